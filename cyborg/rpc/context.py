# SPDX-License-Identifier: Apache-2.0
"""Who asks: the request context, carried with every message."""

from typing import Any

import oslo_messaging
from oslo_context import context

# What a token can do, its bearer can do: no credential leaves the process that was given it.
_SECRETS = ("auth_token",)


def current() -> context.RequestContext:
    """Return the context of the request this thread serves, or that of the service itself."""
    return context.get_current() or context.RequestContext(overwrite=False)


class ContextSerializer(oslo_messaging.NoOpSerializer):  # type: ignore[misc]
    """Turns a context into plain values and back; the token stays behind."""

    def serialize_context(self, ctxt: context.RequestContext) -> dict[str, Any]:
        """Return the context as it travels."""
        values = ctxt.to_dict()
        return {
            key: value
            for key, value in values.items()
            if key not in _SECRETS and value not in (None, [])
        }

    def deserialize_context(self, ctxt: dict[str, Any]) -> context.RequestContext:
        """Rebuild the context; unknown values are left out."""
        return context.RequestContext.from_dict(ctxt, overwrite=False)

# SPDX-License-Identifier: Apache-2.0
"""Who asks: the request context, carried with every message."""

from collections.abc import Mapping
from typing import Any

import oslo_messaging
from oslo_context import context

# What a token can do, its bearer can do: no credential leaves the process that was given it.
_SECRETS = ("auth_token",)

SENDER = "sender"
"""The key of a context under which this side notes which daemon a message comes from."""

_LISTS = ("roles",)
_FLAGS = ("is_admin", "read_only", "show_deleted", "is_admin_project")
_LONGEST = 255  # characters of one value, and values of a list


class CallContext(context.RequestContext):  # type: ignore[misc]
    """The context of a call that came over the bus; ``sender`` says from whom, in words."""

    sender: str = "an unknown sender"


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

    def deserialize_context(self, ctxt: Mapping[str, Any]) -> CallContext:
        """Rebuild the context; what is unknown or malformed is left out.

        The log shows it with each line, so that nothing in it may look like another line.
        """
        values = {key: value for key, value in ctxt.items() if _is_sound(key, value)}
        made: CallContext = CallContext.from_dict(values, overwrite=False)
        made.sender = str(ctxt.get(SENDER, CallContext.sender))
        return made


def _is_sound(key: str, value: Any) -> bool:
    if key in _SECRETS:
        return False
    if key in _FLAGS:
        return isinstance(value, bool)
    if key in _LISTS:
        return isinstance(value, list) and len(value) <= _LONGEST and all(map(_is_word, value))
    return _is_word(value)


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST and value.isprintable()

# SPDX-License-Identifier: Apache-2.0
"""Parse the devices of running guests that conductors and agents exchange."""

from collections.abc import Mapping
from typing import Any

from cyborg.core.errors import Invalid
from cyborg.core.validation import parse_uuid, string


def parse_guest_arq(value: Any) -> dict[str, Any]:
    """Return the fields of an ARQ that name its device. Raise Invalid if one is malformed.

    The values of ``attach_handle_info`` depend on the type; ``cyborg.os_acc`` parses them.
    """
    if not isinstance(value, Mapping):
        raise Invalid(f"devices: expected objects, found {type(value).__name__}", field="arguments")
    uuid = parse_uuid(value.get("uuid"), "devices['uuid']")
    info = value.get("attach_handle_info")
    if not isinstance(info, Mapping):
        raise Invalid(
            f"attach_handle_info of ARQ {uuid}: expected an object, found {type(info).__name__}",
            field="attach_handle_info",
        )
    try:
        texts = {name: string(value[name]) for name in ("state", "attach_handle_type")}
    except (KeyError, TypeError, ValueError) as exc:
        raise Invalid(
            f"malformed device of ARQ {uuid}: {type(exc).__name__} {exc}", field="devices"
        ) from exc
    handle = parse_uuid(value.get("attach_handle_uuid"), "attach_handle_uuid")
    return {"uuid": uuid, **texts, "attach_handle_uuid": handle, "attach_handle_info": dict(info)}

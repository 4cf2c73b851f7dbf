# SPDX-License-Identifier: Apache-2.0
"""Strict parsing of accelerator requests (ARQs), as the REST API shows them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cyborg.core.binding.states import ArqState
from cyborg.core.errors import Invalid
from cyborg.core.text import describe
from cyborg.core.validation import parse_uuid

ALIAS_PREFIX = "ua-cyborg-"
"""Start of the aliases of attached devices; libvirt keeps an alias of others only if it begins
with ``ua-``."""

_HANDLE_TYPE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class BoundArq:
    """The parsed fields of an ARQ that owns an attach handle.

    ``handle_uuid`` and ``info`` are not parsed: their meaning depends on ``handle_type``, whose
    plugin parses them.
    """

    uuid: str
    handle_type: str
    handle_uuid: Any
    info: Mapping[Any, Any]

    @property
    def alias(self) -> str:
        """Return the alias of the device in a libvirt domain."""
        return f"{ALIAS_PREFIX}{self.uuid}"


def parse_arq(arq: Any) -> BoundArq:
    """Parse an ARQ that owns an attach handle. Raise Invalid with the field."""
    if not isinstance(arq, Mapping):
        raise Invalid(
            f"arq: expected an object of GET /v2/accelerator_requests, found {type(arq).__name__}",
            field="arq",
        )
    uuid = parse_uuid(arq.get("uuid"), "uuid")
    handle_type = arq.get("attach_handle_type")
    if not isinstance(handle_type, str) or not _HANDLE_TYPE.fullmatch(handle_type):
        reason = (
            "the ARQ has no attach handle, bind it first"
            if handle_type in ("", None)
            else f"invalid value {describe(handle_type)}, expected a type such as PCI"
        )
        raise Invalid(f"attach_handle_type of ARQ {uuid}: {reason}", field="attach_handle_type")
    info = arq.get("attach_handle_info")
    if not isinstance(info, Mapping):
        raise Invalid(
            f"attach_handle_info of ARQ {uuid}: expected an object of strings, found "
            f"{type(info).__name__}",
            field="attach_handle_info",
        )
    return BoundArq(uuid, handle_type, arq.get("attach_handle_uuid"), info)


def require_bound(arq: Mapping[str, Any]) -> None:
    """Raise Invalid unless the state of a parsed ARQ is Bound."""
    if (state := arq.get("state")) != ArqState.BOUND:
        raise Invalid(
            f"state of ARQ {arq['uuid']}: found {describe(state)}, only the device of an ARQ in "
            f"state {ArqState.BOUND} can be attached",
            field="state",
        )


def check_info(arq: BoundArq, key: str, pattern: re.Pattern[str], expected: str) -> str:
    """Return a value of the attach handle info. Raise Invalid unless all of it matches."""
    field = f"attach_handle_info['{key}']"
    if key not in arq.info:
        raise Invalid(f"{field} of ARQ {arq.uuid} is missing, expected {expected}", field=field)
    value = arq.info[key]
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise Invalid(
            f"{field} of ARQ {arq.uuid}: invalid value {describe(value)}, expected {expected}",
            field=field,
        )
    return value

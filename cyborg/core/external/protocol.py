# SPDX-License-Identifier: Apache-2.0
"""Protocol of external drivers: parsing and validation of their messages.

A driver is identified by its endpoint, the unix socket ``<name>.sock`` in the socket folder. So its
hello message has no name.
"""

import json
import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cyborg.core.errors import Invalid
from cyborg.core.inventory.device import Ability, Health
from cyborg.core.inventory.health import Measurement
from cyborg.core.validation import string

AGENT_SOCKET = "agent"
"""Name of the agent's own socket, reserved."""

SUFFIX = ".sock"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_CALLS: Mapping[Ability, frozenset[str]] = {
    Ability.PREPARES: frozenset({"prepare", "release"}),
    Ability.PROGRAMS: frozenset({"program"}),
    Ability.MEASURES: frozenset({"health"}),
}
OPTIONAL_CALLS = frozenset[str]().union(*_CALLS.values())
"""Optional calls that a hello may list in ``abilities``."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Registration of a driver. ``type`` is the default type of its hardware."""

    name: str
    type: str
    abilities: frozenset[Ability] = frozenset()


def is_driver_name(name: str) -> bool:
    """Return whether a driver name is valid: up to 40 of ``a-z``, ``0-9``, ``_`` and ``-``."""
    return bool(_NAME.fullmatch(name)) and name != AGENT_SOCKET


def socket_path(folder: str, name: str) -> str:
    """Return the path of the socket of a driver or of the agent."""
    return os.path.join(folder, f"{name}{SUFFIX}")


def decode(body: bytes) -> Any:
    """Parse JSON. Raise Invalid for malformed or too deeply nested JSON, and for NaN."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise Invalid(f"the body is not JSON: {type(exc).__name__} {str(exc)[:100]}") from exc


def parse_hello(body: Any, folder: str) -> Hello:
    """Parse a hello. Raise Invalid if it is malformed."""
    try:
        status, where, kind = (string(body[key]) for key in ("status", "endpoint", "type"))
        calls = [string(call) for call in _list(body.get("abilities", []))]
    except (KeyError, TypeError, AttributeError) as exc:
        raise Invalid(
            f"the hello is malformed ({type(exc).__name__} {exc}): expected "
            '{"status": "READY", "endpoint": "<path>", "type": "<type>"}',
            field="hello",
        ) from exc
    if status != "READY":
        raise Invalid(f"the hello has status {status[:40]!r}: expected READY", field="status")
    name = os.path.basename(where).removesuffix(SUFFIX)
    if not is_driver_name(name) or where not in (f"{name}{SUFFIX}", socket_path(folder, name)):
        raise Invalid(
            f"the hello has endpoint {where[:120]!r}: expected "
            f"{socket_path(folder, '<name>')} with the driver's name",
            field="endpoint",
        )
    if not _KIND.fullmatch(kind):
        raise Invalid(
            f"the hello has type {kind[:40]!r}: expected a type such as CRYPTO", field="type"
        )
    return Hello(name, kind.upper(), _abilities(calls))


def parse_discovery(body: Any) -> str:
    """Return the ``discovery_id`` of the answer to POST /discovery.

    Raise Invalid if the answer is malformed.
    """
    try:
        status, number = string(body["status"]), string(body["discovery_id"])
    except (KeyError, TypeError) as exc:
        raise Invalid(
            f"the answer is malformed ({type(exc).__name__} {exc}): expected "
            '{"status": "IN-PROGRESS", "discovery_id": "<id>"}',
            field="discovery",
        ) from exc
    if status != "IN-PROGRESS":
        raise Invalid(f"the status is {status[:40]!r}: expected IN-PROGRESS", field="status")
    return number[:255]


def parse_health(body: Any) -> dict[str, Measurement]:
    """Parse the answer to GET /health: ``{"health": {address: {"health", "reason"}}}``.

    Raise Invalid if it is malformed.
    """
    try:
        return {
            string(address): Measurement(Health(entry["health"]), _reason(entry.get("reason")))
            for address, entry in body["health"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise Invalid(
            f"the answer is malformed ({type(exc).__name__} {str(exc)[:100]}): expected "
            '{"health": {"<address>": {"health": "ok", "reason": null}}}',
            field="health",
        ) from exc


def _reason(reason: Any) -> str | None:
    return None if reason is None else string(reason)


def _abilities(calls: list[str]) -> frozenset[Ability]:
    named = frozenset(calls)
    if unknown := sorted(named - OPTIONAL_CALLS):
        raise Invalid(
            f"the hello has the unknown ability {unknown[0][:40]!r}: expected any of "
            f"{', '.join(sorted(OPTIONAL_CALLS))}",
            field="abilities",
        )
    for needed in _CALLS.values():
        if named & needed and not needed <= named:
            raise Invalid(
                f"the hello: ability {', '.join(named & needed)} requires "
                f"{', '.join(needed - named)}",
                field="abilities",
            )
    return frozenset(ability for ability, needed in _CALLS.items() if needed <= named)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")

# SPDX-License-Identifier: Apache-2.0
"""What a driver in a process of its own says, read and checked: none of it is believed unseen.

A driver is known by its endpoint: the unix socket ``<name>.sock`` in the folder of the sockets. So
the hello has what the internal contract gives it and needs no name.
"""

import json
import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cyborg.core.device import Ability, Health
from cyborg.core.errors import Invalid
from cyborg.core.health import Measurement
from cyborg.core.plain import string

AGENT = "agent"
"""The name of the agent's own socket, which no driver can have."""

SUFFIX = ".sock"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_CALLS: Mapping[Ability, frozenset[str]] = {
    Ability.PREPARES: frozenset({"prepare", "release"}),
    Ability.PROGRAMS: frozenset({"program"}),
    Ability.MEASURES: frozenset({"health"}),
}
CALLS = frozenset[str]().union(*_CALLS.values())
"""The optional calls that a hello may name in ``abilities``."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A driver's word that it can be called. ``type`` is that of its hardware unless this says."""

    name: str
    type: str
    abilities: frozenset[Ability] = frozenset()


def is_name(name: str) -> bool:
    """Tell whether a driver can be called so: up to 40 of ``a-z``, digits, ``_`` and ``-``."""
    return bool(_NAME.fullmatch(name)) and name != AGENT


def endpoint(folder: str, name: str) -> str:
    """Return the path of a driver's socket, or of the agent's."""
    return os.path.join(folder, f"{name}{SUFFIX}")


def decode(body: bytes) -> Any:
    """Read JSON. Raises Invalid, also for NaN, which is none, and for what is nested too deep."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as bad:
        raise Invalid(f"the body is not JSON: {type(bad).__name__} {str(bad)[:100]}") from bad


def hello(body: Any, folder: str) -> Hello:
    """Read a hello. Raises Invalid."""
    try:
        status, where, kind = (string(body[key]) for key in ("status", "endpoint", "type"))
        able = [string(word) for word in _list(body.get("abilities", []))]
    except (KeyError, TypeError, AttributeError) as bad:
        raise Invalid(
            f"the hello is malformed ({type(bad).__name__} {bad}): expected "
            '{"status": "READY", "endpoint": "<path>", "type": "<type>"}',
            field="hello",
        ) from bad
    if status != "READY":
        raise Invalid(f"the hello has status {status[:40]!r}: expected READY", field="status")
    name = os.path.basename(where).removesuffix(SUFFIX)
    if not is_name(name) or where not in (f"{name}{SUFFIX}", endpoint(folder, name)):
        raise Invalid(
            f"the hello has endpoint {where[:120]!r}: expected {endpoint(folder, '<name>')} with "
            "the driver's name",
            field="endpoint",
        )
    if not _KIND.fullmatch(kind):
        raise Invalid(
            f"the hello has type {kind[:40]!r}: expected one such as CRYPTO", field="type"
        )
    return Hello(name, kind.upper(), _abilities(able))


def discovery(body: Any) -> str:
    """Return the ``discovery_id`` of the answer to POST /discovery. Raises Invalid."""
    try:
        status, number = string(body["status"]), string(body["discovery_id"])
    except (KeyError, TypeError) as bad:
        raise Invalid(
            f"the answer is malformed ({type(bad).__name__} {bad}): expected "
            '{"status": "IN-PROGRESS", "discovery_id": "<id>"}',
            field="discovery",
        ) from bad
    if status != "IN-PROGRESS":
        raise Invalid(f"the status is {status[:40]!r}: expected IN-PROGRESS", field="status")
    return number[:255]


def health(body: Any) -> dict[str, Measurement]:
    """Read the answer to GET /health: ``{"health": {address: {"health", "reason"}}}``.

    Raises Invalid.
    """
    try:
        return {
            string(address): Measurement(Health(one["health"]), _reason(one.get("reason")))
            for address, one in body["health"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as bad:
        raise Invalid(
            f"the answer is malformed ({type(bad).__name__} {str(bad)[:100]}): expected "
            '{"health": {"<address>": {"health": "ok", "reason": null}}}',
            field="health",
        ) from bad


def _reason(reason: Any) -> str | None:
    return None if reason is None else string(reason)


def _abilities(words: list[str]) -> frozenset[Ability]:
    told = frozenset(words)
    if unknown := sorted(told - CALLS):
        raise Invalid(
            f"the hello has the ability {unknown[0][:40]!r}: expected some of "
            f"{', '.join(sorted(CALLS))}",
            field="abilities",
        )
    for needed in _CALLS.values():
        if told & needed and not needed <= told:
            raise Invalid(
                f"the hello has the ability {', '.join(told & needed)} without "
                f"{', '.join(needed - told)}: one who prepares must release",
                field="abilities",
            )
    return frozenset(ability for ability, needed in _CALLS.items() if needed <= told)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")

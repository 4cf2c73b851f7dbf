# SPDX-License-Identifier: Apache-2.0
"""Desired state of a host: backends that add to, or replace, the backends of its configuration.

The conductor stores it, with a generation for the host that rises with each change. When the
generation differs from its own, the agent fetches the desired state, applies it and reports the
result for each backend. An agent that was down or missed a notification converges in the same way.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cyborg.core.codec import Serializable, wire
from cyborg.core.errors import Invalid
from cyborg.core.text import sanitize
from cyborg.core.validation import string

MAX_BACKENDS = 256  # of one host
MAX_ERROR = 1000
ADOPT_IN_USE = "adopt_in_use"
"""Option of devices that are adopted although their hosts use them."""
MANAGED_OPTIONS: Mapping[str, str] = {
    "adopt": "adopt single devices",
    ADOPT_IN_USE: "adopt devices that the host uses",
    "release": "release single devices",
}
"""The options of a driver that are lists of addresses, and what each makes the driver do."""
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,254}$")


class DesiredStatus(StrEnum):
    """Desired status of a backend."""

    ENABLED = "enabled"
    DISABLED = "disabled"  # it runs and the conductor cordons its devices
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class DesiredBackend(Serializable):
    """Desired state of one backend.

    ``config`` has option values that override the host's configuration file and the defaults.
    ``generation`` is the host's generation at the last change of the backend.
    """

    backend: str
    driver: str
    status: DesiredStatus
    generation: int
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DesiredHostState(Serializable):
    """Desired state of a host at a generation; generation 0 has no backend."""

    generation: int = field(default=0, metadata=wire(required=True))
    backends: tuple[DesiredBackend, ...] = field(default=(), metadata=wire(required=True))


def _load_error(error: Any) -> str | None:
    return None if error is None else sanitize(string(error))[:MAX_ERROR] or "no message"


@dataclass(frozen=True, slots=True)
class BackendOutcome(Serializable):
    """Result of applying one desired backend; ``error`` is None on success.

    After an error the host keeps the previous backend unchanged.
    """

    backend: str
    generation: int
    error: str | None = field(default=None, metadata=wire(load=_load_error))


def parse_backend_name(name: Any) -> str:
    """Return the name if it is a valid backend name. Raise Invalid otherwise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Invalid(
            f"invalid backend name {str(name)[:40]!r}: expected letters, digits, _, . and -, at "
            "most 255",
            field="backend",
        )
    return name


def managed_options(
    config: Mapping[str, Any], address: str, option: str, mark: str = ""
) -> dict[str, list[str]]:
    """Return the options of a backend with an address in one of the lists ``MANAGED_OPTIONS``.

    A ``mark`` follows the address after ``@``, so that a repetition changes the option. Unchanged
    lists are left out: a desired option hides its value in the configuration file.
    """
    lists: dict[str, list[str]] = {}
    for name in MANAGED_OPTIONS:
        current = list(config.get(name, ()))
        others = [listed for listed in current if listed.partition("@")[0] != address]
        if name == option:
            lists[name] = sorted({*others, f"{address}@{mark}" if mark else address})
        elif others != current:
            lists[name] = others
    return lists


def load_host(body: Any) -> DesiredHostState:
    """Parse the desired state of a host. Raise Invalid if it is malformed."""
    try:
        host = DesiredHostState.from_dict(body)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise Invalid(
            f"malformed desired state: {type(exc).__name__} {exc}", field="backends"
        ) from exc
    backends = host.backends
    if len(backends) > MAX_BACKENDS:
        raise Invalid(
            f"the desired state has {len(backends)} backends, at most {MAX_BACKENDS} are allowed",
            field="backends",
        )
    if len({backend.backend for backend in backends}) != len(backends):
        raise Invalid("the desired state has two backends of the same name", field="backends")
    return host


def load_outcomes(body: Any) -> tuple[BackendOutcome, ...]:
    """Parse the results of desired backends. Raise Invalid if they are malformed."""
    if not isinstance(body, list) or len(body) > MAX_BACKENDS:
        raise Invalid(
            f"outcomes must be a list of at most {MAX_BACKENDS} objects", field="outcomes"
        )
    try:
        return tuple(map(BackendOutcome.from_dict, body))
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise Invalid(f"malformed outcome: {type(exc).__name__} {exc}", field="outcomes") from exc

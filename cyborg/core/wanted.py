# SPDX-License-Identifier: Apache-2.0
"""Which backends a host is to have besides, or instead of, those of its configuration file.

The conductor keeps them, with a revision for the host that rises with each change. An agent that
hears of another revision than it has asks for all of them, brings itself there, and says for each
what came of it. So an agent that was away, or whose order was lost, comes to the same in the end.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cyborg.core.errors import Invalid
from cyborg.core.plain import integer, string
from cyborg.core.text import clean

MAX_BACKENDS = 256  # of one host
MAX_ERROR = 1000
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,254}$")


class Wish(StrEnum):
    """What is wanted of a backend."""

    ENABLED = "enabled"
    DISABLED = "disabled"  # it runs and is seen, and nothing of it is given out: the conductor's
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One backend as it is wanted.

    ``config`` holds the options that differ from the host's own configuration file, or from their
    defaults where that has none. ``revision`` is that of its last change.
    """

    backend: str
    driver: str
    wish: Wish
    revision: int
    config: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "backend": self.backend,
            "driver": self.driver,
            "wish": str(self.wish),
            "revision": self.revision,
            "config": dict(self.config),
        }


@dataclass(frozen=True, slots=True)
class WantedHost:
    """All that is wanted of a host, as of a revision; 0 is that nobody has ever wanted anything."""

    revision: int = 0
    backends: tuple[Wanted, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"revision": self.revision, "backends": [one.to_dict() for one in self.backends]}


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of one wanted backend on its host; ``error`` is None when it is as wanted.

    Where it is not, the host has left everything of that backend as it was before.
    """

    backend: str
    revision: int
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"backend": self.backend, "revision": self.revision, "error": self.error}


def backend_name(name: Any) -> str:
    """Return a name that a backend may have: a section of a configuration file. Raises Invalid."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Invalid(
            f"backend {str(name)[:40]!r} is not usable as a name: expected letters, digits, _, . "
            "and -, at most 255",
            field="backend",
        )
    return name


def managed(config: Mapping[str, Any], address: str, *, adopt: bool) -> dict[str, list[str]]:
    """Return the options by which a backend takes a device in, or leaves it alone from now on.

    A list that need not change is left out: what is wanted of an option hides what the host's
    configuration file says of it.
    """
    wanted, other = ("adopt", "release") if adopt else ("release", "adopt")
    lists = {wanted: sorted({*config.get(wanted, ()), address})}
    if address in (rest := config.get(other, ())):
        lists[other] = [one for one in rest if one != address]
    return lists


def load_host(body: Any) -> WantedHost:
    """Read what is wanted of a host. Raises Invalid."""
    try:
        backends = tuple(load(one) for one in body["backends"])
        host = WantedHost(integer(body["revision"]), backends)
    except (KeyError, TypeError, ValueError, AttributeError) as bad:
        raise Invalid(f"malformed wish: {type(bad).__name__} {bad}", field="backends") from bad
    if len(backends) > MAX_BACKENDS:
        raise Invalid(f"{len(backends)} backends: at most {MAX_BACKENDS}", field="backends")
    if len({one.backend for one in backends}) != len(backends):
        raise Invalid("a backend stands there twice", field="backends")
    return host


def load_applied(body: Any) -> tuple[Applied, ...]:
    """Read what became of wanted backends. Raises Invalid."""
    if not isinstance(body, list) or len(body) > MAX_BACKENDS:
        raise Invalid(f"outcomes must be a list of at most {MAX_BACKENDS}", field="outcomes")
    try:
        return tuple(_load_applied(one) for one in body)
    except (KeyError, TypeError, ValueError, AttributeError) as bad:
        raise Invalid(f"malformed outcome: {type(bad).__name__} {bad}", field="outcomes") from bad


def load(body: Mapping[str, Any]) -> Wanted:
    """Read one wanted backend. Raises KeyError, TypeError or ValueError."""
    return Wanted(
        backend=string(body["backend"]),
        driver=string(body["driver"]),
        wish=Wish(body["wish"]),
        revision=integer(body["revision"]),
        config={string(name): value for name, value in body.get("config", {}).items()},
    )


def _load_applied(body: Mapping[str, Any]) -> Applied:
    error = body.get("error")
    return Applied(
        backend=string(body["backend"]),
        revision=integer(body["revision"]),
        error=None if error is None else clean(string(error))[:MAX_ERROR] or "no message",
    )

# SPDX-License-Identifier: Apache-2.0
"""What drivers are installed on a host, used or not: the agent's entry points, as it finds them.

Only what stands here can be enabled on that host. Code never travels over the API or the bus.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cyborg.core import option
from cyborg.core.errors import Invalid
from cyborg.core.option import Option
from cyborg.core.plain import string
from cyborg.core.text import clean

MAX_ENTRIES = 256  # drivers of one host
MAX_OPTIONS = 256  # of one driver
MAX_NAME = 255
MAX_ERROR = 1000


class Support(StrEnum):
    """What its maker promises of a driver."""

    SUPPORTED = "supported"
    EXPERIMENTAL = "experimental"
    REFERENCE = "reference"  # to be copied from and tested with
    DEPRECATED = "deprecated"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Entry:
    """One driver that is installed on a host.

    ``type`` is what kind of devices it finds (a ``DeviceType``), None for any kind. ``abilities``
    are those that it may have, as configured. ``error`` says why it cannot be imported; nothing but
    the name is known then.
    """

    name: str
    version: str | None = None
    type: str | None = None
    support: Support = Support.UNKNOWN
    abilities: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "name": self.name,
            "version": self.version,
            "type": self.type,
            "support": str(self.support),
            "abilities": sorted(self.abilities),
            "options": [one.to_dict() for one in self.options],
            "error": self.error,
        }


def dump(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return a host's catalogue as plain values, in the order of the names."""
    return [entry.to_dict() for entry in sorted(entries, key=lambda entry: entry.name)]


def load(body: Any) -> tuple[Entry, ...]:
    """Read a host's catalogue. Raises Invalid, KeyError, TypeError or ValueError."""
    if not isinstance(body, list) or len(body) > MAX_ENTRIES:
        raise Invalid(f"drivers must be a list of at most {MAX_ENTRIES}", field="drivers")
    entries = tuple(_load(one) for one in body)
    if len({entry.name for entry in entries}) != len(entries):
        raise Invalid("drivers: a driver stands there twice", field="drivers")
    return entries


def fingerprint(entries: Sequence[Entry]) -> str:
    """Return what tells one catalogue from another: equal ones have equal fingerprints."""
    text = json.dumps(dump(entries), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _load(body: Mapping[str, Any]) -> Entry:
    options = body.get("options", [])
    if not isinstance(options, list) or len(options) > MAX_OPTIONS:
        raise Invalid(f"a driver has at most {MAX_OPTIONS} options", field="drivers")
    name, error = string(body["name"]), _text(body.get("error"))
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise Invalid(f"drivers: {name[:40]!r} is not usable as a name", field="drivers")
    support = string(body.get("support", ""))
    return Entry(
        name=name,
        version=_text(body.get("version")),
        type=_text(body.get("type")),
        support=Support(support) if support in list(Support) else Support.UNKNOWN,
        abilities=tuple(string(one)[:40] for one in body.get("abilities", [])[:40]),
        options=tuple(option.load(one) for one in options),
        error=None if error is None else clean(error)[:MAX_ERROR],
    )


def _text(value: Any) -> str | None:
    return None if value is None else clean(string(value))[:MAX_ERROR]

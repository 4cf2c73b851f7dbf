# SPDX-License-Identifier: Apache-2.0
"""Drivers installed on a host, used or not: the entry points that the agent finds.

Only these drivers can be enabled on the host. Code is never sent over the API or the bus.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cyborg.core.codec import Serializable, as_list, wire
from cyborg.core.drivers.options import Option
from cyborg.core.errors import Invalid
from cyborg.core.text import sanitize
from cyborg.core.validation import check_text, string

MAX_ENTRIES = 256  # drivers of one host
MAX_OPTIONS = 256  # of one driver
MAX_NAME = 255
MAX_ERROR = 1000


class Support(StrEnum):
    """Support level of a driver, as its author declares it."""

    SUPPORTED = "supported"
    EXPERIMENTAL = "experimental"
    REFERENCE = "reference"  # to be copied from and tested with
    DEPRECATED = "deprecated"
    UNKNOWN = "unknown"


def _load_text(value: Any) -> str | None:
    return None if value is None else sanitize(string(value))[:MAX_ERROR]


def _load_name(value: Any) -> str:
    return check_text("drivers", value, MAX_NAME, subject="driver name")


def _load_support(value: Any) -> Support:
    return Support(value) if string(value) in list(Support) else Support.UNKNOWN


def _load_abilities(values: Any) -> tuple[str, ...]:
    return tuple(string(ability)[:40] for ability in as_list(values)[:40])


def _load_options(values: Any) -> tuple[Option, ...]:
    if not isinstance(values, list) or len(values) > MAX_OPTIONS:
        raise Invalid(
            f"options of a driver must be a list of at most {MAX_OPTIONS} objects", field="drivers"
        )
    return tuple(map(Option.from_dict, values))


@dataclass(frozen=True, slots=True)
class DriverEntry(Serializable):
    """One driver installed on a host.

    ``type`` is the ``DeviceType`` of its devices, None for any type. ``abilities`` has each ability
    that the driver may have, depending on its configuration. ``error`` is the reason why it cannot
    be imported; then only the name is known. ``installable`` is False if the host's configuration
    does not allow users of the API to add a backend of the driver.
    """

    name: str = field(metadata=wire(load=_load_name))
    version: str | None = field(default=None, metadata=wire(load=_load_text))
    type: str | None = field(default=None, metadata=wire(load=_load_text))
    support: Support = field(default=Support.UNKNOWN, metadata=wire(load=_load_support))
    abilities: tuple[str, ...] = field(default=(), metadata=wire(dump=sorted, load=_load_abilities))
    options: tuple[Option, ...] = field(default=(), metadata=wire(load=_load_options))
    error: str | None = field(default=None, metadata=wire(load=_load_text))
    installable: bool = True


def dump(entries: Sequence[DriverEntry]) -> list[dict[str, Any]]:
    """Return a host's drivers as plain values, sorted by name."""
    return [entry.to_dict() for entry in sorted(entries, key=lambda entry: entry.name)]


def load(body: Any) -> tuple[DriverEntry, ...]:
    """Parse a host's drivers.

    Raise Invalid, KeyError, TypeError or ValueError if they are malformed.
    """
    if not isinstance(body, list) or len(body) > MAX_ENTRIES:
        raise Invalid(f"drivers must be a list of at most {MAX_ENTRIES} objects", field="drivers")
    entries = tuple(map(DriverEntry.from_dict, body))
    if len({entry.name for entry in entries}) != len(entries):
        raise Invalid("drivers: two drivers have the same name", field="drivers")
    return entries


def fingerprint(entries: Sequence[DriverEntry]) -> str:
    """Return the SHA-256 of a host's drivers; their order does not matter."""
    text = json.dumps(dump(entries), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

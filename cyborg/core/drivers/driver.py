# SPDX-License-Identifier: Apache-2.0
"""Drivers across all hosts: their uuids, their versions and similar names."""

import difflib
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from cyborg.core.migration.reference_drivers import describe_counterpart

# A namespace of our own: a driver has no row, and every API must return the same uuid for it.
_DRIVERS = uuid.UUID("0b0d5a6c-5d3e-5c57-8f4f-6a8a1c9d2e70")
MAX_SUGGESTIONS = 3
R = TypeVar("R", bound=Mapping[str, Any])


def driver_uuid(name: str) -> str:
    """Return the uuid of a driver, the same in every cloud (uuid5 of RFC 9562)."""
    return str(uuid.uuid5(_DRIVERS, name))


def version_of(name: str, versions: Any) -> str | None:
    """Return the version of a driver from the ``versions`` of an agent's heartbeat, or None.

    ``versions`` is not validated: the version is None if it is not text.
    """
    drivers = versions.get("drivers") if isinstance(versions, Mapping) else None
    version = drivers.get(name) if isinstance(drivers, Mapping) else None
    return version if isinstance(version, str) else None


def common_version(versions: Iterable[str | None]) -> str | None:
    """Return the version that all hosts have; None if versions differ or a host has no version."""
    found = set(versions)
    return found.pop() if len(found) == 1 else None


def newest_row(rows: Sequence[R]) -> R | None:
    """Return the first row with the newest ``version``; None if there are no rows.

    Only the numbers of a version are compared; a row without a version is the oldest.
    """
    return max(rows, key=lambda row: _numbers(row["version"]), default=None)


def closest_names(name: str, names: Iterable[str]) -> list[str]:
    """Return up to MAX_SUGGESTIONS of ``names`` that are similar to ``name``, best first."""
    return difflib.get_close_matches(name[:255], sorted(set(names)), n=MAX_SUGGESTIONS)


def format_hint(alike: Sequence[str]) -> str:
    """Return the end of an error message with suggestions; empty if there are none."""
    return f"; did you mean {' or '.join(alike)}?" if alike else ""


def describe_unknown(name: str, names: Iterable[str]) -> str:
    """Return the message for a driver that no agent has; ``names`` are those of the others."""
    counterpart = describe_counterpart(name)
    if counterpart is not None:
        return f"no agent has a driver {name[:255]!r}, {counterpart}"
    hint = format_hint(closest_names(name, names)) or "; GET /v2/drivers lists the known ones"
    return f"no agent has a driver {name[:255]!r}{hint}"


def _numbers(version: str | None) -> list[int]:
    # Cut: Python refuses to parse a number of thousands of digits.
    return [int(number[:18]) for number in re.findall(r"[0-9]+", version or "")]

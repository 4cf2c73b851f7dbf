# SPDX-License-Identifier: Apache-2.0
"""A driver over all hosts: what the backends of every agent come to, a driver each."""

import difflib
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# A namespace of our own: a driver has no row, and its uuid must be the same wherever one asks.
_DRIVERS = uuid.UUID("0b0d5a6c-5d3e-5c57-8f4f-6a8a1c9d2e70")
MOST_NEAR = 3


def driver_uuid(name: str) -> str:
    """Return the one uuid that the driver of this name has in every cloud (uuid5 of RFC 9562)."""
    return str(uuid.uuid5(_DRIVERS, name))


def version_of(name: str, versions: Any) -> str | None:
    """Return the version of a driver by what an agent's hello told, None if it told none.

    ``versions`` is what the agent sent, which may be anything: only text is taken.
    """
    told = versions.get("drivers") if isinstance(versions, Mapping) else None
    version = told.get(name) if isinstance(told, Mapping) else None
    return version if isinstance(version, str) else None


def common(versions: Iterable[str | None]) -> str | None:
    """Return the version that all hosts tell; None when they differ or one tells none."""
    found = set(versions)
    return found.pop() if len(found) == 1 else None


def newest(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the row of the newest ``version``, of equal ones the first; None of no rows.

    Only the numbers of a version count, and one that tells none is the oldest.
    """
    return max(rows, key=lambda row: _numbers(row["version"]), default=None)


def near(wanted: str, known: Iterable[str]) -> list[str]:
    """Return the known names that are most like one that is not known, the likest first."""
    return difflib.get_close_matches(wanted[:255], sorted(set(known)), n=MOST_NEAR)


def hint(alike: Sequence[str]) -> str:
    """Return the end of a message that names what may have been meant; nothing for none."""
    return f"; did you mean {' or '.join(alike)}?" if alike else ""


def _numbers(version: str | None) -> list[int]:
    # Cut: Python reads no number of thousands of digits.
    return [int(number[:18]) for number in re.findall(r"[0-9]+", version or "")]

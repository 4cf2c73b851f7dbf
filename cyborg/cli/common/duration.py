# SPDX-License-Identifier: Apache-2.0
"""Parsers of durations and times on the command line."""

import argparse
import math
import re
from datetime import UTC, datetime, timedelta

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_FROM_NOW = re.compile(r"\+?([0-9]{1,9})([smhd])")


def parse_seconds(text: str) -> float:
    """Parse a duration. Raise ArgumentTypeError, which argparse shows with the argument's name.

    >>> parse_seconds("1.5")
    1.5
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:  # nan also fails this: no deadline would ever be reached
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return value


def parse_time(text: str, now: datetime | None = None) -> str:
    """Parse a time in ISO 8601, or ``+2h`` or ``2h`` (s, m, h or d): a time from now on.

    ``now`` is for tests. A time stays as it is: the service reads it, and decides about the time
    zone. No time in ISO 8601 ends with one of these units. Raise ArgumentTypeError.

    >>> parse_time("+2h", datetime(2030, 1, 31, 12, tzinfo=UTC))
    '2030-01-31T14:00:00+00:00'
    >>> parse_time("90m", datetime(2030, 1, 31, 12, tzinfo=UTC))
    '2030-01-31T13:30:00+00:00'
    >>> parse_time("2030-01-31T14:00:00Z")
    '2030-01-31T14:00:00Z'
    """
    try:
        found = _FROM_NOW.fullmatch(text)
        if found is None:
            datetime.fromisoformat(text)
            return text
        length = timedelta(**{_UNITS[found[2]]: int(found[1])})
        return ((now or datetime.now(UTC)) + length).isoformat(timespec="seconds")
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time: give a time in ISO 8601, such as 2030-01-31T14:00:00Z, or a "
            "duration from now on, such as +90m, +2h or +1d"
        ) from None

# SPDX-License-Identifier: Apache-2.0
"""The formats of times: one of the fields of JSON, and one in texts for people."""

from datetime import UTC, datetime


def to_iso(moment: datetime) -> str:
    """Format a time as ISO 8601 in UTC: ``2030-01-31T12:00:00.000000+00:00``.

    A time without a zone, as from the database, is UTC. The fraction always has six digits, so all
    times of one answer have one format, and sort as text.
    """
    zoned = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return zoned.isoformat(timespec="microseconds")


def to_text(timestamp: str) -> str:
    """Return a time of ``to_iso`` as texts for people have it: ``2030-01-31T12:00:00Z``."""
    moment = datetime.fromisoformat(timestamp).replace(microsecond=0, tzinfo=None)
    return f"{moment.isoformat()}Z"

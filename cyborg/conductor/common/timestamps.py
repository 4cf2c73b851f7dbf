# SPDX-License-Identifier: Apache-2.0
"""Format timestamps for answers of the conductor."""

from datetime import UTC, datetime


def to_iso(timestamp: datetime | None) -> str | None:
    """Format a timestamp of the database (naive UTC) as ISO 8601."""
    return None if timestamp is None else timestamp.replace(tzinfo=UTC).isoformat()

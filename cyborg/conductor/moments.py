# SPDX-License-Identifier: Apache-2.0
"""Points in time as they leave the conductor."""

from datetime import UTC, datetime


def iso(moment: datetime | None) -> str | None:
    """Return a moment of the database, which keeps UTC without saying so, as ISO 8601."""
    return None if moment is None else moment.replace(tzinfo=UTC).isoformat()

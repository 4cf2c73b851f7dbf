# SPDX-License-Identifier: Apache-2.0
from datetime import UTC, datetime, timedelta, timezone

from cyborg.core.text import to_iso, to_text


def test_times_have_one_format() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5)
    east = moment.replace(tzinfo=UTC).astimezone(timezone(timedelta(hours=2)))
    for same in (moment, moment.replace(tzinfo=UTC), east):
        assert to_iso(same) == "2026-01-02T03:04:05.000000+00:00"
    assert to_iso(moment.replace(microsecond=7)) == "2026-01-02T03:04:05.000007+00:00"
    assert to_text(to_iso(east.replace(microsecond=7))) == "2026-01-02T03:04:05Z"

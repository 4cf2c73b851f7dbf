# SPDX-License-Identifier: Apache-2.0
"""Whether a service that has spoken is still there."""

from datetime import datetime, timedelta
from enum import StrEnum


class Liveness(StrEnum):
    """What the last hello says of a service: ``state`` in the listing of services."""

    UP = "up"
    LATE = "late"
    DOWN = "down"


def judge(
    last_seen: datetime,
    now: datetime,
    interval_seconds: float,
    late_after: int,
    down_after: int,
) -> Liveness:
    """Judge by the hellos missed: ``late_after`` of them make it late, ``down_after`` down.

    A hello counts as missed when a whole interval has passed without it. A last hello in the
    future, which a step of the clock can make, is up.
    """
    silent = now - last_seen
    if silent >= timedelta(seconds=interval_seconds) * (down_after + 1):
        return Liveness.DOWN
    if silent >= timedelta(seconds=interval_seconds) * (late_after + 1):
        return Liveness.LATE
    return Liveness.UP

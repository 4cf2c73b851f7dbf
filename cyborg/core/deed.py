# SPDX-License-Identifier: Apache-2.0
"""What the conductors put right by themselves and count: a deed for each time they had to."""

from collections.abc import Mapping
from enum import StrEnum


class Deed(StrEnum):
    """The kinds of deeds."""

    RECONCILED = "reconciled"
    ORPHANS_SUSPECTED = "orphans_suspected"
    ORPHANS_FREED = "orphans_freed"
    OWNERS_SETTLED = "owners_settled"
    UNBOUND_EXPIRED = "unbound_expired"
    JOBS_TAKEN_OVER = "jobs_taken_over"
    JOBS_UNDONE = "jobs_undone"
    HANDLES_CLEANED = "handles_cleaned"
    REQUESTS_UNSTUCK = "requests_unstuck"
    DRIFT_REPAIRED = "drift_repaired"


SENTENCES: Mapping[Deed, str] = {
    Deed.RECONCILED: "Every bound request was held against Placement's allocations.",
    Deed.ORPHANS_SUSPECTED: "A bound request was seen whose instance has no allocation.",
    Deed.ORPHANS_FREED: "A request that stayed without an allocation was unbound.",
    Deed.OWNERS_SETTLED: "A request bound by an administrator got its instance's project.",
    Deed.UNBOUND_EXPIRED: "A request that nobody had bound for long was deleted.",
    Deed.JOBS_TAKEN_OVER: "Host work whose conductor was gone passed to another one.",
    Deed.JOBS_UNDONE: "Host work that failed or took too long was undone.",
    Deed.HANDLES_CLEANED: "A handle was cleaned that its host had failed to clean at first.",
    Deed.REQUESTS_UNSTUCK: "A request in BindStarted that no work served was failed.",
    Deed.DRIFT_REPAIRED: "A provider that somebody else had changed in Placement was repaired.",
}

if missing := set(Deed) - set(SENTENCES):
    raise AssertionError(f"deeds without a sentence: {sorted(missing)}")

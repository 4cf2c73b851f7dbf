# SPDX-License-Identifier: Apache-2.0
"""When to look at the hardware after the kernel said that something changed."""

from dataclasses import dataclass, replace

QUIET = 0.1
"""Seconds without an event after which a burst of them is over."""

LONGEST = 0.5
"""Seconds after which a burst counts as over though it goes on."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Events that are answered together: one card that comes is several of them.

    ``first`` and ``last`` are seconds of a clock that only counts up. ``subsystems`` are the
    kernel's that were heard of; ``lost`` says that there were events which were not heard.
    """

    first: float
    last: float
    subsystems: frozenset[str] = frozenset()
    events: int = 0
    lost: bool = False

    @property
    def due(self) -> float:
        """When to look: after a quiet moment, and soon also if there is none."""
        return min(self.last + QUIET, self.first + LONGEST)


def heard(burst: Burst | None, now: float, subsystem: str) -> Burst:
    """Return the burst with one more event, or the burst that it begins."""
    before = burst or Burst(now, now)
    return replace(
        before,
        last=now,
        subsystems=before.subsystems | {subsystem},
        events=before.events + 1,
    )


def missed(burst: Burst | None, now: float) -> Burst:
    """Return the burst as one of which a part was not heard."""
    return replace(burst or Burst(now, now), last=now, lost=True)


def concerns(burst: Burst, subsystems: frozenset[str]) -> bool:
    """Tell whether it calls for a look by one who wants to hear of these subsystems."""
    return bool(subsystems) and (burst.lost or bool(subsystems & burst.subsystems))

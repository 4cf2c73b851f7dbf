# SPDX-License-Identifier: Apache-2.0
"""The health of a device: what measurements come to, and when a sick device counts as well again.

A sick device shows so at once. It shows well only when it has measured well for the quiet time
without a break: one that is well and sick by turns must not open and close with each measurement.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cyborg.core.device import Health


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is known of a device's health now; ``reason`` is for people.

    A reason names what is wrong, and no figure that differs at each look: whoever shows it tells
    the conductor each time it changes.
    """

    health: Health
    reason: str | None = None


WELL = Measurement(Health.OK)


@dataclass(frozen=True, slots=True)
class Sick:
    """A device that shows unhealthy: why, and since when it measures well, None while it does not.

    ``well_since`` is of the clock that ``settle`` gets: seconds, counted upwards.
    """

    reason: str | None = None
    well_since: float | None = None


def worst(measurements: Iterable[Measurement]) -> Measurement:
    """Return what several measurements of one device come to; none at all come to ok.

    The worst health wins. All reasons are told, those of the worst first, each once.
    """
    ranked = sorted(measurements, key=lambda m: _RANK[m.health])
    if not ranked:
        return WELL
    reasons = dict.fromkeys(m.reason for m in ranked if m.reason)
    return Measurement(ranked[0].health, "; ".join(reasons) or None)


def settle(
    sick: Sick | None, measured: Measurement, now: float, quiet: float
) -> tuple[Sick | None, Measurement]:
    """Return what becomes of a device's state, and what is shown of it.

    ``sick`` is None for one that shows anything but unhealthy. ``quiet`` is in seconds. What cannot
    be told (unknown) of a sick device counts as a break.
    """
    if measured.health is Health.UNHEALTHY:
        return Sick(measured.reason), measured
    if sick is None:
        return None, measured
    if measured.health is Health.UNKNOWN:
        return Sick(sick.reason), Measurement(Health.UNHEALTHY, sick.reason)
    since = now if sick.well_since is None else sick.well_since
    if now - since >= quiet:
        return None, measured
    return Sick(sick.reason, since), Measurement(Health.UNHEALTHY, _watched(sick.reason, quiet))


def _watched(reason: str | None, quiet: float) -> str:
    """Say that a device is being watched, in words that stay the same while it is."""
    said = f"well now, watched until it has been so for {quiet:g} s"
    return said if reason is None else f"{said}; was: {reason}"


_RANK = {Health.UNHEALTHY: 0, Health.UNKNOWN: 1, Health.OK: 2}

# SPDX-License-Identifier: Apache-2.0
"""Health of a device: combination of measurements, and hysteresis of its recovery.

A device is shown as unhealthy immediately, but as healthy again only after all measurements of a
whole recovery window were healthy. So a device whose health alternates is not uncordoned each time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cyborg.core.inventory.device import Health


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measured health of a device; ``reason`` is for people.

    A reason must not have a value that differs at each measurement, because each change is sent to
    the conductor.
    """

    health: Health
    reason: str | None = None


HEALTHY = Measurement(Health.OK)


@dataclass(frozen=True, slots=True)
class Recovery:
    """State of a device that is shown unhealthy for ``reason``.

    ``healthy_since`` is the time of the first healthy measurement, in seconds of a monotonic clock;
    None after an unhealthy measurement.
    """

    reason: str | None = None
    healthy_since: float | None = None


def combine(measurements: Iterable[Measurement]) -> Measurement:
    """Return the combination of several measurements of a device; ok if there are none.

    It has the worst health and all distinct reasons. Reasons for the worst health come first.
    """
    ranked = sorted(measurements, key=lambda m: _RANK[m.health])
    if not ranked:
        return HEALTHY
    reasons = dict.fromkeys(m.reason for m in ranked if m.reason)
    return Measurement(ranked[0].health, "; ".join(reasons) or None)


def apply_hysteresis(
    recovery: Recovery | None, measured: Measurement, now: float, recovery_window: float
) -> tuple[Recovery | None, Measurement]:
    """Return the new recovery state of a device, and the measurement to show.

    ``recovery`` is None unless the device is shown unhealthy. ``recovery_window`` is in seconds. An
    unknown health of an unhealthy device restarts the window.
    """
    if measured.health is Health.UNHEALTHY:
        return Recovery(measured.reason), measured
    if recovery is None:
        return None, measured
    if measured.health is Health.UNKNOWN:
        return Recovery(recovery.reason), Measurement(Health.UNHEALTHY, recovery.reason)
    since = now if recovery.healthy_since is None else recovery.healthy_since
    if now - since >= recovery_window:
        return None, measured
    return Recovery(recovery.reason, since), Measurement(
        Health.UNHEALTHY, _recovering_reason(recovery.reason, recovery_window)
    )


def _recovering_reason(reason: str | None, recovery_window: float) -> str:
    """Return the reason during the recovery window; it stays the same for the whole window."""
    text = f"recovering, healthy again after {recovery_window:g} s without a fault"
    return text if reason is None else f"{text}; was: {reason}"


_RANK = {Health.UNHEALTHY: 0, Health.UNKNOWN: 1, Health.OK: 2}

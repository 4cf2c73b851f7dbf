# SPDX-License-Identifier: Apache-2.0
"""State of a device: its conditions, the hysteresis of its health, and the check after a reboot.

A device is shown as unhealthy immediately, but as healthy again only after all measurements of a
whole recovery window were healthy. So a device whose health alternates is not uncordoned each time.

After a reboot of its host a device is checked for its layout and its images. It has desired values
if an operator has applied a layout or programmed an image. When the agent sends its first heartbeat
after a reboot, such a device waits for the next report. If that report has other values, the
desired values are lost: they are applied again as soon as nothing uses the device. Other reports
are not compared with the desired values, because an administrator of the host may change a device
on purpose.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Self

from cyborg.core.inventory.device import Health
from cyborg.core.text import DescribedEnum


class DeviceCondition(DescribedEnum):
    """Conditions of a device. If several conditions apply, the last in this list is shown."""

    READY = "ready", "Its free handles can be allocated."
    WITHHELD = (
        "withheld",
        "A device set that is not offered, because its devices are needed in another set.",
    )
    SETUP_REQUIRED = "setup_required", "Its driver must be set up on the host."
    REBOOT_REQUIRED = "reboot_required", "The host must be rebooted."
    UNDELIVERABLE = "undeliverable", "It cannot be attached to an instance."
    BACKEND_DISABLED = (
        "disabled",
        "Its backend is disabled, being removed or cordoned, or it waits for another layout.",
    )
    MAINTAINING = "maintaining", "Disabled by an operator; bound handles stay bound."
    PROGRAMMING = "programming", "An image is being programmed, or its layout is being changed."
    RESTORE_FAILED = (
        "restore_failed",
        "A bound handle could not be prepared again after a reboot; this is retried.",
    )
    FAILING = (
        "failing",
        "Its last prepare jobs failed; it is tried again after a time.",
    )
    UNHEALTHY = "unhealthy", "Its driver measured a fault."
    HOST_DOWN = "host_down", "The agent of its host is marked down."
    DRAINING = "draining", "No longer present on the host; bound handles stay."


# Status of a device that is not disabled by an operator; the other one is ``maintaining``.
ENABLED = "enabled"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts that decide the status of a device or deployable.

    ``status`` is set by an operator, ``health`` by its driver. ``cordoned`` is set if its backend
    is disabled, cordoned or being uninstalled, or if it drains for another layout, ``host_down`` if
    the agent is marked down. ``restore_failed`` is set while a restore job of a bound handle fails,
    ``failing`` after several prepare jobs in a row failed (``core.jobs.progress``). ``withheld`` is
    set for a device set that is not offered at present.
    """

    # The only list of the facts: the rows of the database (``db.deployables.facts``), the filters
    # of a bind, explanations, capacity and the rendering of a provider have these names.
    status: str = ENABLED
    health: str = Health.OK
    setup_required: bool = False
    reboot_required: bool = False
    cordoned: bool = False
    programming: bool = False
    draining: bool = False
    deliverable: bool = True
    restore_failed: bool = False
    failing: bool = False
    withheld: bool = False
    host_down: bool = False

    @classmethod
    def from_row(cls, row: Mapping[Any, Any], **others: Any) -> Self:
        """Return the facts of a database row; ``others`` replace columns or give missing ones."""
        facts: dict[str, Any] = {}
        for name in FACTS:
            value = others[name] if name in others else row[name]
            # Some databases return a boolean expression as a number.
            facts[name] = bool(value) if isinstance(value, int) else value
        return cls(**facts)


def combine_facts(first: DeviceFacts, second: DeviceFacts) -> DeviceFacts:
    """Return the facts of a unit that needs two devices: it is schedulable if both are."""
    return replace(
        first,
        status=first.status if first.status != ENABLED else second.status,
        health=second.health if second.health == Health.UNHEALTHY else first.health,
        deliverable=first.deliverable and second.deliverable,
        **{name: getattr(first, name) or getattr(second, name) for name in _FLAGS},
    )


# The facts of a device that is schedulable.
READY = DeviceFacts()

FACTS = tuple(field.name for field in fields(DeviceFacts))

_FLAGS = tuple(name for name in FACTS if getattr(READY, name) is False)


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """Status of a device: the conditions that make it unschedulable, the strongest first."""

    reasons: tuple[DeviceCondition, ...]

    @property
    def state(self) -> DeviceCondition:
        """Return the condition that is shown."""
        return self.reasons[0] if self.reasons else DeviceCondition.READY

    @property
    def schedulable(self) -> bool:
        """Return whether handles of the device can be allocated; otherwise they are reserved."""
        return not self.reasons


def is_in_grace(cordoned_since: datetime | None, now: datetime, grace: float) -> bool:
    """Return whether servers may still get handles of a cordoned device that they were allocated.

    A cordon reserves the whole inventory in Placement, so an allocation there was made before it.
    ``grace``, in seconds, begins with the cordon. ``cordoned_since`` is None if the device is not
    cordoned, or cannot be used.
    """
    # Without a grace also not for a cordon after ``now``, the begin of a bind.
    return bool(grace and cordoned_since and now - cordoned_since <= timedelta(seconds=grace))


# Cached: the devices of a list differ in few facts.
@functools.lru_cache(maxsize=1024)
def evaluate(facts: DeviceFacts) -> DeviceStatus:
    """Return the status of a device.

    A device of unknown health is schedulable.
    """
    applies = {
        DeviceCondition.WITHHELD: facts.withheld,
        DeviceCondition.SETUP_REQUIRED: facts.setup_required,
        DeviceCondition.REBOOT_REQUIRED: facts.reboot_required,
        DeviceCondition.UNDELIVERABLE: not facts.deliverable,
        DeviceCondition.BACKEND_DISABLED: facts.cordoned,
        # An unknown status makes it unschedulable, too: a newer release may have written it.
        DeviceCondition.MAINTAINING: facts.status != ENABLED,
        DeviceCondition.PROGRAMMING: facts.programming,
        DeviceCondition.RESTORE_FAILED: facts.restore_failed,
        DeviceCondition.FAILING: facts.failing,
        DeviceCondition.UNHEALTHY: facts.health == Health.UNHEALTHY,
        DeviceCondition.HOST_DOWN: facts.host_down,
        DeviceCondition.DRAINING: facts.draining,
    }
    # The enum lists the weakest first. READY has no fact: it is shown if no other one applies.
    return DeviceStatus(tuple(state for state in reversed(DeviceCondition) if applies.get(state)))


def evaluate_row(row: Mapping[Any, Any], **others: Any) -> DeviceStatus:
    """Return the status of a device from a database row: see ``DeviceFacts.from_row``."""
    return evaluate(DeviceFacts.from_row(row, **others))


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
    # Unknown is no proof of health: a driver that cannot read the device must not free it.
    if measured.health is Health.UNKNOWN:
        return Recovery(recovery.reason), Measurement(Health.UNHEALTHY, recovery.reason)
    since = now if recovery.healthy_since is None else recovery.healthy_since
    if now - since >= recovery_window:
        return None, measured
    # Shown unhealthy, although it was measured healthy: the window is not over.
    return Recovery(recovery.reason, since), Measurement(
        Health.UNHEALTHY, _recovering_reason(recovery.reason, recovery_window)
    )


def _recovering_reason(reason: str | None, recovery_window: float) -> str:
    """Return the reason during the recovery window; it stays the same for the whole window."""
    text = f"recovering, healthy again after {recovery_window:g} s without a fault"
    return text if reason is None else f"{text}; was: {reason}"


_RANK = {Health.UNHEALTHY: 0, Health.UNKNOWN: 1, Health.OK: 2}


class BootCheck(StrEnum):
    """State of the check; None in the database if there is nothing to do."""

    AWAITING_REPORT = "awaiting_report"
    LOST = "lost"

# SPDX-License-Identifier: Apache-2.0
"""Conditions of a device, with their descriptions, and the rule for its status."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from cyborg.core.described_enum import DescribedEnum
from cyborg.core.inventory.device import Health


class DeviceCondition(DescribedEnum):
    """Conditions of a device. If several conditions apply, the last in this list is shown."""

    READY = "ready", "Its free handles can be allocated."
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


ENABLED = "enabled"
"""Status of a device that is not disabled by an operator; the other one is ``maintaining``."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts that decide the status of a device or deployable.

    ``status`` is set by an operator, ``health`` by its driver. ``cordoned`` is set if its backend
    is disabled, cordoned or being uninstalled, or if it drains for another layout, ``host_down`` if
    the agent is marked down. ``restore_failed`` is set while a restore job of a bound handle fails,
    ``failing`` after several prepare jobs in a row failed (``core.jobs.failures``).
    """

    # The names are those of the columns, see ``evaluate_row``.

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
    host_down: bool = False


FACTS = tuple(field.name for field in fields(DeviceFacts))


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
    # An unknown ``status`` makes it unschedulable, as a newer release may have written it.
    applies = {
        DeviceCondition.SETUP_REQUIRED: facts.setup_required,
        DeviceCondition.REBOOT_REQUIRED: facts.reboot_required,
        DeviceCondition.UNDELIVERABLE: not facts.deliverable,
        DeviceCondition.BACKEND_DISABLED: facts.cordoned,
        DeviceCondition.MAINTAINING: facts.status != ENABLED,
        DeviceCondition.PROGRAMMING: facts.programming,
        DeviceCondition.RESTORE_FAILED: facts.restore_failed,
        DeviceCondition.FAILING: facts.failing,
        DeviceCondition.UNHEALTHY: facts.health == Health.UNHEALTHY,
        DeviceCondition.HOST_DOWN: facts.host_down,
        DeviceCondition.DRAINING: facts.draining,
    }
    return DeviceStatus(tuple(state for state in reversed(DeviceCondition) if applies.get(state)))


def evaluate_row(row: Mapping[Any, Any], **others: Any) -> DeviceStatus:
    """Return the status of a device from a database row whose columns are named as the facts.

    ``others`` are facts that are not taken from the row.
    """
    return evaluate(
        DeviceFacts(**others, **{name: row[name] for name in FACTS if name not in others})
    )

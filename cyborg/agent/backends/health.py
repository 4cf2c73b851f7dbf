# SPDX-License-Identifier: Apache-2.0
"""Health of the devices of a backend: measured by its driver, and as it is shown.

Both differ while a device recovers: see ``cyborg.core.inventory.device_state``. Nothing is
persisted: each incarnation of the agent starts with its own first measurement.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cyborg.core import log
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory import device_state
from cyborg.core.inventory.device import Ability, Device, Health
from cyborg.core.inventory.device_state import Measurement, Recovery
from cyborg.drivers.base import Driver, MeasureInterface

LOG = log.get_logger(__name__)


@dataclass(eq=False)
class HealthTracker:
    """Health of the devices of one backend. Not thread-safe.

    ``recovery_window`` is in seconds of ``clock``, which is monotonic.
    """

    driver: Driver
    recovery_window: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._recoveries: dict[str, Recovery] = {}
        self._published: dict[str, Measurement] = {}

    def copy_from(self, other: "HealthTracker") -> None:
        """Copy the health from the tracker of the backend that is being replaced."""
        self._recoveries, self._published = dict(other._recoveries), dict(other._published)

    def update(self, devices: Sequence[Device]) -> bool:
        """Measure all devices of the backend; return whether the driver can measure.

        A device that the driver's answer lacks keeps its recorded health. Raise any exception of
        the driver, and DriverFailed if its answer is invalid. In both cases the recorded health
        does not change.
        """
        driver = self.driver
        if Ability.MEASURES not in driver.abilities or not isinstance(driver, MeasureInterface):
            self._recoveries, self._published = {}, {}
            return False
        addresses = {device.address for device in devices}
        measured = _validate(driver.measure(devices)) if devices else {}
        now = self.clock()
        # A device that returns is measured like a new one: it may be another card in the slot.
        for removed in set(self._published) - addresses:
            del self._published[removed]
            self._recoveries.pop(removed, None)
        for address in sorted(addresses & set(measured)):
            self._record(address, measured[address], now)
        return True

    def apply_to(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return the devices with their published health; unmeasured devices are unchanged."""
        return tuple(self._apply(device) for device in devices)

    def _apply(self, device: Device) -> Device:
        published = self._published.get(device.address)
        if published is None:
            return device
        return replace(device, health=published.health, health_reason=published.reason)

    def _record(self, address: str, measured: Measurement, now: float) -> None:
        """Record the health of a device; log when it becomes unhealthy, and healthy again."""
        previous = self._recoveries.pop(address, None)
        recovery, published = device_state.apply_hysteresis(
            previous, measured, now, self.recovery_window
        )
        if recovery is not None:
            self._recoveries[address] = recovery
        self._published[address] = published
        # A device has a recovery as long as it is shown unhealthy.
        was_unhealthy, is_unhealthy = previous is not None, recovery is not None
        if was_unhealthy != is_unhealthy:
            LOG.log(
                logging.WARNING if is_unhealthy else logging.INFO,
                "Device is %s%s",
                published.health,
                f": {published.reason}" if published.reason else "",
                backend=self.driver.backend,
                device=address,
            )


def _validate(answer: Any) -> Mapping[str, Measurement]:
    """Return the measurements that a driver's ``measure`` returned, by device address.

    Raise DriverFailed if they are malformed.
    """
    if not isinstance(answer, Mapping) or not all(
        isinstance(measurement, Measurement)
        and isinstance(measurement.health, Health)
        and isinstance(measurement.reason, str | None)
        for measurement in answer.values()
    ):
        # Any other value would make the report of the whole host invalid.
        raise DriverFailed(
            "the driver's measure() must return a mapping of addresses to measurements"
        )
    return answer

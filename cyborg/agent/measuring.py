# SPDX-License-Identifier: Apache-2.0
"""The health of one backend's devices: asks the driver, and remembers who is sick and who watched.

What is shown differs from what is measured for the time in which a device that was sick is watched:
see ``cyborg.core.health``. Nothing is kept over the agent's end: the next life begins with what
it measures first.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from oslo_log import log

from cyborg.core import health
from cyborg.core.device import Ability, Device, Health
from cyborg.core.errors import DriverFailed
from cyborg.core.health import Measurement, Sick
from cyborg.drivers.base import Driver, Measures

LOG = log.getLogger(__name__)


class Measuring:
    """What is known of the health of one backend's devices. One thread at a time uses it."""

    def __init__(
        self, driver: Driver, quiet: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``quiet`` is in seconds, which ``clock`` counts upwards."""
        self._driver = driver
        self._quiet = quiet
        self._clock = clock
        self._sick: dict[str, Sick] = {}
        self._shown: dict[str, Measurement] = {}

    def inherit(self, other: "Measuring") -> None:
        """Take over what another one knows, of a backend that this one's is to replace."""
        self._sick, self._shown = dict(other._sick), dict(other._shown)

    def look(self, devices: Sequence[Device]) -> bool:
        """Measure these devices, the only ones there are; tell whether the driver can.

        Raises whatever the driver raises, DriverFailed when its answer is unusable; then all
        is as it was before.
        """
        driver = self._driver
        if Ability.MEASURES not in driver.abilities or not isinstance(driver, Measures):
            self._sick, self._shown = {}, {}
            return False
        there = {device.address for device in devices}
        measured = _usable(driver.measure(devices)) if devices else {}
        now = self._clock()
        for gone in set(self._shown) - there:
            del self._shown[gone]
            self._sick.pop(gone, None)
        for address in sorted(there & set(measured)):
            self._take(address, measured[address], now)
        return True

    def over(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return the devices with the health that is to be shown; unmeasured ones as they are."""
        return tuple(self._one(device) for device in devices)

    def _one(self, device: Device) -> Device:
        shown = self._shown.get(device.address)
        if shown is None:
            return device
        return replace(device, health=shown.health, health_reason=shown.reason)

    def _take(self, address: str, measured: Measurement, now: float) -> None:
        before = self._sick.pop(address, None)
        sick, shown = health.settle(before, measured, now, self._quiet)
        if sick is not None:
            self._sick[address] = sick
        self._shown[address] = shown
        if (before is None) != (sick is None):
            LOG.log(
                log.WARNING if shown.health is Health.UNHEALTHY else log.INFO,
                "%s: device %s is %s%s",
                self._driver.backend,
                address,
                shown.health,
                f": {shown.reason}" if shown.reason else "",
            )


def _usable(answer: Any) -> Mapping[str, Measurement]:
    if not isinstance(answer, Mapping) or not all(
        isinstance(measurement, Measurement)
        and isinstance(measurement.health, Health)
        and isinstance(measurement.reason, str | None)
        for measurement in answer.values()
    ):
        # Any other value would cost the whole host its report.
        raise DriverFailed("the driver's measure() returns no map of addresses to measurements")
    return answer

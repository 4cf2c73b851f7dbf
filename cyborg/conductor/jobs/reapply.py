# SPDX-License-Identifier: Apache-2.0
"""Apply the layouts and images again that devices lost with a reboot of their host.

``core.inventory.boot_check`` defines which values are lost. A device gets its layout first, and its
images only when it has the layout, since a new layout replaces the deployables. There is one job
for each lost value and reboot. A job that fails is retried until it succeeds, an operator cancels
it, or the device is removed.
"""

from collections.abc import Callable
from typing import Any

from cyborg.conductor.jobs.partitioning import Partitions
from cyborg.conductor.jobs.programming import Programs
from cyborg.core.errors import CyborgError, InUse, Invalid, NotFound, WrongState
from cyborg.core.log import get_logger
from cyborg.db.deployables import programming as store
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.threads.failures import RateLimitedLogger

LOG = get_logger(__name__)

MAX_DEVICES = 64  # devices of one sweep


class LostValues:
    """Sweep of the devices that lost their layout or images; safe to run in several conductors."""

    def __init__(self, uow: UnitOfWork, partitions: Partitions, programs: Programs) -> None:
        self._uow = uow
        self._partitions = partitions
        self._programs = programs
        self._log = RateLimitedLogger(logger=LOG)
        self._last = 0  # id of the last device of the previous sweep; devices that wait stay found

    def sweep(self) -> int:
        """Create the jobs that are possible now; return the number of devices with new jobs."""
        after = self._last
        found = self._uow.run(lambda tx: store.find_lost(tx, MAX_DEVICES, after))
        self._last = found[-1]["id"] if len(found) == MAX_DEVICES else 0
        return sum(map(self._apply, found))

    def _apply(self, device: store.LostDeviceRow) -> bool:
        """Create the jobs of a device; return False if the device must wait.

        The last transaction records that the device is done. If the conductor is killed before it,
        a later sweep finds the device again, after the end of its job.
        """
        layout = device["desired_layout"]
        if layout is not None and layout != device["layout"]:
            attempts: list[Callable[[], object]] = [
                lambda: self._partitions.start_again(device["uuid"], layout)
            ]
            text = f"layout {layout}"
        else:
            rows = self._uow.run(lambda tx: store.lost_images(tx, device["id"]))
            attempts = [
                lambda row=row: self._programs.start_again(row["uuid"], row["desired_image"])  # type: ignore[misc]
                for row in rows
            ]
            text = "an image"
        fields: dict[str, Any] = {"device": device["uuid"], "host": device["host"]}
        for attempt in attempts:
            waits: CyborgError | None = None
            try:
                attempt()
            except (InUse, WrongState, NotFound, Invalid) as exc:
                # Invalid: a device whose kernel driver is not bound yet has no layouts.
                waits = exc
            if waits is not None:
                # It changed since it was found: the next sweep decides again.
                self._log.warn("Cannot apply %s again yet, will retry: %s", text, waits, **fields)
                return False
            LOG.info("Applying %s again after the reboot of the host", text, **fields)
        self._uow.run(lambda tx: store.clear_boot_check(tx, device["id"]))
        return True

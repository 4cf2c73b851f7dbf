# SPDX-License-Identifier: Apache-2.0
"""Driver for all devices on the PCI bus; its layouts are numbers of SR-IOV virtual functions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from cyborg.core.inventory.device import Ability, Device, Layout
from cyborg.core.jobs.job import WorkItem
from cyborg.core.log import get_logger
from cyborg.drivers.host_use import domains
from cyborg.drivers.pci import sriov
from cyborg.drivers.pci.driver import PciDriver

LOG = get_logger(__name__)


class GenericDriver(PciDriver):
    """Driver for all PCI devices; its layouts are numbers of virtual functions."""

    name = "generic"
    version = "1.0"
    # Whether a card can get virtual functions while the host uses its own network interface.
    CHANGES_USED_INTERFACES: ClassVar[bool] = False
    OPTIONS = (*PciDriver.OPTIONS, *sriov.OPTIONS)

    def initialize(self) -> None:
        """Read the options of this driver, and create its readers."""
        self._layouts = replace(
            self._layouts,
            counts=self.parse_option("vf_counts", sriov.parse_counts),
            autoprobe=bool(self.options["vf_autoprobe"]),
            allow_network=self.CHANGES_USED_INTERFACES,
        )

    @property
    def abilities(self) -> frozenset[Ability]:
        """Return the abilities, with PARTITIONS unless the option ``vf_counts`` is empty."""
        return super().abilities | ({Ability.PARTITIONS} if self._layouts.counts else set())

    def layouts(self, device: Device) -> Sequence[Layout]:
        """Return a layout for each number of virtual functions that a device can have."""
        return self._layouts.of_device(device)

    def partition(self, item: WorkItem, layout: str) -> None:
        """Change the number of virtual functions; see ``privileged.pci.set_count``."""
        domains.check_unused(self._sysfs, self.read_domains, item.device)
        self._layouts.apply(item.device, layout)
        LOG.info("Layout %s applied", layout, backend=self.backend, device=item.device)

# SPDX-License-Identifier: Apache-2.0
"""Builder of a sysfs tree of the PCI bus in a folder, for tests of drivers."""

import os
from pathlib import Path

from cyborg.core.address import PciAddress


class SysfsTree:
    """Simulated sysfs; pass ``root`` to a driver as ``sysfs_root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bus = root / "bus/pci/devices"
        self.bus.mkdir(parents=True, exist_ok=True)

    def add_function(
        self,
        address: str,
        vendor: str = "8086",
        product: str = "37c8",
        class_code: str = "0b4000",
        *,
        kernel_driver: str | None = None,
        iommu_group: str | None = None,
        numa_node: int = -1,
        totalvfs: int = 0,
    ) -> Path:
        """Add a function and return its folder; ``totalvfs`` is the limit of virtual functions."""
        PciAddress.parse(address)
        folder = self.root / "devices/pci0000:00" / address
        folder.mkdir(parents=True)
        files = {
            "vendor": f"0x{vendor}",
            "device": f"0x{product}",
            "class": f"0x{class_code}",
            "revision": "0x04",
            "subsystem_vendor": f"0x{vendor}",
            "subsystem_device": "0x0001",
            "numa_node": str(numa_node),
        }
        if totalvfs:
            files |= {"sriov_totalvfs": str(totalvfs), "sriov_numvfs": "0"}
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")
        if kernel_driver is not None:
            self._link(folder / "driver", self.root / "bus/pci/drivers" / kernel_driver)
        if iommu_group is not None:
            self._link(folder / "iommu_group", self.root / "kernel/iommu_groups" / iommu_group)
        self._link(self.bus / address, folder)
        return folder

    def enable_virtual_functions(
        self, physical: str, count: int, product: str = "37c9", class_code: str = "0b4000"
    ) -> list[str]:
        """Enable this number of virtual functions and return their addresses."""
        folder = self.bus / physical
        (folder / "sriov_numvfs").write_text(f"{count}\n")
        parent = PciAddress.parse(physical)
        addresses: list[str] = []
        for number in range(1, count + 1):
            device, function = divmod(number, 8)
            address = str(PciAddress(parent.domain, parent.bus, parent.device + device, function))
            path = self.add_function(address, product=product, class_code=class_code)
            self._link(path / "physfn", folder.resolve())
            addresses.append(address)
        return addresses

    def remove_function(self, address: str) -> None:
        """Remove a function, but keep its link, as a reader may see it during a removal."""
        folder = (self.bus / address).resolve()
        for name in folder.iterdir():
            name.unlink()
        folder.rmdir()

    @staticmethod
    def _link(path: Path, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(target, path.parent))

# SPDX-License-Identifier: Apache-2.0
"""Builder of a sysfs tree of the PCI bus in a folder, for tests of drivers."""

import os
from pathlib import Path

from cyborg.core.address import PciAddress


class SysfsTree:
    """Simulated sysfs; pass ``root`` to a driver as ``sysfs_root``.

    If ``iommu`` is True, each PCI function has its own IOMMU group, and the driver vfio-pci is
    loaded and accepts all models (``disable_denylist``).
    """

    def __init__(self, root: Path, *, iommu: bool = True) -> None:
        self.root = root
        self.iommu = iommu
        self._groups = 999  # the last group; tests name lower ones
        if iommu:
            self.load_vfio(disable_denylist=True)
        self.bus = root / "bus/pci/devices"
        self.bus.mkdir(parents=True, exist_ok=True)

    def load_vfio(self, *, disable_denylist: bool) -> None:
        """Load the driver vfio-pci, or change its parameter."""
        (self.root / "bus/pci/drivers/vfio-pci").mkdir(parents=True, exist_ok=True)
        folder = self.root / "module/vfio_pci/parameters"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "disable_denylist").write_text("Y\n" if disable_denylist else "N\n")

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
        vf_product: str = "37c9",
        parent: str = "pci0000:00",
    ) -> Path:
        """Add a PCI function and return its folder; ``totalvfs`` limits its virtual functions.

        ``vf_product`` is the product id of its virtual functions. ``parent`` is the path of the
        bridge above it, such as ``pci0000:15/0000:15:01.0``.

        PCI functions with the same ``iommu_group`` are in one group. The default is a new group, or
        no group in a tree without an IOMMU.
        """
        PciAddress.parse(address)  # raises Invalid: a driver would ignore the function
        folder = self.root / "devices" / parent / address
        folder.mkdir(parents=True)
        # The forms of the kernel: ids with 0x, one line each (Documentation/PCI/sysfs-pci.rst).
        files = {
            "vendor": f"0x{vendor}",
            "device": f"0x{product}",
            "class": f"0x{class_code}",
            "revision": "0x04",
            "subsystem_vendor": f"0x{vendor}",
            "subsystem_device": "0x0001",
            "numa_node": str(numa_node),
            "reset": "",  # write-only
        }
        # Only a physical function with SR-IOV has these files.
        if totalvfs:
            files |= {"sriov_totalvfs": str(totalvfs), "sriov_numvfs": "0"}
            files |= {"sriov_offset": "1", "sriov_stride": "1", "sriov_vf_device": vf_product}
            files["sriov_drivers_autoprobe"] = "1"
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")
        if kernel_driver is not None:
            self._link(folder / "driver", self.root / "bus/pci/drivers" / kernel_driver)
        groups = self.root / "kernel/iommu_groups"
        if iommu_group is None and self.iommu:
            self._groups += 1
            iommu_group = str(self._groups)
        # Without an IOMMU the kernel makes no group.
        if iommu_group is not None:
            self._link(folder / "iommu_group", groups / iommu_group)
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
        # The offset and the stride are 1: the addresses follow that of the physical function.
        for number in range(1, count + 1):
            device, function = divmod(number, 8)
            address = str(PciAddress(parent.domain, parent.bus, parent.device + device, function))
            path = self.add_function(address, product=product, class_code=class_code)
            # Both directions: readers follow physfn, and virtfnN has the numbers.
            self._link(path / "physfn", folder.resolve())
            self._link(folder.resolve() / f"virtfn{number - 1}", path)
            addresses.append(address)
        return addresses

    def list_in_group(self, address: str) -> None:
        """List a function in its IOMMU group, as the kernel does; some tests list other devices."""
        folder = (self.bus / address).resolve()
        if (folder / "iommu_group").is_symlink():
            self._link((folder / "iommu_group").resolve() / "devices" / address, folder)

    def add_virtual_function(self, address: str, physical: str) -> None:
        """Make a function a virtual function of another one, which has one more."""
        folder = (self.bus / physical).resolve()
        count = len(list(folder.glob("virtfn*")))
        (folder / "sriov_numvfs").write_text(f"{count + 1}\n")
        self._link((self.bus / address).resolve() / "physfn", folder)
        self._link(folder / f"virtfn{count}", (self.bus / address).resolve())

    def remove_function(self, address: str) -> None:
        """Remove the folder of a PCI function but not its link, as during a removal."""
        folder = (self.bus / address).resolve()
        # The link on the bus stays for a moment: a driver must tolerate that it leads nowhere.
        for name in folder.iterdir():
            name.unlink()
        folder.rmdir()

    @staticmethod
    def _link(path: Path, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Relative, as those of the kernel: the path in the target has the bridges.
        path.symlink_to(os.path.relpath(target, path.parent))

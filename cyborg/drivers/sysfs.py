# SPDX-License-Identifier: Apache-2.0
"""Reading sysfs: bounded, without privileges, and of devices that may vanish meanwhile.

What the files mean is told by ``Documentation/ABI/testing/sysfs-bus-pci`` of the Linux kernel.
"""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cyborg.core.address import PciAddress
from cyborg.core.errors import Invalid

MAX_BYTES = 4096  # of one attribute: sysfs gives no more than a page
TRIES = 3  # to read the bus while virtual functions are made or taken away


@dataclass(frozen=True, slots=True)
class PciFunction:
    """One function on the PCI bus; numbers are lower-case hexadecimal without ``0x``.

    ``class_code`` has six digits: base class, sub-class, programming interface. ``physfn`` is the
    physical function of a virtual one; ``numvfs`` and ``totalvfs`` are 0 without SR-IOV.
    """

    address: str
    vendor: str
    product: str
    class_code: str
    revision: str | None = None
    subsystem_vendor: str | None = None
    subsystem_product: str | None = None
    kernel_driver: str | None = None
    iommu_group: str | None = None
    numa_node: int | None = None
    physfn: str | None = None
    numvfs: int = 0
    totalvfs: int = 0


class Sysfs:
    """A sysfs below some root; nothing here raises because something is missing."""

    def __init__(self, root: str | Path = "/sys") -> None:
        self.root = Path(root)

    def text(self, path: str | Path) -> str | None:
        """Return an attribute without white space around it; None if it cannot be read."""
        raw = self.start(path)
        return None if raw is None else raw.decode(errors="replace").strip()

    def start(self, path: str | Path, size: int = MAX_BYTES) -> bytes | None:
        """Return the first bytes of an attribute, up to ``size``; None if it cannot be read."""
        try:
            handle = os.open(self.root / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return os.read(handle, size)
        except OSError:
            return None
        finally:
            os.close(handle)

    def number(self, path: str | Path) -> int | None:
        """Return a decimal attribute, or one in hexadecimal with its ``0x``."""
        text = self.text(path)
        try:
            return None if text is None else int(text, 0)
        except ValueError:
            return None

    def link(self, path: str | Path) -> str | None:
        """Return the last part of what a link points to."""
        try:
            return os.readlink(self.root / path).rpartition("/")[2] or None
        except OSError:
            return None

    def names(self, path: str | Path) -> list[str]:
        """Return what a directory holds, sorted; nothing if there is none."""
        try:
            return sorted(os.listdir(self.root / path))
        except OSError:
            return []

    def pci_functions(self) -> list[PciFunction]:
        """Return all functions of the PCI bus in its order, without those that just vanish.

        Virtual functions come and go one after another, and ``sriov_numvfs`` cannot be read before
        the last has: the two are read until they agree, a few times. Nothing tells when it is over
        that they have gone: the uevents come before, and the kernel takes a second more.
        """
        for _ in range(TRIES):
            found = self._functions()
            count = Counter(function.physfn for function in found)
            if all(function.numvfs == count[function.address] for function in found):
                break
        return found

    def _functions(self) -> list[PciFunction]:
        addresses: list[PciAddress] = []
        for name in self.names("bus/pci/devices"):
            try:
                addresses.append(PciAddress.parse(name))
            except Invalid:
                continue
        found = (self.pci_function(str(address)) for address in sorted(addresses))
        return [function for function in found if function is not None]

    def pci_function(self, address: str) -> PciFunction | None:
        """Return one function; None if it is not there, or no longer."""
        folder = Path("bus/pci/devices") / address
        vendor = self._hex(folder / "vendor", 4)
        product = self._hex(folder / "device", 4)
        class_code = self._hex(folder / "class", 6)
        if vendor is None or product is None or class_code is None:
            return None
        numa = self.number(folder / "numa_node")
        return PciFunction(
            address=address,
            vendor=vendor,
            product=product,
            class_code=class_code,
            revision=self._hex(folder / "revision", 2),
            subsystem_vendor=self._hex(folder / "subsystem_vendor", 4),
            subsystem_product=self._hex(folder / "subsystem_device", 4),
            kernel_driver=self.link(folder / "driver"),
            iommu_group=self.link(folder / "iommu_group"),
            # The kernel says -1 where the firmware does not tell.
            numa_node=None if numa is None or numa < 0 else numa,
            physfn=self.link(folder / "physfn"),
            numvfs=self.number(folder / "sriov_numvfs") or 0,
            totalvfs=self.number(folder / "sriov_totalvfs") or 0,
        )

    def _hex(self, path: Path, digits: int) -> str | None:
        value = self.number(path)
        return None if value is None or value < 0 else f"{value:0{digits}x}"[-digits:]

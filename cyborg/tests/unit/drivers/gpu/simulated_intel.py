# SPDX-License-Identifier: Apache-2.0
"""A simulated host with an Intel GPU, whose kernel driver is ``xe`` or ``i915``.

The attributes of ``sriov_admin`` follow ``Documentation/ABI/testing/sysfs-driver-intel-xe-sriov``
of Linux 6.19; the number of virtual functions is that of ``simulated_sriov``. No card was used.
"""

import errno
import os
import re
import shutil
from pathlib import Path

import pytest

from cyborg.drivers.kernel import xe as kernel_xe
from cyborg.drivers.privileged import xe
from cyborg.tests.unit.drivers.sriov.simulated_sriov import SimulatedSriov

CARD = "0000:03:00.0"
VFS = [f"0000:03:00.{n}" for n in range(1, 8)]
PRODUCT, CLASS = "e211", "030000"  # Arc Pro B60
_NUMBER = re.compile(r"(0x[0-9a-f]+|[0-9]+)\n?")  # kstrtouint of Linux


class SimulatedIntelHost(SimulatedSriov):
    """Simulated host; ``failing`` are attributes whose writes the firmware refuses."""

    def __init__(self, folder: Path, *, driver: str = "xe", totalvfs: int = 7) -> None:
        super().__init__(folder)
        self.failing: set[str] = set()
        self.ignoring: set[str] = set()  # attributes whose writes have no effect
        self.fixed_priority = False  # the hardware has no other scheduling priority
        self._driver = driver
        path = self.add_function(
            CARD,
            "8086",
            PRODUCT,
            CLASS,
            kernel_driver=driver,
            totalvfs=totalvfs,
            vf_product=PRODUCT,
        )
        if driver == kernel_xe.KERNEL_DRIVER and totalvfs:
            bulk = path / "sriov_admin/.bulk_profile"
            bulk.mkdir(parents=True)
            for name in (*kernel_xe.NUMBERS, kernel_xe.PRIORITY):
                (bulk / name).touch()
            for number in range(totalvfs + 1):
                self._profile(number).mkdir(parents=True)
            self._release()

    def redirect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the privileged functions run in this process on this host."""
        super().redirect(monkeypatch)
        monkeypatch.setattr(xe, "_SYS", self.root)
        monkeypatch.setattr(xe, "_write", self.write_attribute)

    def enable(self, count: int, address: str = CARD) -> list[str]:
        """Create virtual functions, as the host does by itself."""
        return self.enable_virtual_functions(address, count, PRODUCT, CLASS)

    def profile(self, number: int) -> dict[str, str]:
        """Return the scheduling of a virtual function, or of the card with number 0."""
        return {path.name: path.read_text().strip() for path in self._profile(number).iterdir()}

    def reboot(self) -> None:
        """Act as a boot of the host."""
        self._change((self.bus / CARD).resolve(), 0)

    def write_attribute(self, path: Path, text: str) -> None:
        """Write an attribute as the kernel does. Raise OSError."""
        if path.parent.name != ".bulk_profile":
            super().write_attribute(path, text)
            return
        self.writes.append((path.name, text))
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if path.name == kernel_xe.PRIORITY:
            if text not in kernel_xe.PRIORITIES:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            if self.fixed_priority:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        elif not _NUMBER.fullmatch(text):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if path.name in self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if path.name not in self.ignoring:
            for number in range(self.numvfs(CARD) + 1):
                self._set(number, path.name, text)

    def _change(self, folder: Path, count: int) -> None:
        if not count and any(name.is_dir() for name in (self.root.parent / "dev/vfio").iterdir()):
            raise AssertionError("virtual functions that a guest has open were removed")
        super()._change(folder, count)
        if not count and (folder / "sriov_admin").exists():
            self._release()

    def _release(self) -> None:
        """Release the resources of all virtual functions, with their scheduling."""
        for folder in self._profile(0).parent.parent.glob("*/profile"):
            number = int(folder.parent.name.removeprefix("vf").replace("pf", "0"))
            for name in kernel_xe.NUMBERS:
                self._set(number, name, "0")
            self._set(number, kernel_xe.PRIORITY, "low")

    def _profile(self, number: int) -> Path:
        name = f"vf{number}" if number else "pf"
        return (self.bus / CARD).resolve() / "sriov_admin" / name / "profile"

    def _set(self, number: int, name: str, value: str) -> None:
        if name == kernel_xe.PRIORITY:
            value = " ".join(f"[{p}]" if p == value else p for p in kernel_xe.PRIORITIES)
        elif value != "0":
            value = str(-(-int(value) // 5) * 5)  # rounded as by hardware
        (self._profile(number) / name).write_text(f"{value}\n")


def remove_admin(host: SimulatedIntelHost) -> None:
    """Act as ``xe`` before Linux 6.19, which has no attributes of the scheduling."""
    shutil.rmtree((host.bus / CARD).resolve() / "sriov_admin")

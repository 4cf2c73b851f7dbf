# SPDX-License-Identifier: Apache-2.0
"""A simulated host with an Intel GPU, whose kernel driver is ``xe`` or ``i915``.

The attributes of ``sriov_admin`` follow ``Documentation/ABI/testing/sysfs-driver-intel-xe-sriov``
of Linux 7.0, and ``xe_sriov_pf_sysfs.c``, ``xe_sriov_pf_provision.c`` and
``xe_gt_sriov_pf_config.c`` of ``xe``; the number of virtual functions is that of
``simulated_sriov``. No card was used.
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
_MIB = 1 << 20
SPARE = 128 * _MIB  # that the driver keeps for the physical function


class SimulatedIntelHost(SimulatedSriov):
    """Simulated host; ``failing`` are attributes whose writes the firmware refuses."""

    def __init__(
        self, folder: Path, *, driver: str = "xe", totalvfs: int = 7, vram_mib: int = 24480
    ) -> None:
        """``vram_mib`` is the memory of the card, 0 for one without memory of its own."""
        super().__init__(folder)
        self.failing: set[str] = set()
        self.ignoring: set[str] = set()  # attributes whose writes have no effect
        self.fixed_priority = False  # the hardware has no other scheduling priority
        self.fixed_vram = False  # the driver does not support changes of the memory
        self._vram = vram_mib * _MIB
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
            names = (*kernel_xe.NUMBERS, kernel_xe.PRIORITY)
            for name in (*names, kernel_xe.VRAM) if vram_mib else names:
                (bulk / name).touch()
            for number in range(totalvfs + 1):
                self._profile(number).mkdir(parents=True)
            self._release()

    def redirect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the privileged functions run in this process on this host."""
        super().redirect(monkeypatch)
        monkeypatch.setattr(xe, "_SYS", self.root)
        monkeypatch.setattr(xe, "_DEV", self.root.parent / "dev")
        monkeypatch.setattr(xe, "_write", self.write_attribute)

    def enable(self, count: int, address: str = CARD) -> list[str]:
        """Create virtual functions, as the host does by itself."""
        found = self.enable_virtual_functions(address, count, PRODUCT, CLASS)
        if self._vram and (self.bus / address / "sriov_admin").exists():
            self._divide_vram(count)
        return found

    def profile(self, number: int) -> dict[str, str]:
        """Return the scheduling of a virtual function, or of the card with number 0."""
        return {
            path.name: path.read_text().strip()
            for path in self._profile(number).iterdir()
            if path.name != kernel_xe.VRAM
        }

    def vram_mib(self) -> list[int]:
        """Return the MiB of memory of each virtual function that the card can have."""
        paths = [self._profile(number) / kernel_xe.VRAM for number in range(1, 8)]
        return [int(path.read_text()) // _MIB for path in paths]

    def reboot(self) -> None:
        """Act as a boot of the host."""
        self._change((self.bus / CARD).resolve(), 0)

    def write_attribute(self, path: Path, text: str) -> None:
        """Write an attribute as the kernel does. Raise OSError."""
        if path.parent.name not in (".bulk_profile", "profile"):
            super().write_attribute(path, text)
            return
        self.writes.append((path.name, text))
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if path.name == kernel_xe.VRAM:
            # Of all functions that the card can have, also of missing ones.
            bulk = sorted(path.parent.parent.glob(f"vf*/profile/{kernel_xe.VRAM}"))
            for each in bulk if path.parent.name == ".bulk_profile" else [path]:
                self._write_vram(each, text)
            return
        if path.name == kernel_xe.PRIORITY:
            # Of the physical function only: "high".
            if text not in ("low", "normal"):
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

    def _write_vram(self, path: Path, text: str) -> None:
        if not _NUMBER.fullmatch(text):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if self.fixed_vram:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        if kernel_xe.VRAM in self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if kernel_xe.VRAM in self.ignoring:
            return
        path.write_text("0\n")  # released before it is allocated
        size = -(-int(text, 0) // (2 * _MIB)) * 2 * _MIB
        if size > self.free_vram():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        path.write_text(f"{size}\n")

    def free_vram(self) -> int:
        """Return the bytes of memory that no virtual function has."""
        folder = (self.bus / CARD).resolve() / "sriov_admin"
        used = sum(int(p.read_text()) for p in folder.glob(f"vf*/profile/{kernel_xe.VRAM}"))
        return self._vram - used

    def _divide_vram(self, count: int) -> None:
        """Give each virtual function an equal part, a power of two."""
        part = (self._vram - SPARE) // count
        part = 1 << (part.bit_length() - 1)
        for number in range(1, count + 1):
            (self._profile(number) / kernel_xe.VRAM).write_text(f"{part}\n")

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
            if number and self._vram:
                (self._profile(number) / kernel_xe.VRAM).write_text("0\n")

    def _profile(self, number: int) -> Path:
        name = f"vf{number}" if number else "pf"
        return (self.bus / CARD).resolve() / "sriov_admin" / name / "profile"

    def _set(self, number: int, name: str, value: str) -> None:
        if name == kernel_xe.PRIORITY:
            names = ("low", "normal") if number else ("low", "normal", "high")
            value = " ".join(f"[{p}]" if p == value else p for p in names)
        elif value != "0":
            value = str(-(-int(value) // 5) * 5)  # rounded as by hardware
        (self._profile(number) / name).write_text(f"{value}\n")


def remove_admin(host: SimulatedIntelHost) -> None:
    """Act as ``xe`` before Linux 6.19, which has no attributes of the scheduling."""
    shutil.rmtree((host.bus / CARD).resolve() / "sriov_admin")

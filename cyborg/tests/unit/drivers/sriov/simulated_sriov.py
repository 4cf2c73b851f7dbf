# SPDX-License-Identifier: Apache-2.0
"""A simulated kernel that creates and removes virtual functions.

It follows ``sriov_numvfs_store`` of ``drivers/pci/iov.c`` of Linux 6.1: a change needs 0 first.
"""

import errno
import os
from pathlib import Path

import pytest

from cyborg.drivers.privileged import CONTEXT, pci
from cyborg.testing.machine import HostTree

CARD = "0000:3b:00.0"
VIRTUAL = ("0000:3b:00.1", "0000:3b:00.2", "0000:3b:00.3", "0000:3b:00.4")


class SimulatedSriov(HostTree):
    """Simulated host; ``write_attribute`` changes the number of virtual functions."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "dev/vfio").mkdir(parents=True)
        self.writes: list[tuple[str, str]] = []
        self.limit = 64  # more virtual functions fail with ENOMEM, as without memory space
        self.broken = False  # no virtual function can be created
        self.virtual_driver: str | None = None  # kernel driver of new virtual functions

    def redirect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the privileged function run in this process on this kernel."""
        monkeypatch.setattr(pci, "_SYS", self.root)
        monkeypatch.setattr(pci, "_DEV", self.root.parent / "dev")
        monkeypatch.setattr(pci, "_write", self.write_attribute)
        monkeypatch.setattr(CONTEXT, "client_mode", False)

    def add_card(
        self, address: str = CARD, class_code: str = "020000", driver: str | None = "ice"
    ) -> None:
        """Add a network card, or another one, with four virtual functions at most."""
        self.add_function(
            address,
            "8086",
            "1592",
            class_code,
            kernel_driver=driver,
            totalvfs=4,
            vf_product="1889",
        )
        if driver == "nvme":
            self.add_disk("nvme0n1", f"pci0000:00/{address}/nvme/nvme0")

    def numvfs(self, address: str = CARD) -> int:
        """Return the number of virtual functions of a card."""
        return int((self.bus / address / "sriov_numvfs").read_text())

    def enable(self, count: int, address: str = CARD) -> list[str]:
        """Create virtual functions, as the host does by itself."""
        class_code = (self.bus / address / "class").read_text().strip().removeprefix("0x")
        virtual = self.enable_virtual_functions(address, count, "1889", class_code)
        for name in virtual if self.virtual_driver else ():
            self.bind(name, str(self.virtual_driver))
        return virtual

    def bind(self, address: str, driver: str | None) -> None:
        """Bind a function to a kernel driver; give a VFIO driver its group."""
        folder = (self.bus / address).resolve()
        (folder / "driver").unlink(missing_ok=True)
        if driver is not None:
            self._link(folder / "driver", self.root / "bus/pci/drivers" / driver)
        if driver == "vfio-pci":
            group = os.readlink(folder / "iommu_group").rpartition("/")[2]
            (self.root.parent / "dev/vfio" / group).touch()

    def write_attribute(self, path: Path, text: str) -> None:
        """Write an attribute as the kernel does."""
        self.writes.append((path.name, text))
        if path.name == "sriov_numvfs":
            self._change(path.parent, int(text))
        else:
            path.write_text(f"{text}\n")

    def _change(self, folder: Path, count: int) -> None:
        if not (folder / "driver").exists():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        if count > int((folder / "sriov_totalvfs").read_text()):
            raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
        if count and self.numvfs(folder.name):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if count > self.limit or (count and self.broken):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        if count:
            self.enable(count, folder.name)
            return
        for link in (p for p in folder.iterdir() if p.name.startswith("virtfn")):
            name = os.readlink(link).rpartition("/")[2]
            # Kept elsewhere: no later folder gets its inode number, as in sysfs.
            removed = self.root / "removed"
            removed.mkdir(exist_ok=True)
            (self.bus / name).resolve().rename(removed / str(len(list(removed.iterdir()))))
            (self.bus / name).unlink()
            link.unlink()
        (folder / "sriov_numvfs").write_text("0\n")

# SPDX-License-Identifier: Apache-2.0
"""Simulated FPGA cards: sysfs trees written by hand, and a kernel that loads images.

Sources: the classes after ``Documentation/ABI/testing/sysfs-class-fpga-manager`` and
``sysfs-class-fpga-region``; the DFL card after ``Documentation/fpga/dfl.rst``,
``sysfs-platform-dfl-fme``, ``sysfs-platform-dfl-port`` and ``drivers/fpga/dfl-fme-pr.c``; the
attribute ``firmware`` after ``drivers/fpga/fpga-mgr.c`` of linux-xlnx; the functions of the Alveo
card after ``devices.h`` of XRT's kernel driver xocl.
"""

import errno
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg.drivers.fpga.driver import FpgaDriver
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.privileged import CONTEXT, fpga
from cyborg.testing.machine import HostTree

PLAIN, PAC, USER, MANAGEMENT = "0000:03:00.0", "0000:5e:00.0", "0000:b3:00.1", "0000:b3:00.0"
INTERFACE = "69528db6eb31577a8c3668f9faa081f6"
OTHER_INTERFACE = "9926ab6d6c925a68aabca7d84c545738"
OLD_FUNCTION, NEW_FUNCTION = "d8424dc4a4a3c413f89e433683f9040b", "331db30c988541ea9081f88b8f655caa"
HALF_WAY, REFUSED, BUSY = b"fails half-way", b"refused", b"busy"


class SimulatedKernel(HostTree):
    """Simulated host with FPGA cards; ``writes`` are the changes, in their order."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.writes: list[tuple[str, str]] = []
        self.firmware = folder / "firmware"
        self.firmware.mkdir()
        self.dev = folder / "dev"
        self.dev.mkdir()
        self.boot("6c1d2a41-0000-4000-8000-000000000001")
        self._numbers = {"region": 0, "fpga": 0}

    def boot(self, boot_id: str) -> None:
        """Set the boot id of the host."""
        path = self.proc / "sys/kernel/random/boot_id"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{boot_id}\n")

    def add_plain_card(self, *, firmware: bool = True, compat_id: str | None = INTERFACE) -> None:
        """Add a card with a manager and a region; ``firmware``: its kernel is the vendor's."""
        card = self.add_function(PLAIN, "1234", "11e8", "00ff00", kernel_driver="edufpga")
        manager = self._add_class_device("fpga_manager", "fpga", card)
        self._fill(manager, {"name": "edu fpga", "state": "operating", "status": ""})
        if firmware:
            (manager / "firmware").touch(0o200)
        region = self._add_class_device("fpga_region", "region", card)
        if compat_id is not None:
            self._fill(region, {"compat_id": compat_id})

    def add_dfl_card(self, ports: int = 1, virtual: int = 0) -> None:
        """Add a DFL card; with ``virtual`` its ports are those of as many virtual functions."""
        card = self.add_function(
            PAC, "8086", "09c4", "120000", kernel_driver="dfl-pci", totalvfs=ports, numa_node=1
        )
        base = self._add_class_device("fpga_region", "region", card)
        engine = base / "dfl-fme.0"
        self._fill(
            engine,
            {
                "ports_num": str(ports),
                "bitstream_id": "0x23000110010310",
                "bitstream_metadata": "0x177402141",
                "dev": "244:0",
            },
        )
        self._link(self.root / "bus/platform/devices/dfl-fme.0", engine)
        manager = self._add_class_device("fpga_manager", "fpga", engine / "dfl-fme-mgr.0")
        self._fill(manager, {"name": "DFL FME FPGA Manager", "state": "unknown", "status": ""})
        functions = self.enable_virtual_functions(PAC, virtual, "09c5", "120000") if virtual else []
        for number in range(ports):
            region = self._add_class_device(
                "fpga_region", "region", engine / f"dfl-fme-region.{number + 1}"
            )
            self._fill(region, {"compat_id": INTERFACE})
        for number in range(ports):
            home = base
            if functions:
                folder = (self.bus / functions[number]).resolve()
                home = self._add_class_device("fpga_region", "region", folder)
            port = home / f"dfl-port.{number}"
            self._fill(port, {"id": str(number), "afu_id": OLD_FUNCTION})

    def add_alveo(self) -> None:
        """Add an Alveo U200 with its management and user functions."""
        self.add_function(MANAGEMENT, "10ee", "5000", "120000", kernel_driver="xclmgmt")
        self.add_function(USER, "10ee", "5001", "120000", kernel_driver="xocl")

    def unbind(self, address: str) -> None:
        """Bind a function to vfio-pci, as libvirt does: its regions and managers disappear."""
        folder = (self.bus / address).resolve()
        for class_ in ("fpga_region", "fpga_manager"):
            for link in (self.root / "class" / class_).iterdir():
                if folder in link.resolve().parents:
                    link.unlink()
        (folder / "driver").unlink()
        self._link(folder / "driver", self.root / "bus/pci/drivers/vfio-pci")

    def redirect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the privileged functions run in this process on this kernel."""
        monkeypatch.setattr(fpga, "_SYS", self.root)
        monkeypatch.setattr(fpga, "_DEV", self.dev)
        monkeypatch.setattr(fpga, "_FIRMWARE", self.firmware)
        monkeypatch.setattr(fpga, "_write", self.write_attribute)
        monkeypatch.setattr(CONTEXT, "client_mode", False)

    def write_attribute(self, path: Path, text: str) -> None:
        """Act as the kernel on a write to ``firmware``: load the file. Raise OSError."""
        self.writes.append((str(path.relative_to(self.root)), text))
        state, file = path.parent / "state", self.firmware / text
        if not file.exists():
            state.write_text("firmware request error\n")
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        content = file.read_bytes()
        if content.startswith(BUSY):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if content.startswith(REFUSED):
            state.write_text("write init error\n")
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if content.startswith(HALF_WAY):
            state.write_text("write error\n")
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        state.write_text("operating\n")

    def _add_class_device(self, class_: str, prefix: str, parent: Path) -> Path:
        number = self._numbers[prefix]
        self._numbers[prefix] += 1
        folder = parent / class_ / f"{prefix}{number}"
        self._link(self.root / "class" / class_ / folder.name, folder)
        return folder

    @staticmethod
    def _fill(folder: Path, values: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (folder / name).write_text(f"{value}\n")


class SimulatedFpgaDriver(FpgaDriver):
    """The fpga driver with the privileged functions in this process."""

    def __init__(
        self, backend: str, options: Mapping[str, Any], sysfs_root: str | Path = "/sys"
    ) -> None:
        """Create the driver."""
        access = replace(
            HostAccess.of(Path(sysfs_root)),
            load_firmware=fpga.load_firmware,
            reconfigure=fpga.reconfigure,
            run_tool=fpga.run_tool,
        )
        super().__init__(backend, options, sysfs_root, access)

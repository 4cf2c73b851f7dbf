# SPDX-License-Identifier: Apache-2.0
"""A simulated host with AMD GPUs whose kernel driver ``amdgpu`` divides them for computing.

It follows ``amdgpu_gfx.c`` and ``__aqua_vanjaram_is_valid_mode`` of ``aqua_vanjaram.c`` of Linux: a
mode is valid for a number of dies (XCC) and of memory partitions. No card was used.
"""

import errno
import os
import shutil
from pathlib import Path

import pytest

from cyborg.drivers.kernel import amdgpu as kernel_amdgpu
from cyborg.drivers.privileged import CONTEXT, amdgpu
from cyborg.testing.machine import HostTree

CARD = "0000:c1:00.0"
PARTITIONS = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4}


class SimulatedAmdHost(HostTree):
    """Simulated host with an MI300X, which has eight dies; ``memory`` is its memory mode."""

    def __init__(self, folder: Path, *, memory: str = "NPS1", dies: int = 8) -> None:
        super().__init__(folder)
        self.dies, self.memory = dies, memory
        self.mode = ""
        self.writes: list[str] = []
        self.failing: set[str] = set()  # modes whose change fails
        self.late = False  # a change that fails has changed the mode before
        self.busy = False  # a process uses a GPU by /dev/kfd
        self.resetting = False
        self.requested: str | None = None  # memory mode for the next load of the module
        self.add_function(CARD, "1002", "74a1", "120000", kernel_driver="amdgpu")
        self.load()

    def redirect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the privileged function run in this process on this host."""
        monkeypatch.setattr(amdgpu, "_SYS", self.root)
        monkeypatch.setattr(amdgpu, "_write", self.write_attribute)
        monkeypatch.setattr(CONTEXT, "client_mode", False)

    def load(self) -> None:
        """Load the module, as at a boot: a requested memory mode applies, in its own mode."""
        self.memory, self.requested = self.requested or self.memory, None
        count = int(self.memory.removeprefix("NPS"))
        self._set({1: "SPX", 2: "DPX", 4: "QPX"}.get(count, "CPX"))

    def bind(self, driver: str | None) -> None:
        """Bind the card to a kernel driver: only ``amdgpu`` shows partitions."""
        folder = (self.bus / CARD).resolve()
        (folder / "driver").unlink(missing_ok=True)
        if driver is not None:
            self._link(folder / "driver", self.root / "bus/pci/drivers" / driver)
        if driver == "amdgpu":
            self.load()
            return
        for path in folder.glob("*_partition"):
            path.unlink()
        self._set_nodes(0)

    def nodes(self) -> list[str]:
        """Return the devices of partitions besides the first one, which the card itself has."""
        folder = self.root / "devices/platform"
        return sorted(path.name for path in folder.glob("amdgpu_xcp_*"))

    def write_attribute(self, path: Path, text: str) -> None:
        """Act as the kernel on a write to an attribute. Raise OSError."""
        self.writes.append(f"{path.name}={text}")
        if path.name == "current_memory_partition":
            self.requested = text
            return
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if self.resetting:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        if text not in self._valid():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if self.busy:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        fails = text in self.failing
        if not fails or self.late:
            self._set(text)
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _valid(self) -> list[str]:
        memory, dies = int(self.memory.removeprefix("NPS")), self.dies
        rules = {
            "SPX": memory == 1,
            "DPX": memory <= 2 and dies % 4 == 0,
            "TPX": memory in (1, 3) and dies % 3 == 0,
            "QPX": memory in (1, 4) and dies // 4 >= 2,
            "CPX": dies > 1 and memory in (1, 4) and dies % memory == 0,
        }
        return [mode for mode, valid in rules.items() if valid]

    def _set(self, mode: str) -> None:
        self.mode = mode
        folder = (self.bus / CARD).resolve()
        for name, text in (
            ("current_compute_partition", mode),
            ("available_compute_partition", ", ".join(self._valid())),
            ("current_memory_partition", self.memory),
            ("available_memory_partition", "NPS1, NPS4"),
        ):
            (folder / name).write_text(f"{text}\n")
        self._set_nodes(PARTITIONS.get(mode, self.dies) - 1)

    def _set_nodes(self, count: int) -> None:
        folder = self.root / "devices/platform"
        shutil.rmtree(folder, ignore_errors=True)
        for number in range(count):
            (folder / f"amdgpu_xcp_{number}/drm/renderD{129 + number}").mkdir(parents=True)


ALL = kernel_amdgpu.MODES

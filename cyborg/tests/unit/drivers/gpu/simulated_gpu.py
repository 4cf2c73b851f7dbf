# SPDX-License-Identifier: Apache-2.0
"""A simulated kernel with mediated devices, and the gpu driver on it.

It follows ``drivers/vfio/mdev`` of Linux 6.1. As in ``samples/vfio-mdev/mtty.c``, the types of a
parent share a number of units: a device of one type reduces the available instances of all types.
"""

import contextlib
import errno
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg.drivers.gpu.card_locks import locked, locked_if_free
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.privileged import CONTEXT, gpu
from cyborg.testing.sysfs_tree import SysfsTree

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\n?")


class SimulatedKernel(SysfsTree):
    """Simulated host whose kernel creates and removes mediated devices by ``write``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "sys")
        (self.root / "bus/mdev/devices").mkdir(parents=True)
        self.units: dict[str, int] = {}  # free units by parent
        self.costs: dict[str, dict[str, int]] = {}  # units of one device by parent and type
        self.writes: list[tuple[str, str]] = []

    def add_parent(self, name: str, units: int, costs: Mapping[str, int]) -> None:
        """Make a PCI function or a virtual device a parent; ``costs`` are units by type."""
        folder = self.bus / name if (self.bus / name).exists() else None
        if folder is None:
            folder = self.root / "devices/virtual" / name.rpartition("-")[0] / name
        for type_ in costs:
            (folder / "mdev_supported_types" / type_ / "devices").mkdir(parents=True)
            (folder / "mdev_supported_types" / type_ / "create").touch()
            texts = {"name": f"Name of {type_}", "device_api": "vfio-pci"}
            for file, text in texts.items():
                (folder / "mdev_supported_types" / type_ / file).write_text(f"{text}\n")
        self._link(self.root / "class/mdev_bus" / name, folder.resolve())
        self.units[name], self.costs[name] = units, dict(costs)
        self._count(name)

    def redirect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the privileged functions run in this process on this kernel."""
        monkeypatch.setattr(gpu, "_SYS", self.root)
        monkeypatch.setattr(gpu, "_DEV", self.root.parent / "dev")
        monkeypatch.setattr(gpu, "_write", self.write)
        monkeypatch.setattr(CONTEXT, "client_mode", False)

    def reboot(self) -> None:
        """Remove all mediated devices, as a boot of the host does."""
        for device in self.devices():
            self.write(self.root / "bus/mdev/devices" / device / "remove", "1")

    def devices(self) -> list[str]:
        """Return the uuids of all mediated devices."""
        return sorted(os.listdir(self.root / "bus/mdev/devices"))

    def write(self, path: Path, text: str) -> None:
        """Act as the kernel on a write to an attribute. Raise OSError."""
        self.writes.append((str(path.relative_to(self.root)), text))
        if path.name == "create":
            self._create(path.resolve().parent, text)
        elif path.name == "remove" and path.parent.exists():
            self._remove(path.resolve().parent)
        else:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _create(self, type_folder: Path, text: str) -> None:
        if not _UUID.fullmatch(text):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        parent, device = type_folder.parent.parent, text.strip()
        if device in self.devices():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        cost = self.costs[parent.name][type_folder.name]
        if self.units[parent.name] < cost:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.units[parent.name] -= cost
        folder = parent / device
        folder.mkdir()
        (folder / "remove").touch()
        self._link(folder / "mdev_type", type_folder)
        self._link(folder / "iommu_group", self.root / "kernel/iommu_groups/41")
        self._link(type_folder / "devices" / device, folder)
        self._link(self.root / "bus/mdev/devices" / device, folder)
        self._count(parent.name)

    def _remove(self, folder: Path) -> None:
        type_folder = (folder / "mdev_type").resolve()
        parent = folder.parent.name
        self.units[parent] += self.costs[parent][type_folder.name]
        (type_folder / "devices" / folder.name).unlink()
        (self.root / "bus/mdev/devices" / folder.name).unlink()
        shutil.rmtree(folder)
        self._count(parent)

    def _count(self, parent: str) -> None:
        types = self.root / "class/mdev_bus" / parent / "mdev_supported_types"
        for type_, cost in self.costs[parent].items():
            (types / type_ / "available_instances").write_text(f"{self.units[parent] // cost}\n")

    @staticmethod
    def _link(path: Path, target: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(target, path.parent))


@contextlib.contextmanager
def changing(card: str) -> Iterator[Callable[[], None]]:
    """Let a job of another thread have the lock of a card; yield a function that ends it."""
    is_locked, may_end = threading.Event(), threading.Event()

    def change() -> None:
        with locked(card):
            is_locked.set()
            assert may_end.wait(60)

    job = threading.Thread(target=change)
    job.start()
    assert is_locked.wait(60)

    def end() -> None:
        may_end.set()
        job.join(60)

    try:
        yield end
    finally:
        end()


@contextlib.contextmanager
def reading(card: str) -> Iterator[None]:
    """Let a discovery in another thread read a card for a short time, with its lock."""
    is_locked, never = threading.Event(), threading.Event()

    def read() -> None:
        with locked_if_free(card) as acquired:
            assert acquired
            is_locked.set()
            never.wait(0.1)

    reader = threading.Thread(target=read)
    reader.start()
    assert is_locked.wait(10)
    yield
    reader.join()


def privileged_access(root: Path) -> HostAccess:
    """Return the access to a host by the privileged functions in this process."""
    return replace(
        HostAccess.of(root),
        create_mdev=gpu.create,
        remove_mdev=gpu.remove,
        set_instances=gpu.set_instances,
    )


class SimulatedGpuDriver(GpuDriver):
    """The gpu driver with the privileged functions in this process."""

    def __init__(
        self, backend: str, options: Mapping[str, Any], sysfs_root: str | Path = "/sys"
    ) -> None:
        """Create the driver."""
        super().__init__(backend, options, sysfs_root, privileged_access(Path(sysfs_root)))

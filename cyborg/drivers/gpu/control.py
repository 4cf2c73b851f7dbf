# SPDX-License-Identifier: Apache-2.0
"""Privileged changes of GPUs, for the gpu driver."""

from pathlib import Path
from typing import Protocol

from cyborg.core.errors import DriverFailed
from cyborg.drivers.gpu.mdev import is_present


class GpuControl(Protocol):
    """Creator and remover of mediated devices and of MIG instances; see ``privileged``."""

    def create(self, parent: str, type_: str, device: str) -> None:
        """Create a mediated device; if it exists and no process uses it, remove it first.

        Raise DriverFailed.
        """

    def remove(self, parent: str, type_: str, device: str) -> None:
        """Remove a mediated device, if it exists. Raise DriverFailed if it cannot be removed."""

    def set_instances(self, address: str, profile: str | None) -> None:
        """Replace the MIG instances of a GPU; see ``privileged.mig``. Raise DriverFailed."""


class HostControl:
    """Control that changes the GPUs of this host."""

    def create(self, parent: str, type_: str, device: str) -> None:
        """Create a mediated device."""
        # Imported here: without this work, the agent does not need oslo.privsep.
        from cyborg.drivers import privileged
        from cyborg.drivers.privileged import gpu

        privileged.call_in_process_as_root()
        gpu.create(parent, type_, device)

    def remove(self, parent: str, type_: str, device: str) -> None:
        """Remove a mediated device."""
        from cyborg.drivers import privileged
        from cyborg.drivers.privileged import gpu

        privileged.call_in_process_as_root()
        gpu.remove(parent, type_, device)

    def set_instances(self, address: str, profile: str | None) -> None:
        """Replace the MIG instances of a GPU."""
        from cyborg.drivers import privileged
        from cyborg.drivers.privileged import gpu

        privileged.call_in_process_as_root()
        gpu.set_instances(address, profile)


class NoControl:
    """Control that refuses changes; for a sysfs that is not the sysfs of this host."""

    def __init__(self, sysfs_root: Path) -> None:
        self._root = sysfs_root

    def create(self, parent: str, type_: str, device: str) -> None:
        """Raise DriverFailed."""
        raise DriverFailed(f"{device} cannot be created: {parent} is not a device of this host")

    def remove(self, parent: str, type_: str, device: str) -> None:
        """Raise DriverFailed if the device exists."""
        if is_present(self._root, device):
            raise DriverFailed(f"{device} cannot be removed: {parent} is not a device of this host")

    def set_instances(self, address: str, profile: str | None) -> None:
        """Raise DriverFailed."""
        raise DriverFailed(f"{address} cannot be partitioned: it is not a device of this host")

# SPDX-License-Identifier: Apache-2.0
"""Mediated devices as the kernel shows them: their names, the types of a parent, the devices.

``Documentation/ABI/testing/sysfs-bus-vfio-mdev`` of Linux describes the files, and
``Documentation/driver-api/vfio-mediated-device.rst`` the model. A parent has one folder for each
type in ``mdev_supported_types``. ``available_instances`` is the number of devices of this type that
can be created now. Devices of another type on the same parent may reduce this number.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from cyborg.core.address import is_pci_address
from cyborg.core.errors import DriverFailed
from cyborg.drivers.sysfs import MAX_SCANS, Sysfs

# Names of parents: one component of a path, never ``..``.
PARENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,39}")


# Names of types: one component of a path, never ``..``.
TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")


DEVICES = Path("bus/mdev/devices")


@dataclass(frozen=True, slots=True)
class MdevType:
    """Type of mediated devices at a parent.

    ``available`` is the number of devices that can be created, ``devices`` has the uuids of
    existing devices.
    """

    available: int
    devices: frozenset[str]
    name: str | None = None
    description: str | None = None
    device_api: str | None = None


def is_present(sysfs_root: Path, device: str) -> bool:
    """Return whether a mediated device exists. Raise DriverFailed if sysfs cannot be read."""
    try:
        (sysfs_root / "bus").stat()  # without sysfs, no device would be found
        (sysfs_root / DEVICES / device).lstat()
    except FileNotFoundError as exc:
        if exc.filename == str(sysfs_root / "bus"):
            raise DriverFailed(f"{sysfs_root} is not the root of a sysfs") from exc
        return False
    except OSError as exc:
        raise DriverFailed(f"{exc.filename} cannot be read: {exc.strerror}") from exc
    return True


def types_folder(parent: str) -> Path:
    """Return the folder with the types of a parent, relative to the root of sysfs."""
    # ``mdev_register_parent`` of ``drivers/vfio/mdev/mdev_core.c`` links it in ``class/mdev_bus``.
    bus = "bus/pci/devices" if is_pci_address(parent) else "class/mdev_bus"
    return Path(bus) / parent / "mdev_supported_types"


def read_types(sysfs: Sysfs, parent: str) -> dict[str, MdevType]:
    """Return the types of a parent by name; an empty mapping if it has none."""
    # The types are read again, up to MAX_SCANS times, if devices are created or removed during the
    # reading. So each device is counted once, as existing or as available.
    for _ in range(MAX_SCANS):
        before = _read_devices(sysfs, parent)
        types = {
            name: _read_type(sysfs, types_folder(parent) / name, devices)
            for name, devices in before.items()
        }
        if _read_devices(sysfs, parent) == before:
            break
    return types


def _read_devices(sysfs: Sysfs, parent: str) -> dict[str, frozenset[str]]:
    """Return the uuids of the existing devices by type."""
    folder = types_folder(parent)
    return {
        name: frozenset(sysfs.list_names(folder / name / "devices"))
        for name in sysfs.list_names(folder)
        if TYPE.fullmatch(name)
    }


def _read_type(sysfs: Sysfs, folder: Path, devices: frozenset[str]) -> MdevType:
    return MdevType(
        available=max(0, sysfs.read_int(folder / "available_instances") or 0),
        devices=devices,
        name=sysfs.read_text(folder / "name"),
        description=sysfs.read_text(folder / "description"),
        device_api=sysfs.read_text(folder / "device_api"),
    )

# SPDX-License-Identifier: Apache-2.0
"""Privileged functions of the gpu driver: mediated devices, and the MIG instances of a GPU.

``Documentation/ABI/testing/sysfs-bus-vfio-mdev`` of the Linux kernel describes the files. A removal
waits for the processes that use the device (``vfio_unregister_group_dev`` of
``drivers/vfio/vfio_main.c``).

NVIDIA documents the functions of NVML in the NVML API Reference Guide, "Multi Instance GPU
Management", and the order of the work in "Configuring a GPU for MIG-Backed vGPUs" of the NVIDIA AI
Enterprise guide: MIG mode, GPU instances, and a compute instance in each.
"""

import errno
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path

from cyborg.core.address import PciAddress
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.host_use.check import mediated_parents, vgpu_functions
from cyborg.drivers.kernel import nvml
from cyborg.drivers.kernel.mdev import DEVICES, PARENT, TYPE, is_present, types_folder
from cyborg.drivers.privileged import CONTEXT, files
from cyborg.drivers.privileged.files import write as _write
from cyborg.drivers.sysfs import Sysfs

_SYS, _DEV = Path("/sys"), Path("/dev")


@CONTEXT.entrypoint
def create(parent: str, type_: str, device: str) -> None:
    """Create a mediated device with a uuid and a type at a parent.

    If the device exists and no process can use it, remove it first. If it may be in use, do
    nothing: it belongs to a running server. Raise DriverFailed if the uuid belongs to a device of
    another parent or type, if the parent does not have the type, or if the kernel refuses.
    """
    device_uuid = _parse(parent, type_, device)
    folder = types_folder(parent) / type_
    if _exists(device_uuid, parent, type_):
        if _find_use(device_uuid) is not None:
            return
        # It may have data of its last user.
        _remove(device_uuid, parent, type_)
    sysfs = Sysfs(_SYS)
    if type_ not in sysfs.list_names(folder.parent):
        raise DriverFailed(f"{parent} has no type {type_} of mediated devices")
    try:
        _write(_SYS / folder / "create", device_uuid)
    except OSError as exc:
        # EEXIST: another process created it since the check.
        if exc.errno != errno.EEXIST or not _exists(device_uuid, parent, type_):
            raise DriverFailed(
                f"a device of type {type_} could not be created at {parent}: {exc.strerror}; "
                f"available instances: {sysfs.read_text(folder / 'available_instances')}"
            ) from exc


@CONTEXT.entrypoint
def remove(parent: str, type_: str, device: str) -> None:
    """Remove the mediated device with a uuid and a type at a parent.

    Do nothing if the device does not exist. Raise DriverFailed if the uuid belongs to a device of
    another parent or type, if a process uses the device, if this cannot be determined, or if the
    kernel refuses.
    """
    device_uuid = _parse(parent, type_, device)
    if not _exists(device_uuid, parent, type_):
        return
    # A removal would wait for the end of the process.
    if (use := _find_use(device_uuid)) is not None:
        raise DriverFailed(f"{device_uuid} may still be used by a process: {use}")
    _remove(device_uuid, parent, type_)


def _remove(device_uuid: str, parent: str, type_: str) -> None:
    """Remove an existing device that no process uses."""
    try:
        _write(_SYS / DEVICES / device_uuid / "remove", "1")
    except OSError as exc:
        if _exists(device_uuid, parent, type_):
            raise DriverFailed(f"{device_uuid} could not be removed: {exc.strerror}") from exc


def _parse(parent: str, type_: str, device: str) -> str:
    """Return the uuid as the kernel writes it. Raise Invalid for an argument in another form."""
    for name, form in ((parent, PARENT), (type_, TYPE)):
        if not isinstance(name, str) or not form.fullmatch(name):
            raise Invalid(f"{name!r} is not a name of sysfs", field="mediated device")
    try:
        text = str(uuid.UUID(device))
    except (ValueError, AttributeError, TypeError) as exc:
        raise Invalid(f"{device!r} is not a uuid", field="mediated device") from exc
    if text != device:
        raise Invalid(f"{device!r} is not a uuid in the canonical form", field="mediated device")
    return text


def _exists(device: str, parent: str, type_: str) -> bool:
    """Return whether a device exists. Raise DriverFailed if it has another parent or type."""
    # Raise DriverFailed also if a folder cannot be read, because this does not prove absence.
    if not is_present(_SYS, device):
        return False
    if device not in Sysfs(_SYS).list_names(types_folder(parent) / type_ / "devices"):
        found = (_SYS / DEVICES / device / "mdev_type").resolve()
        raise DriverFailed(
            f"{device} is a device of {found.parent.parent.name}, type {found.name}; expected "
            f"{parent}, type {type_}"
        )
    return True


def _find_use(device: str) -> str | None:
    """Return why a process may use a device; None if no process can."""
    # A group that cannot be opened may be in use. If VFIO has a group but its device node is
    # missing, as in a container without ``/dev/vfio``, the use cannot be determined. A device
    # without a group has no VFIO driver, or the kernel has no groups (``CONFIG_VFIO_GROUP``); the
    # kernel then waits with the removal until no process uses the device.
    # ``class/vfio`` lists the groups of VFIO (``drivers/vfio/group.c``), and a device of VFIO has a
    # folder ``vfio-dev`` (``Documentation/ABI/testing/sysfs-devices-vfio-dev``).
    sysfs = Sysfs(_SYS)
    path = files.group_path(_DEV, sysfs.read_link(DEVICES / device / "iommu_group"))
    if path is None:
        return None
    try:
        os.close(files.open_group(path))
    except FileNotFoundError:
        if os.path.lexists(_SYS / "class/vfio" / path.name) or sysfs.list_names(
            DEVICES / device / "vfio-dev"
        ):
            return f"{path} is missing; the agent, also in a container, needs /dev/vfio of the host"
    except OSError as exc:
        return f"{path} cannot be opened: {exc.strerror}"
    return None


MAX_INSTANCES = 64  # of one profile; a GPU has up to eight slices
_PROFILE = re.compile(r"[0-9a-z][0-9a-z.+-]{0,31}")


@CONTEXT.entrypoint
def set_instances(address: str, instances: Mapping[str, int]) -> None:
    """Replace all MIG instances of a GPU by numbers of instances of profiles, or by none.

    A profile is a name such as ``1g.10gb``. Raise DriverFailed before any change if the PCI
    function is not a GPU with NVIDIA's kernel driver, is not in MIG mode, has vGPUs, or does not
    have a profile. Raise DriverFailed also if NVML fails, for example because a process uses an
    instance.
    """
    function = str(PciAddress.parse(address))
    if not isinstance(instances, Mapping):
        raise Invalid(f"{instances!r} are not numbers of MIG instances", field="layout")
    for profile, count in instances.items():
        if not isinstance(profile, str) or not _PROFILE.fullmatch(profile):
            raise Invalid(f"{profile!r} is not the name of a MIG profile", field="layout")
        # Not isinstance, for which True is an int.
        if type(count) is not int or not 0 < count <= MAX_INSTANCES:
            raise Invalid(f"{count!r} is not a number of MIG instances", field="layout")
    card = Sysfs(_SYS).pci_function(function)
    if card is None:
        raise DriverFailed(f"there is no device {function}")
    if card.vendor != nvml.NVIDIA or card.kernel_driver != nvml.KERNEL_DRIVER or card.physfn:
        raise DriverFailed(
            f"{function} is {card.vendor}:{card.product}, bound to {card.kernel_driver}; "
            f"expected a card bound to {nvml.KERNEL_DRIVER}"
        )
    if function in mediated_parents(_SYS):
        raise DriverFailed(f"{function} has mediated devices, which servers may use")
    functions = {f.address: f for f in Sysfs(_SYS).pci_functions() if f.physfn == function}
    if (reason := vgpu_functions(Sysfs(_SYS), functions).get(function)) is not None:
        raise DriverFailed(f"{function} cannot be partitioned: {reason}, which a server may use")
    nvml.replace_instances(function, instances)

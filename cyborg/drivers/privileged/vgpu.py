# SPDX-License-Identifier: Apache-2.0
"""Privileged functions of the gpu driver for vGPUs without mediated devices.

``cyborg.drivers.kernel.vgpu`` describes the attributes. The kernel driver refuses to remove a vGPU
that a process has open; whether a process has it is checked before, for a clear message.

Virtual functions are enabled and disabled by NVIDIA's script ``sriov-manage`` ("Virtual GPU
Software User Guide"), which unbinds the card from its driver and binds it again: a write to
``sriov_numvfs`` alone is refused. The script fails for a moment while a program such as
``nvidia-smi`` has the node of the card open, with "Cannot obtain unbindLock".
"""

import os
import time
from pathlib import Path

from cyborg.core.address import PciAddress
from cyborg.core.errors import CyborgError, DriverFailed, Invalid
from cyborg.drivers.host_use import open_nodes
from cyborg.drivers.host_use.check import used_functions, vgpu_functions
from cyborg.drivers.kernel import nvml, vgpu
from cyborg.drivers.privileged import CONTEXT, files, programs
from cyborg.drivers.privileged.files import write as _write
from cyborg.drivers.privileged.pci import find_card
from cyborg.drivers.privileged.programs import resolve as _resolve
from cyborg.drivers.sysfs import PCI_DEVICES, Sysfs

_SYS, _DEV, _PROC = Path("/sys"), Path("/dev"), Path("/proc")
_SCRIPT = "sriov-manage"
_SCRIPT_TIMEOUT = 120.0  # seconds; a card with 32 functions takes some
_BUSY = "Cannot obtain unbindLock"
_ATTEMPTS, _DELAY = 5, 1.0  # while another program has the node of the card open; seconds


@CONTEXT.entrypoint
def create(address: str, type_: str, parameters: str) -> None:
    """Create a vGPU of a type at a virtual function, instead of the vGPU that it may have.

    ``type_`` is the name of the type, with or without its product line. ``parameters`` are those of
    ``vgpu_params``; an empty text writes none. Raise DriverFailed, and leave the function without a
    vGPU if possible, if it does not exist, a process may use it, the card cannot have such a vGPU
    now, or the kernel driver refuses.
    """
    function = str(PciAddress.parse(address))
    if not isinstance(type_, str) or not vgpu.TYPE.fullmatch(type_):
        raise Invalid(f"{type_!r} is not the name of a vGPU type", field="type")
    if not isinstance(parameters, str) or (
        parameters and not vgpu.PARAMETERS.fullmatch(parameters)
    ):
        raise Invalid(f"{parameters!r} are not parameters of a vGPU", field="parameters")
    virtual = Sysfs(_SYS).pci_function(function)
    if virtual is None or virtual.physfn is None or virtual.vendor != nvml.NVIDIA:
        raise DriverFailed(f"there is no virtual function of an NVIDIA GPU at {function}")
    if (current := _read_current(function)) is None:
        raise DriverFailed(
            f"{function} has no attribute nvidia/current_vgpu_type: load the driver for hosts"
        )
    _check_unused(function)
    if current:
        # It may have data of its last user, or another type.
        _remove(function)
    state = vgpu.read(Sysfs(_SYS), function)
    types = {} if state is None else state.creatable
    type_id = vgpu.find_type(types, type_)
    if type_id is None:
        raise DriverFailed(
            f"{function} cannot have a vGPU of type {type_} now; creatable types: "
            f"{', '.join(types) or 'none'}"
        )
    try:
        _set(function, "current_vgpu_type", str(type_id))
        if (current := _read_current(function)) != type_id:
            raise DriverFailed(f"{function} has the vGPU type {current} after a write of {type_id}")
        if parameters:
            _set(function, "vgpu_params", parameters)
    except DriverFailed:
        if _read_current(function):
            _remove(function)
        raise


@CONTEXT.entrypoint
def remove(address: str) -> None:
    """Remove the vGPU of a virtual function; do nothing if there is none.

    Raise DriverFailed if a process may use it, or the kernel driver refuses.
    """
    function = str(PciAddress.parse(address))
    if _read_current(function):
        _check_unused(function)
        _remove(function)


@CONTEXT.entrypoint
def set_sriov(address: str, enable: bool, script: str) -> None:
    """Enable or disable the virtual functions of a card by the script at a path.

    Do nothing if the card is in this state already. The name of the script must be
    ``sriov-manage``, and only root may be able to change it. Raise DriverFailed before any change
    if the card is not bound to the kernel driver, is used by the host, or a virtual function has a
    vGPU or is open. Raise DriverFailed also if the script fails, or has no effect.
    """
    function = str(PciAddress.parse(address))
    if type(enable) is not bool:
        raise Invalid(f"{enable!r} is neither true nor false", field="enable")
    if not programs.is_path_of(script, _SCRIPT):
        raise Invalid(f"{script!r} is not the absolute path of sriov-manage", field="script")
    sysfs = Sysfs(_SYS)
    card = sysfs.pci_function(function)
    if card is None or card.vendor != nvml.NVIDIA or not card.totalvfs:
        raise DriverFailed(f"there is no NVIDIA GPU with SR-IOV at {function}")
    if bool(card.numvfs) == enable:
        return
    if card.kernel_driver != nvml.KERNEL_DRIVER:
        raise DriverFailed(
            f"{function} is bound to {card.kernel_driver or 'no kernel driver'}; expected "
            f"{nvml.KERNEL_DRIVER}, which creates virtual functions"
        )
    virtual = [f.address for f in sysfs.pci_functions() if f.physfn == function]
    used = used_functions(_SYS)
    for affected in (*virtual, function):
        if (reason := used.get(affected)) is not None:
            raise DriverFailed(f"SR-IOV of {function} cannot be changed: {affected}: {reason}")
    for virtual_function in virtual:
        _check_unused(virtual_function)
    _run_script(_resolve(script, _SCRIPT), "-e" if enable else "-d", function)
    after = sysfs.pci_function(function)
    if after is None or bool(after.numvfs) != enable:
        raise DriverFailed(
            f"{function} has {after.numvfs if after else 'no'} virtual functions after "
            f"{script} {'-e' if enable else '-d'}"
        )


@CONTEXT.entrypoint
def set_heterogeneous(address: str, enable: bool) -> None:
    """Switch the mode of a card in which its vGPUs can have different framebuffer sizes.

    Raise DriverFailed before any change if the PCI function is not a card with NVIDIA's kernel
    driver, or a virtual function of it has a vGPU. Raise DriverFailed also if the card does not
    support the mode, or the change has no effect.
    """
    function = str(PciAddress.parse(address))
    if type(enable) is not bool:
        raise Invalid(f"{enable!r} is neither true nor false", field="enable")
    sysfs = Sysfs(_SYS)
    find_card(sysfs, function, "NVIDIA GPU", vendor=nvml.NVIDIA, driver=nvml.KERNEL_DRIVER)
    functions = {f.address: f for f in sysfs.pci_functions() if f.physfn == function}
    if (reason := vgpu_functions(sysfs, functions).get(function)) is not None:
        raise DriverFailed(
            f"the heterogeneous mode of {function} cannot be changed: {reason}, which a server may "
            "use"
        )
    nvml.set_heterogeneous(function, enable=enable)


def _run_script(script: Path, option: str, function: str) -> None:
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            programs.run([str(script), option, function], environment, _SCRIPT_TIMEOUT)
            return
        except DriverFailed as exc:
            if _BUSY not in exc.message or attempt == _ATTEMPTS:
                raise
        time.sleep(_DELAY)


def _read_current(function: str) -> int | None:
    """Return the id of the type of a function's vGPU; None if it cannot have one."""
    path = _SYS / vgpu.attributes_folder(function) / "current_vgpu_type"
    try:
        (_SYS / PCI_DEVICES).stat()  # without sysfs, no function would be found
        return int(path.read_text())
    except FileNotFoundError as exc:
        if exc.filename == str(_SYS / PCI_DEVICES):
            raise DriverFailed(f"{_SYS} is not the root of a sysfs") from exc
        return None
    except (OSError, ValueError) as exc:
        raise DriverFailed(f"{path} cannot be read: {exc}") from exc


def _set(function: str, attribute: str, value: str) -> None:
    try:
        _write(_SYS / vgpu.attributes_folder(function) / attribute, value)
    except OSError as exc:
        raise DriverFailed(
            f"{function}: the kernel driver refused {value!r} for nvidia/{attribute}: "
            f"{exc.strerror}"
        ) from exc


def _remove(function: str) -> None:
    _set(function, "current_vgpu_type", "0")
    if current := _read_current(function):
        raise DriverFailed(f"{function} still has the vGPU type {current} after its removal")


def _check_unused(function: str) -> None:
    """Raise DriverFailed if a process has a function open by VFIO, or may have it."""
    if (use := _find_use(function)) is not None:
        raise DriverFailed(f"the vGPU of {function} may still be used by a process: {use}")


def _find_use(function: str) -> str | None:
    """Return why a process may use a function through VFIO, None if none does."""
    sysfs = Sysfs(_SYS)
    path = files.group_path(_DEV, sysfs.read_link(PCI_DEVICES / function / "iommu_group"))
    # ``class/vfio`` lists the groups (``drivers/vfio/group.c``): a group can be opened only while
    # no process has it or one of its devices.
    if path is not None and path.name in sysfs.list_names("class/vfio"):
        try:
            os.close(files.open_group(path))
        except OSError as exc:
            return f"{path} cannot be opened: {exc.strerror}"
        return None
    # A kernel without groups (``CONFIG_VFIO_GROUP``): several processes may open the node of a
    # device, and only their open files show it.
    nodes = {
        f"/dev/vfio/devices/{name}"
        for name in sysfs.list_names(PCI_DEVICES / function / "vfio-dev")
    }
    if not nodes:
        return None
    try:
        open_nodes.check_namespace(_PROC)
        found = open_nodes.scan({os.getpid()}, _PROC)
    except (CyborgError, OSError) as exc:
        return f"the processes of the host cannot be read: {exc}"
    users = sorted({program for node in nodes for program in found.get(node, ())})
    return f"{', '.join(users)} has {', '.join(sorted(nodes))} open" if users else None

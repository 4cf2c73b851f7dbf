# SPDX-License-Identifier: Apache-2.0
"""Reset of a PCI function, for drivers with the option ``reset``.

``Documentation/ABI/testing/sysfs-bus-pci`` of the Linux kernel describes ``reset`` and
``reset_method``; ``cyborg.drivers.pci.reset`` says which functions can be reset.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cyborg.core.address import PciAddress
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.delivery import is_vfio
from cyborg.drivers.host_use.check import used_functions
from cyborg.drivers.pci.reset import find_current_obstacle
from cyborg.drivers.privileged import CONTEXT, vfio
from cyborg.drivers.privileged.attributes import write as _write
from cyborg.drivers.privileged.reset_check import CHECKED, answers, set_mark
from cyborg.drivers.sysfs import PciFunction, Sysfs

_SYS, _DEV = Path("/sys"), Path("/dev")
_UNNAMED = "reset"  # before Linux 5.15 the methods have no names


@CONTEXT.entrypoint
def reset(address: str) -> str | None:
    """Reset the PCI function at an address; return its reset methods, the preferred one first.

    The methods are one text, separated by blanks; "; checked" follows if ``reset_check`` has seen
    that the function was reset. Return None if the PCI function does not exist. Raise DriverFailed
    without a reset if the host or a process uses the PCI function, if it is bound to a kernel
    driver that does not permit a reset, or if it has virtual functions. Raise DriverFailed also if
    the kernel fails to reset it, if the reset had no effect, and if the function does not answer
    afterwards.
    """
    parsed = str(PciAddress.parse(address))
    sysfs = Sysfs(_SYS)
    function = sysfs.pci_function(parsed)
    if function is None:
        return None
    obstacle = find_current_obstacle(sysfs, function, used_functions(_SYS))
    if obstacle is not None:
        raise DriverFailed(f"{parsed} cannot be reset: {obstacle}")
    folder = _SYS / "bus/pci/devices" / parsed
    methods = sysfs.read_text(folder / "reset_method") or _UNNAMED
    with _group_held(function):
        mark = None
        # With lockdown the kernel refuses writes to the configuration space, and permits resets.
        with contextlib.suppress(OSError):
            mark = set_mark(folder / "config") if CHECKED.issuperset(methods.split()) else None
        try:
            _write(folder / "reset", "1")
            is_ready = answers(folder / "config")
            is_unchanged = is_ready and mark is not None and mark.is_left()
        except OSError as exc:
            if sysfs.pci_function(parsed) is None:
                return None
            raise DriverFailed(f"{parsed} could not be reset: {exc.strerror} ({methods})") from exc
    if not is_ready:
        raise DriverFailed(f"{parsed} does not answer after its reset ({methods})")
    if is_unchanged:
        raise DriverFailed(
            f"the reset of {parsed} had no effect ({methods}): a register kept its value; choose "
            "another method in its reset_method"
        )
    return methods if mark is None else f"{methods}; checked"


@contextlib.contextmanager
def _group_held(function: PciFunction) -> Iterator[None]:
    """Keep the VFIO group of a function open, so that no process can begin to use the function.

    Raise DriverFailed if a process uses the function,
    or if this cannot be determined. A function without a VFIO driver has no group to open.
    """
    if not is_vfio(function.kernel_driver):
        yield
        return
    path = vfio.group_path(_DEV, function.iommu_group)
    if path is None:
        raise DriverFailed(
            f"{function.address} is bound to {function.kernel_driver} and has no IOMMU group, so "
            "it is unknown whether a process uses it"
        )
    try:
        descriptor = vfio.open_group(path)
    except OSError as exc:
        raise DriverFailed(
            f"{function.address} may still be used by a process: {path} cannot be opened: "
            f"{exc.strerror}"
        ) from exc
    try:
        yield
    finally:
        os.close(descriptor)

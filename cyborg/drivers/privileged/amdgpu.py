# SPDX-License-Identifier: Apache-2.0
"""Privileged function of the gpu driver for the partitions of AMD GPUs.

``cyborg.drivers.kernel.amdgpu`` describes the attributes.
"""

import errno
from pathlib import Path

from cyborg.core.address import PciAddress
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.host_use.check import used_functions
from cyborg.drivers.kernel import amdgpu
from cyborg.drivers.privileged import CONTEXT
from cyborg.drivers.privileged.files import write as _write
from cyborg.drivers.privileged.pci import find_card
from cyborg.drivers.sysfs import PCI_DEVICES, Sysfs

_SYS = Path("/sys")


@CONTEXT.entrypoint
def set_mode(address: str, mode: str) -> None:
    """Change the compute partition mode of a card.

    Do nothing if the card has the mode. Raise DriverFailed before any change if the card is not
    bound to ``amdgpu``, cannot have the mode with its memory mode, or is used by the host. Raise
    DriverFailed also if the kernel refuses; if the mode is another one then, the previous mode is
    restored, and the error says so if this fails too.
    """
    function = str(PciAddress.parse(address))
    if mode not in amdgpu.MODES:
        raise Invalid(f"{mode!r} is not one of {', '.join(amdgpu.MODES)}", field="mode")
    sysfs = Sysfs(_SYS)
    find_card(sysfs, function, "AMD GPU", vendor=amdgpu.AMD, driver=amdgpu.KERNEL_DRIVER)
    previous = amdgpu.read_mode(sysfs, function)
    if previous == mode:
        return
    if mode not in (available := amdgpu.read_available(sysfs, function)):
        raise DriverFailed(
            f"{function} cannot be in mode {mode} with the memory mode "
            f"{amdgpu.read_memory_mode(sysfs, function)}; expected one of {', '.join(available)}"
        )
    if (reason := used_functions(_SYS).get(function)) is not None:
        raise DriverFailed(f"{function} cannot be changed: the host uses it: {reason}")
    error = _change(function, mode)
    if error is None:
        return
    if previous is not None and amdgpu.read_mode(sysfs, function) != previous:
        failure = _change(function, previous)
        error += f"; {previous} was restored" if failure is None else f"; then {failure}"
    raise DriverFailed(error)


def _change(function: str, mode: str) -> str | None:
    """Change the mode; return what failed, or None."""
    try:
        _write(_SYS / PCI_DEVICES / function / amdgpu.COMPUTE_MODE, mode)
    except OSError as exc:
        busy = "; a process uses the GPU (/dev/kfd): end it" if exc.errno == errno.EBUSY else ""
        return f"{function} cannot be changed to {mode}: {exc.strerror}{busy}"
    found = amdgpu.read_mode(Sysfs(_SYS), function)
    return None if found == mode else f"{function} is in mode {found} after a change to {mode}"

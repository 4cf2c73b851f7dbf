# SPDX-License-Identifier: Apache-2.0
"""Privileged functions of the gpu driver for what virtual functions of Intel GPUs have.

``cyborg.drivers.kernel.xe`` describes the attributes.
"""

from collections.abc import Mapping
from pathlib import Path

from cyborg.core.address import PciAddress
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.host_use.check import used_functions
from cyborg.drivers.kernel import xe
from cyborg.drivers.privileged import CONTEXT
from cyborg.drivers.privileged.files import write as _write
from cyborg.drivers.privileged.pci import Host, reserve_virtual_functions
from cyborg.drivers.sysfs import PciFunction, Sysfs

_SYS, _DEV = Path("/sys"), Path("/dev")
_MAX_MIB = 1 << 24


@CONTEXT.entrypoint
def set_scheduling(address: str, settings: Mapping[str, str]) -> None:
    """Set attributes of the scheduling of a card and all of its virtual functions.

    Raise DriverFailed before any change if the card is not bound to ``xe``, has no virtual function
    or does not have an attribute. Raise DriverFailed also if the kernel refuses a value, or it has
    no effect; then some attributes are changed.
    """
    function = str(PciAddress.parse(address))
    if not isinstance(settings, Mapping):
        raise Invalid(f"{settings!r} are not settings", field="settings")
    for name, value in settings.items():
        if not xe.is_valid(name, value):
            raise Invalid(f"{value!r} is not a value of {name!r}", field="settings")
    sysfs = Sysfs(_SYS)
    card = _find_card(sysfs, function)
    if not xe.has_scheduling(sysfs, function, settings):
        raise DriverFailed(
            f"{function} does not have all of {', '.join(settings)} in sriov_admin: Linux 6.19 or "
            "later has them for cards that share their time"
        )
    for name, value in settings.items():
        try:
            _write(_SYS / xe.bulk_folder(function) / name, value)
        except OSError as exc:
            raise DriverFailed(
                f"{function}: the kernel driver refused {value!r} for {name}: {exc.strerror}"
            ) from exc
        # The last virtual function stands for all: the write applies to each of them.
        found = xe.read(sysfs, function, card.numvfs, name)
        # The hardware may round a number, but not to unlimited.
        rounded = name in xe.NUMBERS and found is not None and value != "0" and found != "0"
        if found != value and not rounded:
            raise DriverFailed(f"{function} has {found} for {name} after a write of {value}")


@CONTEXT.entrypoint
def set_vram(address: str, mib: int) -> None:
    """Give each virtual function of a card a number of MiB of the memory of the card.

    Do nothing for functions that have it. Raise DriverFailed before any change if the card is not
    bound to ``xe``, has no virtual function or no such attribute, or if a function is or may be in
    use. Raise DriverFailed also if the kernel refuses, or a function has less afterwards; then some
    functions have another part, or none.
    """
    function = str(PciAddress.parse(address))
    # Not isinstance, for which True is an int.
    if type(mib) is not int or not 0 < mib <= _MAX_MIB:
        raise Invalid(f"{mib!r} is not a number of MiB from 1 to {_MAX_MIB}", field="mib")
    sysfs = Sysfs(_SYS)
    card = _find_card(sysfs, function)
    if not xe.has_vram(sysfs, function):
        raise DriverFailed(
            f"{function} does not have {xe.VRAM} in sriov_admin: Linux 7.0 or later has it for "
            "cards with memory of their own"
        )
    num_bytes = mib << 20
    parts = {n: xe.read_vram(sysfs, function, n) for n in range(1, card.numvfs + 1)}
    to_change = [n for n, part in parts.items() if not xe.is_rounded(part, num_bytes)]
    if not to_change:
        return
    # The function with the largest part first: its change leaves memory for the others.
    to_change.sort(key=lambda number: -(parts[number] or 0))
    host = Host(_SYS, _DEV, _write)
    with reserve_virtual_functions(host, card, used_functions(_SYS)):
        for number in to_change:
            try:
                _write(_SYS / xe.profile_folder(function, number) / xe.VRAM, str(num_bytes))
            except OSError as exc:
                raise DriverFailed(
                    f"{function}: the kernel driver refused {mib} MiB for virtual function "
                    f"{number}: {exc.strerror}"
                ) from exc
            found = xe.read_vram(sysfs, function, number)
            if not xe.is_rounded(found, num_bytes):
                raise DriverFailed(
                    f"virtual function {number} of {function} has {found} bytes of memory after a "
                    f"write of {num_bytes}"
                )


def _find_card(sysfs: Sysfs, function: str) -> PciFunction:
    """Return a card of ``xe`` with virtual functions. Raise DriverFailed if there is none."""
    card = sysfs.pci_function(function)
    if card is None or card.kernel_driver != xe.KERNEL_DRIVER or not card.numvfs:
        raise DriverFailed(
            f"there is no card of {xe.KERNEL_DRIVER} with virtual functions at {function}"
        )
    return card

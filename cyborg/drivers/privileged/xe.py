# SPDX-License-Identifier: Apache-2.0
"""Privileged function of the gpu driver for the scheduling of virtual functions of Intel GPUs.

``cyborg.drivers.kernel.xe`` describes the attributes.
"""

from collections.abc import Mapping
from pathlib import Path

from cyborg.core.address import PciAddress
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.kernel import xe
from cyborg.drivers.privileged import CONTEXT
from cyborg.drivers.privileged.files import write as _write
from cyborg.drivers.sysfs import Sysfs

_SYS = Path("/sys")


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
    card = sysfs.pci_function(function)
    if card is None or card.kernel_driver != xe.KERNEL_DRIVER or not card.numvfs:
        raise DriverFailed(
            f"there is no card of {xe.KERNEL_DRIVER} with virtual functions at {function}"
        )
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
        found = xe.read(sysfs, function, card.numvfs, name)
        # The hardware may round a number, but not to unlimited.
        rounded = name in xe.NUMBERS and found is not None and value != "0" and found != "0"
        if found != value and not rounded:
            raise DriverFailed(f"{function} has {found} for {name} after a write of {value}")

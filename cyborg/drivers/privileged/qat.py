# SPDX-License-Identifier: Apache-2.0
"""Change of the services of a QAT device, for the crypto driver.

The kernel describes ``qat/state`` and ``qat/cfg_services`` in
``Documentation/ABI/testing/sysfs-driver-qat``, and ``sriov_numvfs`` in ``sysfs-bus-pci``. A device
that is stopped loses its virtual functions (``adf_dev_stop``, in older kernels
``adf_dev_shutdown``, of ``drivers/crypto/intel/qat/qat_common/adf_init.c``). The kernel refuses
with EBUSY to stop a device with which it computes (``state_store`` of ``adf_sysfs.c``).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cyborg.core.address import PciAddress
from cyborg.core.errors import DriverFailed
from cyborg.drivers.kernel.crypto import QAT_CONFIGURABLE, QAT_LAYOUTS, parse_services
from cyborg.drivers.privileged import CONTEXT
from cyborg.drivers.sysfs import Sysfs

_SYS = Path("/sys")
_KERNEL_DRIVERS = ("4xxx", "420xx", "6xxx")


class Attributes(Protocol):
    """Access to the attributes of a QAT device in its sysfs folder ``qat``."""

    def read(self, name: str) -> str | None:
        """Return the value of an attribute; None if it cannot be read."""

    def write(self, name: str, value: str) -> None:
        """Write an attribute. Raise OSError if the kernel refuses the value."""

    def has_virtual_functions(self) -> bool:
        """Return whether the device has virtual functions now."""


@CONTEXT.entrypoint
def set_services(address: str, layout: str) -> None:
    """Set the services of the QAT device at a PCI address to those of a layout.

    The module ``services`` lists the layouts. Do nothing if the device has the services already.
    Raise DriverFailed if the device is not a physical function of the fourth generation that is
    bound to its kernel driver, if it has virtual functions, or if the kernel refuses the change. If
    the change fails, the old services and state are restored; the error says so if this fails too.
    """
    function = str(PciAddress.parse(address))
    if layout not in QAT_LAYOUTS:
        raise DriverFailed(f"unknown layout {layout!r}: expected one of {sorted(QAT_LAYOUTS)}")
    check_unused(Sysfs(_SYS), function)
    folder = _SYS / "bus/pci/devices" / function / "qat"
    change(function, SysfsAttributes(folder), layout)


def check_unused(sysfs: Sysfs, function: str) -> None:
    """Raise DriverFailed if a PCI function is not a QAT device whose services may be changed."""
    card = sysfs.pci_function(function)
    if card is None:
        raise DriverFailed(f"there is no device {function}")
    if card.vendor != "8086" or card.product not in QAT_CONFIGURABLE:
        raise DriverFailed(
            f"{function} is {card.vendor}:{card.product}; expected the physical function of a "
            "QAT device 4xxx, 420xx or 6xxx"
        )
    if card.kernel_driver not in _KERNEL_DRIVERS:
        raise DriverFailed(
            f"{function} is bound to the kernel driver {card.kernel_driver}; expected "
            f"{' or '.join(_KERNEL_DRIVERS)}"
        )
    virtual = [f.address for f in sysfs.pci_functions() if f.physfn == function]
    if card.numvfs or virtual:
        raise DriverFailed(
            f"{function} has virtual functions, which servers may use, and which a change would "
            "remove: write 0 to its sriov_numvfs first"
        )


def change(function: str, device: Attributes, layout: str) -> None:
    """Stop a device, set the services of a layout, start it, and verify the attributes.

    Raise DriverFailed after a failure; first try to restore the old services and state.
    """
    old_state, old_value = device.read("state"), device.read("cfg_services")
    expected = parse_services(QAT_LAYOUTS[layout])
    if old_state not in ("up", "down") or not old_value:
        raise DriverFailed(
            f"the services of {function} cannot be changed: qat/state is {old_state}, "
            f"qat/cfg_services is {old_value}"
        )
    # Parsed: the order of services has no meaning, and a stop would need an unused device.
    if old_state == "up" and parse_services(old_value) == expected:
        return
    try:
        _apply(device, QAT_LAYOUTS[layout], state="up")
        return
    except OSError as exc:
        error = f"{function} refused the services {layout}: {exc.strerror or exc}"
    try:
        # A device that the kernel refused to stop is unchanged, and would refuse again.
        if _observe(device) != (old_state, parse_services(old_value)):
            _apply(device, old_value, old_state)
    except OSError as exc:
        raise DriverFailed(
            f"{error}; its services {old_value} could not be restored: {exc.strerror or exc}"
        ) from exc
    raise DriverFailed(f"{error}; its services {old_value} were restored")


def _apply(device: Attributes, value: str, state: str) -> None:
    """Set ``cfg_services`` and the state of a device. Raise OSError if the device refuses."""
    if device.read("state") != "down":
        # The host may have created some since the first check, for example by a udev rule.
        if device.has_virtual_functions():
            raise OSError("it has virtual functions, which servers may use and a stop would remove")
        device.write("state", "down")
    if parse_services(device.read("cfg_services")) != parse_services(value):
        device.write("cfg_services", value)
    if state == "up":
        device.write("state", "up")
    new_state, services = _observe(device)
    if (new_state, services) != (state, parse_services(value)):
        raise OSError(
            f"after the change the state is {new_state} and the services are {';'.join(services)}"
        )


def _observe(device: Attributes) -> tuple[str | None, tuple[str, ...]]:
    """Return the state of a device, and its services."""
    return device.read("state"), parse_services(device.read("cfg_services"))


def _write_line(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_TRUNC)
    try:
        os.write(descriptor, f"{text}\n".encode())
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class SysfsAttributes:
    """Attributes of a device in a folder ``qat``; ``write_line`` writes a line to one of them."""

    folder: Path
    write_line: Callable[[Path, str], None] = _write_line

    def read(self, name: str) -> str | None:
        """Return the value of an attribute; None if it cannot be read."""
        return Sysfs(self.folder).read_text(name)

    def has_virtual_functions(self) -> bool:
        """Return whether the device has virtual functions now."""
        sysfs = Sysfs(self.folder.parent)
        # The kernel creates the links virtfnN before it updates the number.
        links = (name for name in sysfs.list_names("") if name.startswith("virtfn"))
        return bool(sysfs.read_int("sriov_numvfs")) or any(links)

    def write(self, name: str, value: str) -> None:
        """Write an attribute. Raise OSError if the kernel refuses the value."""
        self.write_line(self.folder / name, value)

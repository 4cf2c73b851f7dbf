# SPDX-License-Identifier: Apache-2.0
"""Which PCI functions can be reset now, as the kernel does it.

``Documentation/ABI/testing/sysfs-bus-pci`` of the Linux kernel describes ``reset`` and
``reset_method``. The kernel tries the methods in their order (``__pci_reset_function_locked`` of
``drivers/pci/pci.c``) and refuses a bus reset while the bus has another function
(``pci_parent_bus_reset``). It waits at most 60 s for the function (``PCIE_RESET_READY_POLL_MS`` of
``drivers/pci/pci.c``).
"""

from collections.abc import Mapping

from cyborg.core.inventory.delivery import is_vfio
from cyborg.drivers.sysfs import PCI_DEVICES, PciFunction, Sysfs


def can_reset(sysfs: Sysfs, address: str) -> bool:
    """Return whether the kernel has a method to reset a PCI function."""
    # An administrator can disable all methods, which makes ``reset_method`` empty.
    # ``Documentation/ABI/testing/sysfs-bus-pci``: a function that cannot be reset has neither
    # ``reset_method`` nor ``reset``; kernels before 5.15 have ``reset`` alone.
    folder = PCI_DEVICES / address
    names = sysfs.list_names(folder)
    if "reset_method" in names:
        return bool(sysfs.read_text(folder / "reset_method"))
    return "reset" in names


# Kernel drivers, besides those of VFIO, with which a function can be reset.
# The kernel saves and restores only the configuration of a function. Few drivers of hosts restore
# its other state (``reset_prepare`` and ``reset_done`` in ``pci_dev_save_and_disable`` and
# ``pci_dev_restore`` of ``drivers/pci/pci.c``), so others lose the device.
RESETTABLE_DRIVERS = (None, "pci-stub")


# Methods that reset all functions of a bus: the kernel refuses them for one of several.
# ``pci_reset_bus_function`` of ``drivers/pci/pci.c``, which tries the slot before the bus and which
# ``cxl_reset_bus_function`` calls. ``pci_reset_fn_methods`` there has the names of all methods.
_WITH_BUS = frozenset({"bus", "cxl_bus"})


def find_obstacle(sysfs: Sysfs, function: PciFunction, accepted: str | None = None) -> str | None:
    """Return why an unused PCI function cannot be reset, with a remedy; None if it can.

    ``accepted`` is a use by the host that an adoption by force has accepted.
    """
    driver = function.kernel_driver
    if accepted is not None:
        return (
            f"it cannot be reset while the host uses it: {accepted}; end this use, or set the "
            "option reset to if_possible"
        )
    if not can_reset(sysfs, function.address):
        return (
            "the kernel has no method to reset it: enable one in its reset_method, use another "
            "device, or set the option reset to if_possible"
        )
    if (other := _other_on_bus(sysfs, function.address)) is not None:
        return (
            f"the kernel can only reset it together with {other}, which is on the same bus, and so "
            "not alone: use another device, or set the option reset to if_possible"
        )
    if not is_vfio(driver) and driver not in RESETTABLE_DRIVERS:
        return (
            f"it cannot be reset while it is bound to the kernel driver {driver}: bind it to "
            "vfio-pci at boot, or set the option reset to if_possible"
        )
    if function.numvfs:
        return "a reset would remove its virtual functions: remove them on the host"
    return None


def _other_on_bus(sysfs: Sysfs, address: str) -> str | None:
    """Return another function of the bus if a function can only be reset with its bus, or None."""
    # The kernel lists these methods before it has found the other functions, and fails later
    # (``pci_parent_bus_reset`` and ``pci_dev_reset_slot_function`` of ``drivers/pci/pci.c``).
    methods = set((sysfs.read_text(f"bus/pci/devices/{address}/reset_method") or "").split())
    if not methods or methods - _WITH_BUS:
        return None
    bus = address.rpartition(":")[0]
    names = sysfs.list_names("bus/pci/devices")
    return next((n for n in names if n != address and n.rpartition(":")[0] == bus), None)


def find_current_obstacle(
    sysfs: Sysfs, function: PciFunction, used: Mapping[str, str]
) -> str | None:
    """Return why a PCI function cannot be reset now; None if it can.

    ``used`` has a reason for each PCI function that the host uses, by address.
    """
    if (reason := used.get(function.address)) is not None:
        return f"the host uses it: {reason}"
    return find_obstacle(sysfs, function)

# SPDX-License-Identifier: Apache-2.0
"""Reset of a PCI function after its use, and the reasons why a function cannot be reset.

VFIO resets a function itself when a process opens and closes it, and ignores a failure
(``vfio_pci_core_enable`` and ``vfio_pci_core_disable`` of ``drivers/vfio/pci/vfio_pci_core.c``).
This module resets the function once more, by the attribute ``reset``, and detects a failure.

``Documentation/ABI/testing/sysfs-bus-pci`` of the Linux kernel describes ``reset`` and
``reset_method``. The kernel tries the methods in their order (``__pci_reset_function_locked`` of
``drivers/pci/pci.c``) and refuses a bus reset while the bus has another function
(``pci_parent_bus_reset``). It waits at most 60 s for the function (``PCIE_RESET_READY_POLL_MS`` of
``drivers/pci/pci.c``).
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial

from cyborg.core.address import PciAddress
from cyborg.core.drivers.registry import Option
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.inventory.delivery import is_vfio
from cyborg.core.log import get_logger
from cyborg.drivers.base import Driver
from cyborg.drivers.host_use.check import used_functions
from cyborg.drivers.pci import topology
from cyborg.drivers.sysfs import LOCAL_ROOT, PciFunction, Sysfs

LOG = get_logger(__name__)


class ResetPolicy(StrEnum):
    """Values of the option ``reset``."""

    NEVER = "never"
    IF_POSSIBLE = "if_possible"
    REQUIRED = "required"


OPTION = Option(
    "reset",
    "str",
    str(ResetPolicy.NEVER),
    "Whether the agent resets a PCI function after each use, before it is offered again: never "
    "(only VFIO resets it), if_possible (if the kernel has a method and no kernel driver of the "
    "host is bound to it), or required (a function that cannot be reset is shown and not "
    "scheduled). A function whose reset fails stays unavailable, and the reset is retried.",
)

RESETTABLE_DRIVERS = (None, "pci-stub")
"""Kernel drivers, besides those of VFIO, with which a function can be reset.

The kernel saves and restores only the configuration of a function. Few drivers of hosts restore its
other state (``reset_prepare`` and ``reset_done`` in ``pci_dev_save_and_disable`` and
``pci_dev_restore`` of ``drivers/pci/pci.c``), so others lose the device.
"""

Reset = Callable[[str], str | None]
"""Reset of the function at an address; returns the methods, None if the function disappeared."""


_WITH_BUS = frozenset({"bus", "cxl_bus"})
"""Methods that reset all functions of a bus: the kernel refuses them for one of several.

``pci_reset_bus_function`` of ``drivers/pci/pci.c``, which tries the slot before the bus and which
``cxl_reset_bus_function`` calls. ``pci_reset_fn_methods`` there has the names of all methods.
"""


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
    if not topology.can_reset(sysfs, function.address):
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
    """Return another function of the bus if a function can only be reset with its bus, or None.

    The kernel lists these methods before it has found the other functions, and fails later
    (``pci_parent_bus_reset`` and ``pci_dev_reset_slot_function`` of ``drivers/pci/pci.c``).
    """
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


def _reset_on_this_host(address: str) -> str | None:
    """Reset the PCI function at an address of this host; return its reset methods."""
    # Imported here: without a reset, the agent does not need oslo.privsep.
    from cyborg.drivers import privileged
    from cyborg.drivers.privileged import pci

    privileged.call_in_process_as_root()
    methods: str | None = pci.reset(address)
    return methods


def _refuse(address: str) -> str | None:
    raise DriverFailed(f"{address} cannot be reset: it is not a function of this host")


class Resetter:
    """Reset of a backend's PCI functions according to its option ``reset``.

    A driver without the option resets nothing. ``run`` resets the PCI function at an address. The
    default ``run`` resets PCI functions of this host. If the sysfs root is not /sys, it raises
    DriverFailed, because the addresses are not those of this host.
    """

    def __init__(self, driver: Driver, run: Reset | None = None) -> None:
        """Read the option. Raise Misconfigured for an unknown value."""
        value = driver.options.get(OPTION.name, OPTION.default)
        if value not in list(ResetPolicy):
            raise driver.misconfigured(OPTION.name, value, f"one of {', '.join(ResetPolicy)}")
        self.policy = ResetPolicy(value)
        self._backend = driver.backend
        self._sysfs = Sysfs(driver.sysfs_root)
        self._driver = driver
        local = driver.sysfs_root == LOCAL_ROOT
        self._run = run or (_reset_on_this_host if local else _refuse)

    @property
    def enabled(self) -> bool:
        """Return whether PCI functions are reset after their use."""
        return self.policy is not ResetPolicy.NEVER

    def reset(self, handle: str) -> None:
        """Reset a handle that is a PCI function. Raise DriverFailed if the reset fails.

        Do nothing for other handles. With ``reset = if_possible``, a PCI function that cannot be
        reset is not changed and no error is raised.
        """
        try:
            address = str(PciAddress.parse(handle))
        except Invalid:
            return  # no function, but for example a mediated device, which no longer exists
        function = self._sysfs.pci_function(address)
        if function is None or not self.enabled:
            return
        read_domains = partial(self._driver.read_domains, fresh=True)
        used = used_functions(self._sysfs.root, domains=read_domains)
        obstacle = find_current_obstacle(self._sysfs, function, used)
        if obstacle is not None and self.policy is ResetPolicy.IF_POSSIBLE:
            LOG.info("PCI function not reset: %s", obstacle, backend=self._backend, device=address)
        elif obstacle is not None:
            raise DriverFailed(f"{address} cannot be reset: {obstacle}")
        elif (methods := self._run(address)) is not None:
            LOG.info(
                "PCI function reset, its reset methods: %s",
                methods,
                backend=self._backend,
                device=address,
            )

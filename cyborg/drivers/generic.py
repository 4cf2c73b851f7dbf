# SPDX-License-Identifier: Apache-2.0
"""Driver for all devices on the PCI bus: rules select functions, sysfs describes them.

The driver only reads: it binds and unbinds no kernel driver and creates no virtual functions. A
function is offered as a whole, as one handle. A physical function with enabled virtual functions is
not offered itself: the virtual functions that a rule matches are the handles of its deployable.
Functions that the host itself uses, such as its boot disk, are shown and never offered
(``host_use``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyborg.core.address import PciAddress
from cyborg.core.drivers.registry import Support
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.inventory.device import (
    MAX_TEXT,
    Ability,
    AttachHandle,
    Deployable,
    Device,
    DeviceType,
    HandleType,
)
from cyborg.core.inventory.health import Measurement
from cyborg.core.log import get_logger
from cyborg.core.naming import make_custom_name
from cyborg.core.wire.hardware import NOT_OFFERED
from cyborg.drivers import health, host_use, hwdb, managed, pci_classes, rules
from cyborg.drivers.base import Driver, Option
from cyborg.drivers.sysfs import PciFunction, Sysfs

LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Offer:
    """A function that a rule selects. ``withheld`` is the reason for not offering it, or None."""

    function: PciFunction
    type: DeviceType
    resource_class: str
    traits: frozenset[str]
    kernel_drivers: frozenset[str]
    withheld: str | None = None


class GenericDriver(Driver):
    """Driver that offers the PCI functions that its rules select."""

    name = "generic"
    version = "1.0"
    SUPPORT_LEVEL = Support.SUPPORTED
    UEVENT_SUBSYSTEMS = frozenset({"pci"})
    OPTIONS = (
        Option(
            "devices",
            "multi",
            (),
            "A rule that selects devices of the PCI bus, such as 'vendor=8086,product=37c8|37c9' "
            "or 'class=0302,address=0000:3d:*,resource_class=PGPU,traits=CUSTOM_A|CUSTOM_B'. Keys "
            "that match: vendor, product, class (prefix of the class code), address (a pattern); "
            "a|b means either, !a means not a. Keys that set properties: type, resource_class, "
            "traits, action (offer, skip), kernel_driver (a|b: the device is unhealthy without one "
            "of these). The option can be repeated. The first rule that matches a device applies; "
            "a device that matches no rule is ignored.",
        ),
        Option(
            "health",
            "list",
            health.DEFAULT,
            "Health checks of the devices: aer (uncorrectable PCIe errors increase), link (the "
            "PCIe link is down), temperature (a sensor is critical), bus (the device does not "
            "respond on the bus), driver (the kernel driver is not one of the rule), xid (NVIDIA "
            "Xid errors in the kernel log, if the agent can read it). An empty list disables "
            "health measurement.",
        ),
        *managed.OPTIONS,
    )

    def __init__(
        self,
        backend: str,
        options: Mapping[str, Any],
        sysfs_root: str | Path = "/sys",
        lookup: hwdb.Lookup | None = None,
        kernel_log: str | Path | None = None,
    ) -> None:
        """Create the driver. ``lookup`` returns display names of a function.

        The defaults are udev for ``lookup`` and /dev/kmsg for ``kernel_log``; with another sysfs
        root than /sys there are no names and no kernel log.
        """
        super().__init__(backend, options, sysfs_root)
        self._sysfs = Sysfs(sysfs_root)
        local = self.sysfs_root == Path("/sys")
        self._lookup = lookup or (hwdb.udev_names if local else hwdb.no_names)
        checks = self.options["health"]
        if unknown := sorted(set(checks) - set(health.CHECKS)):
            raise self.misconfigured("health", unknown[0], f"one of {', '.join(health.CHECKS)}")
        log = kernel_log or ("/dev/kmsg" if local else None)
        self._readers = health.HealthReader(self._sysfs, checks, log)
        self._managed = managed.read_options(self)
        # Kernel drivers required by the rules at the last discovery, by device and function.
        self._kernel_drivers: dict[str, dict[str, frozenset[str]]] = {}
        self._rules: list[rules.Rule] = []
        self._remarks: tuple[str, ...] = ()
        self._used: dict[
            str, str
        ] = {}  # functions in use by the host at the last discovery, with reasons
        for text in self.options["devices"]:
            try:
                self._rules.append(rules.parse(text))
            except rules.RuleSyntaxError as exc:
                raise self.misconfigured("devices", exc.found, exc.expected) from exc

    @property
    def abilities(self) -> frozenset[Ability]:
        """The driver measures health unless the option ``health`` is empty."""
        return frozenset({Ability.MEASURES} if self.options["health"] else ())

    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        """Return the health of the devices that are present."""
        return self._readers.measure(
            {d.address: self._kernel_drivers.get(d.address, {}) for d in devices}
        )

    @property
    def remarks(self) -> Sequence[str]:
        """Rules that apply to no device, and adopted addresses that cannot be offered."""
        return self._remarks

    def check_adoption(self, addresses: Sequence[str]) -> None:
        """Raise DriverFailed for an address without a function that can be offered."""
        functions = {f.address: f for f in self._sysfs.pci_functions()}
        used = host_use.used_functions(self.sysfs_root)
        for address in addresses:
            if (reason := _unadoptable(address, functions, used)) is not None:
                raise DriverFailed(f"{address} cannot be adopted: {reason}")

    def discover(self) -> Sequence[Device]:
        """Return a device for each function that is offered, itself or as virtual functions.

        A function that the host uses is returned without deployables, with the reason.
        """
        functions = {f.address: f for f in self._sysfs.pci_functions()}
        used = self._used = host_use.used_functions(self.sysfs_root, self._used)
        self._remarks = self._collect_remarks(functions, used)
        whole: list[_Offer] = []  # functions that are offered as a whole
        by_physfn: dict[str, list[_Offer]] = {}
        for function in functions.values():
            offer = self._offer(function, used.get(function.address))
            if offer is None:
                continue
            if function.physfn is not None:
                by_physfn.setdefault(function.physfn, []).append(offer)
            elif not function.numvfs:
                whole.append(offer)
        cards = [(o.function, [o]) for o in whole]
        cards += [(functions[pf], vfs) for pf, vfs in by_physfn.items() if pf in functions]
        self._kernel_drivers = {
            card.address: {
                o.function.address: o.kernel_drivers for o in offers if o.withheld is None
            }
            for card, offers in cards
        }
        devices = [self._device(card, offers) for card, offers in cards]
        return sorted(
            (device for device in devices if device is not None),
            key=lambda device: PciAddress.parse(device.address),
        )

    def _collect_remarks(
        self, functions: Mapping[str, PciFunction], used: Mapping[str, str]
    ) -> tuple[str, ...]:
        """Return the remarks about rules and adopted addresses."""
        offerable = [f for f in functions.values() if not _is_bridge(f)]
        matching = {rules.matching_index(self._rules, function) for function in offerable}
        remarks: list[str] = []
        for number, text in enumerate(self.options["devices"]):
            if number in matching:
                continue
            if any(self._rules[number].matches(function) for function in offerable):
                problem = "applies to no device: earlier rules match all devices that it matches"
            else:
                problem = "matches no device of this host"
            remarks.append(f"rule {text!r} {problem}")
        for address in self._managed.adopted:
            if (reason := _unadoptable(address, functions, used)) is not None:
                remarks.append(f"{address} cannot be adopted: {reason}")
        return tuple(remarks)

    def _offer(self, function: PciFunction, withheld: str | None) -> _Offer | None:
        if _is_bridge(function):
            return None
        rule = rules.matching_rule(self._rules, function)
        adopted = self._managed.decision(function.address, function.physfn)
        if adopted is False or (adopted is None and rule is None):
            return None
        if rule is None:
            rule = rules.Rule()  # the class code determines type and resource class
        vendor, product = function.vendor, function.product
        type_, resource_class = pci_classes.default_type_and_class(
            vendor, product, function.class_code
        )
        traits = {
            make_custom_name(f"PCI_VENDOR_{vendor}"),
            make_custom_name(f"PCI_PRODUCT_{vendor}_{product}"),
        }
        return _Offer(
            function,
            rule.type or type_,
            rule.resource_class or resource_class,
            rule.traits | traits,
            rule.kernel_drivers,
            withheld,
        )

    def _device(self, card: PciFunction, offers: Sequence[_Offer]) -> Device | None:
        """Return the device of a function; log a warning and return None if it is invalid."""
        names = self._lookup(card.address)
        try:
            return Device(
                address=card.address,
                type=offers[0].type,
                vendor=card.vendor,
                model=names.model or f"{card.vendor}:{card.product}",
                backend=self.backend,
                std_board_info=_board(card, names),
                vendor_board_info=_withheld(card, offers),
                numa_node=card.numa_node,
                deployables=_deployables(card, [o for o in offers if o.withheld is None]),
            )
        except Invalid as exc:
            error = exc.message
        LOG.warning(
            "Device omitted, it cannot be reported: %s",
            error,
            backend=self.backend,
            device=card.address,
        )
        return None


def _is_bridge(function: PciFunction) -> bool:
    return function.class_code.startswith(pci_classes.BRIDGE)


def _unadoptable(
    address: str, functions: Mapping[str, PciFunction], used: Mapping[str, str]
) -> str | None:
    """Return why the function at an address cannot be offered; None if it can."""
    if address not in functions:
        return "the host has no PCI function at this address"
    if _is_bridge(functions[address]):
        return "it is a bridge, and bridges are never offered"
    return f"the host uses it: {used[address]}" if address in used else None


def _withheld(card: PciFunction, offers: Sequence[_Offer]) -> dict[str, str]:
    """Return board info with the functions that are not offered and the reasons, if any."""
    reasons = [
        offer.withheld
        if offer.function.address == card.address
        else f"{offer.function.address}: {offer.withheld}"
        for offer in offers
        if offer.withheld is not None
    ]
    return {NOT_OFFERED: "; ".join(reasons)[:MAX_TEXT]} if reasons else {}


def _deployables(card: PciFunction, offers: Sequence[_Offer]) -> tuple[Deployable, ...]:
    """Return one deployable for each resource class.

    The deployable of the first class has the address of the card, which is the provider name in
    existing deployments. For any other class the address has the class name as a suffix.
    """
    by_class: dict[str, list[_Offer]] = {}
    for offer in offers:
        by_class.setdefault(offer.resource_class, []).append(offer)
    return tuple(
        Deployable(
            address=card.address if number == 0 else f"{card.address}-{resource_class}",
            resource_class=resource_class,
            traits=frozenset().union(*(offer.traits for offer in group)),
            handles=tuple(_handle(offer.function) for offer in group),
            attributes=_attributes(card),
        )
        for number, (resource_class, group) in enumerate(by_class.items())
    )


def _handle(function: PciFunction) -> AttachHandle:
    info = PciAddress.parse(function.address).attach_info()
    return AttachHandle(function.address, HandleType.PCI, info)


def _board(card: PciFunction, names: hwdb.Names) -> dict[str, str]:
    info = {
        "vendor_id": card.vendor,
        "product_id": card.product,
        "class": card.class_code,
        "revision": card.revision,
        "subsystem_vendor_id": card.subsystem_vendor,
        "subsystem_product_id": card.subsystem_product,
        "vendor_name": names.vendor,
        "product_name": names.model,
    }
    return {key: value for key, value in info.items() if value is not None}


def _attributes(card: PciFunction) -> dict[str, str]:
    attributes = {
        "class": card.class_code,
        "iommu_group": card.iommu_group,
        "kernel_driver": card.kernel_driver,
        "numa_node": None if card.numa_node is None else str(card.numa_node),
        "revision": card.revision,
        "sriov_totalvfs": str(card.totalvfs) if card.totalvfs else None,
        "subsystem_product": card.subsystem_product,
        "subsystem_vendor": card.subsystem_vendor,
    }
    return {key: value for key, value in attributes.items() if value is not None}

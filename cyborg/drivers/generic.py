# SPDX-License-Identifier: Apache-2.0
"""The driver for anything on the PCI bus: rules choose functions, sysfs tells what they are.

It reads and never writes: it binds no driver, unbinds none and makes no virtual functions. A
function is offered whole, as one handle. A physical function whose virtual functions are switched
on is not offered itself: those of them that a rule matches are the handles of a deployable on it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyborg.core.address import PciAddress
from cyborg.core.catalogue import Support
from cyborg.core.device import Ability, AttachHandle, Deployable, Device, DeviceType, HandleType
from cyborg.core.errors import Invalid
from cyborg.core.health import Measurement
from cyborg.core.names import custom
from cyborg.drivers import health, hwdb, managed, pci_classes, rules
from cyborg.drivers.base import Driver, Option
from cyborg.drivers.sysfs import PciFunction, Sysfs

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Offer:
    """A function that a rule gives away, and as what."""

    function: PciFunction
    type: DeviceType
    resource_class: str
    traits: frozenset[str]
    kernel_drivers: frozenset[str]


class GenericDriver(Driver):
    """Offers the functions of the PCI bus that the rules choose."""

    name = "generic"
    version = "1.0"
    SUPPORT = Support.SUPPORTED
    WATCHES = frozenset({"pci"})
    OPTIONS = (
        Option(
            "devices",
            "multi",
            (),
            "A rule that chooses devices of the PCI bus, such as 'vendor=8086,product=37c8|37c9' "
            "or 'class=0302,address=0000:3d:*,resource_class=PGPU,traits=CUSTOM_A|CUSTOM_B'. Keys "
            "to match by: vendor, product, class (how the code starts), address (a pattern); a|b "
            "is either, !a is not a. Keys that say what it is: type, resource_class, traits, "
            "action (offer, skip), kernel_driver (a|b: it is sick without one of these). May stand "
            "several times; the first rule that matches a device decides, and a device that none "
            "matches is left alone.",
        ),
        Option(
            "health",
            "list",
            health.DEFAULT,
            "What is measured of the devices' health, of aer (uncorrectable PCIe errors rise), "
            "link (the PCIe link is down), temperature (a sensor is critical), bus (fallen off the "
            "bus), driver (not the kernel_driver of its rule), xid (NVIDIA's Xids in the kernel "
            "log, if the agent may read it). Empty measures nothing.",
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
        """``lookup`` gives names for people; udev's, unless sysfs is another host's.

        ``kernel_log`` is /dev/kmsg, with the same exception.
        """
        super().__init__(backend, options, sysfs_root)
        self._sysfs = Sysfs(sysfs_root)
        here = self.sysfs_root == Path("/sys")
        self._lookup = lookup or (hwdb.udev_names if here else hwdb.nobody_knows)
        checks = self.options["health"]
        if unknown := sorted(set(checks) - set(health.CHECKS)):
            raise self.misconfigured("health", unknown[0], f"of {', '.join(health.CHECKS)}")
        log = kernel_log or ("/dev/kmsg" if here else None)
        self._readers = health.Readers(self._sysfs, checks, log)
        self._managed = managed.read(self)
        # By device and handle: the kernel drivers that the rules ask for, as discovered last.
        self._kernel_drivers: dict[str, dict[str, frozenset[str]]] = {}
        self._rules: list[rules.Rule] = []
        for text in self.options["devices"]:
            try:
                self._rules.append(rules.parse(text))
            except rules.Unreadable as bad:
                raise self.misconfigured("devices", bad.found, bad.expected) from bad

    @property
    def abilities(self) -> frozenset[Ability]:
        """It measures, unless told to measure nothing."""
        return frozenset({Ability.MEASURES} if self.options["health"] else ())

    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        """Return the health of the devices that are there."""
        return self._readers.measure(
            {d.address: self._kernel_drivers.get(d.address, {}) for d in devices}
        )

    def discover(self) -> Sequence[Device]:
        """Return a device for each function that is offered whole or by its virtual functions."""
        functions = {f.address: f for f in self._sysfs.pci_functions()}
        whole: list[_Offer] = []
        parts: dict[str, list[_Offer]] = {}
        for function in functions.values():
            offer = self._offer(function)
            if offer is None:
                continue
            if function.physfn is not None:
                parts.setdefault(function.physfn, []).append(offer)
            elif not function.numvfs:
                whole.append(offer)
        cards = [(o.function, [o]) for o in whole]
        cards += [(functions[pf], vfs) for pf, vfs in parts.items() if pf in functions]
        self._kernel_drivers = {
            card.address: {o.function.address: o.kernel_drivers for o in offers}
            for card, offers in cards
        }
        found = [self._device(card, offers) for card, offers in cards]
        return sorted(
            (device for device in found if device is not None),
            key=lambda device: PciAddress.parse(device.address),
        )

    def _offer(self, function: PciFunction) -> _Offer | None:
        if function.class_code.startswith(pci_classes.BRIDGE):
            return None
        rule = rules.first(self._rules, function)
        adopted = self._managed.decides(function.address, function.physfn)
        if adopted is False or (adopted is None and rule is None):
            return None
        if rule is None:
            rule = rules.Rule()  # its class code says what it is
        vendor, product = function.vendor, function.product
        type_, resource_class = pci_classes.defaults(vendor, product, function.class_code)
        traits = {custom(f"PCI_VENDOR_{vendor}"), custom(f"PCI_PRODUCT_{vendor}_{product}")}
        return _Offer(
            function,
            rule.type or type_,
            rule.resource_class or resource_class,
            rule.traits | traits,
            rule.kernel_drivers,
        )

    def _device(self, card: PciFunction, offers: Sequence[_Offer]) -> Device | None:
        """Return the device of one function; None, and a line in the log, if it cannot be told."""
        names = self._lookup(card.address)
        try:
            return Device(
                address=card.address,
                type=offers[0].type,
                vendor=card.vendor,
                model=names.model or f"{card.vendor}:{card.product}",
                backend=self.backend,
                std_board_info=_board(card, names),
                numa_node=card.numa_node,
                deployables=_deployables(card, offers),
            )
        except Invalid as bad:
            LOG.warning("%s: device %s is left out: %s", self.backend, card.address, bad.message)
            return None


def _deployables(card: PciFunction, offers: Sequence[_Offer]) -> tuple[Deployable, ...]:
    """Return one deployable for each resource class.

    The class of the first offer has the function's own address, the provider name that existing
    deployments know; any other has its name appended.
    """
    by_class: dict[str, list[_Offer]] = {}
    for offer in offers:
        by_class.setdefault(offer.resource_class, []).append(offer)
    return tuple(
        Deployable(
            address=card.address if number == 0 else f"{card.address}-{resource_class}",
            resource_class=resource_class,
            traits=frozenset().union(*(offer.traits for offer in same)),
            handles=tuple(_handle(offer.function) for offer in same),
            attributes=_attributes(card),
        )
        for number, (resource_class, same) in enumerate(by_class.items())
    )


def _handle(function: PciFunction) -> AttachHandle:
    info = PciAddress.parse(function.address).attach_info()
    return AttachHandle(function.address, HandleType.PCI, info)


def _board(card: PciFunction, names: hwdb.Names) -> dict[str, str]:
    known = {
        "vendor_id": card.vendor,
        "product_id": card.product,
        "class": card.class_code,
        "revision": card.revision,
        "subsystem_vendor_id": card.subsystem_vendor,
        "subsystem_product_id": card.subsystem_product,
        "vendor_name": names.vendor,
        "product_name": names.model,
    }
    return {key: value for key, value in known.items() if value is not None}


def _attributes(card: PciFunction) -> dict[str, str]:
    known = {
        "class": card.class_code,
        "iommu_group": card.iommu_group,
        "kernel_driver": card.kernel_driver,
        "numa_node": None if card.numa_node is None else str(card.numa_node),
        "revision": card.revision,
        "sriov_totalvfs": str(card.totalvfs) if card.totalvfs else None,
        "subsystem_product": card.subsystem_product,
        "subsystem_vendor": card.subsystem_vendor,
    }
    return {key: value for key, value in known.items() if value is not None}

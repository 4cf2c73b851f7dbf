# SPDX-License-Identifier: Apache-2.0
"""Driver for all devices on the PCI bus: rules select PCI functions, sysfs describes them.

The driver binds and unbinds no kernel driver. It creates virtual functions only when an operator
applies a layout (``sriov``), and resets PCI functions only with the option ``reset``. A PCI
function is offered as a whole, as one handle. A physical function with enabled virtual functions is
not offered itself: the virtual functions that a rule matches are the handles of its deployable. PCI
functions that the host itself uses, such as its boot disk, are shown but never offered
(``host_use.check``). PCI functions that Nova cannot attach are shown but not scheduled
(``obstacles``).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from cyborg.core.address import PciAddress
from cyborg.core.drivers.registry import Option, Support
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.inventory.delivery import describe_host_use
from cyborg.core.inventory.device import Ability, Device, DeviceType
from cyborg.core.inventory.device_state import Measurement
from cyborg.core.jobs.job import WorkItem
from cyborg.core.log import get_logger
from cyborg.core.naming import make_custom_name
from cyborg.drivers.base import Driver
from cyborg.drivers.host_use import domains
from cyborg.drivers.kernel import reset as kernel_reset
from cyborg.drivers.pci import classes, health, managed, obstacles, offers, reset, rules, topology
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.pci.host_uses import DiskHistory, Exceptions, HostUses
from cyborg.drivers.pci.sriov import NOT_SELECTED, Layouts
from cyborg.drivers.sysfs import PciFunction, Sysfs

LOG = get_logger(__name__)


class PciDriver(Driver):
    """Base class of drivers that offer the PCI functions that their rules select."""

    SUPPORT_LEVEL = Support.SUPPORTED
    UEVENT_SUBSYSTEMS = frozenset({"pci"})
    RULE_KEYS: ClassVar[tuple[str, ...]] = rules.KEYS
    OPTIONS: ClassVar[tuple[Option, ...]] = (
        Option(
            "devices",
            "multi",
            (),
            "A rule that selects devices of the PCI bus, such as 'vendor=8086,product=37c8|37c9' "
            "or 'class=0302,address=0000:3d:*,resource_class=PGPU,traits=CUSTOM_A|CUSTOM_B'. Keys "
            "that match: vendor, product, subsystem_vendor, subsystem_product, class (prefix of "
            "the class code), address (a pattern), numa_node; a|b means either, !a means not a; "
            "functions (whole, vf or all; of GPUs whole is the default). Keys that set properties: "
            "type, resource_class, traits, action (offer, skip), kernel_driver (a|b: the device is "
            "unhealthy without one of these), active_port (offer: a network port that is up with a "
            "link is offered; withhold is the default). The option can be repeated. The first rule "
            "that matches a device applies; a device that matches no rule is ignored.",
        ),
        Option(
            "health",
            "list",
            health.DEFAULT,
            "Health checks of the devices: aer (uncorrectable PCIe errors increase), link (the "
            "PCIe link is down), link_width (it has fewer lanes than the device and its slot "
            "support), temperature (a sensor is critical), bus (the device does not "
            "respond on the bus), driver (the kernel driver is not one of the rule), xid (NVIDIA "
            "Xid errors in the kernel log, if the agent can read it). An empty list disables "
            "health measurement.",
        ),
        Option(
            "check_iommu",
            "bool",
            True,
            "Check whether Nova can attach a function: the host has an IOMMU, VFIO is present, and "
            "the IOMMU group has no function that another user may get. A device that fails the "
            "check is shown and not scheduled. Without the check, attaching it to a server may "
            "fail.",
        ),
        reset.OPTION,
        *managed.OPTIONS,
        managed.IN_USE,
    )

    def __init__(
        self,
        backend: str,
        options: Mapping[str, Any],
        sysfs_root: str | Path = "/sys",
        access: HostAccess | None = None,
    ) -> None:
        """Create the driver; ``access`` is by default that to the host of the sysfs root."""
        super().__init__(backend, options, sysfs_root)
        self._sysfs = Sysfs(sysfs_root)
        self._access = access or HostAccess.of(self.sysfs_root)
        checks = self.parse_option("health", health.parse_checks)
        self._topology = topology.TopologyReader(self._sysfs)
        self._health_reader = health.HealthReader(self._sysfs, checks, self._access.kernel_log)
        self._managed_options = managed.read_options(self)
        # Functions return the memory, because the agent sets it later.
        self._disks = DiskHistory(self._sysfs, lambda: self.memory)
        self._uses = HostUses(self.sysfs_root, self._managed_options.in_use, lambda: self.memory)
        self._resetter = reset.Resetter(self, self._access.reset)
        self._layouts = Layouts(self._sysfs, self._offered_class, self._access.set_count)
        # Kernel drivers required by the rules at the last discovery, by device and function.
        self._kernel_drivers: dict[str, dict[str, frozenset[str]]] = {}
        self._remarks: tuple[str, ...] = ()
        self._gpu_programs: Mapping[str, str] = {}  # programs that have GPUs open, by address
        # Functions in use by the host at the last discovery, with reasons.
        self._used: dict[str, str] = {}
        self._rules = self.parse_option(
            "devices", lambda texts: [rules.parse(t, self.RULE_KEYS, self.name) for t in texts]
        )
        # Last: a subclass uses what is read above, and has no parameters of its own.
        self.initialize()

    def initialize(self) -> None:
        """Read the options of a subclass, and create its readers. Raise Misconfigured."""

    @property
    def abilities(self) -> frozenset[Ability]:
        """Return MEASURES and SANITISES if the options ``health`` and ``reset`` enable them."""
        found = {
            Ability.MEASURES: self.options["health"],
            Ability.SANITISES: self._resetter.enabled,
        }
        return frozenset(ability for ability, enabled in found.items() if enabled)

    def is_candidate(self, function: PciFunction) -> bool:
        """Return whether rules may select a PCI function."""
        return not function.class_code.startswith(classes.BRIDGE)

    def describe(self, card: PciFunction) -> offers.Description:
        """Return details of a card that the PCI bus does not show."""
        return offers.Description()

    def default_type_and_class(self, function: PciFunction) -> tuple[DeviceType, str]:
        """Return the default type and resource class of a PCI function; a rule overrides them."""
        type_, resource_class = classes.default_type_and_class(
            function.vendor, function.product, function.class_code
        )
        return type_, classes.GPU_VF if classes.is_gpu_vf(function) else resource_class

    def select(self, function: PciFunction) -> rules.Rule | None:
        """Return the rule for a PCI function; None if only an adoption makes it offered."""
        return rules.matching_rule(self._rules, function)

    def needs_iommu(self, function: PciFunction) -> bool:
        """Return whether a PCI function can be attached to an instance only with an IOMMU."""
        return bool(self.options["check_iommu"])

    def is_reset_after_use(self, function: PciFunction) -> bool:
        """Return whether data of a server can be in a PCI function until a reset."""
        return self.needs_iommu(function)

    def find_obstacle(self, function: PciFunction) -> str | None:
        """Return why a PCI function is not scheduled although Nova can attach it, with a remedy.

        Return None if the PCI function is scheduled.
        """
        obstacle = obstacles.find_obstacle(self._sysfs, function, self._gpu_programs)
        if obstacle is None and self._resetter.policy is reset.ResetPolicy.REQUIRED:
            accepted = self._uses.overridden.get(function.address)
            obstacle = kernel_reset.find_obstacle(self._sysfs, function, accepted)
        return obstacle

    def is_shared(self, function: PciFunction) -> bool:
        """Return whether several servers and the host use a PCI function at the same time."""
        return False

    def find_used(self, functions: Mapping[str, PciFunction]) -> dict[str, str]:
        """Return the PCI functions that the host uses: a text with the reason by address."""
        return self._uses.find(functions, self._exceptions(functions), self.read_domains)

    def _exceptions(self, functions: Mapping[str, PciFunction]) -> Exceptions:
        """Return what does not count as a use by the host."""
        # Not ``select``, which records what it has selected.
        ports = (f for f in functions.values() if self._rule_offers_port(f))
        return Exceptions(
            frozenset(f.address for f in functions.values() if self.is_shared(f)),
            frozenset(f.address for f in ports),
        )

    def _rule_offers_port(self, function: PciFunction) -> bool:
        rule = rules.matching_rule(self._rules, function)
        return rule is not None and rule.offers_active_port

    def check_unused(self, address: str) -> None:
        """Raise DriverFailed if the host uses a PCI function now; the use may have just begun."""
        self.read_domains(fresh=True)  # ``find_used`` gets the same facts
        functions = {function.address: function for function in self._sysfs.pci_functions()}
        address = str(PciAddress.parse(address))
        # Not that of a subclass: it may change what a discovery in another thread reads.
        reason = PciDriver.find_used(self, functions).get(address)
        function = functions.get(address)
        if reason is None and function is not None and not self._is_adopted(function):
            reason = self._disks.find_contents(function)
        if reason is not None:
            raise DriverFailed(f"{address} cannot be given to a server: {reason}")

    def _is_adopted(self, function: PciFunction) -> bool:
        return self._managed_options.decision(function.address, function.physfn) is True

    def sanitise(self, item: WorkItem) -> None:
        """Reset the PCI function of a handle according to the option ``reset``."""
        self._resetter.reset(item.handle or item.device)

    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        """Return the health of the devices that are present."""
        return self._health_reader.measure(
            {d.address: self._kernel_drivers.get(d.address, {}) for d in devices}
        )

    @property
    def remarks(self) -> Sequence[str]:
        """Return the warnings of the last discovery.

        They are about rules without a device, addresses that cannot be adopted, and PCI functions
        that cannot be reset.
        """
        return self._remarks

    def check_adoption(self, addresses: Sequence[str], forced: Collection[str] = ()) -> None:
        """Raise DriverFailed if an address has no PCI function that can be offered."""
        functions = {f.address: f for f in self._sysfs.pci_functions()}
        exceptions = self._exceptions(functions)
        self._uses.accept(forced, functions, exceptions)
        used = self.find_used(functions)
        for address in addresses:
            if (reason := self._unadoptable(address, functions, used)) is not None:
                can_force = self._uses.can_be_accepted(address, functions, exceptions)
                remedy = f"; end this use {'or force the adoption' if can_force else 'first'}"
                raise DriverFailed(
                    f"{address} cannot be adopted: {reason}{remedy if address in used else ''}"
                )

    def discover(self) -> Sequence[Device]:
        """Return a device for each card that is offered as a whole or as virtual functions.

        A PCI function that the host uses becomes a device without deployables, with the reason. A
        device is not deliverable if none of its PCI functions can be attached. If only some of them
        can be attached, the others are not offered.
        """
        # One reading of the bus for all steps: they must see the same functions.
        functions = {f.address: f for f in self._sysfs.pci_functions()}
        used = self._used = self.find_used(functions)
        # Before ``_collect_offers`` adds reasons to ``used`` that only an adoption overrides: these
        # are no uses.
        host_used = frozenset(used)
        self._gpu_programs = obstacles.find_managers(self._sysfs, functions.values())
        self._remarks = self._collect_remarks(functions, used)
        self._disks.read()
        cards = self._find_obstacles(self._collect_offers(functions), functions, host_used)
        self._remarks += offers.describe_unresettable(
            self._sysfs, (o for c in cards for o in c.offers if self.is_reset_after_use(o.function))
        )
        self._topology.forget_others({c.function.address for c in cards})
        self._kernel_drivers = {
            c.function.address: {
                o.function.address: o.kernel_drivers for o in c.offers if o.withheld is None
            }
            for c in cards
        }
        devices = filter(None, map(self._device, cards))
        return sorted(devices, key=lambda device: PciAddress.parse(device.address))

    def _collect_offers(self, functions: Mapping[str, PciFunction]) -> list[offers.OfferedCard]:
        """Return the cards that are offered as a whole, and those of offered virtual functions."""
        whole: list[offers.OfferedCard] = []
        by_physfn: dict[str, list[offers.Offer]] = {}
        for function in functions.values():
            offer = self._offer(function, self._used.get(function.address))
            if offer is None:
                offer = self._physical_only(function)
            else:
                offer = self._check_unadopted(offer, functions)
            if offer is None:
                continue
            if function.physfn is not None:
                by_physfn.setdefault(function.physfn, []).append(offer)
            elif not function.numvfs:  # otherwise only its virtual functions are offered
                whole.append(offers.OfferedCard(function, [offer]))
        # A virtual function may be listed although its card has just disappeared.
        virtual = [
            offers.OfferedCard(functions[a], o) for a, o in by_physfn.items() if a in functions
        ]
        return [*whole, *virtual]

    def _check_unadopted(
        self, offer: offers.Offer, functions: Mapping[str, PciFunction]
    ) -> offers.Offer:
        """Return an offer, withheld for what only an adoption overrides.

        That is data on its disks, which may be of the host, and the control of another function.
        """
        function = offer.function
        if offer.withheld:
            self._disks.note_use(function, offer.withheld)
            return offer
        if self._is_adopted(function):
            self._disks.adopt(function)
            return offer
        reason = self._disks.find_reason(function)
        reason = classes.describe_management(function, functions) or reason
        if reason is not None:
            self._used[function.address] = reason
        return replace(offer, withheld=reason)

    def _find_obstacles(
        self,
        cards: Sequence[offers.OfferedCard],
        functions: Mapping[str, PciFunction],
        used: frozenset[str],
    ) -> list[offers.OfferedCard]:
        """Return cards whose offers have the reasons why functions cannot be attached.

        ``used`` are the functions that the host uses.
        """
        guests = domains.find_used(self.sysfs_root, self.read_domains, functions.values())
        iommu = obstacles.IommuFacts(self._sysfs, functions.values(), guests=guests)
        # Whether others may get a function of an IOMMU group depends on what is offered. With what
        # can be attached, two functions would depend on each other.
        offered = {o.function.address for c in cards for o in c.offers if o.withheld is None}
        return [
            card._replace(
                offers=offers.apply_obstacles(
                    [self._with_obstacle(o, iommu, offered, used) for o in card.offers]
                )
            )
            for card in cards
        ]

    def _with_obstacle(
        self,
        offer: offers.Offer,
        iommu: obstacles.IommuFacts,
        offered: set[str],
        used: frozenset[str],
    ) -> offers.Offer:
        """Return an offer with the reason why its PCI function cannot be attached, if any."""
        if offer.withheld == NOT_SELECTED:
            return offer  # the card is only shown, for its other layouts
        if self.needs_iommu(offer.function):
            obstacle = iommu.find_obstacle(offer.function, offer.withheld, offered, used)
        else:
            obstacle = describe_host_use(offer.withheld)
        return replace(offer, obstacle=obstacle or self.find_obstacle(offer.function))

    def _collect_remarks(
        self, functions: Mapping[str, PciFunction], used: Mapping[str, str]
    ) -> tuple[str, ...]:
        """Return the warnings about rules and adopted addresses.

        ``used`` has the use by the host of each function that is in use, by address.
        """
        offerable = [f for f in functions.values() if self.is_candidate(f)]
        # A rule may be for virtual functions that a card has in another layout only.
        virtual = [self._layouts.find_virtual(function) for function in offerable]
        offerable += [function for function in virtual if function is not None]
        # Functions whose offer depends on something else than the rules of this option.
        decided = {
            f.address
            for f in offerable
            if self.is_shared(f) or self._managed_options.decision(f.address, f.physfn) is not None
        }
        remarks = offers.describe_rules(self.options["devices"], self._rules, offerable)
        remarks += offers.describe_parted_gpus(self._rules, offerable, decided)
        for address in self._managed_options.adopted:
            if (reason := self._unadoptable(address, functions, used)) is not None:
                remarks.append(f"{address} cannot be adopted: {reason}")
        remarks += self._uses.describe_missing(functions)
        return (*remarks, *self.read_domains().remarks)

    def _offer(self, function: PciFunction, withheld: str | None) -> offers.Offer | None:
        """Return the offer of a PCI function; None unless a rule or an operator selects it."""
        if not self.is_candidate(function):
            return None
        rule = self.select(function)
        # True for an adopted function, False for a released one, None for any other.
        adopted = self._managed_options.decision(function.address, function.physfn)
        if adopted is False or (adopted is None and rule is None):
            return None
        if rule is None:
            rule = rules.Rule()  # the class code determines type and resource class
        vendor, product = function.vendor, function.product
        type_, resource_class = self.default_type_and_class(function)
        traits = {
            make_custom_name(f"PCI_VENDOR_{vendor}"),
            make_custom_name(f"PCI_PRODUCT_{vendor}_{product}"),
        }
        if classes.is_gpu_vf(function) and not self.is_shared(function):
            traits.add(classes.GPU_VF)
        return offers.Offer(
            function=function,
            type=rule.type or type_,
            resource_class=rule.resource_class or resource_class,
            traits=rule.traits | traits,
            kernel_drivers=rule.kernel_drivers,
            withheld=withheld,
        )

    def _physical_only(self, card: PciFunction) -> offers.Offer | None:
        """Return an offer of a card without virtual functions that another layout would offer.

        The offer is withheld: the card is only shown. Return None for any other card.
        """
        function = self._layouts.find_virtual(card)
        offer = None if function is None else self._offer(function, withheld=None)
        if offer is None:
            return None
        withheld = self._used.get(card.address, NOT_SELECTED)
        return replace(offer, function=card, withheld=withheld)

    def _offered_class(self, function: PciFunction) -> str | None:
        """Return the resource class of a PCI function; None if it is not offered."""
        # A virtual function whose address is not known has that of its card, which can be in use.
        predicted = function.physfn == function.address
        offer = self._offer(function, None if predicted else self._used.get(function.address))
        return None if offer is None or offer.withheld is not None else offer.resource_class

    def _unadoptable(
        self, address: str, functions: Mapping[str, PciFunction], used: Mapping[str, str]
    ) -> str | None:
        """Return why the PCI function at an address cannot be offered; None if it can."""
        if address not in functions:
            return "the host has no PCI function at this address"
        function = functions[address]
        if function.class_code.startswith(classes.BRIDGE):
            return "it is a bridge, and bridges are never offered"
        if not self.is_candidate(function):
            return f"the driver {self.name} does not offer devices of class {function.class_code}"
        return f"the host uses it: {used[address]}" if address in used else None

    def _device(self, offered: offers.OfferedCard) -> Device | None:
        """Return the device of a card; log a warning and return None if the device is invalid."""
        card = offered.function
        description = self.describe(card)
        layout, layout_traits = self._layouts.describe(card)
        place = self._topology.read(card)
        try:
            return offers.build_device(
                card,
                offered.offers,
                description,
                self._access.lookup(card.address),
                place,
                backend=self.backend,
                layout=layout,
                traits=layout_traits | topology.traits(card, place),
            )
        except Invalid as exc:
            LOG.warning(
                "Device omitted, because its data are invalid: %s",
                exc.message,
                backend=self.backend,
                device=card.address,
            )
            return None

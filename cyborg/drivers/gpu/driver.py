# SPDX-License-Identifier: Apache-2.0
"""Driver for GPUs: whole cards, virtual functions, and vGPUs that it creates.

Whole PCI functions are offered as by the generic driver. A rule of ``mdev_types`` makes a PCI
function a parent of mediated devices; a parent is never offered as a whole. Each parent is a
deployable, and each slot of it (``mdev``) is a handle. The mediated device of a slot exists only
while an instance has the handle. The device has the same uuid as the handle (``handle_uuid``). A
rule of ``vgpu_types`` makes virtual functions of a card vGPUs without mediated devices (``vgpu``).
NVML, if it is installed, describes NVIDIA's cards (``nvml``).
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from cyborg.core.address import PciAddress, is_pci_address
from cyborg.core.drivers.registry import Support
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.inventory import device as inventory
from cyborg.core.inventory.device_state import Measurement
from cyborg.core.jobs.job import WorkItem
from cyborg.core.log import get_logger
from cyborg.core.naming import handle_uuid
from cyborg.drivers.gpu import mdev, mig, parents, vf_layouts, vgpu
from cyborg.drivers.gpu.card_locks import locked, locked_once, mediated_devices_excluded
from cyborg.drivers.gpu.facts import CardFacts
from cyborg.drivers.gpu.mig_layouts import MigLayouts
from cyborg.drivers.gpu.mig_modes import MigModes, WholeCards, is_whole
from cyborg.drivers.gpu.mixes import parse_mixes
from cyborg.drivers.gpu.options import OPTIONS
from cyborg.drivers.gpu.partition_layouts import PartitionLayouts, parse_modes
from cyborg.drivers.gpu.vgpu_cards import GpuHost, VgpuCards
from cyborg.drivers.gpu.vgpu_layouts import VgpuLayouts
from cyborg.drivers.host_use import check, domains
from cyborg.drivers.kernel.mdev import read_types
from cyborg.drivers.kernel.nvml import NVIDIA, GpuFacts, short_name
from cyborg.drivers.pci import classes, reset, rules, sriov
from cyborg.drivers.pci.driver import PciDriver
from cyborg.drivers.pci.offers import Description, Offer, add_reasons
from cyborg.drivers.sysfs import PciFunction

LOG = get_logger(__name__)

_Layouts = VgpuLayouts | vf_layouts.VfLayouts | PartitionLayouts | MigLayouts

_VFIO = "vfio-pci"  # kernel driver of a function that a server has as a whole
_DETACHED = (None, _VFIO, "pci-stub")  # kernel drivers with which VFIO gives a group to a guest


class GpuDriver(PciDriver):
    """Driver that offers GPUs, their virtual functions and mediated devices."""

    name = "gpu"
    version = "1.0"
    DEVICE_TYPE = inventory.DeviceType.GPU
    SUPPORT_LEVEL = Support.SUPPORTED
    UEVENT_SUBSYSTEMS = frozenset({"pci", "mdev"})
    OPTIONS = (
        # The memory of a GPU still has the data of a server until a reset.
        *(
            replace(option, default=str(reset.ResetPolicy.REQUIRED))
            if option == reset.OPTION
            else option
            for option in PciDriver.OPTIONS
        ),
        *OPTIONS,
    )

    def initialize(self) -> None:
        """Read the options of this driver, and create its readers."""
        self._whole = WholeCards(lambda: self.memory, self._sysfs, lambda: self.read_domains)
        self._facts = CardFacts(
            self._sysfs, self._access, lambda: self.memory, self._whole.has_owner
        )
        self._mig_modes = MigModes(self._facts, self._access, self._whole, self._may_be_whole)
        # Facts about cards at their last description; None for one that was not read yet.
        self._cards: dict[str, GpuFacts | None] = {}
        # By the address of the card, and that of the parent.
        self._mig_parents: dict[str, dict[str, mig.Parent]] = {}
        self._mdev_remarks: tuple[str, ...] = ()
        # Parents on the PCI bus that the running discovery has found, with their rules.
        self._selected: dict[str, mdev.MdevRule] = {}
        self._mdev_rules = self.parse_option(
            "mdev_types", lambda texts: [mdev.parse(text) for text in texts]
        )
        vgpu_rules = self.parse_option("vgpu_types", lambda texts: [vgpu.parse(t) for t in texts])
        host = GpuHost(
            sysfs=self._sysfs,
            access=self._access,
            read_facts=self._facts.read_address,
            read_facts_again=self._facts.read_again,
            forget_facts=self._facts.forget,
        )
        mixes = self.parse_option("vgpu_layouts", parse_mixes)
        self._vgpus = VgpuCards(host, vgpu_rules, lambda: self.memory, mixes)
        self._layouts = replace(
            self._layouts,
            counts=self.parse_option("vf_counts", sriov.parse_counts),
            autoprobe=bool(self.options["vf_autoprobe"]),
            supports=vf_layouts.is_supported,
        )
        self._vf_layouts = vf_layouts.VfLayouts(
            self._sysfs, lambda: self._layouts, vf_layouts.VfResources.of(self, self._access)
        )
        self._partitions = PartitionLayouts(
            self._sysfs,
            self.parse_option("partition_modes", parse_modes),
            lambda: self.memory,
            self._access.set_partition_mode,
            self._class_of_whole,
        )
        # A mix can need the other MIG mode, and NVML may list only the types of the present one.
        self._facts.reader.keeps_types = bool(mixes)
        self._vgpu_layouts = VgpuLayouts(
            self._vgpus,
            str(self.options["sriov_manage"]),
            str(self.options["nvidia_smi"]),
            self._class_of_whole,
        )
        # The first that has layouts of a device applies; the last one has some of any device.
        self._layout_kinds: tuple[_Layouts, ...] = (
            self._vgpu_layouts,
            self._vf_layouts,
            self._partitions,
            MigLayouts(
                self._facts_of,
                lambda card: self._mig_parents.get(card, {}),
                self._access.set_instances,
                host.read_facts,
                host.forget_facts,
            ),
        )

    @property
    def abilities(self) -> frozenset[inventory.Ability]:
        """Return the abilities, always with PREPARES: a removed rule can leave mediated devices."""
        changes = ("mig_layouts", "vgpu_layouts", "vf_counts", "partition_modes")
        layouts = {inventory.Ability.PARTITIONS} if any(map(self.options.get, changes)) else set()
        return super().abilities | {inventory.Ability.PREPARES} | layouts

    @property
    def remarks(self) -> Sequence[str]:
        """Return the warnings of the generic driver and about vGPUs.

        The latter are about rules without a parent or card and parents without a slot.
        """
        missing = self._vf_layouts.describe_missing(self._cards)
        return (*super().remarks, *self._mdev_remarks, *self._vgpus.remarks, *missing)

    def is_candidate(self, function: PciFunction) -> bool:
        """Return whether a PCI function is a GPU: a display controller, or AMD's for computing."""
        return classes.is_gpu(function)

    def select(self, function: PciFunction) -> rules.Rule | None:
        """Return the rule for a PCI function; record it if it is for vGPUs."""
        rule: vgpu.VgpuRule | mdev.MdevRule | None = self._vgpus.select(function)
        if rule is None and (mdev_rule := mdev.rule_of_function(self._mdev_rules, function)):
            rule = self._selected[function.address] = mdev_rule
        if rule is None:
            return super().select(function)
        return rules.Rule(type=inventory.DeviceType.GPU, resource_class=rule.resource_class)

    def needs_iommu(self, function: PciFunction) -> bool:
        """Return whether a PCI function needs an IOMMU; a parent of mediated devices does not."""
        return function.address not in self._selected and super().needs_iommu(function)

    def is_reset_after_use(self, function: PciFunction) -> bool:
        """Return whether data can be in a PCI function until a reset; not in one for vGPUs."""
        selected = self._vgpus.is_selected(function.address)
        return not selected and super().is_reset_after_use(function)

    def find_obstacle(self, function: PciFunction) -> str | None:
        """Return why a PCI function is not scheduled, or None; one for vGPUs has no obstacle."""
        if function.address in self._selected or self._vgpus.is_selected(function.address):
            return None
        return super().find_obstacle(function)

    def is_shared(self, function: PciFunction) -> bool:
        """Return whether a rule makes a PCI function a parent, or a virtual function a vGPU."""
        return (
            self._vgpus.rule_of(function) is not None
            or mdev.rule_of_function(self._mdev_rules, function) is not None
        )

    def find_used(self, functions: Mapping[str, PciFunction]) -> dict[str, str]:
        """Return the PCI functions that must not be offered: a text with the reason by address."""
        reasons = super().find_used(functions)
        withheld = self._partitions.find_divided(functions.values())
        withheld |= self._vgpus.find_used(functions)
        withheld |= self._mig_modes.find_used(functions, self._vgpu_layouts.has_layouts)
        for address, reason in withheld.items():
            reasons.setdefault(address, reason)
        for card in functions.values():
            if self.is_shared(card) or card.iommu_group is None or not self.is_candidate(card):
                continue
            # A server that gets a whole card also gets the companions in its IOMMU group.
            for other in classes.find_companions(card, functions.values()):
                if other.iommu_group == card.iommu_group and other.kernel_driver not in _DETACHED:
                    kind = classes.COMPANIONS[other.class_code[:4]]
                    reasons.setdefault(
                        card.address,
                        f"its {kind} function {other.address}, in the same IOMMU group, is bound "
                        f"to {other.kernel_driver}; expected {_VFIO}",
                    )
        return reasons

    def _may_be_whole(self, card: PciFunction) -> bool:
        """Return whether the backend offers a card of NVIDIA as a whole, unless it is used."""
        if card.vendor != NVIDIA or card.physfn is not None or card.numvfs or self.is_shared(card):
            return False
        # Not ``select``, which records what it has selected.
        selected = rules.matching_rule(self._rules, card) or self._vgpus.rule_of_card(card.address)
        return self.is_candidate(card) and (selected is not None or self._is_adopted(card))

    def describe(self, card: PciFunction) -> Description:
        """Return the facts of NVML about a card, and its other PCI functions, such as audio."""
        slot = PciAddress.parse(card.address)
        functions = (
            self._sysfs.pci_function(str(replace(slot, function=number))) for number in range(8)
        )
        names = [
            f"{other.address} ({classes.COMPANIONS[other.class_code[:4]]})"
            for other in classes.find_companions(card, [f for f in functions if f is not None])
        ]
        self._facts.forget_outdated(card.address)
        # What ``_facts_of`` returns later in the same discovery must agree with the description.
        self._cards[card.address] = self._facts.find(card)
        facts = self._facts_of(card.address)
        partition, traits = self._partitions.describe(card)
        info = {
            **partition,
            "other_functions": ", ".join(names)[: inventory.MAX_TEXT],
            "memory_bytes": str(facts.memory or ""),
            "ecc": facts.ecc,
            mig.BOARD_INFO: facts.mig,
        }
        if self.options["mig_layouts"] and mig.is_enabled(facts):
            traits |= {mig.trait_of(mig.current_layout(facts))}
        return Description(
            serial=facts.uuid,
            firmware=facts.vbios,
            traits=traits,
            info={key: value for key, value in info.items() if value},
            topology=mig.topology_of(facts),
        )

    def discover(self) -> Sequence[inventory.Device]:
        """Return a device for each card, and for each parent that is not on the PCI bus."""
        self._selected, self._mig_parents = {}, {}
        self._vgpus.begin_discovery()
        functions = self._sysfs.pci_functions()
        self._mig_modes.refresh(
            functions,
            self.is_shared,
            lambda cards: domains.find_used(self.sysfs_root, self.read_domains, cards),
        )
        cards = super().discover()
        with mediated_devices_excluded():
            plans = {
                parent: self._plan(parent, rule) for parent, rule in sorted(self._selected.items())
            }
            plans = parents.limit_slots(plans, self._selected, self._card_of, self._cards)
            # The parents that are not on the PCI bus.
            virtual_rules = {
                name: rule
                for name in self._sysfs.list_names("class/mdev_bus")
                if (rule := mdev.rule_of_parent(self._mdev_rules, name)) is not None
            }
            virtual = {name: self._plan(name, rule) for name, rule in virtual_rules.items()}
            # Without those of cards that are gone.
            self._cards = {card.address: self._cards.get(card.address) for card in cards}
            cards = [self._vgpus.replace_handles(card) for card in cards]
        devices = [self._with_slots(card, plans) for card in cards]
        devices += [
            parents.build_virtual(name, virtual_rules[name], plan, self.backend, self._uuid)
            for name, plan in virtual.items()
        ]
        used = {rule.text for rule in (*self._selected.values(), *virtual_rules.values())}
        self._mdev_remarks = (
            *(
                f"rule {rule.text!r} matches no parent of this host"
                for rule in self._mdev_rules
                if rule.text not in used
            ),
            *(
                f"{parent}: {plan.reason}"
                for parent, plan in (plans | virtual).items()
                if plan.reason
            ),
        )
        return devices

    def check_adoption(self, addresses: Sequence[str], forced: Collection[str] = ()) -> None:
        """Raise DriverFailed if an address has no PCI function that can be offered."""
        # The new driver knows no card yet. Others, which may be many, do not matter here.
        for address in addresses:
            self._facts.read_waiting(address)
        super().check_adoption(addresses, forced)

    def measure(self, devices: Sequence[inventory.Device]) -> Mapping[str, Measurement]:
        """Return the health of the cards; a parent that is not on the PCI bus has no health."""
        return super().measure([device for device in devices if is_pci_address(device.address)])

    def prepare(self, item: WorkItem, instance: str | None) -> None:
        """Create the vGPU or mediated device of a handle.

        For a handle that is a whole PCI function, check that the host does not use it.
        """
        if self._vgpus.handles(item):
            with locked(item.device):
                type_ = self._vgpus.prepare(item, self.read_domains)
            LOG.info(
                "vGPU of type %s is ready on %s for instance %s",
                type_,
                item.handle,
                instance,
                backend=self.backend,
                device=item.device,
            )
            return
        # A use, such as a mediated device that Nova created, can have begun since the discovery.
        if is_pci_address(item.handle):
            with self._whole.add_owner(item.device) if is_whole(item) else nullcontext():
                self.check_unused(item.handle)
            return
        try:
            slot = mdev.Slot.parse(item.handle)
        except Invalid as exc:
            raise DriverFailed(exc.message) from exc
        if slot.parent != item.deployable:
            raise DriverFailed(f"{item.handle} is not a slot of {item.deployable}")
        function = self._sysfs.pci_function(slot.parent) if is_pci_address(slot.parent) else None
        if function is not None and function.kernel_driver == _VFIO:
            raise DriverFailed(
                f"{slot.parent} is bound to {_VFIO}: a server may use the whole card"
            )
        device = self._uuid(slot)
        with locked(item.device), mediated_devices_excluded():
            self._access.create_mdev(slot.parent, slot.type, device)
        LOG.info(
            "Mediated device %s of type %s is ready for instance %s",
            device,
            slot.type,
            instance,
            backend=self.backend,
            device=item.device,
        )

    def release(self, item: WorkItem) -> None:
        """Remove the vGPU or mediated device of a handle, also if no rule enables its type now."""
        if is_pci_address(item.handle):
            with locked(item.device):
                type_ = self._vgpus.release(item)
                if is_whole(item):
                    self._whole.remove_owner(item.device)
            if type_ is not None:
                LOG.info(
                    "vGPU of type %s removed from %s",
                    type_,
                    item.handle,
                    backend=self.backend,
                    device=item.device,
                )
            return
        try:
            slot = mdev.Slot.parse(item.handle)
        except Invalid:
            return  # something that was never prepared
        device = self._uuid(slot)
        if slot.parent != item.deployable:
            return  # never prepared: ``prepare`` refuses such a handle
        with locked(item.device), mediated_devices_excluded():
            self._access.remove_mdev(slot.parent, slot.type, device)
        LOG.info(
            "Mediated device %s of type %s removed",
            device,
            slot.type,
            backend=self.backend,
            device=item.device,
        )

    def recreate(self, address: str) -> None:
        """Create the vGPU of a prepared virtual function again, if another program removed it."""
        with locked(self._card_of(address)):
            type_ = self._vgpus.recreate(address, self.read_domains)
        if type_ is not None:
            LOG.warning(
                "vGPU of type %s was removed from %s by another program, and created again",
                type_,
                address,
                backend=self.backend,
            )

    def sanitise(self, item: WorkItem) -> None:
        """Reset the PCI function of a handle; a vGPU was removed by ``release``."""
        if not self._vgpus.handles(item):
            super().sanitise(item)

    def check_unused(self, address: str) -> None:
        """Raise DriverFailed if the host uses a PCI function or it has mediated devices."""
        address = str(PciAddress.parse(address))
        self.read_domains(fresh=True)  # ``find_used`` gets the same facts
        if not self._whole.has_owner(address):
            # Another program may have changed the MIG mode. A card with an owner is not opened: its
            # server may start now.
            with locked_once(address):
                self._facts.expire(address)
                self._facts.read_address(address)
        functions = {function.address: function for function in self._sysfs.pci_functions()}
        # A parent of mdev_types can have been given to a server before the rule existed.
        used = check.mediated_parents(self.sysfs_root) | self.find_used(functions)
        if (reason := used.get(address)) is not None:
            raise DriverFailed(f"{address} cannot be given to a server: {reason}")

    def _uuid(self, slot: mdev.Slot) -> str:
        """Return the uuid of a slot, which is also the uuid of its attach handle."""
        return handle_uuid(self.host, slot.parent, str(slot))

    def _plan(self, parent: str, rule: mdev.MdevRule) -> mdev.SlotPlan:
        """Return the slot plan of a parent for one of the types of its rule.

        Prefer the type that has devices in slots, then the first type with slots, then the first
        type of the rule.
        """
        types = read_types(self._sysfs, parent)
        if is_pci_address(parent):
            card = self._card_of(parent)
            by_type = self._facts_of(card).vgpu_profiles
            names = [short_name(types[name].name or "") for name in rule.types if name in types]
            profiles = frozenset(by_type[name] for name in names if name in by_type)
            parents_of_card = self._mig_parents.setdefault(card, {})
            parents_of_card[parent] = mig.Parent(rule.resource_class, profiles)
        plans = [mdev.plan_slots(parent, name, types, self._uuid) for name in rule.types]
        # Not the first with slots: servers may have the devices of another type.
        return next(
            (plan for plan in plans if plan.occupied),
            next((plan for plan in plans if plan.slots), plans[0]),
        )

    def _card_of(self, parent: str) -> str:
        return self._sysfs.read_link(f"bus/pci/devices/{parent}/physfn") or parent

    def _class_of_whole(self, address: str) -> str | None:
        """Return the resource class of a card without virtual functions; None if not offered."""
        card = self._sysfs.pci_function(address)
        offer = None if card is None else self._offer(replace(card, numvfs=0), withheld=None)
        return None if offer is None else offer.resource_class

    def _physical_only(self, card: PciFunction) -> Offer | None:
        """Return a withheld offer of a card that only other layouts offer, or None."""
        rule = self._vgpus.rule_of_card(card.address)
        if rule is None or card.numvfs or not self._vgpu_layouts.has_layouts(card.address):
            return super()._physical_only(card)
        reason = self._used.get(card.address, sriov.NOT_SELECTED)
        type_, kernel_drivers = inventory.DeviceType.GPU, frozenset[str]()
        return Offer(card, type_, rule.resource_class, rule.traits, kernel_drivers, withheld=reason)

    def _facts_of(self, card: str) -> GpuFacts:
        return self._cards.get(card) or GpuFacts()

    def layouts(self, device: inventory.Device) -> Sequence[inventory.Layout]:
        """Return the layouts of a card; a layout ``fixed`` for devices without others."""
        return self._layouts_of(device.address).of_device(device)

    def partition(self, item: WorkItem, layout: str) -> None:
        """Change the layout of a card; see ``vgpu_layouts`` and ``mig_layouts``."""
        if is_pci_address(item.device):
            domains.check_unused(self._sysfs, self.read_domains, item.device)
        with locked(item.device):
            self._whole.remove_owner(item.device)  # no handle of it is in use
            try:
                self._layouts_of(item.device).apply(item.device, layout)
            finally:
                # A discovery may have no time to read what has changed.
                self._facts.read_address(item.device)
        LOG.info("Layout %s applied", layout, backend=self.backend, device=item.device)

    def _layouts_of(self, address: str) -> _Layouts:
        return next(kind for kind in self._layout_kinds if kind.has_layouts(address))

    def _with_slots(
        self, card: inventory.Device, plans: Mapping[str, mdev.SlotPlan]
    ) -> inventory.Device:
        """Return a card in which the deployable of each parent has slots as its handles."""
        deployables: list[inventory.Deployable] = []
        reasons: list[str] = []
        for deployable in card.deployables:
            planned = [h.address for h in deployable.handles if h.address in plans]
            whole = tuple(h for h in deployable.handles if h.address not in plans)
            if whole:
                deployables.append(replace(deployable, handles=whole))
            for parent in planned:
                plan, rule = plans[parent], self._selected[parent]
                deployables.append(parents.build(deployable, parent, rule, plan, self._uuid))
                if plan.reason is not None:
                    reasons.append(f"{parent}: {plan.reason}")
        return add_reasons(replace(card, deployables=tuple(deployables)), reasons)

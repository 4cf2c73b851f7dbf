# SPDX-License-Identifier: Apache-2.0
"""The cards of a backend whose virtual functions are vGPUs without mediated devices.

The memory of the driver has the functions that it prepared. Only these are changed: a vGPU on any
other function belongs to another program. So nothing is changed that cannot be recorded: after a
restart of the agent, a vGPU without a record would be one of another program.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cyborg.core.address import PciAddress, is_pci_address
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import AttachHandle, Deployable, Device, HandleType
from cyborg.core.jobs.job import WorkItem
from cyborg.core.log import get_logger
from cyborg.drivers.base import Memory
from cyborg.drivers.gpu import vgpu
from cyborg.drivers.gpu.mixes import OTHER, WHOLE, Mix, trait_of
from cyborg.drivers.gpu.vgpu_records import VgpuRecords
from cyborg.drivers.host_use import domains
from cyborg.drivers.kernel import vgpu as kernel_vgpu
from cyborg.drivers.kernel.nvml import GpuFacts
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.pci.offers import add_reasons
from cyborg.drivers.sysfs import PCI_DEVICES, PciFunction, Sysfs

LOG = get_logger(__name__)

_CHANGING = (
    "its layout is being changed, or a change did not end: if no job of the card is open, apply a "
    "layout"
)
_WITHOUT_FUNCTIONS = (
    "the virtual functions of its layout or of servers are missing, such as after a boot of the "
    "host: apply the layout again, or enable SR-IOV with sriov-manage if the card has no layouts"
)


@dataclass(frozen=True, slots=True)
class GpuHost:
    """How the driver reads and changes its host.

    ``read_facts`` returns the facts of NVML about a card, read again after ``forget_facts``; the
    last known ones if that fails. ``read_facts_again`` raises DriverFailed then.
    """

    sysfs: Sysfs
    access: HostAccess
    read_facts: Callable[[str], GpuFacts]
    read_facts_again: Callable[[str], GpuFacts]
    forget_facts: Callable[[str], None]


class VgpuCards:
    """Cards with vGPUs: their rules, their offers, and the work on their virtual functions.

    ``memory`` returns the memory of the driver. ``mixes`` are the configured layouts.
    """

    def __init__(
        self,
        host: GpuHost,
        vgpu_rules: Sequence[vgpu.VgpuRule],
        memory: Callable[[], Memory],
        mixes: Sequence[Mix] = (),
    ) -> None:
        self.host = host
        self.mixes = mixes
        self._rules = vgpu_rules
        self.records = VgpuRecords(memory)
        # Rule of each card, as the running discovery reads it: each function asks for it.
        self._card_rules: dict[str, vgpu.VgpuRule | None] = {}
        self._selected: dict[str, vgpu.VgpuRule] = {}  # by virtual function, of this discovery
        self._plans: dict[str, vgpu.VgpuPlan] = {}  # by card, of the last discovery

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return warnings about rules without a card, and cards without a known limit."""
        used = {rule.text for rule in self._selected.values()}
        if self.mixes:
            used |= {rule.text for rule in self._card_rules.values() if rule is not None}
        unused = [
            f"rule {rule.text!r} matches no card with virtual functions for vGPUs: enable SR-IOV "
            "with sriov-manage, and check that the driver for hosts is loaded"
            for rule in self._rules
            if rule.text not in used
        ]
        remarks = list(dict.fromkeys(plan.remark for plan in self._plans.values() if plan.remark))
        lacking = [a for a, rule in self._card_rules.items() if rule and self._lacks_types(a)]
        if lacking:
            remarks.append(
                f"{', '.join(lacking[:4])}: a mix of vgpu_layouts has types or profiles that NVML "
                "does not list, and it describes no MIG profiles: enable the MIG mode once "
                "(nvidia-smi -mig 1) and restart the agent, which remembers them"
            )
        return (*unused, *remarks)

    def _lacks_types(self, card: str) -> bool:
        """Return whether a mix has unknown types, and a card may have them in MIG mode."""
        facts, rule = self.host.read_facts(card), self.rule_of_card(card)
        if rule is None or facts.mig != "disabled" or facts.mig_profiles:
            return False
        types = {type_ for mix in self.mixes for type_ in mix.counts} & set(rule.types)
        has_profiles = any(mix.profiles for mix in self.mixes)
        return has_profiles or not types <= facts.max_vgpus.keys()

    def begin_discovery(self) -> None:
        """Forget what the last discovery selected."""
        self._selected, self._card_rules = {}, {}

    def rule_of(self, function: PciFunction) -> vgpu.VgpuRule | None:
        """Return the rule of the card of a virtual function that can have vGPUs, or None."""
        if not self._rules or function.physfn is None or not self._has_vgpus(function.address):
            return None
        return self.rule_of_card(function.physfn)

    def select(self, function: PciFunction) -> vgpu.VgpuRule | None:
        """Return the rule of a virtual function, and record it for this discovery."""
        rule = self.rule_of(function)
        if rule is not None:
            self._selected[function.address] = rule
        return rule

    def is_selected(self, address: str) -> bool:
        """Return whether the running discovery has selected a virtual function for vGPUs."""
        return address in self._selected

    def find_used(self, functions: Mapping[str, PciFunction]) -> dict[str, str]:
        """Return the cards and virtual functions that are not offered: a reason by address."""
        cards = filter(self._may_be_whole, functions.values())
        found = {f.address: _WITHOUT_FUNCTIONS for f in cards if self._lacks_functions(f.address)}
        states = self._states(functions)
        for card, known in states.items():
            for state in known:
                if (reason := self._find_other_type(state, card, known)) is not None:
                    found[state.address] = reason
        return found | self._find_foreign(states)

    def _find_foreign(
        self, states: Mapping[str, Sequence[kernel_vgpu.VgpuFunction]]
    ) -> dict[str, str]:
        """Return the virtual functions for vGPUs that other programs use: a reason by address."""
        return {
            state.address: "it has a vGPU of type "
            f"{vgpu.name_of(state.current, known, self.host.read_facts(card))} "
            "that this service did not create"
            for card, known in states.items()
            for state in known
            if self.is_foreign(state, card, known)
        }

    def _states(
        self, functions: Mapping[str, PciFunction]
    ) -> dict[str, list[kernel_vgpu.VgpuFunction]]:
        """Return the states of the virtual functions for vGPUs among some functions, by card."""
        states: dict[str, list[kernel_vgpu.VgpuFunction]] = {}
        for function in functions.values():
            if self.rule_of(function) is not None:
                state = kernel_vgpu.read(self.host.sysfs, function.address)
                states.setdefault(str(function.physfn), []).extend([state] if state else [])
        return states

    def replace_handles(self, card: Device) -> Device:
        """Return a card in which the functions for vGPUs are deployables, one for each type.

        With layouts, all deployables of the card have the trait of its current layout.
        """
        layout = self._layout_of(card.address)
        addresses = sorted(
            (a for a in self._selected if self._card_of(a) == card.address), key=PciAddress.parse
        )
        if addresses:
            card = self._divide(card, addresses, self.find_mix(card.address, layout))
        else:
            self._plans.pop(card.address, None)
        if layout is None:
            return card
        traits = {trait_of(layout)}
        parts = tuple(replace(part, traits=part.traits | traits) for part in card.deployables)
        return replace(card, deployables=parts)

    def _divide(self, card: Device, addresses: Sequence[str], mix: Mix | None) -> Device:
        """Return a card in which its functions at these addresses are deployables by type."""
        rule = self._selected[addresses[0]]  # a rule selects cards: it is that of all functions
        plan = self._plans[card.address] = self._plan(card.address, rule, addresses, mix)
        # The deployable of each function: those of the types differ from it in little.
        templates = {h.address: part for part in card.deployables for h in part.handles}
        by_type: dict[str, list[str]] = {}  # addresses of functions
        for address, type_ in plan.handles.items():
            if address in templates:  # not withheld, such as for a use by the host
                by_type.setdefault(type_, []).append(address)
        parts = [
            replace(part, handles=others)
            for part in card.deployables
            if (others := tuple(h for h in part.handles if h.address not in self._selected))
        ]
        parts += [
            self._deployable(templates[offered[0]], card.address, rule, type_, offered)
            for type_, offered in by_type.items()
        ]
        return add_reasons(replace(card, deployables=tuple(parts)), plan.reasons)

    def _may_be_whole(self, function: PciFunction) -> bool:
        """Return whether a function is a card for vGPUs without virtual functions."""
        return (
            function.physfn is None
            and not function.numvfs
            and self.rule_of_card(function.address) is not None
        )

    def handles(self, item: WorkItem) -> bool:
        """Return whether a work item is about a virtual function for a vGPU."""
        if not is_pci_address(item.handle) or item.handle == item.device:
            return False
        # Also one that has disappeared: SR-IOV is disabled after a boot of the host.
        return (
            self.records.prepared_type(item.handle) is not None
            or self._has_vgpus(item.handle)
            or self.rule_of_card(item.device) is not None
        )

    def prepare(self, item: WorkItem, read_domains: domains.ReadDomains) -> str:
        """Create the vGPU of a virtual function; return its type.

        Raise DriverFailed if no rule enables the type of the deployable, or another program has a
        vGPU on the function or uses it.
        """
        function, rule = self.host.sysfs.pci_function(item.handle), self.rule_of_card(item.device)
        if function is None or function.physfn != item.device:
            raise DriverFailed(
                f"{item.handle} is not a virtual function of {item.device}: enable SR-IOV with "
                "sriov-manage"
            )
        types = () if rule is None else rule.types
        by_deployable = {vgpu.deployable_address(item.device, name): name for name in types}
        type_ = by_deployable.get(item.deployable)
        if rule is None or type_ is None:
            raise DriverFailed(f"no rule of vgpu_types enables vGPUs of {item.deployable}")
        self._check_free(function, read_domains)
        # Before the write: after a failure in between the function is known as one of this service.
        self.records.add_prepared(item.device, item.handle, type_)
        self._create(item.handle, type_, rule.parameters)
        return type_

    def recreate(self, address: str, read_domains: domains.ReadDomains) -> str | None:
        """Create the vGPU of a prepared function again if another program removed it.

        Return its type; None, and do nothing, for a function that has its vGPU or is not prepared
        any more. Raise DriverFailed if it does not exist, another program uses it, or its vGPU has
        another type.
        """
        type_ = self.records.prepared_type(address)
        if type_ is None:
            return None
        state = kernel_vgpu.read(self.host.sysfs, address)
        function = self.host.sysfs.pci_function(address)
        if state is not None and state.current:
            # Without the function its card is unknown, and the facts about it are empty.
            card = "" if function is None else str(function.physfn)
            if (reason := self._find_other_type(state, card, [state])) is not None:
                raise DriverFailed(f"{address} cannot be given to its server: {reason}")
            return None
        if function is None or function.physfn is None:
            raise DriverFailed(
                f"{address} is no virtual function any more: enable SR-IOV with sriov-manage"
            )
        rule = self.rule_of_card(function.physfn)
        self._check_free(function, read_domains)
        self._create(address, type_, "" if rule is None else rule.parameters)
        return type_

    def _create(self, function: str, type_: str, parameters: str) -> None:
        self.host.access.create_vgpu(function, type_, parameters)
        state = kernel_vgpu.read(self.host.sysfs, function)
        if state is not None and state.current:
            self.records.put_written(function, state.current)

    def _find_other_type(
        self, state: kernel_vgpu.VgpuFunction, card: str, known: Sequence[kernel_vgpu.VgpuFunction]
    ) -> str | None:
        """Return why the vGPU of a prepared function is not that of its server, or None.

        The ids of the types are other ones after a boot with another driver, and the names cannot
        be read while the card is full and NVML does not know them.
        """
        type_ = self.records.prepared_type(state.address)
        if type_ is None or not state.current:
            return None
        name = vgpu.name_of(state.current, known, self.host.read_facts(card))
        if name == vgpu.unknown_name(state.current):
            # Only the ids can be compared; where none was stored, nothing shows another type.
            same = self.records.written_id(state.address) in (None, str(state.current))
        else:
            same = name == type_
        if same:
            return None
        return (
            f"it has a vGPU of type {name}, and this service created one of {type_}: delete the "
            "server, or remove that vGPU"
        )

    def _check_free(self, function: PciFunction, read_domains: domains.ReadDomains) -> None:
        """Raise DriverFailed if another program has a vGPU on a function, or uses it."""
        functions = {function.address: function}
        found = domains.find_used(
            self.host.sysfs.root, partial(read_domains, fresh=True), functions.values()
        )
        # A vGPU of this service that has another type is replaced.
        used = self._find_foreign(self._states(functions))
        if (reason := (found | used).get(function.address)) is not None:
            raise DriverFailed(f"{function.address} cannot be given to a server: {reason}")

    def release(self, item: WorkItem) -> str | None:
        """Remove the vGPU of a virtual function that this service prepared; return its type.

        Do nothing, and return None, for any other function. Raise DriverFailed if a process uses
        the vGPU, or its removal cannot be recorded: call this again then.
        """
        type_ = self.records.prepared_type(item.handle)
        if type_ is not None:
            self.host.access.remove_vgpu(item.handle)
        # Also without a type: the last call may have removed the vGPU, and not the record.
        if self.handles(item):
            self.records.remove_prepared(item.device, item.handle)
        return type_

    def find_mix(self, card: str, layout: str | None) -> Mix | None:
        """Return the mix with a name, with its types on a card; None for another layout."""
        mix = next((mix for mix in self.mixes if mix.name == layout), None)
        rule = self.rule_of_card(card)
        if mix is None or rule is None:
            return None
        # Types that servers have come first: they are those of a layout that is applied again.
        in_use = self.records.prepared_of(card).values()
        types = sorted(rule.types, key=lambda type_: type_ not in in_use)
        return mix.find_types(types, self.host.read_facts(card))

    def current_layout(self, card: PciFunction) -> str:
        """Return the name of the current layout of a card that a rule selects.

        Which mix it has is in the memory, because a virtual function has a vGPU only while a server
        has it. A mix whose modes or GPU instances another program changed is not applied any more,
        nor is one whose change did not end. A card without virtual functions is not whole while the
        memory has a mix or servers of it.
        """
        if self.records.is_changing(card.address):
            return OTHER
        if not card.numvfs:
            facts = self.host.read_facts(card.address)
            mig_differs = facts.in_mig_mode or facts.mig_pending
            return OTHER if mig_differs or self._lacks_functions(card.address) else WHOLE
        mix = self.find_mix(card.address, self.records.layout_of(card.address))
        applied = mix is not None and mix.is_applied(self.host.read_facts(card.address))
        return mix.name if mix is not None and applied else OTHER

    def is_tried(
        self, state: kernel_vgpu.VgpuFunction, known: Sequence[kernel_vgpu.VgpuFunction]
    ) -> bool:
        """Return whether a change of the layout created the vGPU of a function to try its mix.

        ``known`` are the functions of the card. The record of a function can be left, as by a boot
        of the host, so a vGPU of another type is none of these.
        """
        type_ = self.records.tried_type(state.address)
        function = self.host.sysfs.pci_function(state.address)
        # A server may have got the function since the change.
        if type_ is None or function is None or self.records.prepared_type(state.address):
            return False
        facts = self.host.read_facts(str(function.physfn))
        return type_ == vgpu.name_of(state.current, known, facts)

    def is_foreign(
        self,
        state: kernel_vgpu.VgpuFunction,
        card: str,
        known: Sequence[kernel_vgpu.VgpuFunction],
    ) -> bool:
        """Return whether a function has a vGPU that this service did not create."""
        if not state.current or self.records.prepared_type(state.address) is not None:
            return False
        return not (self.records.is_changing(card) and self.is_tried(state, known))

    def _lacks_functions(self, card: str) -> bool:
        """Return whether a card without virtual functions should have them: see the records."""
        records = self.records
        has_mix = self.find_mix(card, records.layout_of(card)) is not None
        return has_mix or records.is_changing(card) or bool(records.prepared_of(card))

    def _layout_of(self, address: str) -> str | None:
        """Return the name of the layout of a card; None for a card without layouts."""
        if not self.mixes or self.rule_of_card(address) is None:
            return None
        card = self.host.sysfs.pci_function(address)
        return None if card is None else self.current_layout(card)

    def _plan(
        self, card: str, rule: vgpu.VgpuRule, addresses: Sequence[str], mix: Mix | None
    ) -> vgpu.VgpuPlan:
        """Return the vGPUs that a card offers at the functions of these addresses."""
        states = (kernel_vgpu.read(self.host.sysfs, address) for address in addresses)
        prepared = {a: t for a in addresses if (t := self.records.prepared_type(a)) is not None}
        if self.records.is_changing(card):
            # Only what servers have: a new server could get a function that the change removes.
            return vgpu.VgpuPlan(dict(sorted(prepared.items())), (_CHANGING,))
        return vgpu.plan_card(
            rule.types,
            rule.max_per_card,
            [state for state in states if state is not None],
            prepared,
            self.host.read_facts(card),
            # Without types of its profiles, which no rule enables any more, it offers nothing: the
            # reason names the types of the rule.
            None if mix is None else mix.counts or None,
        )

    def _deployable(
        self,
        template: Deployable,
        card: str,
        rule: vgpu.VgpuRule,
        type_: str,
        addresses: Sequence[str],
    ) -> Deployable:
        """Return the deployable of a type: ``template`` with the functions of these addresses."""
        return replace(
            template,
            address=vgpu.deployable_address(card, type_),
            resource_class=rule.resource_class,
            traits=template.traits | rule.traits | {vgpu.trait_of(type_)},
            handles=tuple(
                AttachHandle(
                    address,
                    HandleType.VFIO,
                    {**PciAddress.parse(address).attach_info(), "vgpu_type": type_},
                )
                for address in addresses
            ),
            attributes={**template.attributes, "vgpu_type": type_},
        )

    def rule_of_card(self, card: str) -> vgpu.VgpuRule | None:
        """Return the rule that selects the physical function at an address, or None."""
        if not self._rules:
            return None
        rules = self._card_rules  # a discovery in another thread replaces it
        if card not in rules:
            function = self.host.sysfs.pci_function(card)
            rules[card] = None if function is None else vgpu.rule_of_card(self._rules, function)
        return rules[card]

    def _card_of(self, address: str) -> str | None:
        return self.host.sysfs.read_link(PCI_DEVICES / address / "physfn")

    def _has_vgpus(self, address: str) -> bool:
        return "creatable_vgpu_types" in self.host.sysfs.list_names(
            kernel_vgpu.attributes_folder(address)
        )

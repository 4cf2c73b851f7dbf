# SPDX-License-Identifier: Apache-2.0
"""The deployables and devices of parents of mediated devices, built from the plans of their slots.

``uuid_of`` returns the uuid of the mediated device in a slot.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from cyborg.core.address import MdevAddress, PciAddress, is_pci_address
from cyborg.core.inventory import device as inventory
from cyborg.core.naming import make_custom_name
from cyborg.drivers.gpu import mdev
from cyborg.drivers.gpu.mdev import MdevRule, Slot, SlotPlan
from cyborg.drivers.kernel.nvml import GpuFacts, short_name
from cyborg.drivers.pci.offers import add_reasons

UuidOf = Callable[[Slot], str]

_UNREAD = "how many devices its card can have was not read yet: a next discovery reads it"


def build(
    template: inventory.Deployable, parent: str, rule: MdevRule, plan: SlotPlan, uuid_of: UuidOf
) -> inventory.Deployable:
    """Return the deployable of a parent, with the properties of ``template``."""
    attributes = {"mdev_type": plan.type}
    if plan.type_name:
        attributes["mdev_name"] = plan.type_name
    if plan.others:
        attributes["mdevs_of_others"] = str(plan.others)
    return replace(
        template,
        address=parent,
        resource_class=rule.resource_class,
        traits=template.traits | rule.traits | {make_custom_name(f"MDEV_{plan.type}")},
        handles=tuple(_handle(slot, uuid_of) for slot in plan.slots),
        attributes={**template.attributes, **attributes},
    )


def build_virtual(
    name: str, rule: MdevRule, plan: SlotPlan, backend: str, uuid_of: UuidOf
) -> inventory.Device:
    """Return the device of a parent that is not on the PCI bus."""
    part = inventory.Deployable(name, rule.resource_class)
    # The kernel puts the name of the parent's driver before that of each type.
    device = inventory.Device(
        address=name,
        type=inventory.DeviceType.GPU,
        vendor=plan.type.partition("-")[0],
        model=name,
        backend=backend,
        deployables=(build(part, name, rule, plan, uuid_of),),
    )
    return add_reasons(device, [plan.reason] if plan.reason else [])


def _handle(slot: Slot, uuid_of: UuidOf) -> inventory.AttachHandle:
    if is_pci_address(slot.parent):
        parent = PciAddress.parse(slot.parent)
        info = MdevAddress(parent, slot.type, uuid_of(slot)).attach_info()
    else:
        info = {"parent": slot.parent, "asked_type": slot.type}
    return inventory.AttachHandle(str(slot), inventory.HandleType.MDEV, info)


def limit_slots(
    plans: Mapping[str, SlotPlan],
    rules: Mapping[str, MdevRule],
    card_of: Callable[[str], str],
    known: Mapping[str, GpuFacts | None],
) -> dict[str, SlotPlan]:
    """Return the plans, with at most as many slots for each card as it can have devices.

    ``plans`` and ``rules`` are those of the parents on the PCI bus, by address. ``known`` are the
    facts about each card; one with None, which was not read yet, has only the slots in use.
    """
    limited = dict(plans)
    groups: dict[tuple[str, str], dict[str, SlotPlan]] = defaultdict(dict)
    for parent, plan in plans.items():
        groups[card_of(parent), plan.type][parent] = plan
    for (card, _), group in groups.items():
        known_facts, type_name = known.get(card, GpuFacts()), _name_of(group.values())
        facts = known_facts or GpuFacts()
        profile = facts.vgpu_profiles.get(type_name, "")
        maximum = facts.max_vgpus.get(type_name)
        if profile and facts.in_mig_mode and not facts.mig_instances:
            # The instances are unknown: the kernel driver says only whether one more can exist.
            maximum = 1 + sum(plan.others + len(plan.occupied) for plan in group.values())
        # The first that is known applies. Each MIG-backed vGPU needs an instance, whatever a rule
        # permits; a rule overrides what NVML knows of a product.
        limits = [
            facts.mig_instances.get(profile),
            *(rules[parent].max_per_card for parent in group),
            maximum,
        ]
        limit = next((limit for limit in limits if limit is not None), None)
        if limit is not None:
            limited |= mdev.limit_slots(group, limit)
        elif known_facts is None:
            limited |= {
                parent: plan if plan.slots else replace(plan, reason=plan.reason or _UNREAD)
                for parent, plan in mdev.limit_slots(group, limit=0).items()
            }
    # A card whose other functions have its devices is not a problem to be shown.
    full = {card_of(plan.slots[0].parent) for plan in plans.values() if plan.slots}
    for parent, plan in plans.items():
        if plan.exhausted and card_of(parent) in full:
            limited[parent] = replace(plan, reason=None)
    return limited


def _name_of(plans: Iterable[SlotPlan]) -> str:
    """Return the short name of the mediated device type of plans; empty if no plan has a slot."""
    return next((short_name(plan.type_name) for plan in plans if plan.type_name), "")

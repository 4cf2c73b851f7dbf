# SPDX-License-Identifier: Apache-2.0
"""PCI functions that a driver offers, and the deployables and board info built from them.

It also has the warnings about rules that offer nothing, and functions that cannot be reset.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cyborg.core.address import PciAddress
from cyborg.core.inventory import capability
from cyborg.core.inventory import device as inventory
from cyborg.core.inventory.functions import root_of
from cyborg.core.text import join_limited
from cyborg.drivers.kernel.reset import can_reset
from cyborg.drivers.pci import classes
from cyborg.drivers.pci.rules import Rule, matching_index, matching_rule
from cyborg.drivers.sysfs import PciFunction, Sysfs

MAX_ADDRESSES = 4  # of functions with the same reason


@dataclass(frozen=True, slots=True)
class Offer:
    """A PCI function that a rule selects, or that is adopted.

    ``withheld`` is the reason why the PCI function is not offered, or None. ``obstacle`` is the
    reason why it cannot be attached to an instance, or None.
    """

    function: PciFunction
    type: inventory.DeviceType
    resource_class: str
    traits: frozenset[str]
    kernel_drivers: frozenset[str]
    withheld: str | None = None
    obstacle: str | None = None


class OfferedCard(NamedTuple):
    """A card and its offers: one of the card as a whole, or those of its virtual functions."""

    function: PciFunction
    offers: list[Offer]


@dataclass(frozen=True, slots=True)
class Description:
    """Data that a driver of one kind of device adds to the description of a card.

    ``tree`` is a capability tree (``core.inventory.capability``). The capabilities of the tree and
    ``traits`` become traits of all deployables of the card. ``handle_info`` has additional info of
    handles by the address of the PCI function, ``topology`` additional entries of the topology.
    """

    serial: str | None = None
    info: Mapping[str, str] = field(default_factory=dict)
    firmware: str | None = None
    tree: Mapping[str, Any] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()
    handle_info: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    topology: Mapping[str, str] = field(default_factory=dict)


def build_device(
    card: PciFunction,
    offers: Sequence[Offer],
    description: Description,
    names: classes.Names,
    place: Mapping[str, str],
    *,
    backend: str,
    layout: Mapping[str, str],
    traits: frozenset[str],
) -> inventory.Device:
    """Return the device of a card. Raise Invalid if its data are invalid.

    ``place`` is its topology, ``layout`` the board info of its layout; all its deployables have
    ``traits``.
    """
    obstacles = [offer.obstacle for offer in offers]
    # One function that can be attached is enough: apply_obstacles has withheld the others.
    deliverable = None in obstacles
    firmware = {"firmware_version": description.firmware} if description.firmware else {}
    return inventory.Device(
        address=card.address,
        type=offers[0].type,
        vendor=card.vendor,
        model=names.model or f"{card.vendor}:{card.product}",
        backend=backend,
        std_board_info={**board_info(card, names), **layout, **description.info},
        serial=description.serial,
        vendor_board_info=describe_withheld(card, offers)
        | capability.to_board_info(description.tree),
        numa_node=card.numa_node,
        deliverable=deliverable,
        undeliverable_reason=None if deliverable else obstacles[0],
        topology={**place, **description.topology, **firmware},
        deployables=build_deployables(card, offers, description, traits),
    )


def describe_withheld(card: PciFunction, offers: Sequence[Offer]) -> dict[str, str]:
    """Return board info with the PCI functions that are not offered and the reasons, if any."""
    addresses: dict[str, list[str]] = {}
    for offer in offers:
        if offer.withheld is not None:
            addresses.setdefault(offer.withheld, []).append(offer.function.address)
    texts: list[str] = []
    for reason, withheld in addresses.items():
        is_card = withheld == [card.address]
        names = join_limited(withheld, MAX_ADDRESSES, nouns="functions")
        texts.append(reason if is_card else f"{names}: {reason}")
    return {inventory.NOT_OFFERED: "; ".join(texts)[: inventory.MAX_TEXT]} if texts else {}


def apply_obstacles(offers: list[Offer]) -> list[Offer]:
    """Withhold offers that cannot be attached, if others of the card can be attached."""
    # Without any, the whole card is shown as not deliverable, and keeps its handles.
    if all(offer.obstacle is not None for offer in offers):
        return offers
    return [replace(o, withheld=o.obstacle) if o.withheld is None else o for o in offers]


def build_deployables(
    card: PciFunction, offers: Sequence[Offer], description: Description, traits: frozenset[str]
) -> tuple[inventory.Deployable, ...]:
    """Return a deployable for each resource class of the offered PCI functions of a card.

    Each deployable has ``traits``, the traits of the description and the traits of its offers.
    """
    # The deployable of the first class has the address of the card; for any other class the address
    # has the class name as a suffix.
    by_class: dict[str, list[Offer]] = {}
    for offer in offers:
        # Withheld offers count for the order of the classes: otherwise bound handles could change
        # their deployable when all offers of the first class become withheld.
        group = by_class.setdefault(offer.resource_class, [])
        if offer.withheld is None:
            group.append(offer)
    return tuple(
        inventory.Deployable(
            # The first without a suffix: existing deployments keep the name of the provider.
            address=card.address if number == 0 else f"{card.address}-{resource_class}",
            resource_class=resource_class,
            traits=traits.union(
                description.traits,
                capability.build_traits(root_of(resource_class), description.tree),
                *(offer.traits for offer in group),
            ),
            handles=tuple(_handle(offer.function, description) for offer in group),
            attributes=_attributes(card),
        )
        for number, (resource_class, group) in enumerate(by_class.items())
        if group
    )


def _handle(function: PciFunction, description: Description) -> inventory.AttachHandle:
    info = PciAddress.parse(function.address).attach_info()
    more = description.handle_info.get(function.address, {})
    return inventory.AttachHandle(function.address, inventory.HandleType.PCI, {**more, **info})


def board_info(card: PciFunction, names: classes.Names) -> dict[str, str]:
    """Return the ids and names of a card."""
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


def add_reasons(device: inventory.Device, reasons: Sequence[str]) -> inventory.Device:
    """Return a device that also shows these reasons why a part of it is not offered."""
    shown = device.vendor_board_info
    texts = [text for text in (shown.get(inventory.NOT_OFFERED), *reasons) if text]
    info = {inventory.NOT_OFFERED: "; ".join(texts)[: inventory.MAX_TEXT]} if texts else {}
    return replace(device, vendor_board_info={**shown, **info})


def _attributes(card: PciFunction) -> dict[str, str]:
    """Return the attributes that all deployables of a card have."""
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


MAX_REMARK_ADDRESSES = 5  # of functions in a remark


def describe_rules(
    texts: Sequence[str], rules: Sequence[Rule], functions: Sequence[PciFunction]
) -> list[str]:
    """Return a warning for each rule that applies to none of these functions."""
    # The first that matches, as for the offers: a rule may be hidden by an earlier one.
    matching = {matching_index(rules, function) for function in functions}
    remarks: list[str] = []
    for number, text in enumerate(texts):
        if number in matching:
            continue
        if any(rules[number].matches(function) for function in functions):
            problem = "applies to no device: earlier rules match all devices that it matches"
        elif rules[number].scope is None and any(
            replace(rules[number], scope="all").matches(function) for function in functions
        ):
            problem = "matches only virtual functions of GPUs, which need functions=vf"
        else:
            problem = "matches no device of this host"
        remarks.append(f"rule {text!r} {problem}")
    return remarks


def describe_parted_gpus(
    rules: Sequence[Rule], functions: Sequence[PciFunction], decided: Collection[str]
) -> list[str]:
    """Return a warning about GPUs that a rule selects, but none of their virtual functions.

    ``decided`` are the addresses of virtual functions and cards about which an operator decided
    otherwise.
    """
    not_offered = {
        function.address
        for function in functions
        if function.numvfs and classes.is_gpu(function) and matching_rule(rules, function)
    }
    for function in functions:
        # Also a rule with the action skip: it shows that an operator thought of virtual functions.
        has_rule = matching_index(rules, function) is not None
        if function.address in decided or (has_rule and function.physfn is not None):
            not_offered -= {function.address, function.physfn}
    if not not_offered:
        return []
    names = join_limited(sorted(not_offered), MAX_REMARK_ADDRESSES)
    return [
        f"{names} is not offered, because it has virtual functions: a rule with functions=vf "
        "offers these"
    ]


def describe_unresettable(sysfs: Sysfs, offers: Iterable[Offer]) -> tuple[str, ...]:
    """Return a warning about PCI functions that are offered but cannot be reset, if any."""
    addresses = [
        offer.function.address
        for offer in offers
        if (offer.withheld, offer.obstacle) == (None, None)
        and not can_reset(sysfs, offer.function.address)
    ]
    if not addresses:
        return ()
    return (
        f"the kernel has no method to reset {join_limited(addresses, MAX_REMARK_ADDRESSES)}: a "
        "server may find data of the previous server",
    )

# SPDX-License-Identifier: Apache-2.0
"""Mediated devices that the driver offers: the slots of a parent, and the rules that enable them.

A slot is a place for one mediated device of one type. The number of a slot does not change while
the slot is used or when the host reboots. It determines the uuid of the device in the slot.

A rule enables one type of mediated devices for each parent that it selects. It is one line of
``key=value`` pairs. Either it selects functions of the PCI bus by the keys of
``cyborg.drivers.pci.rules``, or ``parent`` is the name of a parent that is not on the PCI bus.
``type`` is the name of the type in ``mdev_supported_types``, or several names: then the first type
that has a device applies, or else the first that can have one. ``max_per_card`` is the maximum
number of devices of all parents of a card together::

    address=0000:3d:*,type=nvidia-222,resource_class=VGPU,traits=CUSTOM_A|CUSTOM_B
    vendor=10de,product=2236,type=nvidia-558,max_per_card=4
    parent=mtty,type=mtty-2
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from cyborg.core.address import is_pci_address
from cyborg.core.errors import Invalid
from cyborg.drivers.base import InvalidOption
from cyborg.drivers.kernel.mdev import PARENT, TYPE, MdevType
from cyborg.drivers.kernel.nvme import ERASE
from cyborg.drivers.pci import rules
from cyborg.drivers.pci.rules import Rule
from cyborg.drivers.sysfs import PciFunction

# Slots of one parent; ``vfio_ap`` of s390, which is no GPU driver, reports 65536 instances
# (``MAX_ZDEV_ENTRIES_EXT`` in ``drivers/s390/crypto/vfio_ap_ops.c`` of Linux).
MAX_SLOTS = 256

_SLOT = re.compile(rf"({PARENT.pattern})/({TYPE.pattern})/(0|[1-9][0-9]{{0,2}})")


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A place for one mediated device; as text it is ``0000:3d:00.0/nvidia-222/0``."""

    parent: str
    type: str
    number: int

    @classmethod
    def parse(cls, text: str) -> "Slot":
        """Parse the address of an attach handle. Raise Invalid if it is not the text of a slot."""
        found = _SLOT.fullmatch(text)
        if found is None or int(found[3]) >= MAX_SLOTS:
            raise Invalid(
                f"{text!r} is not a slot: expected PARENT/TYPE/NUMBER", field="attach handle"
            )
        return cls(found[1], found[2], int(found[3]))

    def __str__(self) -> str:
        return f"{self.parent}/{self.type}/{self.number}"


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slots that a parent offers, or the reason why it has none.

    ``others`` is the number of existing devices that are in no slot, because another program
    created them. ``occupied`` are the slots that have a device. ``type`` is the enabled type, and
    ``type_name`` the content of its file ``name``. ``exhausted`` is True if the parent has no slot
    because no device of the type can be created.
    """

    slots: tuple[Slot, ...]
    others: int
    reason: str | None = None
    occupied: frozenset[Slot] = frozenset()
    type: str = ""
    type_name: str | None = None
    exhausted: bool = False


def plan_slots(
    parent: str, enabled: str, types: Mapping[str, MdevType], uuid_of: Callable[[Slot], str]
) -> SlotPlan:
    """Return the slots of a parent for the enabled type.

    ``uuid_of`` returns the uuid of the device of a slot.

    The number of slots is ``devices in slots + available devices``. It does not change when a
    device is created in a slot, and decreases when another program creates a device. All slots with
    a device are included, and then the free slots with the lowest numbers.
    """
    used = {name: _used_slots(parent, name, types[name], uuid_of) for name in types}
    others = sum(len(types[name].devices) - len(used[name]) for name in types)
    if not types:
        reason = "it has no types of mediated devices: its vGPU driver is not loaded"
        return SlotPlan((), others=0, reason=reason, type=enabled)
    if enabled not in types:
        reason = f"it has no type {enabled}, its types are {', '.join(types)}"
        return SlotPlan((), others, reason=reason, type=enabled)
    occupied = used[enabled]
    free = [number for number in range(MAX_SLOTS) if number not in occupied]
    numbers = sorted([*occupied, *free[: types[enabled].available]])
    if numbers:
        return SlotPlan(
            tuple(Slot(parent, enabled, number) for number in numbers),
            others,
            occupied=frozenset(Slot(parent, enabled, number) for number in occupied),
            type=enabled,
            type_name=types[enabled].name,
        )
    existing = [
        f"{len(types[name].devices)} of {name} ({len(types[name].devices) - len(used[name])} not "
        "created by this service)"
        for name in types
        if types[name].devices
    ]
    return SlotPlan(
        (),
        others,
        reason=f"no device of type {enabled} can be created; existing devices: "
        f"{', '.join(existing) or 'none'}",
        type=enabled,
        exhausted=True,
    )


def limit_slots(plans: Mapping[str, SlotPlan], limit: int) -> dict[str, SlotPlan]:
    """Return the plans of one card and one type, with at most ``limit`` devices together.

    ``plans`` are by parent. Slots with a device stay, and devices of other programs count. The
    remaining slots are given to the parents in the order of their addresses.
    """
    # Virtual functions share the memory of their card, and each one reports an available device
    # until the memory is used up.
    used = sum(plan.others + len(plan.occupied) for plan in plans.values())
    # Not below 0: devices that exist stay, also if there are more than the limit permits.
    free = max(0, limit - used)
    limited: dict[str, SlotPlan] = {}
    for parent, plan in sorted(plans.items()):
        added = [slot for slot in plan.slots if slot not in plan.occupied][:free]
        free -= len(added)
        limited[parent] = replace(plan, slots=tuple(sorted({*plan.occupied, *added})))
    return limited


def _used_slots(
    parent: str, name: str, found: MdevType, uuid_of: Callable[[Slot], str]
) -> frozenset[int]:
    """Return the numbers of the slots of a type in which a device exists."""
    # Each number costs a uuid, and most parents have no device.
    if not found.devices:
        return frozenset()
    return frozenset(n for n in range(MAX_SLOTS) if uuid_of(Slot(parent, name, n)) in found.devices)


DEFAULT_CLASS = "VGPU"
_FORBIDDEN = ("action", "kernel_driver", "active_port", ERASE)
_PARENT_KEYS = ("resource_class", "traits")
_OWN_KEYS = ("type", "parent", "max_per_card")
_NUMBER = re.compile(r"[1-9][0-9]{0,2}")


@dataclass(frozen=True, slots=True)
class MdevRule:
    """A rule: the functions of ``selector``, or one ``parent``, and the enabled ``types``."""

    text: str
    types: tuple[str, ...]
    resource_class: str
    traits: frozenset[str]
    selector: Rule | None = None
    parent: str | None = None
    max_per_card: int | None = None


def parse(text: str) -> MdevRule:
    """Parse a rule. Raise InvalidOption if it is invalid."""
    own, others = split_rule(text, _OWN_KEYS)
    types = tuple(name.strip() for name in own.get("type", "").split("|"))
    if not all(TYPE.fullmatch(name) for name in types) or len(set(types)) < len(types):
        raise InvalidOption(
            text, "the name of a type in mdev_supported_types, such as type=nvidia-222"
        )
    parent = own.get("parent")
    if parent is not None:
        _check_parent(parent, others)
    # ``functions=all`` is the default here, because functions of any kind can be parents. It is
    # removed and set again below: the parser of rules refuses it with a resource class, which in
    # this rule is that of the mediated devices.
    others = [part for part in others if part.replace(" ", "") != f"{rules.SCOPE}=all"]
    if parent is not None:
        others.append("address=*")  # the parser below needs a key that matches
    elif not others:
        raise InvalidOption(text, "a key that matches functions, such as address, or parent=NAME")
    # Without ``max_per_card``, NVML says how many devices a card of this product can have.
    limit = parse_max_per_card(own)
    rule = rules.parse(",".join(others))
    rule = replace(rule, scope=rule.scope or "all")
    return MdevRule(
        text=text,
        types=types,
        resource_class=rule.resource_class or DEFAULT_CLASS,
        traits=rule.traits,
        selector=rule if parent is None else None,
        parent=parent,
        max_per_card=limit,
    )


def split_rule(text: str, own_keys: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of the own keys of a rule for vGPUs, and its other parts.

    Raise InvalidOption for a key that such a rule cannot have, and a key that it has twice.
    """
    own: dict[str, str] = {}
    others: list[str] = []
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key in _FORBIDDEN:
            raise InvalidOption(part.strip(), f"no {key} in a rule for mediated devices and vGPUs")
        if key not in own_keys:
            others.append(part)
        elif key in own:
            raise InvalidOption(part.strip(), f"{key} only once in a rule")
        else:
            own[key] = value
    return own, others


def parse_max_per_card(own: Mapping[str, str]) -> int | None:
    """Return the value of ``max_per_card``; None without it. Raise InvalidOption."""
    limit = own.get("max_per_card")
    if limit is not None and not _NUMBER.fullmatch(limit):
        raise InvalidOption(f"max_per_card={limit}", "a number from 1 to 999")
    return None if limit is None else int(limit)


def rule_of_function(mdev_rules: Sequence[MdevRule], function: PciFunction) -> MdevRule | None:
    """Return the first rule that selects a function; None if no rule does."""
    return next((r for r in mdev_rules if r.selector and r.selector.matches(function)), None)


def rule_of_parent(mdev_rules: Sequence[MdevRule], name: str) -> MdevRule | None:
    """Return the first rule for a parent that is not on the PCI bus; None if there is none."""
    return next((r for r in mdev_rules if r.parent == name), None)


def _check_parent(parent: str, others: Sequence[str]) -> None:
    """Raise InvalidOption for an invalid name, a PCI address, and keys of PCI functions."""
    if not PARENT.fullmatch(parent):
        raise InvalidOption(f"parent={parent}", "a name of /sys/class/mdev_bus, as parent=mtty")
    if is_pci_address(parent):
        raise InvalidOption(f"parent={parent}", f"address={parent} for a PCI function")
    for part in others:
        if part.partition("=")[0].strip() not in _PARENT_KEYS:
            raise InvalidOption(
                part.strip(), f"only type, {' and '.join(_PARENT_KEYS)} in a rule with parent"
            )

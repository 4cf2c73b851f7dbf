# SPDX-License-Identifier: Apache-2.0
"""Rules that enable one type of mediated devices for each selected parent.

A rule is one line of ``key=value`` pairs. Either it selects functions of the PCI bus by the keys of
``cyborg.drivers.pci.rules``, or ``parent`` is the name of a parent that is not on the PCI bus.
``type`` is the name of the type in ``mdev_supported_types``, or several names: then the first type
that has a device applies, or else the first that can have one. ``max_per_card`` is the maximum
number of devices of all parents of a card together::

    address=0000:3d:*,type=nvidia-222,resource_class=VGPU,traits=CUSTOM_A|CUSTOM_B
    vendor=10de,product=2236,type=nvidia-558,max_per_card=4
    parent=mtty,type=mtty-2
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cyborg.core.address import is_pci_address
from cyborg.drivers.gpu.mdev import PARENT, TYPE
from cyborg.drivers.pci import rules
from cyborg.drivers.pci.rules import Rule, RuleSyntaxError
from cyborg.drivers.sysfs import PciFunction

DEFAULT_CLASS = "VGPU"
_FORBIDDEN = ("action", "kernel_driver", "active_port", rules.ERASE)
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
    """Parse a rule. Raise RuleSyntaxError if it is invalid."""
    own: dict[str, str] = {}
    others: list[str] = []
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key in _FORBIDDEN:
            raise RuleSyntaxError(part.strip(), f"no {key} in a rule for mediated devices")
        if key not in _OWN_KEYS:
            others.append(part)
        elif key in own:
            raise RuleSyntaxError(part.strip(), f"{key} only once in a rule")
        else:
            own[key] = value
    types = tuple(name.strip() for name in own.get("type", "").split("|"))
    if not all(TYPE.fullmatch(name) for name in types) or len(set(types)) < len(types):
        raise RuleSyntaxError(
            text, "the name of a type in mdev_supported_types, such as type=nvidia-222"
        )
    parent = own.get("parent")
    if parent is not None:
        _check_parent(parent, others)
        others.append("address=*")
    elif not others:
        raise RuleSyntaxError(text, "a key that matches functions, such as address, or parent=NAME")
    limit = own.get("max_per_card")
    if limit is not None and not _NUMBER.fullmatch(limit):
        raise RuleSyntaxError(f"max_per_card={limit}", "a number from 1 to 999")
    # Parents can be virtual functions, and their class is that of their mediated devices.
    every = f"{rules.SCOPE}=all"
    rule = rules.parse(",".join(part for part in others if part.replace(" ", "") != every))
    rule = replace(rule, scope=rule.scope or "all")
    return MdevRule(
        text,
        types,
        rule.resource_class or DEFAULT_CLASS,
        rule.traits,
        selector=rule if parent is None else None,
        parent=parent,
        max_per_card=None if limit is None else int(limit),
    )


def rule_of_function(mdev_rules: Sequence[MdevRule], function: PciFunction) -> MdevRule | None:
    """Return the first rule that selects a function; None if no rule does."""
    return next((r for r in mdev_rules if r.selector and r.selector.matches(function)), None)


def rule_of_parent(mdev_rules: Sequence[MdevRule], name: str) -> MdevRule | None:
    """Return the first rule for a parent that is not on the PCI bus; None if there is none."""
    return next((r for r in mdev_rules if r.parent == name), None)


def _check_parent(parent: str, others: Sequence[str]) -> None:
    """Raise RuleSyntaxError for an invalid name, a PCI address, and keys of PCI functions."""
    if not PARENT.fullmatch(parent):
        raise RuleSyntaxError(f"parent={parent}", "a name of /sys/class/mdev_bus, as parent=mtty")
    if is_pci_address(parent):
        raise RuleSyntaxError(f"parent={parent}", f"address={parent} for a PCI function")
    for part in others:
        if part.partition("=")[0].strip() not in _PARENT_KEYS:
            raise RuleSyntaxError(
                part.strip(), f"only type, {' and '.join(_PARENT_KEYS)} in a rule with parent"
            )

# SPDX-License-Identifier: Apache-2.0
"""vGPUs without mediated devices that the driver offers: rules, and the plan of a card.

A rule enables one type of vGPUs for each card that it selects. It is one line of ``key=value``
pairs: the keys of ``cyborg.drivers.pci.rules`` match the physical function of a card, and ``type``
is the name of a type in ``nvidia/creatable_vgpu_types``, or several names: then the first type that
has a vGPU of this service applies, or else the first that can have one::

    address=0000:41:00.0,type=NVIDIA H200X-1-18C,resource_class=VGPU,traits=CUSTOM_A|CUSTOM_B
    vendor=10de,product=2335,type=H200X-70C|H200X-141C,max_per_card=2
    address=0000:c1:*,type=L40S-12Q,vgpu_params=disable_vnc=1|frame_rate_limiter=0

A handle is a virtual function. A card has more functions than it can have vGPUs of most types, and
its kernel driver says whether one more can be created, but not how many: NVML knows the maximum of
a card that has no others.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cyborg.core.naming import make_custom_name
from cyborg.drivers.base import InvalidOption
from cyborg.drivers.gpu.mdev import DEFAULT_CLASS, parse_max_per_card, split_rule
from cyborg.drivers.kernel.nvml import GpuFacts, short_name
from cyborg.drivers.kernel.vgpu import PARAMETERS, TYPE, VgpuFunction, find_type
from cyborg.drivers.pci import rules
from cyborg.drivers.sysfs import PciFunction

_OWN_KEYS = ("type", "max_per_card", "vgpu_params")
_EXAMPLE = "the name of a type in creatable_vgpu_types, such as type=NVIDIA H200X-1-18C"


@dataclass(frozen=True, slots=True)
class VgpuRule:
    """A rule: the physical functions of ``selector``, and the ``types`` without product line.

    ``parameters`` has the form of ``vgpu_params``; empty without parameters.
    """

    text: str
    types: tuple[str, ...]
    resource_class: str
    traits: frozenset[str]
    selector: rules.Rule
    max_per_card: int | None = None
    parameters: str = ""


def parse(text: str) -> VgpuRule:
    """Parse a rule. Raise InvalidOption if it is invalid."""
    own, others = split_rule(text, _OWN_KEYS)
    names = tuple(name.strip() for name in own.get("type", "").split("|"))
    types = tuple(map(short_name, names))
    if not all(map(TYPE.fullmatch, names)) or len(set(types)) < len(types):
        raise InvalidOption(text, _EXAMPLE)
    if not others:
        raise InvalidOption(text, "a key that matches cards, such as address")
    if any(part.partition("=")[0].strip() == rules.SCOPE for part in others):
        raise InvalidOption(text, f"no {rules.SCOPE}: the rule selects physical functions")
    parameters = ", ".join(part.strip() for part in own.get("vgpu_params", "").split("|"))
    if parameters and not PARAMETERS.fullmatch(parameters):
        raise InvalidOption(
            f"vgpu_params={own['vgpu_params']}", "name=value, with | between several of them"
        )
    rule = rules.parse(",".join(others))
    return VgpuRule(
        text=text,
        types=types,
        resource_class=rule.resource_class or DEFAULT_CLASS,
        traits=rule.traits,
        selector=rule,
        max_per_card=parse_max_per_card(own),
        parameters=parameters,
    )


def rule_of_card(vgpu_rules: Sequence[VgpuRule], card: PciFunction) -> VgpuRule | None:
    """Return the first rule that selects a card; None for a virtual function, or without one."""
    if card.physfn is not None:
        return None
    return next((rule for rule in vgpu_rules if rule.selector.matches(card)), None)


def trait_of(vgpu_type: str) -> str:
    """Return the trait of a type, such as ``CUSTOM_VGPU_H200X_1_18C``."""
    return make_custom_name(f"VGPU_{vgpu_type}")


def deployable_address(card: str, vgpu_type: str) -> str:
    """Return the address of the deployable with the vGPUs of one type of a card."""
    return f"{card}-{re.sub('[^A-Za-z0-9._-]', '_', vgpu_type)}"


@dataclass(frozen=True, slots=True)
class VgpuPlan:
    """What a card offers: ``handles`` maps the address of a function to the type of its vGPU.

    ``reasons`` say why the card offers less than its rule permits, ``remark`` what an operator
    should configure.
    """

    handles: Mapping[str, str]
    reasons: tuple[str, ...] = ()
    remark: str | None = None


def plan_card(
    types: Collection[str],
    max_per_card: int | None,
    functions: Sequence[VgpuFunction],
    prepared: Mapping[str, str],
    facts: GpuFacts,
    mix: Mapping[str, int] | None = None,
) -> VgpuPlan:
    """Return what a card offers for one of several types, or for a mix: numbers by type.

    ``functions`` are all its virtual functions by address, ``prepared`` maps the address of each
    one that this service prepared to the type. These are included: their servers may not have
    started. The others with a vGPU belong to other programs.
    """
    own = {f.address: prepared[f.address] for f in functions if f.address in prepared}
    foreign = [
        name_of(f.current, functions, facts)
        for f in functions
        if f.current and f.address not in own
    ]
    free = [f for f in functions if not f.current and f.address not in own and f.registered]
    creatable = [t for t in types if any(find_type(f.creatable, t) is not None for f in free)]
    remark = None
    if mix is None:
        type_in_use = next((t for t in types if t in own.values()), None)
        chosen = type_in_use or next(iter(creatable), next(iter(types)))
        limit = max_per_card if max_per_card is not None else facts.max_vgpus_of(chosen)
        others = Counter([*(t for t in own.values() if t != chosen), *foreign])
        if limit is None and chosen in creatable:
            # The kernel driver says that one more fits, and nothing says how many.
            limit = 1 + len([t for t in own.values() if t == chosen]) + others.total()
            remark = (
                f"how many vGPUs of type {chosen} a card can have is not known: install the extra "
                "nvml, or set max_per_card"
            )
        counts: Mapping[str, int] = {chosen: limit or 0}
    else:
        counts, others = mix, Counter(foreign)
    handles: dict[str, str] = {}
    for type_, limit in counts.items():
        present = [address for address, name in own.items() if name == type_]
        count = limit - len(present) if type_ in creatable else 0
        count -= sum(n * _units(name, type_, limit, facts) for name, n in others.items())
        added = [f.address for f in free[: max(0, count)]]
        free = free[len(added) :]
        handles |= dict.fromkeys([*present, *added], type_)
    reasons = [
        f"{address} has a vGPU of type {name}, which is not enabled any more"
        for address, name in own.items()
        if name not in (types if mix is None else mix)
    ]
    unregistered = [f.address for f in functions if not f.registered]
    if unregistered:
        reasons.append(f"{', '.join(unregistered[:4])} is not registered with VFIO (vfio-dev)")
    if not handles:
        names = sorted({name for f in free for name in f.creatable})
        reasons.append(
            f"no vGPU of type {' or '.join(types if mix is None else mix)} can be created now; "
            f"creatable types: {', '.join(names) or 'none'}"
        )
    return VgpuPlan(dict(sorted(handles.items())), tuple(reasons), remark)


def _units(other: str, chosen: str, limit: int, facts: GpuFacts) -> int:
    """Return how many vGPUs of the chosen type have no place because of one of another type."""
    whole = facts.max_vgpus.get(other)
    return 1 if other == chosen or not whole else -(-limit // whole)


def name_of(current: int, functions: Sequence[VgpuFunction], facts: GpuFacts) -> str:
    """Return the name of the type with an id, which is in the lists of types unless it is full."""
    names = (short_name(n) for f in functions for n, id_ in f.creatable.items() if id_ == current)
    return next(names, facts.vgpu_names.get(str(current), unknown_name(current)))


def unknown_name(current: int) -> str:
    """Return the text for a type of which only the id is known."""
    return f"number {current}"

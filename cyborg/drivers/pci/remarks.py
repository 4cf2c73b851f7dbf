# SPDX-License-Identifier: Apache-2.0
"""Warnings about rules that offer nothing, and about functions that cannot be reset."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from cyborg.core.text import join_limited
from cyborg.drivers.pci import classes as pci_classes
from cyborg.drivers.pci import topology
from cyborg.drivers.pci.offers import Offer
from cyborg.drivers.pci.rules import Rule, matching_index, matching_rule
from cyborg.drivers.sysfs import PciFunction, Sysfs

MAX_REMARK_ADDRESSES = 5  # of functions in a remark


def describe_rules(
    texts: Sequence[str], rules: Sequence[Rule], functions: Sequence[PciFunction]
) -> list[str]:
    """Return a warning for each rule that applies to none of these functions."""
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
    rules: Sequence[Rule], functions: Sequence[PciFunction], selected: Collection[str]
) -> list[str]:
    """Return a warning about GPUs that a rule selects, but none of their virtual functions.

    ``selected`` are the addresses of virtual functions and cards about which an operator decided
    otherwise.
    """
    parted = {
        function.address
        for function in functions
        if function.numvfs and pci_classes.is_gpu(function) and matching_rule(rules, function)
    }
    for function in functions:
        decided = matching_index(rules, function) is not None and function.physfn is not None
        if function.address in selected or decided:
            parted -= {function.address, function.physfn}
    if not parted:
        return []
    names = join_limited(sorted(parted), MAX_REMARK_ADDRESSES)
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
        and not topology.can_reset(sysfs, offer.function.address)
    ]
    if not addresses:
        return ()
    return (
        f"the kernel has no method to reset {join_limited(addresses, MAX_REMARK_ADDRESSES)}: a "
        "server may find data of the previous server",
    )

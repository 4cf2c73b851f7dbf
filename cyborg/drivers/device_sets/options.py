# SPDX-License-Identifier: Apache-2.0
"""Options of a source of device sets."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cyborg.core.drivers.registry import Option
from cyborg.core.inventory.device_set import MAX_MEMBERS, OfferMode, SetKind
from cyborg.core.naming import is_accelerator_class, is_trait
from cyborg.drivers.base import Driver, InvalidOption, one_of
from cyborg.drivers.device_sets.grouping import SIZES
from cyborg.drivers.sysfs import canonical_address

_MAX_GROUP = 255
_MEMBER = re.compile(r"([^:]+)(?::([1-9][0-9]?))?")
_WANTED = re.compile(r"([1-9][0-9]?):(0|[1-9][0-9]{0,5})")
_MODULE = re.compile(r"[1-9][0-9]{0,3}")
# Kinds with sets that have members of several backends in fixed numbers.
_MIXED_KINDS = (SetKind.PCIE, SetKind.NUMA)

OPTIONS = (
    Option(
        "kind",
        "str",
        "",
        "What the members of a set have in common: pcie (they are below one PCIe switch), numa "
        "(at one NUMA node), nvlink (NVLink bridges connect each with each other one), fabric "
        "(they are a partition of NVIDIA Fabric Manager).",
    ),
    Option(
        "members",
        "list",
        (),
        "The backends whose devices are the members, such as 'gpu'. With a number for each "
        "backend, such as 'gpu:1, nic:1', each set has so many devices of it, and the devices of "
        "the second and further backends are those nearest to the first ones; only for the kinds "
        "pcie and numa. A device that is a member is allocated through sets only.",
    ),
    Option(
        "sizes",
        "list",
        (),
        "Sizes of the sets: 1, 2, 4, 8 and 16; empty means all of them. A device that is in no set "
        "of these sizes is shown and not offered. Not for members with numbers.",
    ),
    Option(
        "resource_class",
        "str",
        "",
        "Resource class of the sets; empty means that of the first member.",
    ),
    Option(
        "traits",
        "list",
        (),
        "Traits of the sets, in addition to those that all members have, and to those of kind and "
        "size such as CUSTOM_SET_FABRIC and CUSTOM_SET_SIZE_4.",
    ),
    Option(
        "offer",
        "str",
        str(OfferMode.DISJOINT),
        "Which sets a host offers at the same time: disjoint (sets without a common member), or "
        "all (each set whose members are free; servers that are built at the same time may be "
        "scheduled to overlapping sets, and all but one fail).",
    ),
    Option(
        "wanted",
        "list",
        (),
        "Number of free sets to keep offered by size, such as '8:1, 4:1, 2:2, 1:2'. Only for the "
        "offer disjoint.",
    ),
    Option(
        "group",
        "str",
        "",
        "Name of the hosts that keep the wanted sets together; empty means this host alone.",
    ),
    Option(
        "modules",
        "list",
        (),
        "Module ids of GPUs, such as '0000:1b:00.0=1', instead of those that NVML tells: for GPUs "
        "that are never bound to the kernel driver nvidia. Only for the kind fabric.",
    ),
)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Parsed options of a source.

    ``counts`` are the numbers of members of each backend in a set; all are None, or none is.
    ``modules`` has the configured module ids by device address.
    """

    kind: SetKind
    counts: Mapping[str, int | None]
    sizes: frozenset[int]
    resource_class: str
    traits: frozenset[str]
    mode: OfferMode
    wanted: Mapping[str, int]
    group: str
    modules: Mapping[str, str]

    @property
    def is_mixed(self) -> bool:
        """Return whether a set has a fixed number of members of each backend."""
        return None not in self.counts.values()


def parse(driver: Driver) -> SourceOptions:
    """Return the options of a source. Raise Misconfigured."""
    kind = driver.parse_option("kind", one_of(SetKind))
    counts = driver.parse_option("members", _parse_members)
    sizes = driver.parse_option("sizes", _parse_sizes)
    # Each backend has a number, or none has: see ``_parse_members``.
    numbers = [count for count in counts.values() if count is not None]
    if numbers:
        if kind not in _MIXED_KINDS:
            expected = f"members without numbers for the kind {kind}"
            raise driver.misconfigured("members", driver.options["members"], expected)
        if sizes:
            expected = "no sizes, because the numbers of the members are the size"
            raise driver.misconfigured("sizes", driver.options["sizes"], expected)
        sizes = frozenset({sum(numbers)})
    mode = driver.parse_option("offer", one_of(OfferMode))
    wanted = driver.parse_option("wanted", _parse_wanted)
    sizes = sizes or frozenset(SIZES)
    if mode is not OfferMode.DISJOINT and wanted:
        expected = f"nothing with the offer {mode}, which offers all free sets"
        raise driver.misconfigured("wanted", driver.options["wanted"], expected)
    if unknown := [size for size in wanted if int(size) not in sizes]:
        expected = f"sizes among {', '.join(map(str, sorted(sizes)))}"
        raise driver.misconfigured("wanted", unknown[0], expected)
    modules = driver.parse_option("modules", _parse_modules)
    if modules and kind is not SetKind.FABRIC:
        expected = f"nothing for the kind {kind}"
        raise driver.misconfigured("modules", driver.options["modules"], expected)
    return SourceOptions(
        kind=kind,
        counts=counts,
        sizes=sizes,
        resource_class=driver.parse_option("resource_class", _parse_class),
        traits=driver.parse_option("traits", _parse_traits),
        mode=mode,
        wanted=wanted,
        group=driver.parse_option("group", _parse_group),
        modules=modules,
    )


def _parse_members(texts: Sequence[str]) -> dict[str, int | None]:
    """Return the number of members of each backend; None for all without numbers."""
    expected = (
        "names of backends, each once, all or none with a number such as 'gpu:1', at most "
        f"{MAX_MEMBERS} in all"
    )
    counts: dict[str, int | None] = {}
    for text in texts:
        match = _MEMBER.fullmatch(text)
        if match is None or match[1] in counts:
            raise InvalidOption(text, expected)
        name, number = match.groups()
        counts[name] = None if number is None else int(number)
    numbers = [count for count in counts.values() if count is not None]
    is_partly_numbered = len(numbers) not in (0, len(counts))
    if not counts or is_partly_numbered or sum(numbers) > MAX_MEMBERS:
        raise InvalidOption(", ".join(texts), expected)
    # The members of the first backend are grouped as those of a set without numbers.
    if numbers and numbers[0] not in SIZES:
        raise InvalidOption(texts[0], "1, 2, 4, 8 or 16 as the number of the first backend")
    return counts


def _parse_sizes(texts: Sequence[str]) -> frozenset[int]:
    known = {str(size): size for size in SIZES}
    for text in texts:
        if text not in known:
            raise InvalidOption(text, f"some of {', '.join(known)}")
    return frozenset(known[text] for text in texts)


def _parse_class(text: str) -> str:
    if text and not is_accelerator_class(text):
        raise InvalidOption(text, "PGPU, VGPU, FPGA, or CUSTOM_ and letters, digits or _")
    return text


def _parse_traits(texts: Sequence[str]) -> frozenset[str]:
    for text in texts:
        if not is_trait(text):
            raise InvalidOption(text, "standard traits, or CUSTOM_ and letters, digits or _")
    return frozenset(texts)


def _parse_wanted(texts: Sequence[str]) -> dict[str, int]:
    wanted: dict[str, int] = {}
    for text in texts:
        match = _WANTED.fullmatch(text.replace(" ", ""))
        if match is None or match[1] in wanted:
            raise InvalidOption(text, "SIZE:NUMBER, each size once, such as 4:1")
        wanted[match[1]] = int(match[2])
    return wanted


def _parse_modules(texts: Sequence[str]) -> dict[str, str]:
    modules: dict[str, str] = {}
    for text in texts:
        name, _, module = text.partition("=")
        address = canonical_address(name)
        if address is None or address in modules or not _MODULE.fullmatch(module):
            raise InvalidOption(text, "ADDRESS=MODULE, each address once, such as 0000:1b:00.0=1")
        modules[address] = module
    return modules


def _parse_group(text: str) -> str:
    if len(text) > _MAX_GROUP or not text.isprintable():
        raise InvalidOption(text[:40], f"at most {_MAX_GROUP} printable characters")
    return text

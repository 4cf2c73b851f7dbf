# SPDX-License-Identifier: Apache-2.0
"""Groups of handles that form device sets: below one switch, at one NUMA node, linked by NVLink.

Groups of a switch or a node are made of pairs, fours of two pairs, and so on, in the order of the
addresses, so that a smaller group is always inside of a larger one. All functions are pure.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from cyborg.core.inventory.device import AttachHandle, Deployable, Device, HandleType
from cyborg.core.inventory.device_set import ANOTHER_LAYOUT, SetKind, SetMember
from cyborg.core.naming import make_custom_name
from cyborg.drivers.gpu.facts import UNREAD, is_shown_unread
from cyborg.drivers.gpu.mig import is_shown_enabled
from cyborg.drivers.pci.topology import MODULE_ID, NVLINK_LINKS, NVLINK_MBPS, NVLINK_PEERS

# Types of the handles that are whole functions.
_WHOLE = frozenset({HandleType.PCI, HandleType.TEST_PCI, HandleType.VFIO})
# Number of bridges from the root port to the first port of a switch.
_SWITCH_DEPTH = 2
# Sizes of sets without counts; each is twice the one before.
SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Unit:
    """A handle that can be a member of sets."""

    device: Device
    deployable: Deployable
    handle: AttachHandle

    @property
    def member(self) -> SetMember:
        """Return the addresses of the unit."""
        return SetMember(self.device.address, self.deployable.address, self.handle.address)

    @property
    def is_whole_device(self) -> bool:
        """Return whether the handle is the device itself."""
        return self.handle.address == self.device.address

    @property
    def model(self) -> Hashable:
        """Return what the members of a set without counts have in common."""
        return self.deployable.resource_class, self.device.vendor, self.device.model

    @property
    def bridges(self) -> tuple[str, ...]:
        """Return the bridges from the root port to the device."""
        return tuple(self.device.topology.get("pci_path", "").split("/")[:-1])

    @property
    def links(self) -> Mapping[str, int]:
        """Return the number of NVLinks to each linked GPU, by device address; 0 if unknown."""
        peers = self.device.topology.get(NVLINK_PEERS, "")
        counts = self.device.topology.get(NVLINK_LINKS, "").split(",")
        numbers = [int(count) if count.isdecimal() else 0 for count in counts]
        names = peers.split(",") if peers else []
        numbers += [0] * (len(names) - len(numbers))
        return dict(zip(names, numbers, strict=False))

    @property
    def speed(self) -> int:
        """Return the speed of one NVLink in megabytes per second; 0 if it is unknown."""
        text = self.device.topology.get(NVLINK_MBPS, "")
        return int(text) if text.isdecimal() else 0

    @property
    def module(self) -> int | None:
        """Return the module id, None if it is unknown."""
        text = self.device.topology.get(MODULE_ID, "")
        return int(text) if text.isdecimal() else None


Units = tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The units of one set. ``name`` is unique among the groups of a source.

    ``attributes`` and ``traits`` are facts that only the kind of the source knows.
    """

    name: str
    kind: SetKind
    units: Units
    obstacle: str | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Part:
    """The units of one backend, and how many of them each mixed set has."""

    units: Sequence[Unit]
    count: int


def list_units(devices: Iterable[Device]) -> list[Unit]:
    """Return the handles of devices that are whole functions, in the order of their addresses."""
    units = (
        Unit(device, deployable, handle)
        for device in devices
        for deployable in device.deployables
        for handle in deployable.handles
        if handle.type in _WHOLE
    )
    return sorted(units, key=lambda unit: (unit.device.address, unit.handle.address))


def list_hidden(
    devices: Iterable[Device],
    units: Iterable[Unit],
    make_unit: Callable[[Device], Unit | None],
    *,
    uses_links: bool,
) -> list[Unit]:
    """Return a unit for each GPU that offers no handle because it was not read yet.

    If the sets need NVLinks (``uses_links``), also return one for each GPU in MIG mode, and for
    each that is divided and has a layout in which it is not. So a set with it is shown with the
    reason, and neither removed nor replaced by sets of other GPUs. ``units`` are those of the
    devices. ``make_unit`` returns the unit of a GPU as a whole; a GPU for which it returns None is
    left out.
    """
    counts = Counter(unit.device.address for unit in units)

    def is_hidden(device: Device) -> bool:
        if counts[device.address]:
            return uses_links and counts[device.address] > 1 and _has_undivided_layout(device)
        return is_shown_unread(device) or (uses_links and is_shown_enabled(device))

    found = (make_unit(device) for device in devices if is_hidden(device))
    return [unit for unit in found if unit is not None]


def _has_undivided_layout(device: Device) -> bool:
    """Return whether a device has one handle in one of its layouts."""
    return any(sum(layout.offers.values()) == 1 for layout in device.layouts)


def find_unread_obstacle(units: Iterable[Unit]) -> str | None:
    """Return why a group is withheld because of a GPU that was not read yet, or None."""
    unread = next((u.device.address for u in units if is_shown_unread(u.device)), None)
    return None if unread is None else f"device {unread} is withheld: {UNREAD}"


def find_layout_obstacle(units: Iterable[Unit], *, uses_links: bool) -> str | None:
    """Return why a group has no use because of the layout of a GPU; None without such a reason.

    A GPU in MIG mode has no NVLink to others, and is in no fabric ("NVIDIA Multi-Instance GPU User
    Guide", and "Fabric Manager for NVIDIA NVSwitch Systems User Guide"). ``uses_links`` is whether
    the group needs them. The unit of a divided GPU is none of its handles: see ``list_hidden``.
    """
    for unit in units:
        device = unit.device
        # A GPU without deployables offers nothing, also to a group without links.
        if is_shown_enabled(device) and (uses_links or not device.deployables):
            return (
                f"device {device.address} is in MIG mode, in which it has no NVLink: disable the "
                f"MIG mode, or {ANOTHER_LAYOUT}"
            )
        handles = {handle.address for part in device.deployables for handle in part.handles}
        if handles and unit.handle.address not in handles:
            return f"device {device.address} is divided into {len(handles)}: {ANOTHER_LAYOUT}"
    return None


def group_by_place(kind: SetKind, units: Iterable[Unit], sizes: Collection[int]) -> list[Group]:
    """Return the groups of these sizes below one switch (PCIE) or at one node (NUMA).

    The units of a group have the same model. A group of one has no condition.
    """
    by_model: dict[Hashable, list[Unit]] = defaultdict(list)
    for unit in units:
        by_model[unit.model].append(unit)
    groups: list[Group] = []
    for same in by_model.values():
        blocks = _blocks_below_switches(same) if kind is SetKind.PCIE else _blocks_at_nodes(same)
        groups += [_group(kind, block) for block in blocks if len(block) in sizes]
        groups += [_group(kind, (unit,)) for unit in same if 1 in sizes]
    return groups


def group_by_links(units: Iterable[Unit], sizes: Collection[int]) -> Iterator[Group]:
    """Yield the groups of these sizes whose devices all have an NVLink to each other.

    Devices with several handles are left out. The groups may be very many: stop in time.
    """
    by_address = only_units(units)
    # What one side says is enough: while a server has a GPU, the links of the other end may not be
    # shown.
    links = {address: set(unit.links) & by_address.keys() for address, unit in by_address.items()}
    for address, unit in by_address.items():
        for peer in set(unit.links) & by_address.keys():
            links[peer].add(address)
    for size in sorted(sizes):
        for clique in _cliques(sorted(by_address), links, size):
            block = tuple(by_address[address] for address in clique)
            # A single GPU has no NVLink to use.
            speed = min((unit.speed for unit in block if unit.speed), default=0) if size > 1 else 0
            yield _group(
                SetKind.NVLINK,
                block,
                unique=size == 1,  # larger groups of one size can begin with the same GPU
                obstacle=find_layout_obstacle(block, uses_links=size > 1),
                attributes=_link_facts(block) | speed_facts(speed),
                traits=speed_traits(speed),
            )


def speed_facts(mbps: int) -> dict[str, str]:
    """Return the attributes of a set for the speed of one NVLink; 0 if it is unknown."""
    return {NVLINK_MBPS: str(mbps)} if mbps else {}


def speed_traits(mbps: int) -> frozenset[str]:
    """Return the traits of a set for the speed of one NVLink; 0 if it is unknown."""
    return frozenset({make_custom_name(f"NVLINK_{mbps}_MBPS")} if mbps else ())


def only_units(units: Iterable[Unit]) -> dict[str, Unit]:
    """Return the units of devices that have one unit each, by device address."""
    found = list(units)
    counts = Counter(unit.device.address for unit in found)
    return {u.device.address: u for u in found if counts[u.device.address] == 1}


def group_mixed(kind: SetKind, parts: Sequence[Part]) -> tuple[list[Group], list[Unit]]:
    """Return groups with units of each part, and the units of the first part that none has.

    The units of the first part form the groups. The others are added from the nearest devices:
    below the same switch if ``kind`` is PCIE, then at the same NUMA node. The kind of a group says
    which of them it was. A unit is in one group.
    """
    first, *others = parts
    cores = [g.units for g in group_by_place(kind, first.units, {first.count})]
    # All that share a switch come first, so that none loses a near unit to one that is far.
    levels = [SetKind.PCIE, SetKind.NUMA] if kind is SetKind.PCIE else [SetKind.NUMA]
    groups: list[Group] = []
    for level in levels:
        for core in list(cores):
            chosen = [_nearest(core, part, level) for part in others]
            if not all(chosen):
                continue  # too few near units of one part
            groups.append(_group(level, (*core, *chain.from_iterable(chosen))))
            cores.remove(core)
            others = [replace(part, units=without(part.units, groups[-1:])) for part in others]
    groups.sort(key=lambda group: group.units[0].member)
    return groups, without(first.units, groups)


def withhold(kind: SetKind, units: Iterable[Unit], reason: str) -> list[Group]:
    """Return a group of one for each unit, with an obstacle: no set has them.

    A member is allocated through sets only; without a set it would be offered alone.
    """
    return [_group(kind, (unit,), obstacle=reason) for unit in units]


def without(units: Iterable[Unit], groups: Iterable[Group]) -> list[Unit]:
    """Return the units that are in none of the groups."""
    used = {unit.member for group in groups for unit in group.units}
    return [unit for unit in units if unit.member not in used]


def _group(
    kind: SetKind,
    units: Units,
    *,
    unique: bool = True,
    obstacle: str | None = None,
    attributes: Mapping[str, str] | None = None,
    traits: frozenset[str] = frozenset(),
) -> Group:
    """Return a group; its name has the size and the first address.

    Unless these are ``unique``, the name also has a digest of all addresses.
    """
    name = f"{len(units)}-{units[0].handle.address}"
    if not unique:
        text = ",".join(unit.handle.address for unit in units)
        name += f"-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    return Group(name, kind, units, obstacle, attributes or {}, traits)


def _blocks_at_nodes(units: Iterable[Unit]) -> list[Units]:
    """Return the blocks of two or more units at one NUMA node."""
    nodes: dict[int, list[Units]] = defaultdict(list)
    for unit in units:
        if unit.device.numa_node is not None:
            nodes[unit.device.numa_node].append((unit,))
    return [block for blocks in nodes.values() for block in _join_pairs(blocks).joined]


def _blocks_below_switches(units: Iterable[Unit]) -> list[Units]:
    """Return the blocks of two or more units below one switch."""
    switches: dict[tuple[str, ...], list[Unit]] = defaultdict(list)
    for unit in units:
        # The root port alone is no switch: below it is one slot, or one card with its functions.
        if len(unit.bridges) >= _SWITCH_DEPTH:
            switches[unit.bridges[:_SWITCH_DEPTH]].append(unit)
    return [
        block for below in switches.values() for block in _join_below(below, _SWITCH_DEPTH).joined
    ]


class _Blocks(NamedTuple):
    """Blocks ``joined`` of two smaller ones of equal size, and those that found no partner.

    A joined block can be among ``alone`` too: it may get a partner at the next bridge above.
    """

    joined: list[Units]
    alone: list[Units]


def _join_below(units: Sequence[Unit], depth: int) -> _Blocks:
    """Join units that share ``depth`` bridges: first those that also share the next bridge.

    What finds no partner there is joined with the units that have no further bridge.
    """
    ports: dict[str, list[Unit]] = defaultdict(list)
    alone: list[Units] = []
    for unit in units:
        if len(unit.bridges) > depth:
            ports[unit.bridges[depth]].append(unit)
        else:
            alone.append((unit,))
    joined: list[Units] = []
    for below in ports.values():
        blocks = _join_below(below, depth + 1)
        joined += blocks.joined
        alone += blocks.alone
    blocks = _join_pairs(alone)
    return _Blocks(joined + blocks.joined, blocks.alone)


def _join_pairs(blocks: Iterable[Units]) -> _Blocks:
    """Join blocks of equal size in pairs, these again in pairs, and so on, in order of address.

    The size of each block is one of SIZES.
    """
    by_size: dict[int, list[Units]] = defaultdict(list)
    for block in blocks:
        by_size[len(block)].append(block)
    joined: list[Units] = []
    alone: list[Units] = []
    for size in SIZES[:-1]:
        same = sorted(by_size[size], key=lambda units: units[0].member)
        if len(same) % 2:
            alone.append(same.pop())
        for first, second in zip(same[::2], same[1::2], strict=True):
            # By address, also where a part of one is between those of the other.
            block = tuple(sorted(first + second, key=lambda unit: unit.member))
            joined.append(block)
            by_size[2 * size].append(block)
    # A block of the largest size gets no partner.
    return _Blocks(joined, alone + by_size[SIZES[-1]])


def _cliques(
    nodes: Sequence[str], links: Mapping[str, Collection[str]], size: int
) -> Iterator[tuple[str, ...]]:
    """Yield the sets of this many nodes that are all linked to each other, in order."""

    def extend(clique: tuple[str, ...], candidates: Sequence[str]) -> Iterator[tuple[str, ...]]:
        if len(clique) == size:
            yield clique
            return
        for number, node in enumerate(candidates):
            rest = [other for other in candidates[number + 1 :] if other in links[node]]
            yield from extend((*clique, node), rest)

    yield from extend((), nodes)


def _link_facts(units: Units) -> dict[str, str]:
    """Return the smallest known number of NVLinks between two units of a group."""
    counts = [
        count
        for unit in units
        for other in units
        if (count := unit.links.get(other.device.address, 0))
    ]
    return {"nvlinks": str(min(counts))} if counts else {}


def _nearest(core: Units, part: Part, level: SetKind) -> list[Unit]:
    """Return the units of a part that are nearest to those of a group; none if too few are near."""
    nearness: Callable[[Unit], int] = (
        _switch_depth(core) if level is SetKind.PCIE else _same_node(core)
    )
    # Of equally near devices the one with more free units, so that all devices are used.
    free = Counter(unit.device.address for unit in part.units)
    candidates = sorted(
        filter(nearness, part.units),  # without those of nearness 0, which are not near at all
        key=lambda unit: (-nearness(unit), -free[unit.device.address], unit.member),
    )
    return candidates[: part.count] if len(candidates) >= part.count else []


def _switch_depth(core: Units) -> Callable[[Unit], int]:
    """Return a function that returns how many bridges a unit has in common with a group.

    It returns 0 if none of these is the port of a switch.
    """

    def depth(unit: Unit) -> int:
        common = 0
        for ports in zip(unit.bridges, *(other.bridges for other in core), strict=False):
            if len(set(ports)) > 1:
                break
            common += 1
        return common if common >= _SWITCH_DEPTH else 0

    return depth


def _same_node(core: Units) -> Callable[[Unit], int]:
    """Return a function that returns 1 for a unit at the NUMA node of a group, 0 for others."""
    nodes = {unit.device.numa_node for unit in core}
    return lambda unit: int(unit.device.numa_node is not None and {unit.device.numa_node} == nodes)

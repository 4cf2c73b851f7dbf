# SPDX-License-Identifier: Apache-2.0
"""Groups of handles below one switch, at one NUMA node, and with NVLinks to each other."""

from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.inventory.device import Device, HandleType
from cyborg.core.inventory.device_set import SetKind
from cyborg.drivers.device_sets import grouping
from cyborg.drivers.device_sets.grouping import Group
from cyborg.tests.unit.drivers.device_sets.members import make_device, slot

ALL = frozenset(grouping.SIZES)


def numbers(groups: Iterable[Group]) -> set[tuple[int, ...]]:
    """Return the numbers of the slots of each group."""
    return {
        tuple(int(unit.device.address[5:7], 16) - 0x20 for unit in group.units) for group in groups
    }


def place(kind: SetKind, devices: Iterable[Device], sizes: Iterable[int] = ALL) -> list[Group]:
    return grouping.group_by_place(kind, grouping.list_units(devices), frozenset(sizes))


def test_group_by_place_numa_makes_nested_runs() -> None:
    found = place(SetKind.NUMA, [make_device(slot(n), numa=n // 4) for n in range(8)])
    singles = {(n,) for n in range(8)}
    assert numbers(found) == singles | {(0, 1), (2, 3), (4, 5), (6, 7), (0, 1, 2, 3), (4, 5, 6, 7)}
    assert len({group.name for group in found}) == len(found)


def test_group_by_place_without_numa_node_makes_only_singles() -> None:
    devices = [make_device(slot(n)) for n in range(2)]
    assert numbers(place(SetKind.NUMA, devices)) == {(0,), (1,)}
    assert place(SetKind.NUMA, devices, {2}) == []


@pytest.mark.parametrize(
    ("bridges", "expected"),
    [
        # Below one root port, without a switch.
        (["00:01.0", "00:01.0"], set()),
        (["", ""], set()),
        # One switch: upstream port 15:00.0, downstream ports 16:0x.0.
        (["00:01.0/15:00.0/16:00.0", "00:01.0/15:00.0/16:01.0"], {(0, 1)}),
        # Two switches below one root complex.
        (["00:01.0/15:00.0/16:00.0", "00:02.0/15:00.0/16:01.0"], set()),
        # Three below one of two lower switches, one below the other: the odd one gets it.
        (
            [f"00:01.0/15:00.0/16:00.0/17:00.0/18:0{n}.0" for n in range(3)]
            + ["00:01.0/15:00.0/16:01.0/19:00.0/1a:00.0"],
            {(0, 1), (2, 3), (0, 1, 2, 3)},
        ),
        # Pairs of the lower switches are not mixed although the addresses alternate.
        (
            [f"00:01.0/15:00.0/16:0{n % 2}.0/17:0{n % 2}.0" for n in range(4)],
            {(0, 2), (1, 3), (0, 1, 2, 3)},
        ),
    ],
)
def test_group_by_place_pcie_follows_the_switches(
    bridges: Sequence[str], expected: set[tuple[int, ...]]
) -> None:
    devices = [make_device(slot(n), path) for n, path in enumerate(bridges)]
    assert numbers(place(SetKind.PCIE, devices, ALL - {1})) == expected


def test_group_by_place_keeps_models_and_classes_apart() -> None:
    devices = [
        make_device(slot(0), numa=0),
        make_device(slot(1), numa=0, model="A40"),
        make_device(slot(2), numa=0, resource_class="CUSTOM_GPU"),
        make_device(slot(3), numa=0),
    ]
    assert numbers(place(SetKind.NUMA, devices, {2})) == {(0, 3)}


def test_list_units_leaves_out_parts_of_a_function() -> None:
    virtual = ["0000:20:00.1", "0000:20:00.2"]
    nic = make_device(slot(0), functions=virtual, handle_type=HandleType.VFIO)
    mediated = make_device(slot(1), functions=["a", "b"], handle_type=HandleType.MDEV)
    assert [u.handle.address for u in grouping.list_units([mediated, nic])] == virtual
    assert grouping.only_units(grouping.list_units([nic])) == {}


def linked(pairs: Iterable[tuple[int, int]], count: int) -> list[Device]:
    """Return GPUs with NVLinks between the slots of each pair."""
    peers: dict[int, list[str]] = {n: [] for n in range(count)}
    for first, second in pairs:
        peers[first].append(slot(second))
        peers[second].append(slot(first))
    return [
        make_device(
            slot(n), nvlink_peers=",".join(names), nvlink_links=",".join("4" for _ in names)
        )
        for n, names in peers.items()
    ]


def links(devices: Iterable[Device], sizes: Iterable[int] = ALL) -> list[Group]:
    return list(grouping.group_by_links(grouping.list_units(devices), frozenset(sizes)))


def test_group_by_links_finds_bridged_pairs_and_fours() -> None:
    pairs = links(linked([(0, 1), (2, 3)], 4), {2, 4})
    assert numbers(pairs) == {(0, 1), (2, 3)}
    assert [group.attributes for group in pairs] == [{"nvlinks": "4"}] * 2
    found = links(linked(combinations(range(4), 2), 5))
    assert numbers(found) == {
        *((n,) for n in range(5)),
        *combinations(range(4), 2),
        (0, 1, 2, 3),
    }
    assert len({group.name for group in found}) == len(found)


def test_group_by_links_believes_one_side() -> None:
    devices = [make_device(slot(0), nvlink_peers=f"{slot(1)},0000:99:00.0"), make_device(slot(1))]
    (pair,) = links(devices, {2})
    assert (numbers([pair]), pair.attributes) == ({(0, 1)}, {})


@given(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda p: p[0] < p[1])))
def test_group_by_links_finds_all_complete_groups(pairs: set[tuple[int, int]]) -> None:
    expected = {
        nodes
        for size in (1, 2, 4)
        for nodes in combinations(range(7), size)
        if all(pair in pairs for pair in combinations(nodes, 2))
    }
    assert numbers(links(linked(pairs, 7), {1, 2, 4})) == expected


PORTS = st.lists(st.sampled_from(["15:00.0", "16:00.0", "17:00.0"]), max_size=4).map("/".join)


@given(st.lists(st.tuples(PORTS, st.sampled_from([None, 0, 1])), max_size=16))
def test_group_by_place_sets_nest_and_share_their_place(
    places: list[tuple[str, int | None]],
) -> None:
    devices = [make_device(slot(n), path, numa=node) for n, (path, node) in enumerate(places)]
    for kind in (SetKind.PCIE, SetKind.NUMA):
        groups = place(kind, devices)
        found = [frozenset(unit.member for unit in group.units) for group in groups]
        assert len({group.name for group in groups}) == len(groups)
        for one, other in combinations(found, 2):
            assert not one & other or one <= other or other <= one
        for group in groups:
            if len(group.units) == 1:
                continue
            assert list(group.units) == sorted(group.units, key=lambda unit: unit.member)
            if kind is SetKind.NUMA:
                assert len({unit.device.numa_node for unit in group.units} - {None}) == 1
            else:
                assert len({unit.bridges[:2] for unit in group.units}) == 1
                assert all(len(unit.bridges) > 1 for unit in group.units)
        # At most one unit of a node or of a switch has no partner.
        paired = {unit.device.address for g in groups if len(g.units) == 2 for unit in g.units}
        alone = [d for d in devices if d.address not in paired]
        if kind is SetKind.NUMA:
            keys = [d.numa_node for d in alone if d.numa_node is not None]
            assert len(keys) == len(set(keys))


NIC = {"backend": "nic", "resource_class": "CUSTOM_NIC", "model": "CX7"}


def nic(number: int, bridges: str, numa: int, count: int) -> Device:
    address = f"0000:{0x60 + number:02x}:00.0"
    functions = [f"{address[:-1]}{n}" for n in range(1, count + 1)]
    return make_device(address, bridges, numa=numa, functions=functions, **NIC)  # type: ignore[arg-type]


def mixed(
    kind: SetKind, gpus: list[Device], nics: list[Device], *counts: int
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return the functions of NICs and the kind by the first GPU of a set, and the GPUs left."""
    parts = [
        grouping.Part(grouping.list_units(devices), count)
        for devices, count in zip((gpus, nics), counts, strict=True)
    ]
    groups, left = grouping.group_mixed(kind, parts)
    return {
        group.units[0].device.address: (
            str(group.kind),
            *(unit.handle.address for unit in group.units[counts[0] :]),
        )
        for group in groups
    }, [unit.device.address for unit in left]


def test_group_mixed_prefers_the_switch_then_the_numa_node() -> None:
    gpus = [
        make_device(slot(0), "00:01.0/15:00.0/16:00.0", numa=0),
        make_device(slot(1), "00:02.0", numa=0),
        make_device(slot(2), "00:03.0", numa=1),
    ]
    nics = [nic(0, "00:01.0/15:00.0/16:01.0", 0, 2)]
    near = "0000:60:00.1"
    assert mixed(SetKind.PCIE, gpus, nics, 1, 1) == (
        {slot(0): ("pcie", near), slot(1): ("numa", "0000:60:00.2")},
        [slot(2)],
    )
    # Two of each: the first GPU takes both functions, and the others have none.
    assert mixed(SetKind.PCIE, gpus, nics, 1, 2) == (
        {slot(0): ("pcie", near, "0000:60:00.2")},
        [slot(1), slot(2)],
    )
    found, _ = mixed(SetKind.NUMA, gpus, nics, 1, 1)
    assert [kind for kind, _ in found.values()] == ["numa", "numa"]


def test_group_mixed_uses_all_nics_of_a_switch() -> None:
    gpus = [make_device(slot(n), f"00:01.0/15:00.0/16:0{n}.0", numa=0) for n in range(4)]
    nics = [nic(n, f"00:01.0/15:00.0/16:1{n}.0", 0, 4) for n in range(2)]
    found, left = mixed(SetKind.PCIE, gpus, nics, 1, 1)
    used = [function for _, function in found.values()]
    assert left == []
    assert len(set(used)) == 4
    assert sorted(function[5:7] for function in used) == ["60", "60", "61", "61"]


def test_group_mixed_gives_pairs_of_gpus_functions() -> None:
    gpus = [make_device(slot(n), f"00:01.0/15:00.0/16:0{n}.0") for n in range(3)]
    nics = [nic(0, "00:01.0/15:00.0/16:1f.0", 0, 4)]
    found, left = mixed(SetKind.PCIE, gpus, nics, 2, 2)
    assert list(found) == [slot(0)]
    assert left == [slot(2)]


@given(st.data())
def test_group_mixed_units_are_in_one_group(data: st.DataObject) -> None:
    ports = st.sampled_from(["00:01.0", "00:01.0/15:00.0", "00:02.0/15:00.0/16:00.0"])
    gpus = [
        make_device(slot(n), data.draw(ports), numa=data.draw(st.integers(0, 1))) for n in range(4)
    ]
    nics = [
        nic(n, data.draw(ports), data.draw(st.integers(0, 1)), data.draw(st.integers(1, 3)))
        for n in range(3)
    ]
    count = data.draw(st.integers(1, 2))
    parts = [
        grouping.Part(grouping.list_units(gpus), 1),
        grouping.Part(grouping.list_units(nics), count),
    ]
    groups, left = grouping.group_mixed(SetKind.PCIE, parts)
    used = [unit.member for group in groups for unit in group.units]
    assert len(used) == len(set(used)) == len(groups) * (1 + count)
    assert len(groups) + len(left) == len(gpus)
    for group in groups:
        if group.kind is SetKind.PCIE:
            assert len({unit.bridges[:2] for unit in group.units}) == 1
        else:
            assert len({unit.device.numa_node for unit in group.units}) == 1

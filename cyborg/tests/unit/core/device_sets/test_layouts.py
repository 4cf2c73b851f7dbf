# SPDX-License-Identifier: Apache-2.0
"""What a layout of a device changes in the offers of the sets of its host."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from cyborg.core.device_sets.groups import SizeSummary
from cyborg.core.device_sets.layouts import LayoutChange, SetChange, preview_layout
from cyborg.core.device_sets.offers import UnitUse
from cyborg.core.device_sets.reported import ReportedSet, Unit
from cyborg.core.inventory.device import Layout
from cyborg.core.inventory.device_set import (
    ANOTHER_LAYOUT,
    DeviceSet,
    OfferMode,
    OfferState,
    SetKind,
    SetMember,
)

OFFERED, ALLOCATED, WITHHELD = OfferState.OFFERED, OfferState.ALLOCATED, OfferState.WITHHELD
# Four GPUs in a set of four, in pairs and alone.
FAMILY = ("abcd", "ab", "cd", "a", "b", "c", "d")
WHOLE, VGPUS = Layout("whole", {"PGPU": 1}), Layout("2xvgpu", {"VGPU": 2})
DIVIDED = f"device a is divided into 2: {ANOTHER_LAYOUT}"
LEFT = "device a leaves it with the layout 2xvgpu"


def make_unit(name: str, **facts: Any) -> Unit:
    return replace(Unit(SetMember(name, name, name), "PGPU"), **facts)


def make_sets(*, missing: str = "", offered: str = "abcd", **facts: Any) -> list[ReportedSet]:
    """Return the sets of the family; the GPUs that are ``missing`` are divided."""
    sets = []
    for number, names in enumerate(FAMILY):
        members = tuple(SetMember(name, name, name) for name in names)
        is_divided = any(name in missing for name in names)
        device_set = DeviceSet(SetKind.FABRIC, members, obstacle=DIVIDED if is_divided else None)
        units = tuple(make_unit(name) for name in names if name not in missing)
        state = OFFERED if names in offered.split() else WITHHELD
        device_set = replace(device_set, **facts)
        sets.append(ReportedSet(number, names, "hgx", device_set, units, state))
    return sets


def preview(
    sets: list[ReportedSet],
    layout: Layout = VGPUS,
    uses: Mapping[str, UnitUse] | None = None,
    groups: Mapping[str, list[SizeSummary]] | None = None,
    **change: Any,
) -> dict[str, tuple[OfferState, OfferState, str | None]]:
    """Return the changes by the names of the sets."""
    found = preview_layout(LayoutChange("h", "a", layout, **change), sets, uses or {}, groups or {})
    assert all(isinstance(each, SetChange) for each in found)
    return {FAMILY[each.id]: (each.before, each.after, each.reason) for each in found}


def test_gpu_that_is_divided_leaves_its_sets_and_others_are_offered() -> None:
    assert preview(make_sets()) == {
        "abcd": (OFFERED, WITHHELD, LEFT),
        "ab": (WITHHELD, WITHHELD, LEFT),
        "a": (WITHHELD, WITHHELD, LEFT),
        "cd": (WITHHELD, OFFERED, None),
        "b": (WITHHELD, OFFERED, None),
    }


def test_gpu_that_is_whole_again_returns_to_its_sets() -> None:
    sets = make_sets(missing="a", offered="cd b")
    changes = preview(sets, WHOLE)
    assert changes.pop("abcd") == (WITHHELD, OFFERED, None)
    assert {name: change[:2] for name, change in changes.items()} == {
        "cd": (OFFERED, WITHHELD),
        "b": (OFFERED, WITHHELD),
    }
    # Divided in another way, it is as absent as before.
    assert preview(sets, VGPUS) == {}


def test_layout_with_the_same_handle_changes_no_set() -> None:
    assert preview(make_sets(), Layout("other", {"PGPU": 1, "VGPU": 0})) == {}


def test_layout_with_one_handle_of_another_class_leaves_the_sets() -> None:
    changes = preview(make_sets(), Layout("1xvgpu", {"VGPU": 1}))
    assert changes["abcd"][1] is WITHHELD
    # Nor does such a GPU return to sets of whole GPUs.
    assert preview(make_sets(missing="a", offered="cd b"), Layout("1xvgpu", {"VGPU": 1})) == {}


@pytest.mark.parametrize(
    ("obstacle", "condition"),
    [("Fabric Manager is away", None), (DIVIDED.replace(" a ", " b "), None), (DIVIDED, "failing")],
)
def test_set_with_another_obstacle_is_not_offered_again(
    obstacle: str, condition: str | None
) -> None:
    sets = [
        each if each.device_set.obstacle is None else each.with_obstacle(obstacle)
        for each in make_sets(missing="a", offered="cd b")
    ]
    assert preview(sets, WHOLE, condition=condition) == {}


def test_set_that_misses_another_gpu_is_not_offered_again() -> None:
    sets = make_sets(missing="ab", offered="cd")
    assert preview(sets, WHOLE) == {"a": (WITHHELD, OFFERED, None)}


def test_set_through_which_the_gpu_is_used_is_closed_after_its_release() -> None:
    uses = {name: UnitUse(1) for name in "ab"}
    assert preview(make_sets(offered="ab cd"), uses=uses) == {
        "abcd": (WITHHELD, WITHHELD, LEFT),
        "ab": (ALLOCATED, WITHHELD, LEFT),
        "a": (WITHHELD, WITHHELD, LEFT),
        # Its server has ended, too.
        "b": (WITHHELD, OFFERED, None),
    }


def test_set_of_others_that_is_in_use_stays_allocated() -> None:
    uses = {name: UnitUse(2) for name in "cd"}
    changes = preview(make_sets(offered="ab cd"), uses=uses)
    assert changes["ab"] == (OFFERED, WITHHELD, LEFT)
    assert changes["b"] == (WITHHELD, OFFERED, None)
    assert changes.keys().isdisjoint({"cd", "c", "d"})


def test_other_sets_are_split_for_the_wanted_sizes() -> None:
    sets = make_sets(offered="a b cd", wanted={"1": 2})
    assert preview(sets) == {
        "abcd": (WITHHELD, WITHHELD, LEFT),
        "ab": (WITHHELD, WITHHELD, LEFT),
        "a": (OFFERED, WITHHELD, LEFT),
        "cd": (OFFERED, WITHHELD, preview(sets)["cd"][2]),
        "c": (WITHHELD, OFFERED, None),
        "d": (WITHHELD, OFFERED, None),
    }


def test_sizes_that_another_host_of_the_group_offers_are_not_wanted_here() -> None:
    sets = make_sets(offered="a b cd", wanted={"1": 2}, group="g")
    summaries = [
        SizeSummary("h", 1, offered=2, inside=2, split=0, free_units=4),
        SizeSummary("h", 2, offered=1, inside=0, split=1, free_units=4),
        SizeSummary("other", 1, offered=1, inside=0, split=0, free_units=1),
    ]
    # The group lacks one more set of one without this host.
    changes = preview(sets, groups={"g": summaries})
    assert changes["a"] == (OFFERED, WITHHELD, LEFT)
    assert changes.keys().isdisjoint({"cd", "c", "d"})


def test_mode_all_closes_only_the_sets_of_the_gpu() -> None:
    sets = make_sets(offered=" ".join(FAMILY), mode=OfferMode.ALL)
    assert preview(sets) == dict.fromkeys(("abcd", "ab", "a"), (OFFERED, WITHHELD, LEFT))


def test_handles_that_a_layout_keeps_stay_in_their_sets() -> None:
    """Sets of a GPU and a function of a network card, which then has fewer functions."""
    functions = [Unit(SetMember("a", "a", f"f{number}"), "CUSTOM_NIC") for number in range(4)]
    sets = []
    for number, (gpu, function) in enumerate(zip("bcd", functions, strict=False)):
        units = (make_unit(gpu), function)
        device_set = DeviceSet(SetKind.PCIE, tuple(unit.member for unit in units))
        sets.append(ReportedSet(number, gpu, "near", device_set, units, OFFERED))
    (change,) = preview_layout(
        LayoutChange("h", "a", Layout("vfs-2", {"CUSTOM_NIC": 2})), sets, {}, {}
    )
    assert (change.id, change.before, change.after) == (2, OFFERED, WITHHELD)
    # A set without its function is not known to return with it.
    gone = [replace(each, units=each.units[:1], state=WITHHELD) for each in sets]
    assert (
        preview_layout(LayoutChange("h", "a", Layout("vfs-4", {"CUSTOM_NIC": 4})), gone, {}, {})
        == []
    )

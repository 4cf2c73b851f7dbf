# SPDX-License-Identifier: Apache-2.0
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.inventory.plan import (
    Attribute,
    DeployableKey,
    DeployableTombstone,
    Tombstone,
    plan_restore,
)

RACK = DeployableTombstone("part-1", (Attribute("a-1", "rack", "7"),))
CARD = Tombstone("device-1", "maintaining", {"p": RACK})


def test_plan_restore_removed_device_is_restored() -> None:
    removed = plan_restore({}, {"d": CARD}, [], [])
    assert removed.tombstones == {"d": CARD}
    restored = plan_restore(removed.tombstones, {}, [DeployableKey("d", "p")], ["d"])
    assert restored.devices == {"d": CARD}
    assert restored.deployables == {("d", "p"): RACK}
    assert restored.tombstones == {}


def test_plan_restore_missing_deployable_keeps_tombstone() -> None:
    restored = plan_restore({"d": CARD}, {}, [], ["d"])
    assert restored.devices == {"d": CARD}
    assert restored.tombstones == {"d": CARD}
    later = plan_restore(restored.tombstones, {}, [DeployableKey("d", "p")], ["d"])
    assert later.deployables == {("d", "p"): RACK}
    assert later.tombstones == {}


def test_plan_restore_removed_deployable_of_present_device_has_tombstone() -> None:
    other = DeployableTombstone("part-2")
    first = plan_restore({}, {"d": CARD}, [], ["d"])
    second = plan_restore(first.tombstones, {"d": replace(CARD, deployables={"q": other})}, [], [])
    assert second.tombstones == {"d": replace(CARD, deployables={"p": RACK, "q": other})}


def test_plan_restore_moved_deployable_keeps_values() -> None:
    old_tombstones = {"e": Tombstone("device-2", "enabled", {"p": DeployableTombstone("long-ago")})}
    restore_plan = plan_restore(old_tombstones, {"d": CARD}, [DeployableKey("e", "p")], ["d", "e"])
    assert restore_plan.deployables == {("e", "p"): RACK}
    assert restore_plan.tombstones == {}


_ADDRESS = st.sampled_from(("a", "b", "c"))


@st.composite
def _worlds(draw: st.DrawFn) -> tuple[list[dict[str, frozenset[str]]], list[str]]:
    """Draw the devices of a host at several times; a deployable is on one device at a time."""
    moments = []
    for _ in range(draw(st.integers(1, 6))):
        devices = draw(st.sets(_ADDRESS))
        device_of = {
            deployable: draw(st.sampled_from([*sorted(devices), ""]))
            for deployable in ("p", "q")
            if devices
        }
        moments.append(
            {
                d: frozenset(deployable for deployable, at in device_of.items() if at == d)
                for d in devices
            }
        )
    return moments, [f"u{n}" for n in range(100)]


@given(_worlds())
def test_plan_restore_uuid_is_unique(
    case: tuple[list[dict[str, frozenset[str]]], list[str]],
) -> None:
    moments, fresh = case
    present: dict[str, Tombstone] = {}
    stored: Mapping[str, Tombstone] = {}
    first: dict[str, str] = {}
    for moment in moments:
        removed = {
            d: replace(
                tombstone,
                deployables={
                    p: x for p, x in tombstone.deployables.items() if p not in moment.get(d, ())
                },
            )
            for d, tombstone in present.items()
            if d not in moment or set(tombstone.deployables) - moment[d]
        }
        added = [
            DeployableKey(d, p)
            for d, addresses in moment.items()
            for p in addresses
            if d not in present or p not in present[d].deployables
        ]
        result = plan_restore(stored, removed, added, moment)
        after = {}
        for d, addresses in moment.items():
            old = present.get(d) or result.devices.get(d) or Tombstone(fresh.pop(), "enabled")
            after[d] = replace(
                old,
                deployables={
                    p: (
                        present[d].deployables[p]
                        if d in present and p in present[d].deployables
                        else None
                    )
                    or result.deployables.get(DeployableKey(d, p))
                    or DeployableTombstone(fresh.pop())
                    for p in addresses
                },
            )
        present, stored = after, result.tombstones
        for d, tombstone in present.items():
            assert first.setdefault(d, tombstone.uuid) == tombstone.uuid, (
                "a device keeps its uuid for ever"
            )
        all_of = (*present.values(), *stored.values())
        everywhere = [
            deployable.uuid for tombstone in all_of for deployable in tombstone.deployables.values()
        ]
        assert len(everywhere) == len(set(everywhere))
        assert all(tombstone.deployables or d not in present for d, tombstone in stored.items())

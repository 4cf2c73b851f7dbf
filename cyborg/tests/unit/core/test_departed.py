# SPDX-License-Identifier: Apache-2.0
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.departed import Attribute, Departed, Part, recall

RACK = Part("part-1", (Attribute("a-1", "rack", "7"),))
CARD = Departed("device-1", "maintaining", {"p": RACK})


def test_what_goes_is_remembered_and_comes_back() -> None:
    gone = recall({}, {"d": CARD}, [], [])
    assert gone.kept == {"d": CARD}
    back = recall(gone.kept, {}, [("d", "p")], ["d"])
    assert back.devices == {"d": CARD}
    assert back.parts == {("d", "p"): RACK}
    assert back.kept == {}


def test_a_device_that_comes_back_without_its_part_leaves_that_remembered() -> None:
    back = recall({"d": CARD}, {}, [], ["d"])
    assert back.devices == {"d": CARD}
    assert back.kept == {"d": CARD}
    later = recall(back.kept, {}, [("d", "p")], ["d"])
    assert later.parts == {("d", "p"): RACK}
    assert later.kept == {}


def test_a_part_that_goes_alone_is_remembered_with_its_device_there() -> None:
    other = Part("part-2")
    first = recall({}, {"d": CARD}, [], ["d"])
    second = recall(first.kept, {"d": replace(CARD, parts={"q": other})}, [], [])
    assert second.kept == {"d": replace(CARD, parts={"p": RACK, "q": other})}


def test_a_part_that_moves_takes_what_is_its_own() -> None:
    known = {"e": Departed("device-2", "enabled", {"p": Part("long-ago")})}
    moved = recall(known, {"d": CARD}, [("e", "p")], ["d", "e"])
    assert moved.parts == {("e", "p"): RACK}
    assert moved.kept == {}


_ADDRESS = st.sampled_from(("a", "b", "c"))


@st.composite
def _worlds(draw: st.DrawFn) -> tuple[list[dict[str, frozenset[str]]], list[str]]:
    """Draw what a host has at several moments; a part is on one device at a time."""
    moments = []
    for _ in range(draw(st.integers(1, 6))):
        devices = draw(st.sets(_ADDRESS))
        where = {
            part: draw(st.sampled_from([*sorted(devices), ""])) for part in ("p", "q") if devices
        }
        moments.append(
            {d: frozenset(part for part, at in where.items() if at == d) for d in devices}
        )
    return moments, [f"u{n}" for n in range(100)]


@given(_worlds())
def test_no_uuid_is_ever_in_two_places(
    world: tuple[list[dict[str, frozenset[str]]], list[str]],
) -> None:
    moments, fresh = world
    there: dict[str, Departed] = {}
    kept: Mapping[str, Departed] = {}
    first: dict[str, str] = {}
    for moment in moments:
        gone = {
            d: replace(
                one, parts={p: x for p, x in one.parts.items() if p not in moment.get(d, ())}
            )
            for d, one in there.items()
            if d not in moment or set(one.parts) - moment[d]
        }
        come = [
            (d, p)
            for d, parts in moment.items()
            for p in parts
            if d not in there or p not in there[d].parts
        ]
        result = recall(kept, gone, come, moment)
        after = {}
        for d, parts in moment.items():
            old = there.get(d) or result.devices.get(d) or Departed(fresh.pop(), "enabled")
            after[d] = replace(
                old,
                parts={
                    p: (there[d].parts[p] if d in there and p in there[d].parts else None)
                    or result.parts.get((d, p))
                    or Part(fresh.pop())
                    for p in parts
                },
            )
        there, kept = after, result.kept
        for d, one in there.items():
            assert first.setdefault(d, one.uuid) == one.uuid, "a device keeps its uuid for ever"
        all_of = (*there.values(), *kept.values())
        everywhere = [part.uuid for one in all_of for part in one.parts.values()]
        assert len(everywhere) == len(set(everywhere))
        assert all(one.parts or d not in there for d, one in kept.items())

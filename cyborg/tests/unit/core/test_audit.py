# SPDX-License-Identifier: Apache-2.0
"""What an audit finds: nothing where all agree, and of one disturbance that one alone."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cyborg
from cyborg.core.audit import ADVICE, REPAIRS, Kind, Repair, lasting
from cyborg.core.audit_compare import compare, doubtful
from cyborg.core.audit_view import Facts, Instance, Instances, Placed, ProviderRecord
from cyborg.core.device import Device
from cyborg.core.hardware import Hardware, Part, Seen
from cyborg.core.provider_tree import Inventory, Provider
from cyborg.core.states import RequestState
from cyborg.fixtures import agreement, strategies
from cyborg.fixtures.agreement import HOST, NOW, OLD, ROOT, instance
from cyborg.fixtures.hosts import card

K = Kind


def world() -> Facts:
    """A host of two cards of two handles each; one handle of the first is bound."""
    first = card(0)
    (part,) = first.deployables
    return agreement.facts([first, card(1)], [(part.address, "0000")])


def hw(facts: Facts, **devices: Seen | None) -> Facts:
    seen = dict(facts.hardware.devices)
    for name, device in devices.items():
        address = {"first": "0000:00:00.0", "second": "0000:01:00.0"}.get(name, name)
        seen.pop(address, None)
        if device is not None:
            seen[address] = device
    return replace(facts, hardware=Hardware(seen))


def devices(facts: Facts, n: int, **values: Any) -> Facts:
    changed = list(facts.records.devices)
    changed[n] = replace(changed[n], **values)
    return replace(facts, records=replace(facts.records, devices=tuple(changed)))


def handle(facts: Facts, n: int, h: int, **values: Any) -> Facts:
    (part,) = facts.records.devices[n].parts
    handles = list(part.handles)
    handles[h] = replace(handles[h], **values)
    return devices(facts, n, parts=(replace(part, handles=tuple(handles)),))


def uuid(facts: Facts, n: int) -> str:
    return facts.records.devices[n].parts[0].provider


def tracked(facts: Facts, n: int, **values: Any) -> Facts:
    rows = dict(facts.records.providers)
    rows[uuid(facts, n)] = replace(rows[uuid(facts, n)], **values)
    return replace(facts, records=replace(facts.records, providers=rows))


def placed(facts: Facts, n: int, **values: Any) -> Facts:
    actual = dict(facts.placed.actual)
    actual[uuid(facts, n)] = replace(actual[uuid(facts, n)], **values)
    return replace(facts, placed=replace(facts.placed, actual=actual))


def without(facts: Facts, n: int) -> Facts:
    actual, consumers = dict(facts.placed.actual), dict(facts.placed.consumers)
    del actual[uuid(facts, n)], consumers[uuid(facts, n)]
    return replace(facts, placed=Placed(None, actual, consumers))


def consumers(facts: Facts, n: int, **units: int) -> Facts:
    found = dict(facts.placed.consumers)
    found[uuid(facts, n)] = {instance(int(i.strip("i"))): u for i, u in units.items()}
    return replace(facts, placed=replace(facts.placed, consumers=found))


def extra(facts: Facts, **users: int) -> Facts:
    one = Provider("lost", f"{HOST}_gone", ROOT, {}, frozenset())
    actual = {**facts.placed.actual, "lost": one}
    found = {**facts.placed.consumers, "lost": users}
    return replace(facts, placed=replace(facts.placed, actual=actual, consumers=found))


def requests(facts: Facts, **values: Any) -> Facts:
    (one,) = facts.records.requests
    return replace(facts, records=replace(facts.records, requests=(replace(one, **values),)))


def nova(facts: Facts, server: Instance | None) -> Facts:
    return replace(facts, instances=Instances(frozenset(), {instance(0): server}))


def sold(facts: Facts, **values: Any) -> Facts:
    return placed(facts, 1, inventories={"CUSTOM_FAKE": Inventory(2, max_unit=2, **values)})


PART = Part("CUSTOM_FAKE", frozenset({"0000", "0001"}))
FEWER = {"0000:01:00.0": Part("CUSTOM_FAKE", frozenset({"0000"}))}
OTHER = {"0000:01:00.0": Part("FPGA", PART.handles)}
MORE = {"0000:01:00.0": PART, "x": PART}
LATE = NOW - timedelta(minutes=5)
GONE = Instance(instance(0), "DELETED")
AWAY = Instance(instance(0), "ACTIVE", "compute-2", "compute-2")
OFF = Instance(instance(0), "SHELVED_OFFLOADED")

DISTURBED: Mapping[str, tuple[Callable[[Facts], Facts], Kind, str, Repair | None]] = {
    "a card nobody recorded": (
        lambda f: hw(f, new=Seen("fake", {})),
        *(K.DEVICE_UNRECORDED, "device new", Repair.REPORT),
    ),
    "a card that is not there": (
        lambda f: hw(f, second=None),
        *(K.DEVICE_VANISHED, "device 0000:01:00.0", Repair.REPORT),
    ),
    "a part nobody recorded": (
        lambda f: hw(f, second=Seen("fake", MORE)),
        *(K.PART_UNRECORDED, "deployable x", Repair.REPORT),
    ),
    "a part that is not there": (
        lambda f: hw(f, second=Seen("fake", {})),
        *(K.PART_VANISHED, "deployable 0000:01:00.0", Repair.REPORT),
    ),
    "another class": (
        lambda f: hw(f, second=Seen("fake", OTHER)),
        *(K.PART_DIFFERS, "deployable 0000:01:00.0", Repair.REPORT),
    ),
    "fewer handles": (
        lambda f: hw(f, second=Seen("fake", FEWER)),
        *(K.HANDLES_DIFFER, "deployable 0000:01:00.0", Repair.REPORT),
    ),
    "a silent agent": (
        lambda f: replace(f, hardware=None, silence="no answer"),
        *(K.AGENT_SILENT, "agent", None),
    ),
    "a sick backend": (
        lambda f: replace(f, hardware=Hardware({}, {"fake": "broken"})),
        *(K.BACKEND_SILENT, "backend fake", None),
    ),
    "a drained handle": (
        lambda f: hw(handle(f, 1, 1, draining=True), second=Seen("fake", FEWER)),
        *(K.DRAINED_LEFT, "device 0000:01:00.0", Repair.REPORT),
    ),
    "a dirty handle": (
        lambda f: handle(f, 1, 1, prepared=True),
        *(K.HANDLE_DIRTY, "handle 0000:01:00.0/0001", Repair.CLEAN),
    ),
    "an owner that holds nothing": (
        lambda f: handle(f, 0, 0, owner_state=RequestState.UNBOUND),
        *(K.HANDLE_MISHELD, "handle 0000:00:00.0/0000", None),
    ),
    "an owner that is elsewhere": (
        lambda f: handle(f, 0, 0, owner_provider="other"),
        *(K.REQUEST_MISPLACED, "handle 0000:00:00.0/0000", None),
    ),
    "a bound request without a handle": (
        lambda f: requests(f, has_handle=False),
        *(K.REQUEST_WITHOUT_HANDLE, "request 2a000000-0000-4000-8000-000000000000", None),
    ),
    "no compute node": (
        lambda f: replace(f, wanted={}, placed=Placed("no provider of this name")),
        *(K.NODE_MISSING, "compute node", None),
    ),
    "a deployable that nobody publishes": (
        lambda f: replace(f, records=replace(f.records, providers=few(f))),
        *(K.PROVIDER_UNTRACKED, "provider compute-1_0000:01:00.0", Repair.PUBLISH),
    ),
    "stale for long": (
        lambda f: without(tracked(f, 1, stale_since=LATE), 1),
        *(K.PROVIDER_STALE, "provider compute-1_0000:01:00.0", Repair.PUBLISH),
    ),
    "refused by Placement": (
        lambda f: without(tracked(f, 1, stale_since=NOW, error="a name"), 1),
        *(K.PROVIDER_FAILING, "provider compute-1_0000:01:00.0", Repair.PUBLISH),
    ),
    "deleted in Placement": (
        lambda f: without(f, 1),
        *(K.PROVIDER_MISSING, "provider compute-1_0000:01:00.0", Repair.PUBLISH),
    ),
    "moved in Placement": (
        lambda f: placed(f, 1, parent_uuid="other"),
        *(K.PROVIDER_MISPLACED, "provider compute-1_0000:01:00.0", Repair.PUBLISH),
    ),
    "closed in Placement": (
        lambda f: sold(f, reserved=2),
        *(K.PROVIDER_CLOSED, "provider compute-1_0000:01:00.0", Repair.PUBLISH),
    ),
    "open in Placement": (
        lambda f: replace(f, wanted=sold(f, reserved=2).placed.actual),
        *(K.PROVIDER_OPEN, "provider compute-1_0000:01:00.0", Repair.PUBLISH),
    ),
    "another ratio": (
        lambda f: sold(f, allocation_ratio=2.0),
        *(K.INVENTORY_DIFFERS, "provider compute-1_0000:01:00.0", Repair.PUBLISH),
    ),
    "no trait": (
        lambda f: placed(f, 1, traits=frozenset()),
        *(K.TRAITS_DIFFER, "provider compute-1_0000:01:00.0", Repair.PUBLISH),
    ),
    "left over": (
        extra,
        *(K.PROVIDER_LEFTOVER, "provider compute-1_gone", Repair.DELETE_PROVIDER),
    ),
    "left over and in use": (
        lambda f: extra(f, someone=1),
        *(K.PROVIDER_LEFTOVER, "provider compute-1_gone", None),
    ),
    "bound without an allocation": (
        lambda f: consumers(f, 0),
        K.ALLOCATION_MISSING,
        f"instance {instance(0)} on compute-1_0000:00:00.0",
        Repair.RECONCILE,
    ),
    "suspected already": (
        lambda f: consumers(requests(f, orphan_since=OLD), 0),
        K.ALLOCATION_MISSING,
        f"instance {instance(0)} on compute-1_0000:00:00.0",
        None,
    ),
    "allocated and not bound": (
        lambda f: consumers(f, 1, i7=1),
        K.ALLOCATION_UNUSED,
        f"instance {instance(7)} on compute-1_0000:01:00.0",
        None,
    ),
    "more allocated than bound": (
        lambda f: consumers(f, 0, i0=2),
        K.ALLOCATION_UNUSED,
        f"instance {instance(0)} on compute-1_0000:00:00.0",
        None,
    ),
    "an instance that is gone": (
        lambda f: nova(f, None),
        *(K.INSTANCE_GONE, "request 2a000000-0000-4000-8000-000000000000", None),
    ),
    "a deleted instance, allocation and all": (
        lambda f: consumers(nova(f, GONE), 0),
        *(K.INSTANCE_GONE, "request 2a000000-0000-4000-8000-000000000000", Repair.RECONCILE),
    ),
    "an instance of another host": (
        lambda f: nova(f, AWAY),
        *(K.INSTANCE_ELSEWHERE, "request 2a000000-0000-4000-8000-000000000000", None),
    ),
    "an instance of no host": (
        lambda f: nova(f, OFF),
        *(K.INSTANCE_ELSEWHERE, "request 2a000000-0000-4000-8000-000000000000", None),
    ),
}


def few(facts: Facts) -> dict[str, ProviderRecord]:
    return {u: row for u, row in facts.records.providers.items() if u != uuid(facts, 1)}


IN_FLIGHT: Mapping[str, Callable[[Facts], Facts]] = {
    "nothing": lambda f: f,
    "to be published": lambda f: without(tracked(f, 1, stale_since=NOW), 1),
    "to be deleted": lambda f: replace(
        tracked(f, 1, stale_since=NOW),
        wanted={uuid(f, 0): f.wanted[uuid(f, 0)]},
        records=replace(tracked(f, 1, stale_since=NOW).records, devices=f.records.devices[:1]),
        hardware=Hardware({"0000:00:00.0": f.hardware.devices["0000:00:00.0"]}),
    ),
    "a request being bound": lambda f: consumers(requests(f, state=RequestState.BIND_STARTED), 0),
    "a young request": lambda f: nova(consumers(requests(f, touched=NOW), 0), None),
    "a server being moved": lambda f: nova(f, replace(AWAY, task="resize_migrating")),
    "a server being built": lambda f: nova(consumers(f, 0), Instance(instance(0), "BUILD")),
    "a server in other words": lambda f: nova(f, replace(AWAY, host="Compute-1")),
    "a Nova that tells no hosts": lambda f: nova(f, replace(OFF, told=False)),
    "no Nova": lambda f: replace(f, instances=None),
    "nobody allocates": lambda f: replace(consumers(f, 0), allocates=False),
    "an agent of before": lambda f: hw(f, second=Seen("fake", None)),
    "a backend that looks": lambda f: replace(f, hardware=Hardware({}, {"fake": None})),
    "a handle being cleaned": lambda f: handle(f, 1, 1, prepared=True, cleaning=True),
    "a device being programmed": lambda f: devices(
        hw(f, second=None),
        1,
        parts=(replace(f.records.devices[1].parts[0], programming=True),),
    ),
    "a bound handle that is drained": lambda f: hw(
        handle(f, 0, 0, draining=True),
        first=Seen("fake", {"0000:00:00.0": Part("CUSTOM_FAKE", frozenset({"0001"}))}),
    ),
}


@pytest.mark.parametrize("name", DISTURBED)
def test_one_disturbance_is_one_finding(name: str) -> None:
    disturb, kind, thing, repair = DISTURBED[name]
    (found,) = compare(disturb(world()))
    assert (found.kind, found.object, found.repair, found.host) == (kind, thing, repair, HOST)
    assert any(side in found.explanation for side in ("hardware", "database", "Placement"))
    told = found.to_dict(repaired=True)
    assert (told["advice"], told["repaired"]) == (ADVICE[kind], True)


def test_every_kind_is_disturbed() -> None:
    told = {kind for _, kind, _, _ in DISTURBED.values()}
    # The first needs two requests of an instance, the next drained cards; the rest are no sides'.
    others = {K.ALLOCATION_SHORT, K.DEVICE_RETURNED, K.NOVA_SILENT, K.TOO_MANY}
    assert told | others == set(Kind)
    assert {kind for kind in REPAIRS if not ADVICE[kind]} == set()


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_is_told_of(kind: Kind) -> None:
    page = (Path(cyborg.__file__).parents[1] / "doc/source/admin/audit.rst").read_text()
    assert f"   * - ``{kind}``\n" in page


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_what_is_on_its_way_is_passed_over(name: str) -> None:
    assert compare(IN_FLIGHT[name](world())) == ()


def test_one_of_two_units() -> None:
    facts = agreement.facts([card()], [("0000:00:00.0", "0000"), ("0000:00:00.0", "0001")])
    rows = tuple(replace(r, instance=instance(0)) for r in facts.records.requests)
    facts = consumers(replace(facts, records=replace(facts.records, requests=rows)), 0, i0=1)
    (found,) = compare(facts)
    assert (found.kind, found.repair) == (K.ALLOCATION_SHORT, None)


def test_a_drained_card_that_is_back() -> None:
    facts = world()
    part = facts.records.devices[0].parts[0]
    first = replace(part.handles[0], draining=True)
    second = replace(part.handles[1], draining=True, prepared=True, cleaning=True)
    parts = (replace(part, draining=True, handles=(first, second)),)
    facts = devices(facts, 0, draining=True, parts=parts)
    (found,) = compare(facts)
    assert (found.kind, found.object) == (K.DEVICE_RETURNED, "device 0000:00:00.0")


def test_who_nova_is_asked_about() -> None:
    facts = replace(world(), instances=None)
    assert doubtful(facts, frozenset({instance(0)})) == frozenset()
    assert doubtful(facts, frozenset()) == {instance(0)}
    odd = consumers(consumers(facts, 0), 1, i7=1)
    assert doubtful(odd, frozenset({instance(0)})) == {instance(0), instance(7)}
    assert doubtful(requests(facts, touched=NOW), frozenset()) == frozenset()


def test_what_the_second_look_does_not_see_was_on_its_way() -> None:
    first = compare(consumers(without(world(), 1), 0))
    assert {f.kind for f in first} == {K.PROVIDER_MISSING, K.ALLOCATION_MISSING}
    second = compare(hw(without(world(), 1), second=None))
    (left,) = lasting(first, second)
    assert left.kind is K.PROVIDER_MISSING


@given(strategies.hosts(), st.data())
def test_sides_that_agree(host: tuple[Device, ...], data: st.DataObject) -> None:
    handles = [
        (part.address, handle.address)
        for device in host
        for part in device.deployables
        for handle in part.handles
    ]
    bound = data.draw(st.sets(st.sampled_from(handles))) if handles else set()
    facts = agreement.facts(host, bound)
    assert compare(facts) == ()
    assert doubtful(facts, facts.instances.here) == frozenset()


@given(strategies.hosts(), strategies.hosts())
def test_other_hardware_is_nothing_but_reports(
    seen: tuple[Device, ...], known: tuple[Device, ...]
) -> None:
    told = agreement.facts(known)
    mixed = replace(told, hardware=agreement.facts(seen).hardware)
    found = compare(mixed)
    assert {finding.repair for finding in found} <= {Repair.REPORT}
    assert len({finding.key for finding in found}) == len(found)
    assert (not found) == (
        mixed.hardware.devices.keys() == told.hardware.devices.keys()
        and all(
            one.parts == told.hardware.devices[address].parts
            for address, one in mixed.hardware.devices.items()
        )
    )

# SPDX-License-Identifier: Apache-2.0
"""Invariants of the inventory plan."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.inventory import plan as inventory
from cyborg.core.inventory.device import AttachHandle, Deployable, Device, DeviceType, HandleType
from cyborg.core.inventory.plan import (
    Add,
    Change,
    DeployableKey,
    DeviceKey,
    Drain,
    HandleKey,
    Key,
    Remove,
    Stored,
    apply,
    flatten,
    plan,
)
from cyborg.tests.fixtures.hosts import strategies

Host = tuple[Device, ...]


def stored(host: Host) -> dict[Key, Stored]:
    """Return the stored records of a host right after its report."""
    return {key: Stored(value) for key, value in flatten(host).items()}


@st.composite
def changes(draw: st.DrawFn) -> tuple[Host, Host, frozenset[HandleKey]]:
    """Draw a host before and after a change, and the bound keys of the former."""
    before = draw(strategies.hosts())
    return before, draw(strategies.hosts()), draw(strategies.bound_keys(before))


def assert_all_around(key: DeployableKey, result: Mapping[Key, Stored]) -> None:
    """Check that all ancestors of a deployable are present."""
    while True:
        value = result[key].value
        assert isinstance(value, Deployable)
        if value.parent is None:
            return
        key = DeployableKey(key.device, value.parent)


def _parent(value: object) -> str | None:
    return value.parent if isinstance(value, Deployable) else None


@given(strategies.hosts())
def test_plan_equal_inventories_gives_no_steps(host: Host) -> None:
    assert plan(host, stored(host), ()) == ()


@pytest.mark.slow
@given(strategies.hosts(), strategies.hosts())
def test_apply_unbound_host_equals_report(before: Host, after: Host) -> None:
    steps = plan(after, stored(before), ())
    assert apply(stored(before), steps) == stored(after)
    assert not any(isinstance(step, Drain) for step in steps)


@pytest.mark.slow
@given(changes())
def test_plan_never_removes_bound_records(case: tuple[Host, Host, frozenset[HandleKey]]) -> None:
    before, after, bound = case
    result = apply(stored(before), plan(after, stored(before), bound))
    for key in bound:
        assert key in result
        assert key.deployable_key in result
        assert DeviceKey(key.device) in result
        assert_all_around(key.deployable_key, result)
        assert result[key].draining == (key not in flatten(after))


@pytest.mark.slow
@given(changes())
def test_apply_contains_reported_records(
    case: tuple[Host, Host, frozenset[HandleKey]],
) -> None:
    before, after, bound = case
    result = apply(stored(before), plan(after, stored(before), bound))
    assert {k: v for k, v in result.items() if not v.draining} == stored(after)


@pytest.mark.slow
@given(changes())
def test_plan_second_run_is_empty(case: tuple[Host, Host, frozenset[HandleKey]]) -> None:
    before, after, bound = case
    result = apply(stored(before), plan(after, stored(before), bound))
    assert plan(after, result, bound) == ()


@given(changes())
def test_plan_released_draining_record_is_removed(
    case: tuple[Host, Host, frozenset[HandleKey]],
) -> None:
    before, after, bound = case
    draining = apply(stored(before), plan(after, stored(before), bound))
    assert apply(draining, plan(after, draining, ())) == stored(after)


@pytest.mark.slow
@given(changes())
def test_plan_returned_draining_record_is_restored(
    case: tuple[Host, Host, frozenset[HandleKey]],
) -> None:
    before, after, bound = case
    draining = apply(stored(before), plan(after, stored(before), bound))
    assert {
        key: value
        for key, value in apply(draining, plan(before, draining, bound)).items()
        if key in bound
    } == {key: stored(before)[key] for key in bound}


@pytest.mark.slow
@given(changes())
def test_plan_steps_are_in_valid_order(case: tuple[Host, Host, frozenset[HandleKey]]) -> None:
    """A parent is added before its children and removed after them."""
    before, after, bound = case
    present = set(stored(before))
    steps = plan(after, stored(before), bound)
    removed = {step.key for step in steps if isinstance(step, Remove)}
    for step in steps:
        parents: list[Key] = []
        if not isinstance(step.key, DeviceKey):
            parents.append(DeviceKey(step.key.device))
        if isinstance(step.key, HandleKey):
            parents.append(step.key.deployable_key)
        assert set(parents) <= present
        match step:
            case Add(key, value):
                assert key not in present
                if isinstance(value, Deployable) and value.parent:
                    assert DeployableKey(key.device, value.parent) in present
                present.add(key)
            case Remove(key):
                assert not any(
                    k in present
                    and k.device == key.device
                    and _parent(stored(before)[k].value) == key.deployable
                    for k in removed - {key}
                    if isinstance(key, DeployableKey)
                )
                assert not any(k[: len(key)] == key and len(k) > len(key) for k in present)
                present.remove(key)
            case Change(key, _) | Drain(key):
                assert key in present


def nested(*places: tuple[str, str | None], bound: str = "") -> Device:
    """Return a card of nested deployables; the deployable ``bound`` has a handle."""
    handle = AttachHandle("0", HandleType.TEST_PCI)
    parts = (
        Deployable(own, "FPGA", handles=(handle,) if own == bound else (), parent=around)
        for own, around in places
    )
    return Device("card", DeviceType.FPGA, "8086", "x", "gen0", deployables=tuple(parts))


def test_plan_ancestors_of_bound_handle_are_drained() -> None:
    card = nested(("b", "a"), ("a", None), ("c", "a"), bound="b")
    handle = HandleKey("card", "b", "0")
    assert plan((), stored((card,)), {handle}) == (
        Drain(handle),
        Drain(DeployableKey("card", "b")),
        Remove(DeployableKey("card", "c")),
        Drain(DeployableKey("card", "a")),
        Drain(DeviceKey("card")),
    )


def test_plan_moved_deployable_does_not_pin_old_parent() -> None:
    before = nested(("a", None), ("b", "a"), bound="b")
    after = nested(("b", None), bound="b")
    steps = plan((after,), stored((before,)), {HandleKey("card", "b", "0")})
    assert [type(step) for step in steps] == [Remove, Change]


@pytest.mark.slow
def test_plan_run_time_is_linear() -> None:
    """With quadratic run time a chain of this length would take minutes."""
    names = [f"p{number:05}" for number in range(20_000)]
    chain = nested(*zip(reversed(names), [*reversed(names[:-1]), None], strict=True))
    assert len(plan((chain,), {}, ())) == len(plan((), stored((chain,)), ())) == len(names) + 1


def test_plan_removed_device_keeps_bound_half() -> None:
    handles = tuple(AttachHandle(a, HandleType.PCI) for a in ("0", "1"))
    card = Device(
        "0000:3d:00.0",
        DeviceType.SSD,
        "8086",
        "x",
        "gen0",
        deployables=(Deployable("0000:3d:00.0", "CUSTOM_NVME", handles=handles),),
    )
    bound = HandleKey(card.address, card.address, "1")
    assert plan((), stored((card,)), {bound}) == (
        Remove(HandleKey(card.address, card.address, "0")),
        Drain(bound),
        Drain(DeployableKey(card.address, card.address)),
        Drain(DeviceKey(card.address)),
    )
    assert inventory.flatten([card]).keys() == stored((card,)).keys()

# SPDX-License-Identifier: Apache-2.0
"""Layouts that name MIG profiles: their vGPUs, their refusals, and changes that do not end."""

from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import Memory, VolatileMemory
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.testing.vgpu_host import SimulatedVgpuHost, VgpuType
from cyborg.tests.fixtures.machine.tiers import pick_points
from cyborg.tests.unit.drivers.gpu.simulated_vgpus import (
    CARD,
    SMALL,
    AgentEnds,
    Life,
    discover,
    item,
    make_driver,
    make_killed_driver,
    offered,
)

TYPES = (
    SMALL,
    VgpuType(1501, "NVIDIA H200X-1-18C", 18, "1g.18gb"),
    VgpuType(1502, "NVIDIA H200X-3-71C", 71, "3g.71gb"),
    VgpuType(1503, "NVIDIA H200X-3-35C", 35, "3g.71gb", per_instance=2),
    VgpuType(1504, "NVIDIA H200X-1-18CME", 18, "1g.18gb+me"),
)
RULE = f"address={CARD},type=H200X-35C|H200X-1-18C|H200X-3-71C|H200X-3-35C"
MIXED, SLICES = "1x3g.71gb+4x1g.18gb", "7x1g.18gb"
EFFECTS = 100  # more than a change has


def make_host(folder: Path) -> SimulatedVgpuHost:
    host = SimulatedVgpuHost(folder)
    host.add_card(CARD, TYPES, framebuffer=141, numvfs=8)
    return host


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedVgpuHost:
    found = make_host(tmp_path)
    found.redirect(monkeypatch.setattr)
    return found


def options(*mixes: str, rule: str = RULE) -> dict[str, Any]:
    return {
        "vgpu_types": [rule],
        "vgpu_layouts": list(mixes),
        "devices": ["address=*"],
        "reset": "never",
    }


def make(
    host: SimulatedVgpuHost, *mixes: str, rule: str = RULE, memory: Memory | None = None
) -> GpuDriver:
    values = options(*mixes, rule=rule)
    return make_driver(host, *values.pop("vgpu_types"), memory=memory, **values)


def current(driver: GpuDriver) -> str:
    device = discover(driver)
    return next(found for found in driver.layouts(device) if found.matches(device)).name


def partition(driver: GpuDriver, layout: str) -> None:
    driver.partition(WorkItem("gpus", CARD, "", ""), layout)


def count_offered(driver: GpuDriver) -> dict[str, int]:
    return {part.removeprefix(f"{CARD}-"): len(found) for part, found in offered(driver).items()}


@pytest.mark.parametrize(
    ("types", "mix", "expected"),
    [
        ("H200X-1-18C|H200X-3-71C", MIXED, {"H200X-1-18C": 4, "H200X-3-71C": 1}),
        ("H200X-3-71C|H200X-3-35C|H200X-1-18C", MIXED, {"H200X-1-18C": 4, "H200X-3-71C": 1}),
        ("H200X-3-35C|H200X-3-71C", "2x3g.71gb", {"H200X-3-35C": 4}),
        (
            "H200X-1-18CME|H200X-1-18C",
            "1x1g.18gb+me+6x1g.18gb",
            {"H200X-1-18CME": 1, "H200X-1-18C": 6},
        ),
    ],
)
def test_layout_of_profiles_offers_the_first_type_of_each_profile(
    host: SimulatedVgpuHost, types: str, mix: str, expected: dict[str, int]
) -> None:
    """As many vGPUs as an instance can have of the type."""
    driver = make(host, mix, rule=f"address={CARD},type={types}")
    (layout,) = (found for found in driver.layouts(discover(driver)) if found.name == mix)
    assert layout.offers == {"VGPU": sum(expected.values())}
    partition(driver, mix)
    assert (current(driver), count_offered(driver)) == (mix, expected)
    for part, functions in offered(driver).items():
        for function in functions:
            driver.prepare(item(function, part.removeprefix(f"{CARD}-")), None)
    assert current(driver) == mix


@pytest.mark.parametrize(
    ("mix", "reason"),
    [
        ("1x5g.99gb", "0 GPU instances of 5g.99gb; its MIG profiles: 1g.18gb, 3g.71gb, 1g.18gb+me"),
        ("8x1g.18gb", "it can have 7 GPU instances of 1g.18gb"),
        ("1x1g.18gb+me", "no rule enables a type of 1g.18gb+me; NVML lists H200X-1-18CME"),
    ],
)
def test_layout_that_the_card_cannot_have_is_refused_with_the_reason(
    host: SimulatedVgpuHost, mix: str, reason: str
) -> None:
    driver = make(host, mix, MIXED)
    assert [layout.name for layout in driver.layouts(discover(driver))] == ["whole", MIXED]
    with pytest.raises(DriverFailed) as caught:
        partition(driver, mix)
    assert caught.value.message.startswith(f"{CARD} cannot have the layout {mix}: ")
    assert reason in caught.value.message
    assert (current(driver), host.commands) == ("whole", [])


@pytest.mark.parametrize("previous", ["whole", SLICES])
def test_layout_whose_instances_have_no_room_leaves_the_card_as_before(
    host: SimulatedVgpuHost, previous: str
) -> None:
    mix = "2x3g.71gb+1x1g.18gb"
    driver = make(host, mix, SLICES)
    partition(driver, previous)
    before = discover(driver)
    instances = dict(host.cards[CARD].instances)
    with pytest.raises(DriverFailed, match=r"has no room for the MIG instances .* is as before$"):
        partition(driver, mix)
    assert (current(driver), discover(driver)) == (previous, before)
    assert host.cards[CARD].instances == instances


def test_layout_that_is_applied_again_has_the_types_of_its_servers(host: SimulatedVgpuHost) -> None:
    """After a boot, with a rule that has another type of the profile first."""
    memory = VolatileMemory()
    driver = make(host, MIXED, memory=memory)
    partition(driver, MIXED)
    (function,) = offered(driver)[f"{CARD}-H200X-3-71C"]
    driver.prepare(item(function, "H200X-3-71C"), None)
    host.reboot()
    rule = f"address={CARD},type=H200X-3-35C|H200X-3-71C|H200X-1-18C"
    driver = make(host, MIXED, rule=rule, memory=memory)
    assert current(driver) == "other"
    partition(driver, MIXED)
    assert driver._vgpus.recreate(function, driver.read_domains) == "H200X-3-71C"
    assert count_offered(driver) == {"H200X-3-71C": 1, "H200X-1-18C": 4}
    driver.release(item(function, "H200X-3-71C"))
    assert count_offered(driver) == {"H200X-3-35C": 2, "H200X-1-18C": 4}


def test_layout_whose_types_no_rule_enables_any_more_offers_nothing(
    host: SimulatedVgpuHost,
) -> None:
    memory = VolatileMemory()
    partition(make(host, SLICES, memory=memory), SLICES)
    driver = make(host, SLICES, rule=f"address={CARD},type=H200X-35C", memory=memory)
    device = discover(driver)
    assert (current(driver), device.deployables) == (SLICES, ())
    assert "no vGPU of type H200X-35C can be created" in device.vendor_board_info[NOT_OFFERED]


@pytest.mark.parametrize(
    ("mixes", "expected"),
    [
        (["1x1g.18gb+1xH200X-1-18C"], "either vGPU types or MIG profiles"),
        (["1x1g.18gb+2x1g.18gb"], "numbers of different vGPU types"),
        (["1x1g.18gb+me", "1x1g.18gb-me"], "no mix with the same trait as 1x1g.18gb\\+me"),
    ],
)
def test_mixes_that_are_ambiguous_are_refused_at_the_start(
    host: SimulatedVgpuHost, mixes: list[str], expected: str
) -> None:
    with pytest.raises(Misconfigured, match=expected):
        make(host, *mixes)


def test_card_whose_profiles_are_unknown_asks_for_its_mig_mode(host: SimulatedVgpuHost) -> None:
    host.cards[CARD].lists_all = False
    driver = make(host, MIXED)
    assert [layout.name for layout in driver.layouts(discover(driver))] == ["whole"]
    assert [text for text in driver.remarks if "enable the MIG mode once" in text]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [MIXED, "whole"])
@pytest.mark.parametrize("boot", [False, True])
def test_change_that_is_killed_at_any_effect_ends_when_it_is_applied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, boot: bool
) -> None:
    for effects in pick_points(EFFECTS):
        host = make_host(tmp_path / str(effects))
        host.redirect(monkeypatch.setattr)
        memory = VolatileMemory()
        partition(make(host, MIXED, SLICES, memory=memory), SLICES)
        if boot:
            host.reboot()
        killed = make_killed_driver(host, Life(effects), memory, **options(MIXED, SLICES))
        try:
            partition(killed, layout)
            break
        except AgentEnds:
            pass
        driver = make(host, MIXED, SLICES, memory=memory)
        assert CARD not in offered(driver), "it is not offered as a whole"
        for name, instances in ((layout, MIXED), (SLICES, SLICES)):
            partition(driver, name)
            assert (current(driver), host.cards[CARD].vgpus) == (name, {})
            expected = "" if name == "whole" else instances
            found = dict(+host.cards[CARD].instances)
            assert "+".join(f"{n}x{profile}" for profile, n in found.items()) == expected
    else:
        raise AssertionError("the change never ends")

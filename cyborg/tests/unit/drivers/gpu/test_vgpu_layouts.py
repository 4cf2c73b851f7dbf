# SPDX-License-Identifier: Apache-2.0
"""Layouts of a card: the whole card, and mixes of vGPUs, also MIG-backed ones."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import NOT_OFFERED, Ability, HandleType
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import Memory, VolatileMemory
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.kernel.nvml import GpuFacts
from cyborg.drivers.privileged import vgpu
from cyborg.testing.conformance.kit import Outcome, run_rules
from cyborg.testing.vgpu_host import SimulatedVgpuHost, VgpuType
from cyborg.tests.unit.drivers.full_memory import FullMemory
from cyborg.tests.unit.drivers.gpu.simulated_vgpus import (
    CARD,
    LARGE,
    SMALL,
    SimulatedVgpuDriver,
    discover,
    host,
    item,
    make_access,
    make_driver,
    offered,
)

__all__ = ["host"]

VFS = [f"0000:41:00.{n}" for n in range(1, 8)] + ["0000:41:01.0"]
RULE = f"address={CARD},type=H200X-70C|H200X-35C"
PAIR, MIXED = "2xH200X-70C", "1xH200X-70C+2xH200X-35C"
MIXES = [PAIR, MIXED, "4xH200X-35C"]
BACKED = (
    VgpuType(1501, "NVIDIA H200X-1-18C", 18, "1g.18gb"),
    VgpuType(1502, "NVIDIA H200X-3-71C", 71, "3g.71gb"),
    VgpuType(1503, "NVIDIA H200X-3-35C", 35, "3g.71gb", per_instance=2),
)
MIG_RULE = f"address={CARD},type=H200X-1-18C|H200X-3-71C|H200X-3-35C"
MIG_MIXED, MIG_SMALL, MIG_SHARED = (
    "1xH200X-3-71C+4xH200X-1-18C",
    "7xH200X-1-18C",
    "1xH200X-3-35C+3xH200X-1-18C",
)


@pytest.fixture
def mig_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedVgpuHost:
    found = SimulatedVgpuHost(tmp_path)
    found.add_card(CARD, (*BACKED, SMALL), framebuffer=141, numvfs=8, mig=True)
    found.redirect(monkeypatch.setattr)
    return found


def make(
    host: SimulatedVgpuHost,
    rule: str = RULE,
    mixes: Sequence[str] = MIXES,
    memory: Memory | None = None,
    **options: Any,
) -> GpuDriver:
    options = {"devices": ["address=*"], "reset": "never"} | options
    return make_driver(host, rule, vgpu_layouts=list(mixes), memory=memory, **options)


def layouts(driver: GpuDriver) -> dict[str, dict[str, int]]:
    return {layout.name: dict(layout.offers) for layout in driver.layouts(discover(driver))}


def current(driver: GpuDriver) -> str:
    device = discover(driver)
    (layout,) = (found for found in driver.layouts(device) if found.matches(device))
    return layout.name


def partition(driver: GpuDriver, layout: str) -> None:
    driver.partition(WorkItem("gpus", CARD, "", ""), layout)


def state(host: SimulatedVgpuHost) -> tuple[bool, bool, dict[str, int], list[str]]:
    """Return whether SR-IOV and the heterogeneous mode are on, GPU instances, and vGPUs."""
    card = host.cards[CARD]
    instances = {profile: count for profile, count in card.instances.items() if count}
    return bool(card.functions), card.heterogeneous, instances, sorted(card.vgpus)


def test_layouts_of_a_whole_card_are_its_mixes(host: SimulatedVgpuHost) -> None:
    driver = make(host)
    assert Ability.PARTITIONS in driver.abilities
    assert layouts(driver) == {
        "whole": {"PGPU": 1},
        PAIR: {"VGPU": 2},
        MIXED: {"VGPU": 3},
        "4xH200X-35C": {"VGPU": 4},
    }
    assert current(driver) == "whole"
    (part,) = discover(driver).deployables
    assert "CUSTOM_GPU_LAYOUT_WHOLE" in part.traits
    assert driver.remarks == ()


@pytest.mark.parametrize(
    "mix", ["3xH200X-70C", "1xH200X-999C", "1xH200X-141C", "2xH200X-70C+1xH200X-35C"]
)
def test_layouts_without_an_impossible_mix(host: SimulatedVgpuHost, mix: str) -> None:
    """Too many, unknown to the card, not enabled by the rule, together too many."""
    assert list(layouts(make(host, mixes=[mix, PAIR]))) == ["whole", PAIR]


def test_layouts_of_a_card_that_no_rule_offers_as_a_whole(host: SimulatedVgpuHost) -> None:
    driver = make(host, devices=[])
    device = discover(driver)
    assert device.deployables == ()
    assert (
        "its virtual functions are offered in another layout"
        in (device.vendor_board_info[NOT_OFFERED])
    )
    assert layouts(driver)["whole"] == {}
    partition(driver, PAIR)
    assert offered(driver) == {f"{CARD}-H200X-70C": VFS[:2]}
    partition(driver, "whole")
    assert (offered(driver), current(driver)) == ({}, "whole")


@pytest.mark.slow
@pytest.mark.matrix  # a case of test_partition_to_each_layout_from_each_layout of the MIG modes
def test_partition_to_each_layout_from_each_layout(host: SimulatedVgpuHost) -> None:
    driver = make(host)
    for first in ("whole", *MIXES):
        for second in ("whole", *MIXES):
            partition(driver, first)
            partition(driver, second)
            assert current(driver) == second
            on = second != "whole"
            assert state(host) == (on, second == MIXED, {}, [])
            types = {h.type for d in discover(driver).deployables for h in d.handles}
            assert types == {HandleType.VFIO if on else HandleType.PCI}


def test_partition_to_a_mix_offers_its_types_with_their_traits(host: SimulatedVgpuHost) -> None:
    driver = make(host)
    partition(driver, MIXED)
    large, small = discover(driver).deployables
    assert [h.address for h in large.handles] == VFS[:1]
    assert [h.address for h in small.handles] == VFS[1:3]
    assert {"CUSTOM_GPU_LAYOUT_1XH200X_70C_2XH200X_35C", "CUSTOM_VGPU_H200X_70C"} <= large.traits
    for handle in VFS[1:3]:
        driver.prepare(item(handle, "H200X-35C"), None)
    driver.prepare(item(VFS[0]), None)
    assert [host.current(f) for f in VFS[:3]] == [LARGE.name, SMALL.name, SMALL.name]
    assert current(driver) == MIXED


def test_partition_keeps_the_vgpu_of_a_stopped_server(host: SimulatedVgpuHost) -> None:
    driver = make(host)
    partition(driver, MIXED)
    driver.prepare(item(VFS[0]), None)
    for layout in ("whole", PAIR, "4xH200X-35C"):
        with pytest.raises(DriverFailed, match=f"{VFS[0]} has the vGPU of a server; delete the"):
            partition(driver, layout)
    assert (current(driver), host.current(VFS[0])) == (MIXED, LARGE.name)
    driver.release(item(VFS[0]))
    partition(driver, "whole")
    assert current(driver) == "whole"


def test_partition_after_a_boot_keeps_what_was_prepared_after_its_failure(
    host: SimulatedVgpuHost,
) -> None:
    driver = make(host)
    partition(driver, PAIR)
    driver.prepare(item(VFS[1]), None)
    host.reboot()
    host.failing = {"current_vgpu_type", "-d"}  # the first attempt, and its undoing
    with pytest.raises(DriverFailed, match="could not be undone"):
        partition(driver, PAIR)
    host.failing = set()
    assert current(driver) == "other"
    driver.prepare(item(VFS[1]), None)  # the restore job of its server, which is stopped
    host.writes.clear()
    driver._vgpus.records.put_layout(CARD, None)
    partition(driver, PAIR)
    assert (current(driver), host.current(VFS[1])) == (PAIR, LARGE.name)
    written = [path.partition("/")[0] for path, _ in host.writes]
    assert written == [VFS[0]] * 2, "only the other vGPU of the mix is tried"


def test_partition_without_a_record_changes_nothing(host: SimulatedVgpuHost) -> None:
    memory = FullMemory()
    driver = make(host, memory=memory)
    before = state(host)
    with pytest.raises(DriverFailed, match=f"{CARD} cannot be recorded: free space"):
        partition(driver, PAIR)
    assert (state(host), host.commands) == (before, [])
    memory.is_full = False
    partition(driver, PAIR)
    assert current(driver) == PAIR


def test_partition_is_idempotent_and_survives_a_restart(host: SimulatedVgpuHost) -> None:
    memory = VolatileMemory()
    partition(make(host, memory=memory), MIXED)
    commands = list(host.commands)
    driver = make(host, memory=memory)
    partition(driver, MIXED)
    assert current(driver) == MIXED
    assert host.commands == commands == [f"sriov-manage -e {CARD}"]


def test_partition_after_a_boot_applies_the_mix_again(host: SimulatedVgpuHost) -> None:
    driver = make(host)
    partition(driver, MIXED)
    driver.prepare(item(VFS[0]), None)
    host.reboot()
    assert current(driver) == "other"
    with pytest.raises(DriverFailed, match=f"{VFS[0]} has the vGPU of a server; delete the"):
        partition(driver, "whole")
    partition(driver, MIXED)
    driver.prepare(item(VFS[0]), None)
    assert current(driver) == MIXED
    assert host.current(VFS[0]) == LARGE.name


def test_mix_whose_mode_another_program_cleared_is_another_layout(host: SimulatedVgpuHost) -> None:
    """So is SR-IOV that an operator enables at each boot, without the heterogeneous mode."""
    driver = make(host)
    partition(driver, MIXED)
    assert current(driver) == MIXED
    host.manage_sriov(CARD, enable=False)
    host.manage_sriov(CARD, enable=True)
    assert current(driver) == "other"
    partition(driver, MIXED)
    assert state(host)[1], "the heterogeneous mode"
    with pytest.raises(DriverFailed, match=f"expected one of whole, {PAIR}, "):
        partition(driver, "other")
    host.set_heterogeneous(CARD, enable=False)
    partition(driver, MIXED)
    assert state(host)[1], "the mode is read again before the change"


@pytest.mark.parametrize(
    ("previous", "layout", "step", "expected"),
    [
        ("whole", MIXED, "-e", "sriov-manage failed"),
        ("whole", MIXED, "heterogeneous", "the heterogeneous mode of"),
        ("whole", MIXED, "current_vgpu_type", "refused '1420'"),
        (PAIR, MIXED, "heterogeneous", "the heterogeneous mode of"),
        (PAIR, MIXED, "current_vgpu_type", "refused '1420'"),
        (MIXED, PAIR, "current_vgpu_type", "refused '1420'"),
        (PAIR, "whole", "-d", "sriov-manage failed"),
    ],
)
def test_partition_that_fails_at_a_step_undoes_the_steps_before(
    host: SimulatedVgpuHost, previous: str, layout: str, step: str, expected: str
) -> None:
    driver = make(host)
    partition(driver, previous)
    before = state(host)
    host.failing = {step}
    with pytest.raises(DriverFailed, match=f"{expected}.*; {CARD} is as before"):
        partition(driver, layout)
    assert (state(host), current(driver)) == (before, previous)
    host.failing = set()
    partition(driver, layout)
    assert current(driver) == layout


def test_partition_that_cannot_be_undone_says_so(host: SimulatedVgpuHost) -> None:
    driver = make(host)
    host.failing = {"heterogeneous", "-d"}
    with pytest.raises(
        DriverFailed, match="the steps before could not be undone: sriov-manage failed"
    ):
        partition(driver, MIXED)
    assert current(driver) == "other"


def test_partition_that_the_card_refuses_is_undone(host: SimulatedVgpuHost) -> None:
    """A mix that NVML permits, and the card does not: its placement has rules of its own."""
    driver = make(host)
    partition(driver, "whole")
    host.cards[CARD].framebuffer = 130  # two of 70 GB do not fit
    host.read_facts = lambda address: GpuFacts(  # type: ignore[method-assign]
        max_vgpus={"H200X-70C": 2}, vgpu_memory={"H200X-70C": 70 << 30}, heterogeneous=False
    )
    driver = make(host, mixes=[PAIR])
    with pytest.raises(DriverFailed, match="cannot have a vGPU of type H200X-70C now"):
        partition(driver, PAIR)
    assert state(host) == (False, False, {}, [])


def test_partition_with_a_vgpu_of_another_program_is_refused(host: SimulatedVgpuHost) -> None:
    driver = make(host)
    partition(driver, PAIR)
    host.write_attribute(host.bus / VFS[5] / "nvidia/current_vgpu_type", str(LARGE.id))
    for layout in ("whole", MIXED):
        with pytest.raises(DriverFailed, match=f"{VFS[5]} has a vGPU that this service did not"):
            partition(driver, layout)
    assert host.current(VFS[5]) == LARGE.name
    assert current(driver) == PAIR


def test_partition_of_a_card_that_a_domain_has_is_refused(host: SimulatedVgpuHost) -> None:
    host.give_to_domain(CARD, "guest1")
    with pytest.raises(DriverFailed, match="it is used by the domain guest1 of libvirt"):
        partition(make(host), PAIR)
    assert host.commands == []


def test_partition_with_too_few_virtual_functions_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = SimulatedVgpuHost(tmp_path)
    host.add_card(CARD, (LARGE,), framebuffer=141, numvfs=1)
    host.redirect(monkeypatch.setattr)
    with pytest.raises(DriverFailed, match="has 1 virtual functions for 2 vGPUs of 2xH200X-70C"):
        partition(make(host), PAIR)
    assert state(host)[0] is False


def test_partition_after_the_end_of_the_agent_removes_what_was_tried(
    host: SimulatedVgpuHost,
) -> None:
    class AgentEnds(BaseException):
        """The agent is killed."""

    def end(address: str) -> None:
        raise AgentEnds

    def set_sriov(address: str, enable: bool, script: str) -> None:
        if not enable:
            raise AgentEnds
        vgpu.set_sriov(address, enable, script)

    memory = VolatileMemory()
    driver = make(host, memory=memory)
    access = replace(make_access(host), remove_vgpu=end, set_sriov=set_sriov)
    driver = GpuDriver("gpus", driver.options, host.root, access)
    driver.memory = memory
    with pytest.raises(AgentEnds):
        partition(driver, PAIR)
    assert state(host)[3] == VFS[:2]
    driver = make(host, memory=memory)
    assert current(driver) == "other"
    assert "did not create" not in discover(driver).vendor_board_info.get(NOT_OFFERED, "")
    partition(driver, PAIR)
    assert (current(driver), state(host)[3]) == (PAIR, [])
    host.write_attribute(host.bus / VFS[5] / "nvidia/current_vgpu_type", str(LARGE.id))
    with pytest.raises(DriverFailed, match="did not create"):
        partition(driver, MIXED)


@pytest.mark.parametrize("layout", ["", "3xH200X-70C", "../x", "fixed", "other"])
def test_partition_unknown_layout_changes_nothing(host: SimulatedVgpuHost, layout: str) -> None:
    driver = make(host)
    with pytest.raises(DriverFailed, match=f"expected one of whole, {PAIR}, "):
        partition(driver, layout)
    assert host.commands == []


def test_mix_with_a_foreign_vgpu_offers_less(host: SimulatedVgpuHost) -> None:
    driver = make(host)
    partition(driver, PAIR)
    host.write_attribute(host.bus / VFS[5] / "nvidia/current_vgpu_type", str(LARGE.id))
    assert offered(driver) == {f"{CARD}-H200X-70C": VFS[:1]}


def test_mig_layouts_are_mixes_of_mig_backed_types(mig_host: SimulatedVgpuHost) -> None:
    mixes = [MIG_MIXED, MIG_SMALL, MIG_SHARED, "8xH200X-1-18C", "4xH200X-35C", PAIR]
    driver = make(mig_host, f"{MIG_RULE}|H200X-35C", mixes)
    sliced = "4xH200X-35C"
    assert list(layouts(driver)) == ["other", "whole", MIG_MIXED, MIG_SMALL, MIG_SHARED, sliced]


@pytest.mark.parametrize(
    ("layout", "instances", "offers"),
    [
        (MIG_MIXED, {"3g.71gb": 1, "1g.18gb": 4}, {"H200X-3-71C": 1, "H200X-1-18C": 4}),
        (MIG_SMALL, {"1g.18gb": 7}, {"H200X-1-18C": 7}),
        (MIG_SHARED, {"3g.71gb": 1, "1g.18gb": 3}, {"H200X-3-35C": 1, "H200X-1-18C": 3}),
    ],
)
def test_mig_partition_creates_the_instances_that_the_types_need(
    mig_host: SimulatedVgpuHost, layout: str, instances: dict[str, int], offers: dict[str, int]
) -> None:
    driver = make(mig_host, MIG_RULE, [MIG_MIXED, MIG_SMALL, MIG_SHARED])
    partition(driver, MIG_MIXED)
    partition(driver, layout)
    assert current(driver) == layout
    assert state(mig_host) == (True, False, instances, [])
    found = offered(driver)
    assert {part: len(handles) for part, handles in found.items()} == {
        f"{CARD}-{name}": count for name, count in offers.items()
    }
    for part, handles in found.items():
        for handle in handles:
            driver.prepare(item(handle, part.removeprefix(f"{CARD}-")), None)
    assert current(driver) == layout
    for handle in (h for handles in found.values() for h in handles):
        driver.release(item(handle))
    partition(driver, "whole")
    assert state(mig_host) == (False, False, {}, [])


def test_mig_partition_to_whole_that_fails_keeps_the_instances(
    mig_host: SimulatedVgpuHost,
) -> None:
    driver = make(mig_host, MIG_RULE, [MIG_SMALL])
    partition(driver, MIG_SMALL)
    before = state(mig_host)
    mig_host.failing = {"-d"}
    with pytest.raises(DriverFailed, match=r"sriov-manage failed.* is as before"):
        partition(driver, "whole")
    assert (state(mig_host), current(driver)) == (before, MIG_SMALL)


@pytest.mark.parametrize("previous", ["whole", MIG_SMALL])
@pytest.mark.parametrize("step", ["instances", "current_vgpu_type"])
def test_mig_partition_that_fails_at_a_step_undoes_the_steps_before(
    mig_host: SimulatedVgpuHost, previous: str, step: str
) -> None:
    driver = make(mig_host, MIG_RULE, [MIG_MIXED, MIG_SMALL])
    partition(driver, previous)
    before = state(mig_host)
    mig_host.failing = {step}
    undone = step != "instances" or previous == "whole"
    with pytest.raises(DriverFailed, match="is as before" if undone else "could not be undone"):
        partition(driver, MIG_MIXED)
    if undone:
        assert (state(mig_host), current(driver)) == (before, previous)
    else:
        assert current(driver) == "other"
    mig_host.failing = set()
    partition(driver, previous)
    assert (state(mig_host), current(driver)) == (before, previous)


def test_card_without_rule_has_a_fixed_layout(host: SimulatedVgpuHost) -> None:
    driver = make(host, "address=0000:99:00.0,type=H200X-70C")
    assert list(layouts(driver)) == ["fixed"]


@pytest.mark.slow
def test_gpu_driver_with_vgpu_layouts_passes_all_rules(host: SimulatedVgpuHost) -> None:
    SimulatedVgpuDriver.kernel = host
    options = {
        "vgpu_types": [RULE],
        "vgpu_layouts": MIXES,
        "devices": ["address=*"],
        "reset": "never",
    }
    memory = VolatileMemory()
    driver = SimulatedVgpuDriver("gpus", options, host.root)
    driver.memory = memory
    results = run_rules(
        SimulatedVgpuDriver, options, sysfs_root=host.root, work=True, entry_point="gpu"
    )
    outcomes = {result.rule.name: (result.outcome, result.reason) for result in results}
    failed = {n: r for n, r in outcomes.items() if r[0] in (Outcome.FAILED, Outcome.BLOCKED)}
    # The class of a test module imports more than a driver may.
    assert set(failed) <= {"imports_only_core_and_drivers"}
    assert outcomes["partition_is_discovered"][0] is Outcome.PASSED
    assert state(host) == (False, False, {}, [])


@pytest.mark.slow
def test_gpu_driver_with_vgpus_passes_all_rules(host: SimulatedVgpuHost) -> None:
    host.manage_sriov(CARD, enable=True)
    SimulatedVgpuDriver.kernel = host
    options = {"vgpu_types": [RULE]}
    results = run_rules(
        SimulatedVgpuDriver, options, sysfs_root=host.root, work=True, entry_point="gpu"
    )
    failed = {r.rule.name for r in results if r.outcome in (Outcome.FAILED, Outcome.BLOCKED)}
    assert failed <= {"imports_only_core_and_drivers"}
    assert any(text != "0" for _, text in host.writes), "a handle was prepared"
    assert state(host) == (True, False, {}, [])

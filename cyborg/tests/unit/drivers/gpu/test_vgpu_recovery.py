# SPDX-License-Identifier: Apache-2.0
"""Changes of a layout that did not end, and vGPUs that are not as they were recorded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import VolatileMemory
from cyborg.drivers.gpu import card_locks
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.privileged import vgpu
from cyborg.testing.vgpu_host import SimulatedVgpuHost
from cyborg.tests.fixtures.machine.tiers import pick_points
from cyborg.tests.unit.drivers.gpu.simulated_gpu import reading
from cyborg.tests.unit.drivers.gpu.simulated_vgpus import (
    CARD,
    LARGE,
    SMALL,
    AgentEnds,
    Life,
    discover,
    host,
    item,
    make_access,
    make_driver,
    make_host,
    make_killed_driver,
    offered,
)

__all__ = ["host"]

VFS = [f"0000:41:00.{n}" for n in range(1, 8)] + ["0000:41:01.0"]
RULE = f"address={CARD},type=H200X-70C|H200X-35C"
PAIR, SMALLS = "2xH200X-70C", "4xH200X-35C"
OPTIONS: dict[str, Any] = {
    "vgpu_layouts": [PAIR, SMALLS],
    "devices": ["address=*"],
    "reset": "never",
}


EFFECTS = 100  # more than a change has


def make(host: SimulatedVgpuHost, memory: VolatileMemory, life: Life | None = None) -> GpuDriver:
    if life is None:
        return make_driver(host, RULE, memory=memory, **OPTIONS)
    return make_killed_driver(host, life, memory, vgpu_types=[RULE], **OPTIONS)


def current(driver: GpuDriver) -> str:
    device = discover(driver)
    return next(found for found in driver.layouts(device) if found.matches(device)).name


def partition(driver: GpuDriver, layout: str) -> None:
    driver.partition(WorkItem("gpus", CARD, "", ""), layout)


def is_killed(driver: GpuDriver, layout: str) -> bool:
    try:
        partition(driver, layout)
    except AgentEnds:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("layout", [PAIR, SMALLS])
@pytest.mark.parametrize("boot", [False, True])
def test_change_that_is_killed_at_any_effect_ends_when_it_is_applied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, boot: bool
) -> None:
    """PAIR is what the memory has: also a repeated change to it, and one back to it, must end."""
    left = 0
    for effects in pick_points(EFFECTS):
        host = make_host(tmp_path / str(effects))
        host.redirect(monkeypatch.setattr)
        memory = VolatileMemory()
        partition(make(host, memory), PAIR)
        if boot:
            host.reboot()
        if not is_killed(make(host, memory, Life(effects)), layout):
            break
        left += bool(host.cards[CARD].vgpus)
        driver = make(host, memory)
        assert "did not create" not in discover(driver).vendor_board_info.get(NOT_OFFERED, "")
        partition(driver, PAIR)
        assert (current(driver), host.cards[CARD].vgpus) == (PAIR, {})
        host.write_attribute(host.bus / VFS[5] / "nvidia/current_vgpu_type", str(LARGE.id))
        with pytest.raises(DriverFailed, match=f"{VFS[5]} has a vGPU that this service did not"):
            partition(driver, SMALLS)
    else:
        raise AssertionError("the change never ends")
    changes = boot or layout != PAIR
    assert (left > 0) == changes, "the agent was killed while vGPUs were tried"


@pytest.mark.slow
def test_change_that_did_not_end_keeps_the_vgpu_of_another_program(
    host: SimulatedVgpuHost,
) -> None:
    memory = VolatileMemory()
    partition(make(host, memory), PAIR)
    host.reboot()
    effects = 0
    while not host.cards[CARD].vgpus:
        effects += 1
        assert is_killed(make(host, memory, Life(effects)), PAIR)
    assert host.cards[CARD].vgpus == {VFS[0]: LARGE}
    host.write_attribute(host.bus / VFS[5] / "nvidia/current_vgpu_type", str(LARGE.id))
    driver = make(host, memory)
    assert current(driver) == "other"
    for layout in (PAIR, "whole"):
        with pytest.raises(DriverFailed, match=f"{VFS[5]} has a vGPU that this service did not"):
            partition(driver, layout)
    assert host.current(VFS[5]) == LARGE.name


def test_change_that_did_not_end_offers_what_servers_have(host: SimulatedVgpuHost) -> None:
    memory, mixed = VolatileMemory(), "1xH200X-70C+2xH200X-35C"
    options: dict[str, Any] = {**OPTIONS, "vgpu_layouts": [mixed]}
    driver = make_driver(host, RULE, memory=memory, **options)
    partition(driver, mixed)
    driver.prepare(item(VFS[0]), None)
    driver.prepare(item(VFS[1], "H200X-35C"), None)
    driver._vgpus.records.begin_change(CARD)
    assert offered(driver) == {f"{CARD}-H200X-70C": VFS[:1], f"{CARD}-H200X-35C": VFS[1:2]}
    assert "a change did not end" in discover(driver).vendor_board_info[NOT_OFFERED]
    partition(driver, mixed)
    assert offered(driver) == {f"{CARD}-H200X-70C": VFS[:1], f"{CARD}-H200X-35C": VFS[1:3]}


def test_change_that_did_not_end_keeps_the_vgpu_of_a_server_at_a_tried_function(
    host: SimulatedVgpuHost,
) -> None:
    memory = VolatileMemory()
    driver = make(host, memory)
    partition(driver, PAIR)
    driver._vgpus.records.begin_change(CARD)
    driver._vgpus.records.put_tried(VFS[0], "H200X-70C")
    driver.prepare(item(VFS[0]), None)
    host.writes.clear()
    partition(driver, PAIR)
    assert (current(driver), host.current(VFS[0])) == (PAIR, LARGE.name)
    assert {path.partition("/")[0] for path, _ in host.writes} == {VFS[1]}


@pytest.mark.parametrize("nvml", [True, False])
def test_card_without_its_functions_is_not_offered_as_a_whole(
    host: SimulatedVgpuHost, nvml: bool
) -> None:
    """A boot, or ``sriov-manage -d`` while the servers are stopped, removes them."""
    memory = VolatileMemory()
    partition(make(host, memory), PAIR)
    make(host, memory).prepare(item(VFS[0]), None)
    host.manage_sriov(CARD, enable=False)
    driver = make_driver(host, RULE, nvml=nvml, memory=memory, **OPTIONS)
    device = discover(driver)
    assert (current(driver), device.deployables) == ("other", ())
    assert "apply the layout again" in device.vendor_board_info[NOT_OFFERED]
    with pytest.raises(DriverFailed, match="virtual functions of its layout or of servers"):
        driver.check_unused(CARD)
    for layout in ("whole", SMALLS):
        with pytest.raises(DriverFailed, match=f"{VFS[0]} has the vGPU of a server"):
            partition(make(host, memory), layout)
    make(host, memory).release(item(VFS[0]))
    partition(make(host, memory), "whole")
    assert offered(make(host, memory)) == {CARD: [CARD]}


def test_card_without_layouts_whose_servers_lost_their_functions_is_not_offered(
    host: SimulatedVgpuHost,
) -> None:
    host.manage_sriov(CARD, enable=True)
    memory = VolatileMemory()
    options: dict[str, Any] = {"devices": ["address=*"], "reset": "never"}
    make_driver(host, RULE, memory=memory, **options).prepare(item(VFS[0]), None)
    host.manage_sriov(CARD, enable=False)
    driver = make_driver(host, RULE, memory=memory, **options)
    assert offered(driver) == {}
    driver.release(item(VFS[0]))
    assert offered(driver) == {CARD: [CARD]}


def test_layouts_are_those_of_the_stored_facts_while_nvml_cannot_be_read(
    host: SimulatedVgpuHost,
) -> None:
    memory = VolatileMemory()
    partition(make(host, memory), PAIR)
    driver = make_driver(host, RULE, nvml=False, memory=memory, **OPTIONS)
    assert current(driver) == PAIR
    names = {layout.name for layout in driver.layouts(discover(driver))}
    assert names == {"whole", PAIR, SMALLS}


def test_recreate_of_a_function_with_a_vgpu_of_another_type_fails(host: SimulatedVgpuHost) -> None:
    host.manage_sriov(CARD, enable=True)
    memory = VolatileMemory()
    driver = make_driver(host, RULE, memory=memory)
    driver.prepare(item(VFS[0]), None)
    driver.recreate(VFS[0])
    path = host.bus / VFS[0] / "nvidia/current_vgpu_type"
    host.write_attribute(path, "0")
    host.write_attribute(path, str(SMALL.id))
    for reader in (driver, make_driver(host, RULE, memory=memory, nvml=False)):
        with pytest.raises(DriverFailed, match=f"{VFS[0]} cannot .* a vGPU of type H200X-35C, and"):
            reader.recreate(VFS[0])
        reason = discover(reader).vendor_board_info[NOT_OFFERED]
        assert "a vGPU of type H200X-35C, and this service created one of H200X-70C" in reason
    assert host.current(VFS[0]) == SMALL.name
    driver.release(item(VFS[0]))
    driver.prepare(item(VFS[0]), None)
    assert host.current(VFS[0]) == LARGE.name


def test_recreate_compares_the_id_of_a_type_whose_name_is_unknown(
    host: SimulatedVgpuHost,
) -> None:
    """A full card lists no types, and without NVML their names are unknown."""
    host.manage_sriov(CARD, enable=True)
    memory = VolatileMemory()
    driver = make_driver(host, f"{RULE}|H200X-141C", memory=memory, nvml=False)
    driver.prepare(item(VFS[0], "H200X-141C"), None)
    driver.recreate(VFS[0])
    assert offered(driver) == {f"{CARD}-H200X-141C": [VFS[0]]}
    memory.put(f"vgpu id {VFS[0]}", str(LARGE.id))
    with pytest.raises(DriverFailed, match="a vGPU of type number 1428, and this service"):
        driver.recreate(VFS[0])


@pytest.mark.parametrize("error", [OSError("disk"), RuntimeError("daemon ended")])
def test_change_that_fails_with_another_error_is_undone(
    host: SimulatedVgpuHost, error: Exception
) -> None:
    def fail(function: str, type_: str, parameters: str) -> None:
        raise error

    access = replace(make_access(host), create_vgpu=fail)
    driver = GpuDriver("gpus", {"vgpu_types": [RULE], **OPTIONS}, host.root, access)
    with pytest.raises(DriverFailed, match=f"{error}; {CARD} is as before"):
        partition(driver, PAIR)
    assert current(driver) == "whole"
    assert not host.cards[CARD].functions


def test_change_whose_step_had_no_effect_fails(host: SimulatedVgpuHost) -> None:
    def set_sriov(address: str, enable: bool, script: str) -> None:
        if enable:
            vgpu.set_sriov(address, enable, script)

    driver = make(host, VolatileMemory())
    partition(driver, PAIR)
    access = replace(make_access(host), set_sriov=set_sriov)
    other = GpuDriver("gpus", {"vgpu_types": [RULE], **OPTIONS}, host.root, access)
    other.memory = driver.memory
    with pytest.raises(DriverFailed, match=f"{CARD} is in another state after the change"):
        partition(other, "whole")
    assert current(driver) == PAIR


@pytest.mark.parametrize("needs_reset", [False, True])
@pytest.mark.parametrize("options", [OPTIONS, {**OPTIONS, "vgpu_layouts": []}])
def test_mig_mode_that_another_program_enables_is_noticed_when_a_server_gets_the_card(
    host: SimulatedVgpuHost, needs_reset: bool, options: dict[str, Any]
) -> None:
    driver = make_driver(host, RULE, memory=VolatileMemory(), **options)
    assert offered(driver) == {CARD: [CARD]}
    driver.prepare(item(CARD), None)
    driver.release(item(CARD))
    host.cards[CARD].needs_reset = needs_reset
    host.request_mig_mode(CARD, enable=True)
    with pytest.raises(DriverFailed, match=r"a change of its MIG mode|it is in MIG mode"):
        driver.prepare(item(CARD), None)
    assert offered(driver) == {}


def test_change_of_a_card_excludes_other_jobs_of_the_card_only(
    host: SimulatedVgpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TIMEOUT", "READ_TIMEOUT"):
        monkeypatch.setattr(card_locks, name, 0.01)
    driver = make(host, VolatileMemory())
    partition(driver, PAIR)
    driver.prepare(item(VFS[1]), None)
    host.write_attribute(host.bus / VFS[1] / "nvidia/current_vgpu_type", "0")
    with card_locks.locked(CARD):
        jobs: tuple[Callable[[], None], ...] = (
            lambda: driver.prepare(item(VFS[0]), None),
            lambda: driver.release(item(VFS[1])),
            lambda: driver.recreate(VFS[1]),
            lambda: partition(driver, "whole"),
        )
        for job in jobs:
            with pytest.raises(DriverFailed, match=f"{CARD} is being changed by another job"):
                job()
        assert offered(driver) == {f"{CARD}-H200X-70C": VFS[:2]}
        with card_locks.locked("0000:42:00.0"):
            assert host.cards[CARD].vgpus == {}
    driver.recreate(VFS[1])
    assert host.current(VFS[1]) == LARGE.name


@pytest.mark.slow
def test_jobs_of_a_card_wait_for_a_discovery_that_reads_it(
    host: SimulatedVgpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML may have to initialise the card, which takes longer than a short job."""
    monkeypatch.setattr(card_locks, "TIMEOUT", 0.01)
    driver = make(host, VolatileMemory())

    def remove() -> None:
        host.write_attribute(host.bus / VFS[0] / "nvidia/current_vgpu_type", "0")

    with reading(CARD):
        partition(driver, PAIR)
    assert offered(driver) == {f"{CARD}-H200X-70C": VFS[:2]}
    with reading(CARD):
        driver.prepare(item(VFS[0]), None)
    remove()
    with reading(CARD):
        driver.recreate(VFS[0])
    assert host.current(VFS[0]) == LARGE.name
    with reading(CARD):
        driver.release(item(VFS[0]))
    assert host.current(VFS[0]) == ""

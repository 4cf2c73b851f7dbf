# SPDX-License-Identifier: Apache-2.0
"""Limits of the virtual functions of a card, and functions that Nova cannot attach."""

from dataclasses import replace
from pathlib import Path

import pytest

from cyborg.core.errors import Misconfigured
from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import VolatileMemory
from cyborg.drivers.gpu import card_locks
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.gpu.mdev import Slot, SlotPlan, limit_slots
from cyborg.drivers.kernel.nvml import GpuFacts
from cyborg.testing.machine import HostTree
from cyborg.tests.unit.drivers.gpu.simulated_gpu import (
    SimulatedKernel,
    changing,
    privileged_access,
    reading,
)

CARD, TYPE = "0000:6e:00.0", "nvidia-561"
FOREIGN = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"


class Source:
    """NVML with a limit of one type, whose name has a product line in sysfs."""

    def __init__(self, limit: int | None) -> None:
        self._limits = {} if limit is None else {TYPE: limit}  # the name is "Name of" the type

    def read(self, address: str) -> GpuFacts | None:
        return GpuFacts(max_vgpus=self._limits)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedKernel:
    tree = SimulatedKernel(tmp_path)
    tree.add_function(CARD, "10de", "2235", "030200", kernel_driver="nvidia", totalvfs=16)
    for parent in tree.enable_virtual_functions(CARD, 8, "2235", "030200"):
        (tree.bus / parent / "vendor").write_text("0x10de\n")
        tree.add_parent(parent, 1, {TYPE: 1})
    tree.redirect(monkeypatch)
    return tree


def make_driver(kernel: SimulatedKernel, rule: str = "", limit: int | None = None) -> GpuDriver:
    options = {"mdev_types": [f"address=0000:6e:00.[1-7]|0000:6e:01.0,type={TYPE}{rule}"]}
    access = replace(privileged_access(kernel.root), nvml=Source(limit).read)
    driver = GpuDriver("gpus", options, kernel.root, access)
    driver.host = "compute-1"
    return driver


def offered(driver: GpuDriver) -> list[str]:
    (device,) = driver.discover()
    return [h.address for part in device.deployables for h in part.handles]


def item(handle: str) -> WorkItem:
    return WorkItem("gpus", CARD, handle.partition("/")[0], handle)


def slot(number: int) -> str:
    return f"0000:6e:0{number // 8}.{number % 8}/{TYPE}/0"


@pytest.mark.parametrize(
    ("rule", "limit", "expected"),
    [("", None, 8), (",max_per_card=4", None, 4), ("", 3, 3), (",max_per_card=4", 3, 4)],
    ids=["no limit", "rule", "NVML", "rule overrides NVML"],
)
def test_discover_offers_no_more_slots_than_a_card_can_have(
    kernel: SimulatedKernel, rule: str, limit: int | None, expected: int
) -> None:
    driver = make_driver(kernel, rule, limit)
    assert offered(driver) == [slot(number) for number in range(1, 1 + expected)]
    assert driver.remarks == ()


def test_discover_card_whose_gpu_instances_are_unknown_offers_one_slot_more(
    kernel: SimulatedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML may not list them: the maximum of a card with all instances would be a guess."""
    facts = GpuFacts(
        mig="enabled",
        max_vgpus={TYPE: 7},
        mig_profiles={"1g.10gb": 7},
        vgpu_profiles={TYPE: "1g.10gb"},
    )
    monkeypatch.setattr(Source, "read", lambda self, address: facts)
    driver = make_driver(kernel)
    assert offered(driver) == [slot(1)]
    driver.prepare(item(slot(1)), None)
    assert offered(driver) == [slot(1), slot(2)]
    assert len(offered(make_driver(kernel, ",max_per_card=4"))) == 4


def test_discover_slots_stay_the_same_while_they_are_used(kernel: SimulatedKernel) -> None:
    driver = make_driver(kernel, ",max_per_card=3")
    before = offered(driver)
    for handle in reversed(before):
        driver.prepare(item(handle), None)
        assert offered(driver) == before


def test_discover_card_that_was_not_read_since_a_restart_keeps_its_limit(
    kernel: SimulatedKernel,
) -> None:
    """A discovery has had no time to read it, or a job changes it."""
    memory = VolatileMemory()
    driver = make_driver(kernel, limit=3)
    driver.memory = memory
    expected = [slot(number) for number in range(1, 4)]
    assert offered(driver) == expected
    driver = make_driver(kernel, limit=3)
    driver.memory = memory
    with changing(CARD):
        assert offered(driver) == expected


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 3])
def test_discover_card_that_was_never_read_offers_what_servers_have(
    kernel: SimulatedKernel, limit: int | None
) -> None:
    make_driver(kernel).prepare(item(slot(6)), None)
    driver = make_driver(kernel, limit=limit)
    with changing(CARD):
        assert offered(driver) == [slot(6)]
        (device,) = driver.discover()
        assert "was not read yet" in device.vendor_board_info[NOT_OFFERED]
        assert len(offered(make_driver(kernel, ",max_per_card=4"))) == 4
    assert len(offered(driver)) == (limit or 8)
    without = make_driver(kernel)
    without = GpuDriver(
        "gpus",
        without.options,
        kernel.root,
        replace(privileged_access(kernel.root), has_nvml=lambda: False),
    )
    without.host = driver.host
    with changing(CARD):
        assert len(offered(without)) == 8, "without NVML it is never read"


def test_jobs_of_a_slot_wait_for_a_discovery_that_reads_the_card(
    kernel: SimulatedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_locks, "TIMEOUT", 0.01)
    driver = make_driver(kernel)
    with reading(CARD):
        driver.prepare(item(slot(1)), None)
    assert len(kernel.devices()) == 1
    with reading(CARD):
        driver.release(item(slot(1)))
    assert kernel.devices() == []


def test_discover_used_slots_and_devices_of_others_count_first(kernel: SimulatedKernel) -> None:
    unlimited = make_driver(kernel)
    unlimited.prepare(item(slot(6)), None)
    folder = kernel.bus / "0000:6e:00.7" / "mdev_supported_types" / TYPE
    kernel.write(folder / "create", FOREIGN)
    driver = make_driver(kernel, ",max_per_card=4")
    assert offered(driver) == [slot(1), slot(2), slot(6)]
    assert offered(make_driver(kernel, ",max_per_card=1")) == [slot(6)], "a server may use it"


def test_discover_several_types_keep_the_one_that_has_devices(kernel: SimulatedKernel) -> None:
    parent = "0000:5e:00.0"
    kernel.add_function(parent, "10de", "1eb8", "030200", kernel_driver="nvidia")
    kernel.add_parent(parent, 4, {"nvidia-1": 2, "nvidia-2": 1})

    def slots(types: str) -> tuple[GpuDriver, list[str]]:
        options = {"mdev_types": [f"address={parent},type={types}"]}
        driver = GpuDriver("gpus", options, kernel.root, privileged_access(kernel.root))
        return driver, offered(driver)

    driver, found = slots("nvidia-1|nvidia-2")
    assert found == [f"{parent}/nvidia-1/{number}" for number in range(2)]
    driver, found = slots("nvidia-2|nvidia-1")
    assert len(found) == 4
    driver.prepare(WorkItem("gpus", parent, parent, found[0]), None)
    assert slots("nvidia-1|nvidia-2")[1] == found, "one device of the first type still fits"
    driver.release(WorkItem("gpus", parent, parent, found[0]))
    assert len(slots("nvidia-1|nvidia-2")[1]) == 2
    with pytest.raises(Misconfigured, match="the name of a type"):
        slots("nvidia-1|nvidia-1")


def test_limit_slots_of_several_slots_keeps_the_occupied_ones() -> None:
    slots = [Slot("a", TYPE, number) for number in range(4)]
    plan = SlotPlan(tuple(slots), 1, occupied=frozenset({slots[2]}))
    assert limit_slots({"a": plan}, 3)["a"].slots == (slots[0], slots[2])
    assert limit_slots({"a": plan}, 9)["a"] == plan
    assert limit_slots({}, 3) == {}


@pytest.mark.parametrize("text", ["max_per_card=0", "max_per_card=x", "max_per_card=-1"])
def test_rule_with_invalid_limit_is_misconfigured(kernel: SimulatedKernel, text: str) -> None:
    with pytest.raises(Misconfigured, match="a number from 1 to 999"):
        make_driver(kernel, f",{text}")


def test_rule_with_two_limits_is_misconfigured(kernel: SimulatedKernel) -> None:
    with pytest.raises(Misconfigured, match="max_per_card only once"):
        make_driver(kernel, ",max_per_card=1,max_per_card=2")


def test_discover_function_with_vendor_vfio_is_not_deliverable(kernel: SimulatedKernel) -> None:
    """Nova would let libvirt bind it to vfio-pci."""
    card = "0000:7e:00.0"
    kernel.add_function(card, "10de", "2330", "030200", totalvfs=2)
    first, second = kernel.enable_virtual_functions(card, 2, "2330", "030200")
    for function in (first, second):
        (kernel.bus / function / "nvidia").mkdir()
        (kernel.bus / function / "nvidia/current_vgpu_type").write_text("0\n")
    driver = GpuDriver("gpus", {"devices": [f"address={card[:-2]}.*,functions=vf"]}, kernel.root)
    (device,) = driver.discover()
    assert not device.deliverable
    assert "which Nova cannot attach" in str(device.undeliverable_reason)
    (kernel.bus / first / "nvidia/current_vgpu_type").unlink()
    (device,) = driver.discover()
    assert device.deliverable
    assert [h.address for part in device.deployables for h in part.handles] == [first]


def test_discover_card_that_a_manager_keeps_open_is_not_deliverable(tmp_path: Path) -> None:
    host = HostTree(tmp_path)
    for number, address in enumerate(("0000:3d:00.0", "0000:3e:00.0")):
        host.add_function(address, "10de", "2330", "030200", kernel_driver="nvidia")
        host.add_nvidia_gpu(address, number)
    host.open_node("/dev/nvidia1", "nvidia-persiste")
    options = {"devices": ["vendor=10de"], "reset": "if_possible"}
    driver = GpuDriver("gpus", options, host.root)
    first, second = driver.discover()
    assert first.deliverable
    assert not second.deliverable
    assert str(second.undeliverable_reason).startswith("nvidia-persistenced has its device node")
    host.close_nodes()
    assert all(device.deliverable for device in driver.discover())

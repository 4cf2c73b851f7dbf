# SPDX-License-Identifier: Apache-2.0
"""Layouts of Intel GPUs: numbers of virtual functions, with a failure at each step."""

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.core.inventory.device import Ability, Device, HandleType, Layout
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.privileged import pci, xe
from cyborg.testing.conformance.kit import Outcome, run_rules
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.unit.drivers.gpu.simulated_intel import (
    CARD,
    VFS,
    SimulatedIntelHost,
    remove_admin,
)

RULES = [f"address={CARD}", "vendor=8086,functions=vf"]
SETTINGS = ["exec_quantum_ms=18", "preempt_timeout_us=40000", "sched_priority=normal"]
VRAM = ["2:12000", "4:6000"]
SET = {
    "exec_quantum_ms": "20",
    "preempt_timeout_us": "40000",
    "sched_priority": "low [normal]",
}
UNSET = {
    "exec_quantum_ms": "0",
    "preempt_timeout_us": "0",
    "sched_priority": "[low] normal",
}


@pytest.fixture(params=["xe", "i915"])
def any_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> SimulatedIntelHost:
    found = SimulatedIntelHost(tmp_path, driver=request.param)
    found.redirect(monkeypatch)
    return found


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedIntelHost:
    found = SimulatedIntelHost(tmp_path)
    found.redirect(monkeypatch)
    return found


def make_access(host: SimulatedIntelHost) -> HostAccess:
    access = HostAccess.of(host.root)
    return replace(
        access,
        set_count=pci.set_count,
        set_scheduling=xe.set_scheduling,
        set_vram=xe.set_vram,
    )


def make(host: SimulatedIntelHost, settings: Sequence[str] = (), **options: Any) -> GpuDriver:
    options = {"vf_counts": ["0", "2", "4", "8"], "reset": "if_possible"} | options
    options = {"devices": RULES, "vf_scheduling": list(settings)} | options
    return GpuDriver("gpus", options, host.root, make_access(host))


def discover(driver: GpuDriver) -> Device:
    return next(device for device in driver.discover() if device.address == CARD)


def layouts(driver: GpuDriver) -> list[Layout]:
    return list(driver.layouts(discover(driver)))


def current(driver: GpuDriver) -> str:
    device = discover(driver)
    return next(found for found in driver.layouts(device) if found.matches(device)).name


def partition(driver: GpuDriver, layout: str) -> None:
    driver.partition(WorkItem("gpus", CARD, ""), layout)


def handles(driver: GpuDriver) -> list[str]:
    return [handle.address for part in discover(driver).deployables for handle in part.handles]


def test_layouts_are_the_card_and_numbers_of_its_functions(any_host: SimulatedIntelHost) -> None:
    driver = make(any_host)
    assert Ability.PARTITIONS in driver.abilities
    found = {layout.name: dict(layout.offers) for layout in layouts(driver)}
    assert found == {
        "vfs-0": {"PGPU": 1},
        "vfs-2": {"CUSTOM_GPU_VF": 2},
        "vfs-4": {"CUSTOM_GPU_VF": 4},
    }
    assert driver.remarks == ()


# Each number follows each other one.
EACH_TO_EACH = [(f"vfs-{n}", n) for n in (2, 4, 2, 0, 4, 0, 2)]


def test_partition_to_each_layout_from_each_layout(any_host: SimulatedIntelHost) -> None:
    """A whole card and its functions differ in class and traits, and are never offered at once."""
    driver = make(any_host)
    for layout, count in EACH_TO_EACH:
        partition(driver, layout)
        assert (any_host.numvfs(CARD), current(driver)) == (count, layout)
        (part,) = discover(driver).deployables
        assert [h.address for h in part.handles] == (VFS[:count] or [CARD])
        assert {h.type for h in part.handles} == {HandleType.PCI}
        assert part.resource_class == ("CUSTOM_GPU_VF" if count else "PGPU")
        assert ("CUSTOM_GPU_VF" in part.traits) is bool(count)
        assert f"CUSTOM_SRIOV_VFS_{count}" in part.traits
    autoprobe = (any_host.bus / CARD / "sriov_drivers_autoprobe").read_text().strip()
    assert autoprobe == "0", "no driver of the host binds to the functions"


def test_partition_sets_the_scheduling_of_all_functions(host: SimulatedIntelHost) -> None:
    driver = make(host, SETTINGS)
    for layout, count in (("vfs-2", 2), ("vfs-4", 4), ("vfs-4", 4)):
        partition(driver, layout)
        profiles = [host.profile(number) for number in range(1, 8)]
        assert profiles == [SET] * count + [UNSET] * (7 - count)
    partition(driver, "vfs-0")
    assert host.profile(1) == UNSET
    partition(make(host), "vfs-2")
    assert host.profile(1) == UNSET, "without the option"


def test_partition_sets_the_memory_of_all_functions(host: SimulatedIntelHost) -> None:
    driver = make(host, SETTINGS, vf_vram_mib=VRAM)
    for layout, mib in (("vfs-2", [12000] * 2), ("vfs-4", [6000] * 4), ("vfs-4", [6000] * 4)):
        partition(driver, layout)
        assert host.vram_mib() == mib + [0] * (7 - len(mib))
        assert host.profile(1) == SET
    partition(make(host, vf_vram_mib=VRAM[:1]), "vfs-4")
    assert host.vram_mib()[:4] == [6000] * 4, "no part of it: as they are"
    partition(driver, "vfs-0")
    assert host.vram_mib() == [0] * 7
    partition(make(host), "vfs-2")
    assert host.vram_mib()[:2] == [8192] * 2, "without the option"


@pytest.mark.parametrize("previous", ["vfs-0", "vfs-2"])
def test_partition_whose_memory_is_refused_restores_the_card(
    host: SimulatedIntelHost, previous: str
) -> None:
    driver = make(host, SETTINGS, vf_vram_mib=["2:12000", "4:6200"])  # more than the card has
    partition(driver, previous)
    before, offered = host.vram_mib(), handles(driver)
    refused = f"refused 6200 MiB for virtual function 4: .*; {CARD} is as before"
    with pytest.raises(DriverFailed, match=refused):
        partition(driver, "vfs-4")
    assert (current(driver), handles(driver), host.vram_mib()) == (previous, offered, before)


def test_partition_to_the_same_number_does_not_touch_the_functions_of_servers(
    host: SimulatedIntelHost,
) -> None:
    partition(make(host), "vfs-2")
    host.bind(VFS[1], "vfio-pci")
    group = (host.bus / VFS[1] / "iommu_group").resolve().name
    (host.root.parent / "dev/vfio" / group).unlink()
    (host.root.parent / "dev/vfio" / group).mkdir()
    with pytest.raises(DriverFailed, match=f"function {VFS[1]} is or may be in use") as caught:
        partition(make(host, vf_vram_mib=VRAM), "vfs-2")
    assert "restored" not in caught.value.message
    assert host.vram_mib()[:2] == [8192] * 2


def test_partition_without_the_attribute_of_the_memory_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card that uses the memory of the host, and ``xe`` before Linux 7.0."""
    host = SimulatedIntelHost(tmp_path, vram_mib=0)
    host.redirect(monkeypatch)
    driver = make(host, vf_vram_mib=["2:12000"])
    with pytest.raises(DriverFailed, match=r"vf_vram_mib=2:12000: .* no vram_quota \(xe of Lin"):
        partition(driver, "vfs-2")
    assert (host.writes, current(driver)) == ([], "vfs-0")
    partition(driver, "vfs-4")
    assert current(driver) == "vfs-4"


@pytest.mark.parametrize("parts", [["2"], ["0:5"], ["2:0"], ["2:1g"], ["2:1", "2:2"]])
def test_memory_that_is_malformed_is_misconfigured(
    host: SimulatedIntelHost, parts: list[str]
) -> None:
    with pytest.raises(Misconfigured, match="vf_vram_mib"):
        make(host, vf_vram_mib=parts)


@pytest.mark.parametrize("previous", ["vfs-0", "vfs-2"])
@pytest.mark.parametrize("step", ["exec_quantum_ms", "preempt_timeout_us", "sched_priority"])
def test_partition_whose_scheduling_is_refused_restores_the_card(
    host: SimulatedIntelHost, previous: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition(make(host, SETTINGS[:2]), previous)
    driver = make(host, SETTINGS)
    before, offered = host.profile(1), handles(driver)
    write = host.write_attribute
    host.failing = {step}

    def once(path: Path, text: str) -> None:
        try:
            write(path, text)
        except OSError:
            host.failing = set()
            raise

    monkeypatch.setattr(xe, "_write", once)
    refused = f"refused .* for {step}: Input/output error; {CARD} is as before"
    with pytest.raises(DriverFailed, match=refused):
        partition(driver, "vfs-4")
    assert (current(driver), handles(driver)) == (previous, offered)
    assert host.profile(1) == (SET if previous == "vfs-2" else before)
    assert host.profile(4) == UNSET
    partition(driver, "vfs-4")
    assert (current(driver), host.profile(4)) == ("vfs-4", SET)


class Writes:
    """Writes of a change; the one with the number ``failing`` fails, before or after its effect."""

    def __init__(self, host: SimulatedIntelHost) -> None:
        self.made: list[tuple[str, str]] = []
        self.failing: int | None = None
        self.late = False
        self._write = host.write_attribute

    def __call__(self, path: Path, text: str) -> None:
        fails = len(self.made) == self.failing
        self.made.append((path.name, text))
        if not fails or self.late:
            self._write(path, text)
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


# The longest change before its effects, and two short ones after them.
CHANGES = [
    (*change, late)
    for change in permutations(["vfs-0", "vfs-2", "vfs-4"], 2)
    for late in (False, True)
]
USUAL_CHANGES = [
    ("vfs-2", "vfs-4", False),
    ("vfs-0", "vfs-2", True),
    ("vfs-4", "vfs-0", True),
]


@pytest.mark.parametrize(
    ("previous", "layout", "late"), sample(CHANGES, *USUAL_CHANGES, mark=pytest.mark.long)
)
def test_partition_that_fails_at_any_write_restores_the_card(
    any_host: SimulatedIntelHost,
    monkeypatch: pytest.MonkeyPatch,
    previous: str,
    layout: str,
    late: bool,
) -> None:
    """The write fails before or after its effect; the kernel removes functions or says no."""
    is_xe = (any_host.bus / CARD / "sriov_admin").exists()
    driver = make(any_host, SETTINGS, vf_vram_mib=VRAM) if is_xe else make(any_host)
    writes, autoprobe = Writes(any_host), any_host.bus / CARD / "sriov_drivers_autoprobe"
    for module in (pci, xe):
        monkeypatch.setattr(module, "_write", writes)
    partition(driver, previous)
    writes.made.clear()
    autoprobe.write_text("1\n")
    partition(driver, layout)
    made = list(writes.made)
    partition(driver, previous)
    device = discover(driver)
    parts = [*any_host.vram_mib(), any_host.profile(1)] if is_xe else []
    failing = [n for n, write in enumerate(made) if not late or write != ("sriov_numvfs", "0")]
    assert failing or layout == "vfs-0"
    for number in failing:
        writes.made.clear()
        autoprobe.write_text("1\n")
        writes.failing, writes.late = number, late
        with pytest.raises(DriverFailed, match="Input/output error"):
            partition(driver, layout)
        writes.failing = None
        assert (current(driver), discover(driver)) == (previous, device), made[number]
        found = [*any_host.vram_mib(), any_host.profile(1)] if is_xe else []
        assert found == parts, made[number]
    partition(driver, layout)
    assert current(driver) == layout


@pytest.mark.parametrize("count", ["2", "4"])
def test_partition_whose_functions_cannot_be_created_keeps_the_previous_ones(
    any_host: SimulatedIntelHost, count: str
) -> None:
    driver = make(any_host)
    partition(driver, "vfs-2")
    any_host.limit = 3
    with pytest.raises(DriverFailed, match="the previous 2 virtual functions were restored"):
        partition(driver, "vfs-4")
    assert (current(driver), handles(driver)) == ("vfs-2", VFS[:2])


def test_partition_that_cannot_be_undone_says_so(host: SimulatedIntelHost) -> None:
    partition(make(host), "vfs-2")
    driver = make(host, SETTINGS)
    host.failing = {"sched_priority"}
    with pytest.raises(DriverFailed, match="the 2 previous virtual functions could not be restor"):
        partition(driver, "vfs-4")
    assert current(driver) == "vfs-2", "with another scheduling"


def test_partition_without_the_attributes_of_the_option_changes_nothing(
    any_host: SimulatedIntelHost,
) -> None:
    """``i915`` has none, and ``xe`` before Linux 6.19."""
    if (any_host.bus / CARD / "sriov_admin").exists():
        remove_admin(any_host)
    driver = make(any_host, SETTINGS)
    with pytest.raises(DriverFailed, match=r"has no sriov_admin \(xe of Linux 6\.19"):
        partition(driver, "vfs-2")
    assert (any_host.writes, current(driver)) == ([], "vfs-0")


def test_partition_with_a_function_of_a_guest_is_refused(host: SimulatedIntelHost) -> None:
    driver = make(host)
    partition(driver, "vfs-2")
    host.bind(VFS[1], "vfio-pci")
    group = (host.bus / VFS[1] / "iommu_group").resolve().name
    (host.root.parent / "dev/vfio" / group).unlink()
    (host.root.parent / "dev/vfio" / group).mkdir()  # cannot be opened, like one that is in use
    for layout in ("vfs-4", "vfs-0"):
        with pytest.raises(DriverFailed, match=f"function {VFS[1]} is or may be in use"):
            partition(driver, layout)
    assert host.numvfs(CARD) == 2


def test_refused_partition_does_not_touch_the_functions_of_guests(host: SimulatedIntelHost) -> None:
    """Also if the options have changed since, and the kernel would refuse what they have."""
    partition(make(host), "vfs-2")
    host.bind(VFS[1], "vfio-pci")
    group = (host.bus / VFS[1] / "iommu_group").resolve().name
    (host.root.parent / "dev/vfio" / group).unlink()
    (host.root.parent / "dev/vfio" / group).mkdir()
    driver = make(host, SETTINGS)
    host.failing = {"sched_priority"}
    refusals = {"vfs-4": f"function {VFS[1]} is or may be in use", "vfs-3": "has no layout 'vfs-3'"}
    for layout, refusal in refusals.items():
        with pytest.raises(DriverFailed, match=refusal) as caught:
            partition(driver, layout)
        assert "set again" not in caught.value.message
        assert host.profile(1) == UNSET


def test_partition_of_a_card_that_a_server_may_have_is_refused(host: SimulatedIntelHost) -> None:
    host.bind(CARD, "vfio-pci")
    with pytest.raises(DriverFailed, match="is bound to vfio-pci: bind it to its own kernel dr"):
        partition(make(host), "vfs-2")
    assert host.writes == []


def test_partition_after_a_boot_is_applied_again(host: SimulatedIntelHost) -> None:
    partition(make(host, SETTINGS), "vfs-4")
    host.reboot()
    driver = make(host, SETTINGS)
    assert (current(driver), host.profile(1)) == ("vfs-0", UNSET)
    partition(driver, "vfs-4")
    assert (current(driver), host.profile(4)) == ("vfs-4", SET)


def test_card_whose_driver_is_no_physical_function_has_one_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = SimulatedIntelHost(tmp_path, totalvfs=0)
    host.redirect(monkeypatch)
    driver = make(host)
    assert [layout.name for layout in layouts(driver)] == ["fixed"]
    assert "set max_vfs of the kernel driver xe" in "".join(driver.remarks)
    with pytest.raises(DriverFailed, match="has no layout 'vfs-2'"):
        partition(driver, "vfs-2")


@pytest.mark.parametrize(("vendor", "product"), [("10de", "2335"), ("1002", "74a1")])
def test_cards_of_other_vendors_have_no_such_layouts(
    host: SimulatedIntelHost, vendor: str, product: str
) -> None:
    other = "0000:41:00.0"
    host.add_function(other, vendor, product, "030200", kernel_driver="gim", totalvfs=8)
    driver = make(host, devices=["address=*"])
    device = next(device for device in driver.discover() if device.address == other)
    assert [layout.name for layout in driver.layouts(device)] == ["fixed"]
    with pytest.raises(DriverFailed, match="has no layout 'vfs-2': expected fixed"):
        driver.partition(WorkItem("gpus", other, ""), "vfs-2")


@pytest.mark.parametrize(
    "setting",
    ["exec_quantum_ms", "exec_quantum_ms=-1", "exec_quantum_ms=1s", "sched_priority=high", "x=1"],
)
def test_scheduling_that_is_malformed_is_misconfigured(
    host: SimulatedIntelHost, setting: str
) -> None:
    with pytest.raises(Misconfigured, match="vf_scheduling"):
        make(host, [setting])
    with pytest.raises(Misconfigured, match="vf_scheduling"):
        make(host, [SETTINGS[0], SETTINGS[0]])


class SimulatedIntelDriver(GpuDriver):
    """The gpu driver with the privileged functions of the simulated host ``kernel``."""

    kernel: SimulatedIntelHost

    def __init__(
        self, backend: str, options: dict[str, Any], sysfs_root: str | Path = "/sys"
    ) -> None:
        """Create the driver."""
        super().__init__(backend, options, sysfs_root, make_access(self.kernel))


@pytest.mark.slow
def test_gpu_driver_with_vf_counts_passes_all_rules(host: SimulatedIntelHost) -> None:
    SimulatedIntelDriver.kernel = host
    options = {"devices": RULES, "vf_counts": ["0", "2"], "reset": "never"}
    results = run_rules(
        SimulatedIntelDriver, options, sysfs_root=host.root, work=True, entry_point="gpu"
    )
    failed = {r.rule.name for r in results if r.outcome in (Outcome.FAILED, Outcome.BLOCKED)}
    assert failed <= {"imports_only_core_and_drivers"}
    passed = {r.rule.name for r in results if r.outcome is Outcome.PASSED}
    assert "partition_is_discovered" in passed

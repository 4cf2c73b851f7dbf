# SPDX-License-Identifier: Apache-2.0
"""MIG layouts on a simulated kernel and a simulated NVML, with the real binding of NVML."""

import ctypes
import json
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.inventory.device import Ability, Device, Layout
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.gpu.mig import Parent, current_layout, is_enabled, possible_layouts
from cyborg.drivers.kernel import nvml
from cyborg.drivers.kernel.nvml import GpuFacts, NvmlLibrary
from cyborg.drivers.privileged import gpu
from cyborg.testing.conformance.kit import Outcome, run_rules
from cyborg.tests.unit.drivers.gpu.simulated_gpu import SimulatedKernel, privileged_access

CARD = "0000:3d:00.0"
TYPES = {"nvidia-1001": 19, "nvidia-1002": 14, "nvidia-1003": 0}  # ids of their profiles
SMALL, MEDIUM, LARGE = "7x1g.10gb", "3x2g.20gb", "1x7g.80gb"
NAMES = dict(zip(TYPES, ("GRID A100-1-10C", "GRID A100-2-20C", "GRID A100-7-80C"), strict=True))


class MigKernel(SimulatedKernel):
    """A kernel whose virtual functions can have a device while the card has a free instance."""

    def __init__(self, folder: Path, library: ctypes.CDLL) -> None:
        super().__init__(folder)
        self._library = library
        self.add_function(CARD, "10de", "20b5", "030200", kernel_driver="nvidia", totalvfs=16)
        self.parents = self.enable_virtual_functions(CARD, 16, "20b5", "030200")
        for parent in self.parents:
            self.add_parent(parent, 1, dict.fromkeys(TYPES, 1))
            for type_, name in NAMES.items():
                folder = self.bus / parent / "mdev_supported_types" / type_
                (folder / "name").write_text(f"{name}\n")
        self._written: dict[tuple[str, str], int] = {}
        self.update()

    def write(self, path: Path, text: str) -> None:
        super().write(path, text)
        self.update()

    def update(self) -> None:
        """Write the number of available instances of each type of each function."""
        folder = self.root / "bus/mdev/devices"
        used = Counter((folder / name / "mdev_type").resolve().name for name in self.devices())
        for type_, profile in TYPES.items():
            free = self._library.count_instances(profile) - used[type_]
            for parent in self.parents:
                count = min(1, max(0, free)) if self.units[parent] else 0
                if self._written.get((parent, type_)) != count:
                    types = self.bus / parent / "mdev_supported_types"
                    (types / type_ / "available_instances").write_text(f"{count}\n")
                    self._written[parent, type_] = count

    def _count(self, parent: str) -> None:
        """Write nothing: ``update`` follows each change."""


@pytest.fixture
def kernel(tmp_path: Path, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> MigKernel:
    library.set_mig(1)
    found = MigKernel(tmp_path, library)
    found.redirect(monkeypatch)
    monkeypatch.setattr(gpu, "_SYS", found.root)
    return found


class Control:
    """The privileged function in this process; the kernel follows the instances."""

    kernel: MigKernel | None = None

    def set_instances(self, address: str, instances: Mapping[str, int]) -> None:
        """Replace the instances."""
        assert self.kernel is not None
        try:
            gpu.set_instances(address, instances)
        finally:
            self.kernel.update()


class MigDriver(GpuDriver):
    """The gpu driver with the privileged functions and NVML in this process."""

    def __init__(
        self, backend: str, options: Mapping[str, Any], sysfs_root: str | Path = "/sys"
    ) -> None:
        access = replace(
            privileged_access(Path(sysfs_root)),
            nvml=NvmlLibrary().read,
            set_instances=Control().set_instances,
        )
        super().__init__(backend, options, sysfs_root, access)


OPTIONS = {
    "mdev_types": [f"vendor=8086|10de,product=20b5,address=!{CARD},type={'|'.join(TYPES)}"],
    "mig_layouts": True,
}


def make_driver(kernel: MigKernel, **options: Any) -> GpuDriver:
    Control.kernel = kernel
    driver = MigDriver("gpus", OPTIONS | options, kernel.root)
    driver.host = "compute-1"
    return driver


def discover(driver: GpuDriver) -> Device:
    (device,) = driver.discover()
    return device


def handles(device: Device) -> list[str]:
    return [handle.address for part in device.deployables for handle in part.handles]


def item(handle: str = "") -> WorkItem:
    return WorkItem("gpus", CARD, handle.partition("/")[0], handle)


def layouts(driver: GpuDriver) -> dict[str, Layout]:
    return {layout.name: layout for layout in driver.layouts(discover(driver))}


def current(driver: GpuDriver) -> list[str]:
    device = discover(driver)
    return [layout.name for layout in driver.layouts(device) if layout.matches(device)]


@pytest.mark.slow
def test_layouts_are_the_profiles_with_all_their_instances(kernel: MigKernel) -> None:
    found = layouts(make_driver(kernel))
    assert {name: dict(layout.offers) for name, layout in found.items()} == {
        SMALL: {"VGPU": 7},
        MEDIUM: {"VGPU": 3},
        LARGE: {"VGPU": 1},
        "none": {},
    }
    assert found[SMALL].traits == {"CUSTOM_MIG_7X1G_10GB"}


def test_layouts_without_enabled_type_are_left_out(kernel: MigKernel) -> None:
    rule = f"product=20b5,address=!{CARD},type=nvidia-1002,resource_class=CUSTOM_MIG"
    driver = make_driver(kernel, mdev_types=[rule])
    found = layouts(driver)
    assert list(found) == [MEDIUM, "none"]
    assert found[MEDIUM].offers == {"CUSTOM_MIG": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "type_", "count", "profile"),
    [
        (SMALL, "nvidia-1001", 7, 19),
        (MEDIUM, "nvidia-1002", 3, 14),
        (LARGE, "nvidia-1003", 1, 0),
    ],
)
def test_partition_is_discovered_with_its_slots(
    kernel: MigKernel, library: ctypes.CDLL, layout: str, type_: str, count: int, profile: int
) -> None:
    driver = make_driver(kernel)
    assert current(driver) == ["none"]
    driver.partition(item(), layout)
    assert library.count_instances(profile) == count
    for known in (driver, make_driver(kernel)):
        assert current(known) == [layout]
    device = discover(driver)
    assert [h.split("/")[1] for h in handles(device)] == [type_] * count
    trait = f"CUSTOM_MDEV_{type_.upper().replace('-', '_')}"
    assert all(trait in part.traits for part in device.deployables if part.handles)


def test_partition_again_changes_nothing(kernel: MigKernel, library: ctypes.CDLL) -> None:
    driver = make_driver(kernel)
    driver.partition(item(), SMALL)
    library.set_busy(1)  # a change would fail
    driver.partition(item(), SMALL)
    make_driver(kernel).partition(item(), SMALL)
    assert current(driver) == [SMALL]


def test_partition_of_a_card_that_a_domain_has_is_refused(
    kernel: MigKernel, library: ctypes.CDLL
) -> None:
    path = kernel.root.parent / "proc/libvirt_domains.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"users": {CARD: "guest1"}}))
    with pytest.raises(DriverFailed, match="it is used by the domain guest1 of libvirt"):
        make_driver(kernel).partition(item(), SMALL)
    assert library.count_instances(19) == 0


@pytest.mark.slow
def test_partition_replaces_instances_and_removes_them(
    kernel: MigKernel, library: ctypes.CDLL
) -> None:
    driver = make_driver(kernel)
    # Each one follows each other one.
    sequence = (SMALL, MEDIUM, LARGE, SMALL, LARGE, MEDIUM, "none", LARGE, "none", MEDIUM, SMALL)
    for layout in (*sequence, "none", SMALL, "none"):
        driver.partition(item(), layout)
        assert current(driver) == [layout]
    assert [library.count_instances(profile) for profile in TYPES.values()] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("previous", "layout"),
    [
        pytest.param(*pair, marks=() if pair == (SMALL, MEDIUM) else pytest.mark.long)
        for pair in permutations([SMALL, MEDIUM, LARGE, "none"], 2)
    ],
)
def test_partition_that_fails_at_any_instance_shows_what_is_left(
    kernel: MigKernel, library: ctypes.CDLL, previous: str, layout: str
) -> None:
    """NVML has no undo: the card offers the instances that exist, until a layout is applied."""
    driver = make_driver(kernel)
    driver.partition(item(), previous)
    before = discover(driver)
    if previous != "none":  # otherwise nothing is destroyed, which a process prevents
        library.set_busy(1)
        with pytest.raises(DriverFailed, match="In use by another client"):
            driver.partition(item(), layout)
        assert discover(driver) == before
        library.set_busy(0)
    for created in range(0 if layout == "none" else int(layout[0])):
        driver.partition(item(), previous)
        library.set_failing(created + 1)
        with pytest.raises(DriverFailed, match=r"could not be replaced by .*: Insufficient R"):
            driver.partition(item(), layout)
        library.set_failing(0)
        assert current(driver) == ["other" if created else "none"]
        assert len(handles(discover(driver))) == created
        driver.partition(item(), previous)  # as the agent does
        assert discover(driver) == before
    driver.partition(item(), layout)
    assert current(driver) == [layout]


@pytest.mark.slow
def test_slots_stay_the_same_while_they_are_used(kernel: MigKernel) -> None:
    driver = make_driver(kernel)
    driver.partition(item(), MEDIUM)
    before = handles(discover(driver))
    for handle in before:
        driver.prepare(item(handle), None)
        assert handles(discover(driver)) == before
    assert driver.remarks == (), "the other functions cannot have devices, as expected"
    assert current(driver) == [MEDIUM]


@pytest.mark.slow
def test_partition_of_card_with_devices_is_refused(kernel: MigKernel) -> None:
    driver = make_driver(kernel)
    driver.partition(item(), SMALL)
    driver.prepare(item(handles(discover(driver))[0]), None)
    with pytest.raises(DriverFailed, match=f"{CARD} has mediated devices, which servers may use"):
        driver.partition(item(), MEDIUM)
    assert current(driver) == [SMALL]


@pytest.mark.slow
def test_partition_that_nvml_refuses_says_why(kernel: MigKernel, library: ctypes.CDLL) -> None:
    driver = make_driver(kernel)
    driver.partition(item(), SMALL)
    library.set_busy(1)
    with pytest.raises(
        DriverFailed, match=r"could not be replaced by 3x2g\.20gb: In use by another"
    ):
        driver.partition(item(), MEDIUM)
    assert current(driver) == [SMALL]
    library.set_busy(0)
    library.set_failing(2)
    with pytest.raises(DriverFailed, match="Insufficient Resources"):
        driver.partition(item(), MEDIUM)
    assert current(driver) == ["other"], "the agent applies the previous layout again"
    driver.partition(item(), SMALL)
    assert current(driver) == [SMALL]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2x1g.10gb", "other", "fixed", "../x", ""])
def test_partition_unknown_layout_changes_nothing(kernel: MigKernel, layout: str) -> None:
    driver = make_driver(kernel)
    driver.partition(item(), SMALL)
    with pytest.raises(DriverFailed, match=f"expected {SMALL}, {MEDIUM}, {LARGE}"):
        driver.partition(item(), layout)
    assert current(driver) == [SMALL]


def test_card_outside_mig_mode_has_one_layout(kernel: MigKernel, library: ctypes.CDLL) -> None:
    library.set_mig(0)
    kernel.update()
    driver = make_driver(kernel)
    device = discover(driver)
    assert driver.layouts(device) == [Layout("fixed", {})]
    driver.partition(item(), "fixed")
    with pytest.raises(DriverFailed, match="expected fixed"):
        driver.partition(item(), SMALL)


def test_abilities_have_layouts_only_with_the_option(kernel: MigKernel) -> None:
    assert Ability.PARTITIONS in make_driver(kernel).abilities
    assert Ability.PARTITIONS not in make_driver(kernel, mig_layouts=False).abilities


def test_instances_of_several_profiles_are_one_layout() -> None:
    facts = GpuFacts(mig="enabled", mig_profiles={"1g": 7, "3g": 2})
    for present, expected in (
        ({"1g": 7, "3g": 0}, "7x1g"),
        ({"1g": 3, "3g": 0}, "other"),
        ({"1g": 1, "3g": 1}, "other"),
        ({}, "none"),
    ):
        assert (
            current_layout(
                GpuFacts(mig="enabled", mig_profiles=facts.mig_profiles, mig_instances=present)
            )
            == expected
        )


@pytest.mark.parametrize("profile", ["", "../1g", "1G.10GB", "1g 10gb", "1g\n", "x" * 33])
def test_privileged_function_refuses_other_names(kernel: MigKernel, profile: str) -> None:
    with pytest.raises(Invalid):
        gpu.set_instances(CARD, {profile: 1})


@pytest.mark.parametrize("count", [0, -1, 65, "1", True, None])
def test_privileged_function_refuses_other_numbers(kernel: MigKernel, count: int) -> None:
    with pytest.raises(Invalid):
        gpu.set_instances(CARD, {"1g.10gb": count})
    with pytest.raises(Invalid):
        gpu.set_instances(CARD, ["1g.10gb"])


def test_privileged_function_places_the_instances_of_a_mix(
    kernel: MigKernel, library: ctypes.CDLL
) -> None:
    """At the first free places, the large instance would leave only three for small ones."""
    library.set_profiles(4)
    mix = {"1g.10gb": 4, "3g.40gb": 1}
    gpu.set_instances(CARD, mix)
    assert (library.count_instances(19), library.count_instances(9)) == (4, 1)
    library.set_placing(0)
    with pytest.raises(DriverFailed, match=r"by 4x1g\.10gb\+1x3g\.40gb: Insufficient Resources"):
        gpu.set_instances(CARD, mix)


def test_privileged_function_with_a_mix_without_room_changes_nothing(
    kernel: MigKernel, library: ctypes.CDLL
) -> None:
    gpu.set_instances(CARD, {"1g.10gb": 3, "2g.20gb": 2})
    with pytest.raises(DriverFailed, match=r"has no room for .* 4x1g\.10gb\+2x2g\.20gb"):
        gpu.set_instances(CARD, {"1g.10gb": 4, "2g.20gb": 2})
    assert [library.count_instances(profile) for profile in TYPES.values()] == [3, 2, 0]


def test_privileged_function_without_placements_creates_the_largest_first(
    kernel: MigKernel, library: ctypes.CDLL
) -> None:
    library.set_placing(0)
    gpu.set_instances(CARD, {"1g.10gb": 3, "2g.20gb": 2})
    with pytest.raises(DriverFailed, match=r"replaced by 4x1g\.10gb\+2x2g\.20gb: Insufficient"):
        gpu.set_instances(CARD, {"1g.10gb": 4, "2g.20gb": 2})
    assert [library.count_instances(profile) for profile in TYPES.values()] == [3, 2, 0]


def test_privileged_function_with_vgpus_is_refused(kernel: MigKernel) -> None:
    folder = kernel.bus / kernel.parents[0]
    (folder / "vendor").write_text("0x10de\n")
    (folder / "nvidia").mkdir()
    (folder / "nvidia/current_vgpu_type").write_text("1414\n")
    with pytest.raises(DriverFailed, match=f"its virtual function {kernel.parents[0]} is a vGPU"):
        gpu.set_instances(CARD, {})


def test_privileged_function_refuses_other_functions(
    kernel: MigKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DriverFailed, match="there is no device 0000:77"):
        gpu.set_instances("0000:77:00.0", {})
    with pytest.raises(DriverFailed, match="expected a card bound to nvidia"):
        gpu.set_instances(kernel.parents[0], {})
    with pytest.raises(
        DriverFailed, match=r"has no MIG profile 3g\.40gb: expected one of 1g\.10gb"
    ):
        gpu.set_instances(CARD, {"3g.40gb": 1})
    monkeypatch.setattr(nvml, "MODULE", "no_such_binding")
    with pytest.raises(DriverFailed, match="nvidia-ml-py is missing"):
        gpu.set_instances(CARD, {})


def test_privileged_function_outside_mig_mode_fails(
    kernel: MigKernel, library: ctypes.CDLL
) -> None:
    library.set_mig(0)
    with pytest.raises(DriverFailed, match="is not in MIG mode: enable it"):
        gpu.set_instances(CARD, {})


@pytest.mark.slow
def test_partition_during_a_discovery_reads_the_card_itself(kernel: MigKernel) -> None:
    """The methods run in different threads; a new object has not discovered anything yet."""
    driver = make_driver(kernel)

    def discover() -> None:
        for _ in range(4):  # one after another, as the agent calls it
            driver.discover()

    thread = threading.Thread(target=discover)
    thread.start()
    driver.partition(item(), SMALL)
    thread.join()
    assert current(driver) == [SMALL]


@pytest.mark.slow
@pytest.mark.matrix  # those with layouts of vGPUs are in the default tier
def test_gpu_driver_with_mig_layouts_passes_all_rules(kernel: MigKernel) -> None:
    make_driver(kernel).partition(item(), SMALL)
    results = run_rules(MigDriver, OPTIONS, sysfs_root=kernel.root, work=True, entry_point="gpu")
    outcomes = {result.rule.name: (result.outcome, result.reason) for result in results}
    failed = {n: r for n, r in outcomes.items() if r[0] in (Outcome.FAILED, Outcome.BLOCKED)}
    # The class of a test module imports more than a driver may.
    assert set(failed) <= {"imports_only_core_and_drivers"}
    assert outcomes["partition_is_discovered"][0] is Outcome.PASSED
    assert kernel.devices() == []


def test_current_layout_has_what_the_card_offers() -> None:
    """It can be less than the layout could have, such as beside a device of somebody else."""
    facts = GpuFacts(mig="enabled", mig_profiles={"1g.10gb": 7}, mig_instances={"1g.10gb": 7})
    parents = {f"0000:3d:00.{n}": Parent("VGPU", frozenset({"1g.10gb"})) for n in range(7)}
    (layout,) = possible_layouts(facts, parents, {"VGPU": 6})
    assert (layout.name, layout.offers) == (SMALL, {"VGPU": 6})


def test_card_whose_profiles_are_unknown_is_not_in_mig_mode() -> None:
    """NVML cannot read the card now; what it was is still known."""
    assert not is_enabled(GpuFacts(mig="enabled"))

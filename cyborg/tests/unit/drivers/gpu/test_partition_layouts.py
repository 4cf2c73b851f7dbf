# SPDX-License-Identifier: Apache-2.0
"""Layouts of AMD GPUs: the modes in which their kernel driver divides them."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed, Invalid, Misconfigured
from cyborg.core.inventory.device import NOT_OFFERED, Ability, Device
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import Memory, VolatileMemory
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.privileged import amdgpu
from cyborg.testing.conformance.kit import Outcome, run_rules
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.unit.drivers.gpu.simulated_amd import ALL, CARD, SimulatedAmdHost

MODES = ["SPX", "DPX", "QPX", "CPX"]
NODES = {"SPX": 0, "DPX": 1, "QPX": 3, "CPX": 7}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedAmdHost:
    found = SimulatedAmdHost(tmp_path)
    found.redirect(monkeypatch)
    return found


def make_access(host: SimulatedAmdHost) -> HostAccess:
    return replace(HostAccess.of(host.root), set_partition_mode=amdgpu.set_mode)


def make(host: SimulatedAmdHost, memory: Memory | None = None, **options: Any) -> GpuDriver:
    options = {"devices": ["vendor=1002"], "reset": "if_possible"} | options
    driver = GpuDriver(
        "gpus", {"partition_modes": list(ALL)} | options, host.root, make_access(host)
    )
    if memory is not None:
        driver.memory = memory
    return driver


def discover(driver: GpuDriver) -> Device:
    return next(device for device in driver.discover() if device.address == CARD)


def layouts(driver: GpuDriver) -> dict[str, dict[str, int]]:
    return {layout.name: dict(layout.offers) for layout in driver.layouts(discover(driver))}


def current(driver: GpuDriver) -> str:
    device = discover(driver)
    return next(found for found in driver.layouts(device) if found.matches(device)).name


def partition(driver: GpuDriver, layout: str) -> None:
    driver.partition(WorkItem("gpus", CARD, ""), layout)


@pytest.mark.parametrize(
    ("memory", "modes"),
    [
        ("NPS1", {"SPX": {"PGPU": 1}, "DPX": {}, "QPX": {}, "CPX": {}}),
        ("NPS2", {"DPX": {}}),
        ("NPS4", {"QPX": {}, "CPX": {}}),
    ],
)
def test_layouts_are_the_modes_that_the_memory_mode_permits(
    tmp_path: Path, memory: str, modes: dict[str, dict[str, int]]
) -> None:
    driver = make(SimulatedAmdHost(tmp_path, memory=memory))
    assert Ability.PARTITIONS in driver.abilities
    assert layouts(driver) == modes
    assert discover(driver).std_board_info["memory_partition"] == memory


def test_layouts_are_those_of_the_option_and_the_whole_card(host: SimulatedAmdHost) -> None:
    assert list(layouts(make(host, partition_modes=["CPX", "TPX"]))) == ["SPX", "CPX"]
    driver = make(host, partition_modes=[])
    assert list(layouts(driver)) == ["fixed"]
    assert "compute_partition" not in discover(driver).std_board_info


@pytest.mark.slow
def test_partition_to_each_mode_from_each_mode(host: SimulatedAmdHost) -> None:
    """A divided card is no whole one, and its partitions are no PCI functions."""
    driver = make(host)
    for first in MODES:
        for second in MODES:
            partition(driver, first)
            partition(driver, second)
            device = discover(driver)
            assert (host.mode, current(driver)) == (second, second)
            assert device.std_board_info["compute_partition"] == second
            assert len(host.nodes()) == NODES[second]
            assert [found.address for found in driver.discover()] == [CARD]
            if second == "SPX":
                (part,) = device.deployables
                assert "CUSTOM_GPU_PARTITION_SPX" in part.traits
            else:
                assert device.deployables == ()
                reason = f"its partition mode is {second}, for processes of the host"
                assert reason in device.vendor_board_info[NOT_OFFERED]
                with pytest.raises(DriverFailed, match=reason):
                    driver.prepare(WorkItem("gpus", CARD, CARD, CARD), None)


def test_divided_card_is_not_offered_without_the_option(host: SimulatedAmdHost) -> None:
    partition(make(host), "CPX")
    driver = make(host, partition_modes=[])
    device = discover(driver)
    assert device.deployables == ()
    assert "its partition mode is CPX" in device.vendor_board_info[NOT_OFFERED]
    with pytest.raises(DriverFailed, match="set the mode SPX"):
        driver.prepare(WorkItem("gpus", CARD, CARD, CARD), None)
    partition(make(host), "SPX")
    assert [part.address for part in discover(driver).deployables] == [CARD]


def test_partition_is_idempotent(host: SimulatedAmdHost) -> None:
    driver = make(host)
    partition(driver, "CPX")
    partition(driver, "CPX")
    assert host.writes == ["current_compute_partition=CPX"]


CHANGES = [(*change, late) for change in permutations(MODES, 2) for late in (False, True)]
USUAL_CHANGES = [("SPX", "CPX", False), ("CPX", "SPX", True), ("DPX", "QPX", True)]


@pytest.mark.parametrize(
    ("previous", "layout", "late"), sample(CHANGES, *USUAL_CHANGES, mark=pytest.mark.long)
)
def test_partition_that_the_kernel_refuses_leaves_the_card_as_before(
    host: SimulatedAmdHost, previous: str, layout: str, late: bool
) -> None:
    driver = make(host)
    partition(driver, previous)
    before = discover(driver)
    host.failing, host.late = {layout}, late
    restored = f"; {previous} was restored" if late else ""
    with pytest.raises(DriverFailed, match=f"changed to {layout}: Input/output error{restored}$"):
        partition(driver, layout)
    assert (host.mode, discover(driver)) == (previous, before)
    if late:
        host.failing = {layout, previous}
        with pytest.raises(DriverFailed, match=f"then .* cannot be changed to {previous}: Input"):
            partition(driver, layout)
    host.failing = set()
    partition(driver, layout)
    assert current(driver) == layout


def test_partition_while_a_process_uses_the_card_is_refused(host: SimulatedAmdHost) -> None:
    host.busy = True
    with pytest.raises(DriverFailed, match="Device or resource busy; a process uses the GPU"):
        partition(make(host), "CPX")
    host.busy, host.resetting = False, True
    with pytest.raises(DriverFailed, match="Operation not permitted"):
        partition(make(host), "CPX")
    assert host.mode == "SPX"


def test_partition_of_a_card_that_a_domain_has_is_refused(host: SimulatedAmdHost) -> None:
    host.give_to_domain(CARD, "guest1")
    with pytest.raises(DriverFailed, match="used by the domain guest1 of libvirt"):
        partition(make(host), "CPX")
    assert host.writes == []


@pytest.mark.parametrize("layout", ["", "TPX", "NPS4", "spx", "fixed", "other"])
def test_partition_unknown_layout_changes_nothing(host: SimulatedAmdHost, layout: str) -> None:
    with pytest.raises(DriverFailed, match="mode NPS1: expected one of SPX, DPX, QPX, CPX"):
        partition(make(host), layout)
    assert host.writes == []


def test_layouts_of_a_card_that_a_server_has_are_remembered(host: SimulatedAmdHost) -> None:
    memory = VolatileMemory()
    before = layouts(make(host, memory))
    host.bind("vfio-pci")
    driver = make(host, memory)
    assert (layouts(driver), current(driver)) == (before, "SPX")
    with pytest.raises(DriverFailed, match="bound to vfio-pci; expected amdgpu"):
        partition(driver, "CPX")
    assert list(layouts(make(host))) == ["fixed"], "never seen"


def test_partition_after_a_boot_is_applied_again(host: SimulatedAmdHost) -> None:
    driver = make(host)
    partition(driver, "CPX")
    host.load()
    assert current(driver) == "SPX"
    partition(driver, "CPX")
    assert current(driver) == "CPX"


def test_memory_mode_that_an_operator_changed_permits_other_layouts(
    host: SimulatedAmdHost,
) -> None:
    """The request applies when the module is loaded again, not at the write."""
    driver = make(host)
    host.write_attribute(host.bus / CARD / "current_memory_partition", "NPS4")
    assert list(layouts(driver)) == MODES
    host.load()
    assert (current(driver), layouts(driver)) == ("QPX", {"QPX": {}, "CPX": {}})
    with pytest.raises(DriverFailed, match="memory mode NPS4: expected one of QPX, CPX"):
        partition(driver, "SPX")


def test_card_whose_mode_cannot_be_read_is_not_offered(host: SimulatedAmdHost) -> None:
    (host.bus / CARD / "current_compute_partition").write_text("UNKNOWN\n")
    driver = make(host)
    assert (current(driver), discover(driver).deployables) == ("other", ())


def test_partition_modes_unknown_is_misconfigured(host: SimulatedAmdHost) -> None:
    with pytest.raises(Misconfigured, match="partition_modes"):
        make(host, partition_modes=["NPS4"])


@pytest.mark.parametrize("arguments", [("..", "CPX"), (CARD, "cpx"), (CARD, None)])
def test_set_mode_malformed_argument_is_invalid(
    host: SimulatedAmdHost, arguments: tuple[str, str]
) -> None:
    with pytest.raises(Invalid):
        amdgpu.set_mode(*arguments)
    assert host.writes == []


def test_set_mode_of_another_function_or_mode_is_refused(host: SimulatedAmdHost) -> None:
    host.add_function("0000:c2:00.0", "10de", "2335", "030200", kernel_driver="amdgpu")
    for address in ("0000:c2:00.0", "0000:77:00.0"):
        with pytest.raises(DriverFailed, match="there is no AMD GPU at"):
            amdgpu.set_mode(address, "CPX")
    with pytest.raises(DriverFailed, match="mode TPX with the memory mode NPS1; expected one of"):
        amdgpu.set_mode(CARD, "TPX")
    assert host.writes == []


def test_virtual_functions_of_gim_are_offered_and_not_changed(host: SimulatedAmdHost) -> None:
    """The module ``gim`` creates them when it is loaded (``vf_num``), and not by sysfs."""
    card = "0000:05:00.0"
    folder = host.add_function(
        card, "1002", "74a1", "120000", kernel_driver="gim", totalvfs=8, vf_product="74b5"
    )
    names = host.enable_virtual_functions(card, 8, "74b5", "120000")
    for name in names:
        (host.bus / name / "vendor").write_text("0x1002\n")
    rules = ["vendor=1002", "vendor=1002,functions=vf"]
    driver = make(host, devices=rules, vf_counts=["0", "4"])
    device = next(found for found in driver.discover() if found.address == card)
    (part,) = device.deployables
    assert [handle.address for handle in part.handles] == names, "and not the card"
    assert part.resource_class == "CUSTOM_GPU_VF"
    assert {"CUSTOM_GPU_VF", "CUSTOM_PCI_PRODUCT_1002_74B5"} <= part.traits
    assert [layout.name for layout in driver.layouts(device)] == ["fixed"]
    for layout in ("vfs-4", "CPX"):
        with pytest.raises(DriverFailed, match=r"has no layout .*: expected fixed"):
            driver.partition(WorkItem("gpus", card, ""), layout)
    assert (folder / "sriov_numvfs").read_text() == "8\n"


class SimulatedAmdDriver(GpuDriver):
    """The gpu driver with the privileged function of the simulated host ``kernel``."""

    kernel: SimulatedAmdHost

    def __init__(
        self, backend: str, options: dict[str, Any], sysfs_root: str | Path = "/sys"
    ) -> None:
        """Create the driver."""
        super().__init__(backend, options, sysfs_root, make_access(self.kernel))


@pytest.mark.slow
def test_gpu_driver_with_partition_modes_passes_all_rules(host: SimulatedAmdHost) -> None:
    SimulatedAmdDriver.kernel = host
    options = {"devices": ["vendor=1002"], "partition_modes": ["CPX"], "reset": "never"}
    results = run_rules(
        SimulatedAmdDriver, options, sysfs_root=host.root, work=True, entry_point="gpu"
    )
    failed = {r.rule.name for r in results if r.outcome in (Outcome.FAILED, Outcome.BLOCKED)}
    assert failed <= {"imports_only_core_and_drivers"}

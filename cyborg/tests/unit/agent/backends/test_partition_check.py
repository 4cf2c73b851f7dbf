# SPDX-License-Identifier: Apache-2.0
"""The agent's check of active partitions, with the double of Fabric Manager's library."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from cyborg.agent.backends.backend import Backend
from cyborg.agent.backends.partition_check import (
    INTERVAL,
    LAST_RETRY,
    SETTLED_INTERVAL,
    PartitionCheck,
    make_check,
)
from cyborg.core.errors import DriverFailed, Stale
from cyborg.core.inventory.device_set import Activation
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import VolatileMemory
from cyborg.drivers.device_sets.driver import DeviceSetDriver
from cyborg.rpc.contract import ConductorAPI
from cyborg.testing.fabric_manager import FabricManagerDouble, Programs, build
from cyborg.testing.machine import HostTree
from cyborg.tests.fixtures.machine import prerequisites
from cyborg.tests.unit.drivers.device_sets.members import hgx, slot

NEVER = 3600.0
MODULES = tuple(range(1, 9))
pytestmark = [pytest.mark.requires("compiler"), pytest.mark.slow]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    prerequisites.require("compiler")
    return build(tmp_path_factory.mktemp("fabric"))


class Conductor:
    """Answers with the configured uses, and records the reported partitions."""

    def __init__(self) -> None:
        self.uses: Mapping[str, str | None] = {}
        self.reports: list[list[str]] = []
        self.deactivations: list[list[str]] = []
        self.error: Exception | None = None
        # Called between the report and its answer.
        self.on_report: Callable[[], object] = lambda: None

    def report_active_partitions(
        self, host: str, epoch: str, partitions: Sequence[str]
    ) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        assert (host, epoch) == ("compute-1", "epoch-1")
        self.reports.append(list(partitions))
        self.on_report()
        return {"uses": [self.uses.get(partition, "used") for partition in partitions]}

    def deactivate_partitions(
        self, host: str, epoch: str, partitions: Sequence[str]
    ) -> dict[str, Any]:
        assert (host, epoch) == ("compute-1", "epoch-1")
        self.deactivations.append(list(partitions))
        return {"deactivated": list(partitions)}


class Host:
    """A host with eight GPUs, its Fabric Manager, and the conductor."""

    def __init__(self, folder: Path, programs: Programs) -> None:
        self.tree = HostTree(folder / "tree")
        for number in range(8):
            self.tree.add_function(slot(number), "10de", "2330", "030200", iommu_group=str(number))
        self.double = FabricManagerDouble(folder / "fabric_manager")
        self.programs, self.memory = programs, VolatileMemory()
        self.conductor = Conductor()
        self.now = 0.0
        self.start_agent()

    def start_agent(self) -> None:
        """Create the objects of a new agent process."""
        options = {
            "kind": "fabric",
            "members": ["gpu"],
            "fabric_address": self.double.address,
            "fabric_library": str(self.programs.library),
        }
        self.source = DeviceSetDriver("hgx", options, self.tree.root)
        self.source.memory = self.memory
        self.source.read_devices = lambda backend: hgx(MODULES)
        self.backend = Backend(self.source, NEVER, NEVER)
        conductor = cast(ConductorAPI, self.conductor)
        check = make_check("compute-1", "epoch-1", conductor, [self.backend])
        assert isinstance(check, PartitionCheck)
        check.clock = lambda: self.now
        self.check = check

    def obstacles(self) -> dict[str, str]:
        """Return the obstacles of the next discovery, by the id of the partition."""
        (device,) = self.source.discover()
        return {
            part.address.removeprefix("hgx:"): part.device_set.obstacle
            for part in device.deployables
            if part.device_set is not None and part.device_set.obstacle is not None
        }


@pytest.fixture
def host(tmp_path: Path, programs: Programs) -> Host:
    return Host(tmp_path, programs)


def item(number: int) -> WorkItem:
    return WorkItem("hgx", "hgx", f"hgx:{number}", "")


def test_restarted_agent_reports_its_active_partitions(host: Host) -> None:
    assert host.check.run_once() == INTERVAL
    assert host.conductor.reports == [], "nothing is active"
    host.source.discover()
    host.source.prepare(item(3), None)
    host.double.set("active", "3", "14")  # another program has activated one too
    host.start_agent()
    assert host.check.run_once() == INTERVAL
    assert host.conductor.reports == [["hgx:3"]]
    assert host.obstacles().keys() == {"14", "0", "2", "6"}, "those that overlap the other one"


@pytest.mark.parametrize("restart", [True, False])
def test_restarted_fabric_manager_is_checked_again(host: Host, restart: bool) -> None:
    host.source.discover()
    host.source.prepare(item(3), None)
    host.double.stop()
    host.check.run_once()
    assert host.conductor.reports == [], "it does not answer"
    host.double.start(restart=restart)
    host.check.run_once()
    assert host.conductor.reports == ([["hgx:3"]] if restart else [])


def test_unused_partition_is_deactivated_by_the_job_of_the_conductor(host: Host) -> None:
    """The job is refused while a guest has a device, and the partition stays active."""
    host.source.discover()
    host.source.prepare(item(3), None)
    host.start_agent()
    host.conductor.uses = {"hgx:3": "unused"}
    host.check.run_once()
    assert host.conductor.deactivations == [["hgx:3"]]
    assert set(host.double.active) == {3}, "the agent alone deactivates nothing"
    host.tree.open_node("/dev/vfio/0", "qemu-system-x86")
    with pytest.raises(DriverFailed, match=f"a guest may have {slot(0)}.*stop the guest first"):
        host.source.release(item(3))
    assert set(host.double.active) == {3}
    host.tree.close_nodes()
    host.source.release(item(3))
    assert host.double.active == {}


def test_partition_that_cannot_be_deactivated_closes_its_sets(host: Host) -> None:
    host.source.discover()
    host.source.prepare(item(3), None)
    host.conductor.uses = {"hgx:3": "overlapped"}
    host.check.run_once()
    found = host.obstacles()
    assert found.keys() == {"0", "1", "3", "7", "9"}
    assert "partition 3 is active without a request, and a device of it is in use" in found["1"]
    # The fabric is away: what is known stays.
    host.double.stop()
    host.check.run_once()
    assert host.obstacles() == found
    host.double.start(restart=True)
    host.conductor.uses = {}
    host.check.run_once()
    assert host.obstacles() == {}


@pytest.mark.parametrize("use", ["missing", None])
def test_partition_whose_set_lacks_a_device_closes_the_others(host: Host, use: str | None) -> None:
    """The set is in no report while a GPU is missing, so that the conductor may not know it."""
    host.source.discover()
    host.source.prepare(item(1), None)  # modules 1 to 4
    host.source.read_devices = lambda backend: hgx(MODULES[1:])
    host.conductor.uses = {"hgx:1": use}
    host.check.run_once()
    found = host.obstacles()
    assert "1" not in found, "it has no set now"
    assert {"4", "8"} <= found.keys(), "one and two of its other GPUs"
    assert "deactivate it while no guest has its GPUs (fmpm -d 1)" in found["4"]
    assert host.conductor.deactivations == []


def test_partition_that_was_released_during_the_report_is_not_deactivated(host: Host) -> None:
    host.source.discover()
    host.source.prepare(item(3), None)
    host.conductor.uses = {"hgx:3": "unused"}
    host.conductor.on_report = lambda: host.source.release(item(3))
    host.check.run_once()
    assert host.conductor.reports == [["hgx:3"]]
    assert host.conductor.deactivations == []
    assert host.obstacles() == {}


def test_conductor_is_asked_only_about_what_it_may_not_know(host: Host) -> None:
    host.source.discover()
    host.source.prepare(item(3), None)
    reports = host.conductor.reports
    for _ in range(3):
        host.check.run_once()
    assert reports == [["hgx:3"]], "at the start"
    host.source.prepare(item(14), None)
    for _ in range(3):
        host.check.run_once()
    assert reports[1:] == [["hgx:14", "hgx:3"]], "the active partitions are others"
    host.check.ask_again()
    for _ in range(3):
        host.check.run_once()
    assert len(reports) == 3, "the conductor may have lost its database"
    host.now = SETTLED_INTERVAL
    for _ in range(3):
        host.check.run_once()
    assert len(reports) == 4
    host.conductor.uses = {"hgx:3": "overlapped"}
    host.check.ask_again()
    for _ in range(3):
        host.check.run_once()
    assert len(reports) == 7, "it is not used"


def test_failure_of_one_fabric_leaves_the_others_checked(host: Host) -> None:
    class FailingSource(DeviceSetDriver):
        def read_activations(self) -> dict[str, Activation]:
            raise DriverFailed("the memory cannot be read")

    source = FailingSource("other", {"kind": "fabric", "members": ["gpu"]}, host.tree.root)
    host.check.fabrics = [Backend(source, NEVER, NEVER), *host.check.fabrics]
    host.source.discover()
    host.source.prepare(item(3), None)
    assert host.check.run_once() <= LAST_RETRY
    assert host.conductor.reports == [["hgx:3"]]


def test_agent_before_its_first_heartbeat_warns_of_nothing(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.source.discover()
    host.source.prepare(item(3), None)
    host.conductor.error = Stale("unknown agent epoch")
    host.check.run_once()
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_refused_prepare_withholds_the_sets_at_once(host: Host) -> None:
    host.source.discover()
    host.double.set("mode", 2)
    with pytest.raises(DriverFailed, match="is not in the mode"):
        host.source.prepare(item(3), None)
    host.backend.run_once()
    (device,) = host.backend.snapshot.devices
    sets = [part.device_set for part in device.deployables if part.device_set is not None]
    assert sets
    assert all("needs FABRIC_MODE=1" in str(found.obstacle) for found in sets)


@pytest.mark.parametrize(
    "answer", [Stale("unknown agent epoch"), KeyError("uses"), ValueError("no use")]
)
def test_failed_question_is_repeated(host: Host, answer: Exception) -> None:
    host.source.discover()
    host.source.prepare(item(3), None)
    host.conductor.error = answer
    assert 0 < host.check.run_once() <= LAST_RETRY
    host.conductor.error = None
    assert host.check.run_once() == INTERVAL
    assert host.conductor.reports == [["hgx:3"]]


def test_agent_without_a_fabric_has_no_check() -> None:
    source = DeviceSetDriver("sets", {"kind": "numa", "members": ["gpu"]})
    conductor = cast(ConductorAPI, Conductor())
    assert make_check("compute-1", "epoch-1", conductor, [Backend(source, NEVER, NEVER)]) is None

# SPDX-License-Identifier: Apache-2.0
"""Fabric partitions as device sets, on a fabric in memory."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import Ability, Device, Health
from cyborg.core.inventory.device_set import Activation
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import VolatileMemory
from cyborg.drivers.device_sets.driver import DeviceSetDriver
from cyborg.drivers.device_sets.fabric import FabricState, Partition
from cyborg.testing.machine import HostTree
from cyborg.tests.unit.drivers.device_sets.members import (
    divided,
    hgx,
    in_mig_mode,
    make_device,
    slot,
)

# The partitions of HGX H100 by the module ids of their GPUs.
H100 = (
    tuple(range(1, 9)),
    (1, 2, 3, 4),
    (5, 6, 7, 8),
    *((1, 3), (2, 4), (5, 7), (6, 8)),
    *((module,) for module in range(1, 9)),
)
# The module ids of the GPUs in the order of their addresses: another one, as on a machine.
MODULES = (2, 4, 3, 1, 7, 5, 8, 6)
PROBLEM = "Fabric Manager is starting: wait a minute"


class MemoryFabric:
    """A fabric whose partitions are activated in memory."""

    def __init__(self) -> None:
        self.partitions = tuple(
            Partition(n, m, links=18, line_rate_mbps=25000) for n, m in enumerate(H100)
        )
        self.problem: str | None = None
        self.obstacles: dict[int, str] = {}
        self.active: dict[int, tuple[str, ...]] = {}
        self.own: set[int] = set()

    def read(self) -> FabricState:
        partitions = tuple(replace(p, is_active=p.id in self.active) for p in self.partitions)
        return FabricState(partitions, self.problem, self.obstacles, frozenset(self.own))

    def activate(self, number: int, functions: Sequence[str] = ()) -> None:
        if self.problem is not None:
            raise DriverFailed(self.problem)
        self.active[number] = tuple(functions)
        self.own.add(number)

    def deactivate(self, number: int) -> None:
        self.active.pop(number, None)
        self.own.discard(number)


class Host:
    """A source of partitions, the devices of its GPUs, its fabric and the tree of its host."""

    def __init__(self, tmp_path: Path) -> None:
        self.tree = HostTree(tmp_path)
        for n in range(8):
            self.tree.add_function(slot(n), "10de", "2330", "030200", iommu_group=str(n))
        self.devices = hgx(MODULES)
        self.fabric = MemoryFabric()
        self.memory = VolatileMemory()

    def source(self, *sizes: str) -> DeviceSetDriver:
        """Return a new object of the driver, as after a restart of the agent."""
        options = {"kind": "fabric", "members": ["gpu"], "sizes": list(sizes)}
        source = DeviceSetDriver("hgx", options, self.tree.root)
        source.fabric, source.memory = self.fabric, self.memory
        source.read_devices = lambda backend: self.devices
        return source


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def item(number: int | str) -> WorkItem:
    return WorkItem("hgx", "hgx", f"hgx:{number}", "")


def members(device: Device) -> dict[str, list[str]]:
    return {
        part.address.removeprefix("hgx:"): [m.handle for m in part.device_set.members]
        for part in device.deployables
        if part.device_set is not None and part.device_set.obstacle is None
    }


def test_discover_maps_partitions_by_module_ids(host: Host) -> None:
    source = host.source()
    (device,) = source.discover()
    place = {module: slot(n) for n, module in enumerate(MODULES)}
    assert members(device) == {str(n): [place[m] for m in p] for n, p in enumerate(H100)}
    four = device.deployables[1]
    assert four.attributes["modules"] == "1,2,3,4"
    assert four.attributes["nvlinks"] == "18"
    assert {"CUSTOM_SET_FABRIC", "CUSTOM_SET_SIZE_4", "CUSTOM_H100"} <= four.traits
    assert four.attributes["nvlink_mbps"] == "25000"
    assert "CUSTOM_NVLINK_25000_MBPS" in four.traits
    assert source.abilities == {Ability.PREPARES, Ability.MEASURES}


def test_discover_offers_partitions_of_the_configured_sizes(host: Host) -> None:
    (device,) = host.source("2", "8").discover()
    assert sorted(map(int, members(device))) == [0, 3, 4, 5, 6]


def test_discover_withholds_gpus_without_a_partition(host: Host) -> None:
    # A missing GPU, and one without a module id: no partition with these is complete.
    host.devices = [replace(d, topology={}) if d.address == slot(3) else d for d in host.devices]
    del host.devices[0]
    (device,) = host.source("2").discover()
    assert sorted(members(device)) == ["5", "6"]
    obstacles = {
        part.address: part.device_set.obstacle
        for part in device.deployables
        if part.device_set is not None and part.device_set.obstacle is not None
    }
    reason = "no set of kind fabric and size 2 has it"
    assert obstacles.pop(f"hgx:1-{slot(1)}") == obstacles.pop(f"hgx:1-{slot(2)}") == reason
    (unknown,) = obstacles.values()
    assert unknown is not None
    assert "module id is unknown: install the extra nvml" in unknown


@pytest.mark.parametrize("hidden", [True, False])
def test_discover_withholds_partitions_with_a_gpu_in_mig_mode(host: Host, hidden: bool) -> None:
    """Those of a whole GPU, which offers nothing in this mode, and of a card with one vGPU."""
    every = members(host.source().discover()[0])
    index = MODULES.index(1)
    host.devices[index] = in_mig_mode(host.devices[index], hidden=hidden)
    source = host.source()
    (device,) = source.discover()
    with_it = {str(n) for n, modules in enumerate(H100) if 1 in modules}
    assert members(device) == {name: m for name, m in every.items() if name not in with_it}
    found = {part.address: part for part in device.deployables}
    assert found.keys() == {f"hgx:{name}" for name in every}
    for name in with_it:
        part = found[f"hgx:{name}"]
        assert part.device_set is not None
        assert part.device_set.obstacle == (
            f"device {slot(index)} is in MIG mode, in which it has no NVLink: disable the MIG "
            "mode, or apply another layout"
        )
        assert [m.handle for m in part.device_set.members] == every[name]
        assert part.resource_class == "PGPU"
    assert source.remarks == ()


@pytest.mark.parametrize("functions", [1, 2])
def test_discover_withholds_partitions_with_a_divided_gpu(host: Host, functions: int) -> None:
    """A GPU with one vGPU is not divided; whether its partitions have a use is another question."""
    host.source().discover()
    host.devices[0] = divided(host.devices[0], functions)
    source = host.source("2", "4")
    (device,) = source.discover()
    with_it = {str(n) for n, modules in enumerate(H100) if MODULES[0] in modules}
    found = {part.address.removeprefix("hgx:"): part for part in device.deployables}
    assert found.keys() == {str(number) for number in range(1, 7)}
    for name, part in found.items():
        assert part.device_set is not None
        reason = f"device {slot(0)} is divided into 2: apply another layout"
        is_withheld = name in with_it and functions == 2
        assert part.device_set.obstacle == (reason if is_withheld else None)
        # The member of a divided GPU is the whole one: its vGPUs are offered alone.
        own = {m.handle for m in part.device_set.members if m.device == slot(0)}
        assert own == ({slot(0) if functions == 2 else f"{slot(0)[:-1]}1"} if own else set())
        assert bool(own) == (name in with_it)


def test_discover_leaves_out_a_divided_gpu_without_another_layout(host: Host) -> None:
    host.source().discover()
    host.devices[0] = replace(divided(host.devices[0], 2), layouts=(), layout=None)
    (device,) = host.source().discover()
    assert members(device).keys() == {str(n) for n, m in enumerate(H100) if MODULES[0] not in m}
    assert len(device.deployables) == len(members(device))


def test_discover_names_a_gpu_in_mig_mode_of_which_no_partition_is_known(host: Host) -> None:
    """A card with several MIG-backed vGPUs: none of them is the member of a partition."""
    card = make_device(slot(3), functions=["0000:23:00.4", "0000:23:00.5"], module_id="1")
    host.devices[3] = in_mig_mode(card, hidden=False)
    source = host.source()
    (device,) = source.discover()
    assert members(device).keys() == {str(n) for n, modules in enumerate(H100) if 1 not in modules}
    assert source.remarks == (f"{slot(3)}: in MIG mode, in which no set of kind fabric has a GPU",)


def test_discover_uses_configured_module_ids(host: Host) -> None:
    expected = members(host.source().discover()[0])
    host.devices = [replace(device, topology={}) for device in host.devices]
    assert members(host.source().discover()[0]) == {}
    source = host.source()
    texts = [f"{slot(n)}={module}" for n, module in enumerate(MODULES)]
    again = DeviceSetDriver("hgx", {**source.options, "modules": texts}, host.tree.root)
    again.fabric, again.read_devices = host.fabric, source.read_devices
    assert members(again.discover()[0]) == expected


def test_discover_same_module_id_twice_fails(host: Host) -> None:
    host.devices = hgx((1, 2, 2))
    with pytest.raises(DriverFailed, match=f"{slot(1)} and {slot(2)} have the module id 2"):
        host.source().discover()


def test_discover_own_active_partition_changes_nothing(host: Host) -> None:
    before = host.source().discover()
    host.source().prepare(item(4), "instance")
    # The report of a host, and its digest, stay equal at each boot and delete.
    assert host.source().discover() == before


def test_discover_shows_obstacles_of_failures_and_of_other_programs(host: Host) -> None:
    host.fabric.obstacles = {5: "an NVLink failed"}
    host.fabric.active = {3: ()}  # modules 1 and 3
    (device,) = host.source().discover()
    found = {
        part.address: part.device_set.obstacle for part in device.deployables if part.device_set
    }
    assert found.pop("hgx:5") == "an NVLink failed"
    closed = {address for address, obstacle in found.items() if obstacle is not None}
    assert closed == {"hgx:0", "hgx:1", "hgx:3", "hgx:7", "hgx:9"}
    reason = str(found["hgx:1"])
    assert "another program activated partition 3" in reason
    assert "fmpm -d 3" in reason


def test_read_activations_tells_own_partitions_from_those_of_others(host: Host) -> None:
    source = host.source()
    source.discover()
    host.fabric.active = {4: ()}
    source.prepare(item(3), "instance")
    found = source.read_activations()
    assert found.pop("hgx:3") is Activation.OWN
    assert found.pop("hgx:4") is Activation.FOREIGN
    assert set(found.values()) == {Activation.INACTIVE}
    host.fabric.problem = PROBLEM
    assert source.read_activations() == {}
    source.fabric = None  # a replayed host
    assert source.read_activations() == {}


def test_discover_problem_without_known_partitions_fails(host: Host) -> None:
    host.fabric.problem, host.fabric.partitions = PROBLEM, ()
    with pytest.raises(DriverFailed, match=PROBLEM):
        host.source().discover()


def test_measure_problem_makes_the_source_unhealthy(host: Host) -> None:
    source = host.source()
    devices = source.discover()
    assert source.measure(devices)["hgx"].health is Health.OK
    host.fabric.problem = PROBLEM
    # The sets stay, so that their members are not offered alone.
    assert source.discover() == devices
    measured = source.measure(devices)["hgx"]
    assert (measured.health, measured.reason) == (Health.UNHEALTHY, PROBLEM)


def test_prepare_and_release_change_the_partition(host: Host) -> None:
    source = host.source()
    source.discover()
    for _ in range(2):
        source.prepare(item(1), "instance")
        assert host.fabric.active == {1: ()}
    # A restarted agent releases before its first discovery.
    for _ in range(2):
        host.source().release(item(1))
        assert host.fabric.active == {}


def test_prepare_passes_virtual_functions_in_the_order_of_the_partition(host: Host) -> None:
    host.devices = [
        make_device(slot(n), functions=[f"{slot(n)[:-1]}1"], module_id=str(module))
        for n, module in enumerate(MODULES)
    ]
    source = host.source()
    source.discover()
    source.prepare(item(3), None)
    place = {module: f"{slot(n)[:-1]}1" for n, module in enumerate(MODULES)}
    assert host.fabric.active == {3: (place[1], place[3])}


def test_prepare_failure_of_the_fabric_is_raised(host: Host) -> None:
    source = host.source()
    source.discover()
    host.fabric.problem = PROBLEM
    with pytest.raises(DriverFailed, match=PROBLEM):
        source.prepare(item(1), None)
    with pytest.raises(DriverFailed, match="partition 99 has no known members"):
        source.prepare(item(99), None)
    with pytest.raises(DriverFailed, match=r"hgx:1-a is no partition"):
        source.prepare(item("1-a"), None)


@pytest.mark.parametrize(
    ("node", "program"), [("/dev/vfio/1", "qemu-system-x86"), ("/dev/vfio/devices/vfio3", "qemu")]
)
def test_release_refuses_while_a_guest_has_a_member(host: Host, node: str, program: str) -> None:
    source = host.source()
    source.discover()
    source.prepare(item(1), None)
    host.tree.add_class_device(slot(1), "vfio-dev", "vfio3")
    host.tree.open_node(node, program)
    reason = f"a guest may have {slot(1)}: the process {program} has {node} open; stop the guest"
    with pytest.raises(DriverFailed, match=reason):
        source.release(item(1))
    assert host.fabric.active == {1: ()}
    # Other partitions are free.
    source.release(item(2))
    host.tree.close_nodes()
    host.tree.give_to_domain(slot(2), "foreign")
    with pytest.raises(DriverFailed, match=f"{slot(2)}: it is used by the domain foreign"):
        source.release(item(1))
    host.tree.give_to_domain(slot(2), None)
    source.release(item(1))
    assert host.fabric.active == {}


def test_release_keeps_known_members_while_a_gpu_is_missing(host: Host) -> None:
    source = host.source()
    source.discover()
    source.prepare(item(1), None)
    del host.devices[0]
    host.tree.open_node("/dev/vfio/2", "qemu")
    again = host.source()
    again.discover()
    with pytest.raises(DriverFailed, match=slot(2)):
        again.release(item(1))


def test_release_partition_with_unknown_members(host: Host) -> None:
    source = host.source()
    source.release(item(1))
    host.fabric.active = {1: ()}
    with pytest.raises(DriverFailed, match="partition 1 is not deactivated: its GPUs are unknown"):
        source.release(item(1))
    source.release(item("1-a"))
    other = DeviceSetDriver("hgx", {"kind": "numa", "members": ["gpu"]}, host.tree.root)
    other.release(item(1))
    assert host.fabric.active == {1: ()}

# SPDX-License-Identifier: Apache-2.0
"""A simulated HGX host: GPUs in sysfs, facts of NVML, and the double of Fabric Manager's SDK."""

from dataclasses import replace
from pathlib import Path

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import Device, Health
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import VolatileMemory
from cyborg.drivers.device_sets.driver import DeviceSetDriver
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.kernel.nvml import GpuFacts
from cyborg.drivers.pci.access import HostAccess
from cyborg.testing.fabric_manager import FabricManagerDouble, Programs, build
from cyborg.testing.machine import HostTree
from cyborg.tests.fixtures.device_sets.hgx_host import PLACES, add_gpus
from cyborg.tests.fixtures.machine import prerequisites
from cyborg.tests.unit.drivers.device_sets.members import slot

pytestmark = [pytest.mark.requires("compiler"), pytest.mark.slow]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    prerequisites.require("compiler")
    return build(tmp_path_factory.mktemp("fabric"))


class Host:
    """The host, with the driver of its GPUs and the source of its partitions."""

    def __init__(self, folder: Path, programs: Programs) -> None:
        self.tree = HostTree(folder)
        add_gpus(self.tree)
        facts = {PLACES[module]: GpuFacts(uuid=f"GPU-{module}", module=module) for module in PLACES}
        access = replace(HostAccess.of(self.tree.root), nvml=facts.get)
        options = {"devices": ["class=03"], "reset": "never"}
        self.gpus = GpuDriver("gpu", options, self.tree.root, access)
        self.double = FabricManagerDouble(folder / "fabric_manager")
        self.options = {
            "kind": "fabric",
            "members": ["gpu"],
            "fabric_address": self.double.address,
            "fabric_library": str(programs.library),
            "fabric_command": "/missing/fmpm",
        }
        self.memory = VolatileMemory()

    def source(self, **options: object) -> DeviceSetDriver:
        """Return a new object of the driver, as after a restart of the agent."""
        source = DeviceSetDriver("hgx", {**self.options, **options}, self.tree.root)
        source.memory = self.memory
        source.read_devices = lambda backend: self.gpus.discover()
        return source


@pytest.fixture
def host(tmp_path: Path, programs: Programs) -> Host:
    return Host(tmp_path, programs)


def members(device: Device) -> dict[str, list[str]]:
    sets = {part.address: part.device_set for part in device.deployables}
    return {a: [m.handle for m in found.members] for a, found in sets.items() if found is not None}


def item(number: int) -> WorkItem:
    return WorkItem("hgx", "hgx", f"hgx:{number}", "")


def test_discover_makes_a_set_of_each_partition(host: Host) -> None:
    (device,) = host.source().discover()
    found = members(device)
    assert len(found) == 15
    assert found["hgx:3"] == [PLACES[1], PLACES[3]]
    assert found["hgx:0"] == [PLACES[module] for module in range(1, 9)]
    pair = device.deployables[3]
    assert pair.attributes["modules"] == "1,3"
    assert {"CUSTOM_SET_FABRIC", "CUSTOM_SET_SIZE_2", "CUSTOM_PCI_VENDOR_10DE"} <= pair.traits
    assert any(trait.startswith("CUSTOM_NVLINK_") for trait in pair.traits)


def test_prepare_and_release_change_the_partition(host: Host) -> None:
    source = host.source()
    source.discover()
    source.prepare(item(3), "instance")
    assert host.double.active == {3: ()}
    with pytest.raises(DriverFailed, match=r"overlaps the active partition 3"):
        source.prepare(item(1), "instance")
    assert host.double.values("refused") == ["1 3"]
    host.tree.open_node("/dev/vfio/2", "qemu-system-x86")  # PLACES[3]
    with pytest.raises(DriverFailed, match=f"a guest may have {PLACES[3]}"):
        host.source().release(item(3))
    host.tree.close_nodes()
    host.source().release(item(3))
    assert host.double.active == {}


def test_fabric_manager_away_keeps_the_sets_unhealthy(host: Host) -> None:
    host.double.stop()
    with pytest.raises(DriverFailed):
        host.source().discover()
    host.double.start()
    host.source().discover()
    host.double.stop()
    source = host.source()
    devices = source.discover()
    assert len(members(devices[0])) == 15
    assert source.measure(devices)["hgx"].health is Health.UNHEALTHY
    with pytest.raises(DriverFailed):
        source.prepare(item(3), None)
    host.double.start()
    assert source.measure(devices)["hgx"].health is Health.OK


def test_restarted_fabric_manager_keeps_the_active_partition(host: Host) -> None:
    source = host.source()
    devices = source.discover()
    source.prepare(item(2), "instance")
    host.double.stop()
    host.double.start(restart=True)
    assert source.measure(devices)["hgx"].health is Health.OK
    assert host.double.active == {2: ()}


def test_partitions_of_another_mode_are_withheld(host: Host, tmp_path: Path) -> None:
    config = tmp_path / "fabricmanager.cfg"
    source = host.source(fabric_config=str(config))
    before = source.discover()
    config.write_text("FABRIC_MODE=1\n")
    assert source.discover() == before
    config.write_text("FABRIC_MODE=2\n")
    (device,) = source.discover()
    found = [part.device_set for part in device.deployables]
    assert len(found) == 15
    for device_set in found:
        assert device_set is not None
        assert str(device_set.obstacle).startswith(
            "Fabric Manager has FABRIC_MODE=2, and needs FABRIC_MODE=1 for whole GPUs: set it in "
        )


def test_gpus_below_one_switch_are_pairs(host: Host) -> None:
    source = host.source(kind="pcie", sizes=["2"])
    (device,) = source.discover()
    expected = [[slot(number), slot(number + 1)] for number in range(0, 8, 2)]
    assert list(members(device).values()) == expected
    assert all("CUSTOM_SET_PCIE" in part.traits for part in device.deployables)
    by_node = host.source(kind="numa", sizes=["4"]).discover()[0]
    assert list(members(by_node).values()) == [
        [slot(n) for n in r] for r in (range(4), range(4, 8))
    ]

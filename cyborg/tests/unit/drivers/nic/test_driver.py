# SPDX-License-Identifier: Apache-2.0
"""The nic driver on simulated hosts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import Misconfigured
from cyborg.core.inventory.device import NOT_OFFERED, Ability, Device, DeviceType, Health
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.nic.driver import NicDriver
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.privileged import pci
from cyborg.testing.conformance.kit import Outcome, run_rules
from cyborg.tests.unit.drivers.sriov.simulated_sriov import CARD, VIRTUAL, SimulatedSriov

ALL = {"devices": ["address=*"]}
SECOND = "0000:5e:00.1"
INTERFACE = "ens1f0"


class Host(SimulatedSriov):
    """Simulated host with a network card, whose interface is ``ens1f0``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.add_card()
        self.connect(INTERFACE, CARD)

    def connect(self, name: str, function: str, *, flags: int = 0x1002, **files: str) -> None:
        """Add a network interface of a function, by default one that is down."""
        self.add_interface(name, function, flags=flags)
        (self.bus / function / "net" / name).mkdir(parents=True)
        self.set_files(name, **files)

    def set_files(self, name: str, **files: str) -> None:
        """Write attributes of a network interface."""
        for file, text in files.items():
            (self.root / "class/net" / name / file).write_text(f"{text}\n")

    def disconnect(self, name: str, function: str) -> None:
        """Remove the interface of a function, as an unbind from its kernel driver does."""
        (self.bus / function / "net" / name).rmdir()

    def represent(self, number: int, name: str, port: str, switch: str = "b4a9fc") -> None:
        """Add the representor of a virtual function, in the mode switchdev."""
        self.add_interface(name, flags=0x1002)
        self.set_files(name, phys_switch_id=switch, phys_port_name=port)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    kernel = Host(tmp_path)
    kernel.redirect(monkeypatch)
    return kernel


def make_driver(host: Host, **options: Any) -> NicDriver:
    access = replace(HostAccess.of(host.root), set_count=pci.set_count)
    return NicDriver("n", ALL | options, host.root, access)


def discover(driver: NicDriver, address: str = CARD) -> Device:
    (device,) = (device for device in driver.discover() if device.address == address)
    return device


def infos(device: Device) -> dict[str, dict[str, str]]:
    return {h.address: dict(h.info) for part in device.deployables for h in part.handles}


def traits_of(device: Device) -> set[str]:
    return {trait for part in device.deployables for trait in part.traits}


def test_discover_offers_only_network_controllers(host: Host) -> None:
    host.add_function("0000:01:00.0", "144d", "a80a", "010802")
    (device,) = make_driver(host).discover()
    assert (device.address, device.type) == (CARD, DeviceType.NIC)
    assert [part.resource_class for part in device.deployables] == ["CUSTOM_NIC"]


@pytest.mark.parametrize("entry", [f"physnet1:{CARD}", "physnet1:3b:00.0", "physnet1:ens1f0"])
def test_virtual_functions_have_the_network_of_their_card(host: Host, entry: str) -> None:
    host.enable(2)
    driver = make_driver(host, physical_networks=["physnet2:ens9", entry])
    device = discover(driver)
    assert infos(device) == {
        address: {
            "domain": "0000",
            "bus": "3b",
            "device": "00",
            "function": str(number),
            "physical_network": "physnet1",
        }
        for number, address in enumerate(VIRTUAL[:2], 1)
    }
    assert {"CUSTOM_PHYSNET_PHYSNET1", "CUSTOM_NIC_VF"} <= traits_of(device)
    assert device.std_board_info["physical_network"] == "physnet1"
    assert driver.remarks == (
        "physical_networks: physnet2:ens9 matches no network card of this host",
    )


def test_handle_info_is_what_nova_reads_for_a_port(host: Host) -> None:
    """``get_arq_pci_device_profile`` of Nova reads these keys of a Neutron port's accelerator."""
    host.enable(1)
    device = discover(make_driver(host, physical_networks=[f"physnet1:{CARD}"]))
    info = infos(device)[VIRTUAL[0]]
    slot = f"{info['domain']}:{info['bus']}:{info['device']}.{info['function']}"
    assert (info["physical_network"], slot) == ("physnet1", VIRTUAL[0])


def test_card_without_a_network_is_offered_without_it(host: Host) -> None:
    device = discover(make_driver(host))
    assert "physical_network" not in infos(device)[CARD]
    assert "CUSTOM_NIC_PF" in traits_of(device)
    assert not any("PHYSNET" in trait for trait in traits_of(device))


def test_card_that_a_server_has_keeps_its_network(host: Host) -> None:
    driver = make_driver(host, physical_networks=["physnet1:ens1f0"])
    before = discover(driver)
    assert infos(before)[CARD]["physical_network"] == "physnet1"
    host.disconnect(INTERFACE, CARD)
    host.bind(CARD, "vfio-pci")
    after = discover(driver)
    assert infos(after) == infos(before)
    assert traits_of(after) == traits_of(before)
    assert driver.remarks == ()
    other = make_driver(host, physical_networks=["physnet1:ens1f0"])  # another agent process
    assert "physical_network" not in infos(discover(other))[CARD]


@pytest.mark.parametrize(
    "entries",
    [
        ["physnet1"],
        ["physnet1:"],
        [":ens1f0"],
        ["physnet1:../ens1f0"],
        ["physnet1:ens1f0/x"],
        ["physnet1:.."],
        ["physnet1:0000:3b:00"],
        ["phys net:ens1f0"],
        ["---:ens1f0"],
        ["physnet1:an_interface_name"],
        ["physnet1:ens1f0", "physnet2:ens1f0"],
        [f"physnet1:{CARD}", "physnet2:3b:00.0"],
        ["net-a:ens1f0", "net_a:ens1f1"],
    ],
)
def test_physical_networks_invalid_is_misconfigured(host: Host, entries: list[str]) -> None:
    with pytest.raises(Misconfigured, match=r"physical_networks.*NETWORK:ADDRESS"):
        make_driver(host, physical_networks=entries)


def test_representors_are_those_of_the_same_switch_and_card(host: Host) -> None:
    host.enable(2)
    host.set_files(INTERFACE, phys_switch_id="b4a9fc", phys_port_name="p0")
    host.represent(0, "ens1f0_0", "pf0vf0")
    host.represent(1, "rep1", "p0pf0vf1")
    host.represent(0, "other_pf", "pf1vf0")
    host.represent(0, "other_host", "c1pf0vf0")
    host.represent(0, "other_switch", "pf0vf0", "ffffff")
    device = discover(make_driver(host))
    found = infos(device)
    assert [found[address]["representor"] for address in VIRTUAL[:2]] == ["ens1f0_0", "rep1"]
    assert device.std_board_info["switch_id"] == "b4a9fc"


def test_card_without_switchdev_has_no_representors(host: Host) -> None:
    host.enable(1)
    host.represent(0, "ens1f0_0", "pf0vf0")
    device = discover(make_driver(host))
    assert "representor" not in infos(device)[VIRTUAL[0]]
    assert "switch_id" not in device.std_board_info


def test_discover_is_the_same_while_the_link_changes(host: Host) -> None:
    driver = make_driver(host)
    host.set_files(INTERFACE, speed="25000")
    before = discover(driver)
    assert before.std_board_info["link_speed_mbps"] == "25000"
    assert before.std_board_info["interface"] == INTERFACE
    host.set_files(INTERFACE, speed="-1", carrier="0")
    assert discover(driver) == before


def measure(driver: NicDriver) -> dict[str, tuple[Health, str | None]]:
    found = driver.measure(driver.discover())
    return {address: (m.health, m.reason) for address, m in found.items()}


@pytest.mark.parametrize("health", [["bus"], []])
def test_measure_card_without_a_link_is_unhealthy(host: Host, health: list[str]) -> None:
    host.enable(1)
    driver = make_driver(host, health=health)
    assert Ability.MEASURES in driver.abilities
    host.set_files(INTERFACE, flags="0x1003", carrier="0")
    assert measure(driver)[CARD] == (
        Health.UNHEALTHY,
        "the network interface ens1f0 has no link",
    )
    host.set_files(INTERFACE, carrier="1")
    assert measure(driver)[CARD] == (Health.OK, None)


def test_measure_card_that_is_down_is_healthy(host: Host) -> None:
    """Its carrier cannot be read, and a server can use all of it."""
    host.set_files(INTERFACE, flags="0x1002", carrier="0")
    assert measure(make_driver(host))[CARD] == (Health.OK, None)


def test_measure_without_check_carrier_ignores_the_link(host: Host) -> None:
    host.set_files(INTERFACE, flags="0x1003", carrier="0")
    assert measure(make_driver(host, check_carrier=False))[CARD] == (Health.OK, None)
    assert make_driver(host, check_carrier=False, health=[]).abilities == frozenset()


def test_used_card_is_not_offered_and_gets_virtual_functions(host: Host) -> None:
    host.set_files(INTERFACE, flags="0x1003")
    host.add_route(INTERFACE)
    driver = make_driver(host, vf_counts=["0", "2"])
    device = discover(driver)
    assert device.deployables == ()
    assert "ens1f0 has the default route" in device.vendor_board_info[NOT_OFFERED]
    assert [layout.name for layout in driver.layouts(device)] == ["vfs-0", "vfs-2"]

    driver.partition(WorkItem("n", CARD, ""), "vfs-2")
    assert list(infos(discover(driver))) == list(VIRTUAL[:2])
    driver.partition(WorkItem("n", CARD, ""), "vfs-0")
    assert discover(driver).deployables == ()


def test_virtual_function_that_the_host_uses_is_withheld(host: Host) -> None:
    host.virtual_driver = "iavf"
    host.enable(2)
    host.connect("ens1f0v0", VIRTUAL[0], flags=0x1003)
    host.connect("ens1f0v1", VIRTUAL[1])
    host.add_route("ens1f0v0")
    device = discover(make_driver(host))
    assert list(infos(device)) == [VIRTUAL[1]]
    assert f"{VIRTUAL[0]}: ens1f0v0 has the default route" in device.vendor_board_info[NOT_OFFERED]


def test_virtio_card_has_its_interface_below_its_device(host: Host) -> None:
    host.add_function("0000:00:03.0", "1af4", "1041", "020000", kernel_driver="virtio-pci")
    (host.bus / "0000:00:03.0/virtio1/net/eth0").mkdir(parents=True)
    host.add_interface("eth0", "0000:00:03.0", flags=0x1002)
    device = discover(make_driver(host, physical_networks=["physnet1:eth0"]), "0000:00:03.0")
    assert infos(device)["0000:00:03.0"]["physical_network"] == "physnet1"


@pytest.mark.parametrize("counts", [(), ("0", "2", "4")])
def test_nic_driver_passes_all_rules(host: Host, counts: tuple[str, ...]) -> None:
    class SimulatedNicDriver(NicDriver):
        """The nic driver, which changes the simulated host."""

        __module__ = NicDriver.__module__  # this test module has forbidden imports

        def __init__(self, backend: str, options: Any, sysfs_root: str | Path = "/sys") -> None:
            """Create the driver."""
            access = replace(HostAccess.of(host.root), set_count=pci.set_count)
            super().__init__(backend, options, sysfs_root, access)

    host.add_function(SECOND, "15b3", "101d", "020000", kernel_driver="mlx5_core")
    host.connect("ens2f1", SECOND)
    results = run_rules(
        SimulatedNicDriver,
        {
            "devices": ("class=02",),
            "vf_counts": counts,
            "physical_networks": (f"physnet1:{CARD}", "physnet2:ens2f1"),
        },
        sysfs_root=host.root,
        work=True,
        entry_point="nic",
    )
    failed = (Outcome.FAILED, Outcome.BLOCKED)
    assert {r.rule.name: r.reason for r in results if r.outcome in failed} == {}
    passed = {r.rule.name for r in results if r.outcome is Outcome.PASSED}
    assert ("partition_is_discovered" in passed) == bool(counts)
    assert host.numvfs() == 0

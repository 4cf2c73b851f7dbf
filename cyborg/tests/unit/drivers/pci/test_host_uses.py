# SPDX-License-Identifier: Apache-2.0
"""Uses of a function by the host that an operator overrides: active ports, adoption by force."""

import re
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.drivers.base import VolatileMemory
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.host_use.networks import ACTIVE_PORT
from cyborg.testing.machine import HostTree

NIC, GPU, DRIVE, VF = "0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:01:10.0"


@pytest.fixture
def host(tmp_path: Path) -> HostTree:
    """Return a host with a NIC whose link is up, a GPU and a drive."""
    host = HostTree(tmp_path)
    host.add_function(NIC, "8086", "1572", "020000", kernel_driver="i40e", parent="pci0000:01")
    host.add_interface("eth0", NIC)
    host.add_function(GPU, "10de", "2330", "030200", kernel_driver="nvidia")
    host.add_nvidia_gpu(GPU, 0)
    host.add_function(DRIVE, "144d", "a80a", "010802", kernel_driver="nvme", parent="pci0000:03")
    host.add_disk("nvme0n1", f"pci0000:03/{DRIVE}/nvme/nvme0")
    return host


def make_driver(host: HostTree, memory: VolatileMemory | None = None, **options: Any) -> Any:
    options = {"devices": ["address=*,functions=all"], **options}
    driver = GenericDriver("gen0", options, host.root)
    driver.memory = memory or VolatileMemory()
    return driver


def find_reasons(driver: GenericDriver) -> dict[str, str | None]:
    """Return why each device is not offered, None if it is, by address."""
    return {d.address: d.vendor_board_info.get(NOT_OFFERED) for d in driver.discover()}


def set_interface(host: HostTree, **files: str) -> None:
    for name, text in files.items():
        (host.root / "class/net/eth0" / name).write_text(f"{text}\n")


def test_active_port_is_used_until_it_is_down(host: HostTree) -> None:
    driver = make_driver(host)
    assert find_reasons(driver)[NIC] == f"eth0 {ACTIVE_PORT}"
    set_interface(host, carrier="0")
    assert find_reasons(driver)[NIC] == (
        f"eth0 {ACTIVE_PORT}; this ended, but the interface is still up: set it down to free it"
    )
    assert find_reasons(make_driver(host))[NIC] is None, "without a link"
    set_interface(host, carrier="1", flags="0x1002")
    assert find_reasons(driver)[NIC] is None


def test_active_port_of_a_rule_for_servers_is_offered(host: HostTree) -> None:
    driver = make_driver(host, devices=["class=02,active_port=offer"])
    assert find_reasons(driver) == {NIC: None}
    host.add_route("eth0")
    assert find_reasons(driver) == {NIC: "eth0 has the default route"}
    driver = make_driver(host, devices=["class=02,active_port=withhold"])
    assert find_reasons(driver) == {NIC: "eth0 has the default route"}


def test_active_port_of_a_virtual_function_is_offered(host: HostTree) -> None:
    host.add_function(VF, "8086", "154c", "020000", kernel_driver="iavf", parent="pci0000:01")
    host.add_virtual_function(VF, NIC)
    host.add_interface("eth1", VF)
    (device,) = [d for d in make_driver(host).discover() if d.address == NIC]
    assert [handle.address for part in device.deployables for handle in part.handles] == [VF]


def adopt(host: HostTree, memory: VolatileMemory, address: str, mark: str = "1") -> Any:
    """Adopt a function by force, as the agent does for a job; return the new driver."""
    driver = make_driver(host, memory, adopt_in_use=[f"{address}@{mark}"])
    driver.check_adoption([address], [address])
    return driver


def test_adoption_by_force_accepts_the_present_uses(host: HostTree) -> None:
    memory = VolatileMemory()
    assert find_reasons(adopt(host, memory, NIC))[NIC] is None
    # The agent starts again, then another use begins and ends.
    driver = make_driver(host, memory, adopt_in_use=[f"{NIC}@1"])
    assert find_reasons(driver)[NIC] is None
    host.add_route("eth0")
    assert find_reasons(driver)[NIC] == "eth0 has the default route"
    set_interface(host, flags="0x1002")
    host.remove_routes()
    assert find_reasons(driver)[NIC] is None
    set_interface(host, flags="0x1003", carrier="0")
    set_interface(host, carrier="1")
    assert find_reasons(driver)[NIC] is None, "the accepted use"
    assert driver.remarks == ()


def test_second_adoption_by_force_accepts_the_new_use(host: HostTree) -> None:
    memory = VolatileMemory()
    first = adopt(host, memory, NIC)
    host.add_route("eth0")
    assert find_reasons(first)[NIC] == "eth0 has the default route"
    second = adopt(host, memory, NIC, "2")
    assert find_reasons(second)[NIC] is None
    assert find_reasons(first)[NIC] == "eth0 has the default route", "it may stay active"


def test_adoption_that_is_refused_changes_nothing(host: HostTree) -> None:
    """The backend of before stays, with what it has accepted."""
    memory = VolatileMemory()
    before = adopt(host, memory, NIC)
    host.add_route("eth0")
    with pytest.raises(DriverFailed, match="eth0 has the default route; end this use or force"):
        make_driver(host, memory, adopt=[NIC]).check_adoption([NIC])
    assert find_reasons(before)[NIC] == "eth0 has the default route"


@pytest.mark.parametrize("stored", [None, "", "{}", "[1]", '{"model": "8086:1572"}', "[" * 100_000])
def test_without_its_record_nothing_is_accepted(host: HostTree, stored: str | None) -> None:
    """The agent lost its memory, or a file of the configuration has the option."""
    memory = VolatileMemory()
    adopt(host, memory, NIC)
    memory.put(f"accepted uses {NIC}", stored)
    driver = make_driver(host, memory, adopt_in_use=[f"{NIC}@1"])
    assert find_reasons(driver)[NIC] == f"eth0 {ACTIVE_PORT}"
    assert f"{NIC} was adopted by force, and the uses that were accepted" in driver.remarks[-1]


def test_accepted_use_is_that_of_one_model(host: HostTree) -> None:
    memory = VolatileMemory()
    adopt(host, memory, NIC)
    (host.root / "bus/pci/devices" / NIC / "device").write_text("0x1592\n")
    found = find_reasons(make_driver(host, memory, adopt_in_use=[f"{NIC}@1"]))
    assert found[NIC] == f"eth0 {ACTIVE_PORT}", "another card is in the slot"


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ({"/dev/nvidia0": ["python3"]}, "the process python3 has /dev/nvidia0 open"),
        ({"/dev/nvidia0": ["exporter", "python3"]}, "the process python3 has /dev/nvidia0 open"),
        ({"/dev/dri/card0": ["Xorg"]}, "the process Xorg has /dev/dri/card0 open"),
    ],
)
def test_another_use_of_the_same_kind_withholds_the_device(
    host: HostTree, nodes: dict[str, list[str]], reason: str
) -> None:
    host.add_class_device(GPU, "drm", "card0")
    host.open_node("/dev/nvidia0", "exporter")
    driver = adopt(host, VolatileMemory(), GPU)
    assert find_reasons(driver)[GPU] is None
    for node, programs in nodes.items():
        host.open_node(node, *programs)
    assert find_reasons(driver)[GPU] == reason


def test_use_of_another_interface_withholds_the_device(host: HostTree) -> None:
    host.add_interface("eth1", NIC, flags=0x1002)
    driver = adopt(host, VolatileMemory(), NIC)
    assert find_reasons(driver)[NIC] is None
    (host.root / "class/net/eth1/flags").write_text("0x1003\n")
    host.add_route("eth1")
    assert find_reasons(driver)[NIC] == "eth1 has the default route"


def test_use_above_an_interface_withholds_the_device(host: HostTree) -> None:
    """The address of the interface was accepted, not the default route of its VLAN."""
    host.add_route("eth0", "has an address of the host")
    driver = adopt(host, VolatileMemory(), NIC)
    assert find_reasons(driver)[NIC] is None
    host.add_interface("eth0.100")
    host.stack_interfaces("eth0.100", "eth0", master=False)
    host.add_route("eth0.100")
    assert find_reasons(driver)[NIC] == "eth0 is below eth0.100, which has the default route"


def test_adoption_without_force_names_the_use_and_the_remedy(host: HostTree) -> None:
    text = f"{NIC} cannot be adopted: the host uses it: eth0 {ACTIVE_PORT}; end this use or force"
    with pytest.raises(DriverFailed, match=re.escape(text)):
        make_driver(host, adopt=[NIC]).check_adoption([NIC])


def mount(host: HostTree) -> str:
    host.mount("nvme0n1", "/srv")
    return "nvme0n1 holds the file system /srv"


def open_disk(host: HostTree) -> str:
    host.open_node("/dev/nvme0n1", "ceph-osd")
    return "the process ceph-osd has /dev/nvme0n1 open"


def bind_to_user_space(host: HostTree) -> str:
    folder = host.root / "bus/pci/devices" / DRIVE / "driver"
    folder.unlink()
    folder.symlink_to("../../../bus/pci/drivers/uio_pci_generic")
    return "it is bound to uio_pci_generic, for a driver in user space"


@pytest.mark.parametrize("use", [mount, open_disk, bind_to_user_space])
def test_use_of_storage_is_never_accepted(host: HostTree, use: Any) -> None:
    reason = use(host)
    for forced in ([], [DRIVE]):
        option: dict[str, Any] = {"adopt_in_use": [f"{DRIVE}@1"]} if forced else {"adopt": [DRIVE]}
        driver = make_driver(host, **option)
        with pytest.raises(DriverFailed, match=f"{reason}; end this use first$"):
            driver.check_adoption([DRIVE], forced)
        assert find_reasons(driver)[DRIVE] == reason


def test_use_by_a_domain_of_libvirt_is_never_accepted(host: HostTree) -> None:
    host.give_to_domain(GPU, "desktop")
    driver = make_driver(host, adopt_in_use=[f"{GPU}@1"])
    with pytest.raises(DriverFailed, match=r"domain desktop of libvirt; end this use first$"):
        driver.check_adoption([GPU], [GPU])
    assert find_reasons(driver)[GPU] == "it is used by the domain desktop of libvirt"


def test_device_with_an_accepted_use_cannot_be_reset(host: HostTree) -> None:
    host.open_node("/dev/nvidia0", "exporter")
    memory = VolatileMemory()
    adopt(host, memory, GPU)
    driver = make_driver(host, memory, adopt_in_use=[f"{GPU}@1"], reset="required")
    (device,) = [d for d in driver.discover() if d.address == GPU]
    assert not device.deliverable
    assert "cannot be reset while the host uses it: the process exp" in device.undeliverable_reason


def test_check_unused_raises_for_a_use_that_has_just_begun(host: HostTree) -> None:
    driver = make_driver(host, devices=["address=*,active_port=offer"])
    driver.check_unused(NIC)
    host.add_route("eth0")
    with pytest.raises(DriverFailed, match=f"{NIC} cannot be given to a server: eth0 has the def"):
        driver.check_unused(NIC)


def test_check_unused_raises_for_data_that_the_host_has_just_written(host: HostTree) -> None:
    driver = make_driver(host)
    driver.discover()
    driver.check_unused(DRIVE)
    host.sign_disk("nvme0n1", "a file system (ext4)")
    with pytest.raises(DriverFailed, match=r"nvme0n1 holds a file system \(ext4\)"):
        driver.check_unused(DRIVE)
    make_driver(host, adopt=[DRIVE]).check_unused(DRIVE)

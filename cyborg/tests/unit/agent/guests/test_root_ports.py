# SPDX-License-Identifier: Apache-2.0
"""Free PCIe root ports, by domains that libvirt 9.0 with QEMU 7.2 described.

The domains ran with three devices of their own: a USB controller, a memory balloon and a random
number generator. Then libvirt plugged further generators until it had no slot, which gave the
expected numbers.
"""

from pathlib import Path

import pytest

from cyborg import os_acc
from cyborg.agent.backends.backend import Backend
from cyborg.agent.guests.devices import GuestDevice
from cyborg.agent.guests.reassertion import CONVENTIONAL_SIZE, HostHandles
from cyborg.agent.guests.root_ports import check_free_ports, count_free_ports
from cyborg.core.errors import DriverFailed
from cyborg.drivers.generic import GenericDriver
from cyborg.testing.machine import HostTree
from cyborg.tests.fixtures.hosts.fake_hypervisor import (
    SERVER,
    FakeHypervisor,
    make_arq,
    make_devices,
)
from cyborg.tests.unit.agent.guests.test_devices import discover

DOMAINS = Path(__file__).parent / "domains"
REMEDY = "set .libvirt. num_pcie_ports in nova.conf of its host, and hard reboot the server"


@pytest.mark.parametrize(
    ("name", "free"),
    [
        ("q35-five-free", 5),  # eight root ports
        ("q35-one-free", 1),
        ("q35-none-free", 0),
        ("q35-spare", 1),  # libvirt's own choice of ports
        ("pc", None),
    ],
)
def test_count_free_ports_of_real_domains(name: str, free: int | None) -> None:
    assert count_free_ports((DOMAINS / f"{name}.xml").read_text()) == free


PORT = "<controller type='pci' index='{}' model='pcie-root-port'>{}</controller>"


@pytest.mark.parametrize(
    ("devices", "free"),
    [
        ("", 0),
        (PORT.format(1, ""), 1),
        (PORT.format(1, "<target chassis='1' hotplug='off'/>"), 0),
        (PORT.format(1, "<target chassis='1' hotplug='on'/>"), 1),
        # A function of the host at a bus with the number of the port.
        (
            PORT.format(3, "") + "<hostdev type='pci'><source><address type='pci' bus='0x03'/>"
            "</source><address type='pci' bus='0x00'/></hostdev>",
            1,
        ),
        # A switch in the port, with two ports of its own.
        (
            PORT.format(1, "")
            + "<controller type='pci' index='2' model='pcie-switch-upstream-port'>"
            "<address type='pci' bus='0x01'/></controller>"
            "<controller type='pci' index='3' model='pcie-switch-downstream-port'>"
            "<address type='pci' bus='0x02'/></controller>"
            "<controller type='pci' index='0x4' model='pcie-switch-downstream-port'/>"
            "<disk><address type='pci' bus='3'/></disk>",
            1,
        ),
        # Neither a port of another bus, nor an address that is no PCI address.
        (PORT.format(1, "") + "<disk><address type='drive' bus='1'/></disk>", 1),
        (PORT.format("", "") + "<disk><address type='pci' bus='odd'/></disk>", 0),
    ],
)
def test_count_free_ports_of_parts(devices: str, free: int) -> None:
    root = "<controller type='pci' index='0' model='pcie-root'/>"
    assert count_free_ports(f"<domain><devices>{root}{devices}</devices></domain>") == free


@pytest.mark.parametrize("text", ["", "no XML", "<domain/>", "<domain><devices/></domain>"])
def test_count_free_ports_without_pcie_is_unknown(text: str) -> None:
    assert count_free_ports(text) is None
    check_free_ports(SERVER, text, 99)


def test_check_free_ports_says_what_is_missing_and_what_to_do() -> None:
    domain = (DOMAINS / "q35-one-free.xml").read_text()
    check_free_ports(SERVER, domain, 1)
    with pytest.raises(DriverFailed, match=f"has 1 free PCIe root ports, and needs 2: {REMEDY}"):
        check_free_ports(SERVER, domain, 2)


def test_plug_with_too_few_ports_changes_nothing() -> None:
    hypervisor = FakeHypervisor(ports=2)
    hypervisor.start(SERVER)
    devices, arqs = make_devices(hypervisor), [make_arq(n) for n in range(3)]
    with pytest.raises(DriverFailed, match=f"has 2 free PCIe root ports, and needs 3: {REMEDY}"):
        devices.plug(SERVER, arqs)
    assert hypervisor.count(SERVER) == 0
    assert devices.plug(SERVER, arqs[:2]) == 2
    # The guest has them: none needs a port any more.
    assert devices.plug(SERVER, arqs[:2]) == 0
    devices.unplug(SERVER, arqs[:1])
    assert devices.plug(SERVER, arqs[1:]) == 1


def test_reassert_attaches_as_many_as_fit_and_says_why_others_do_not() -> None:
    hypervisor = FakeHypervisor(ports=1)
    hypervisor.start(SERVER)
    devices, arqs = make_devices(hypervisor), [make_arq(n) for n in range(2)]
    check = devices.reassert([GuestDevice(SERVER, arq, ready=True) for arq in arqs])
    first, second = (check.outcomes[arq["uuid"]] for arq in arqs)
    assert (first.is_attached, second.is_attached) == (True, False)
    assert second.error is not None
    assert "has 0 free PCIe root ports, and needs 1: set [libvirt] num_pcie_ports" in second.error
    # Hard reboot with more ports.
    hypervisor.ports = 4
    hypervisor.start(SERVER, os_acc.attach(arqs[0]))
    check = devices.reassert([GuestDevice(SERVER, arq, ready=True) for arq in arqs])
    assert check.is_complete


@pytest.mark.parametrize(("size", "needed"), [(4096, True), (CONVENTIONAL_SIZE, False)])
def test_conventional_device_needs_no_pcie_port(tmp_path: Path, size: int, needed: bool) -> None:
    address = "0000:3d:01.1"
    host = HostTree(tmp_path)
    host.add_function(address, "8086", "1572", "020000", iommu_group="7")
    (host.root / "bus/pci/devices" / address / "config").write_bytes(bytes(size))
    backend = Backend(
        GenericDriver("b0", {"devices": ["address=*"]}, host.root), 3600, 3600, lambda: None
    )
    discover(backend)
    handles = HostHandles("h", [backend])
    assert handles.needs_port(make_arq(1)) is needed
    assert handles.needs_port(make_arq(2)), "no backend has it"
    (host.root / "bus/pci/devices" / address / "config").unlink()
    assert handles.needs_port(make_arq(1)), "unknown, as for libvirt"


def test_free_ports_of_a_guest_are_counted_while_it_runs() -> None:
    hypervisor = FakeHypervisor(ports=2)
    devices = make_devices(hypervisor)
    assert devices.count_free_ports(SERVER) is None, "not on this host"
    guest = hypervisor.start(SERVER, os_acc.attach(make_arq(1)))
    assert devices.count_free_ports(SERVER) == 1
    guest.runs = False
    assert devices.count_free_ports(SERVER) is None

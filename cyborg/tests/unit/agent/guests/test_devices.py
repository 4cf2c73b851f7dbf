# SPDX-License-Identifier: Apache-2.0
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg import os_acc
from cyborg.agent.backends.backend import Backend
from cyborg.agent.guests.devices import GuestDevice, GuestDevices, NotRunning
from cyborg.agent.guests.hypervisor import Domain, GuestBusy
from cyborg.agent.guests.reassertion import HostHandles
from cyborg.core.errors import CyborgError, DriverFailed, Invalid, NotFound, Unavailable, WrongState
from cyborg.core.inventory.device import AttachHandle, HandleType
from cyborg.core.naming import handle_uuid
from cyborg.drivers.generic import GenericDriver
from cyborg.testing.machine import HostTree
from cyborg.tests.fixtures.hosts.fake_hypervisor import (
    OTHER,
    SERVER,
    FakeHypervisor,
    make_arq,
    make_devices,
)
from cyborg.tests.fixtures.hosts.scripted_driver import LONG, ScriptedDriver, card
from cyborg.tests.unit.drivers.gpu import simulated_vgpus


@pytest.fixture
def hypervisor() -> FakeHypervisor:
    hypervisor = FakeHypervisor()
    hypervisor.start(SERVER)
    return hypervisor


@pytest.mark.slow
def test_plug_refuses_a_device_that_the_host_has_begun_to_use(
    hypervisor: FakeHypervisor, tmp_path: Path
) -> None:
    """The discovery that offered the device is older than the use."""
    arq = make_arq(1)
    address = "0000:3d:01.1"
    host = HostTree(tmp_path)
    host.add_function(address, "8086", "1572", "020000", kernel_driver="i40e", iommu_group="7")
    host.add_interface("eth0", address, flags=0x1002)
    backend = Backend(
        GenericDriver("b0", {"devices": ["address=*"]}, host.root), 3600, 3600, lambda: None
    )
    discover(backend)
    devices = GuestDevices(hypervisor, 1.0, make_ready=HostHandles("h", [backend]).make_ready)
    host.add_route("eth0")
    with pytest.raises(DriverFailed, match=f"{address} cannot be given to a server: eth0 has the"):
        devices.plug(SERVER, [arq])
    assert hypervisor.count(SERVER) == 0
    host.remove_routes()
    (host.root / "class/net/eth0").rename(tmp_path / "eth0")  # bound to VFIO
    (host.root / "bus/pci/devices" / address / "driver").unlink()
    assert devices.plug(SERVER, [arq]) == 1


def test_plug_creates_a_vgpu_again_that_another_program_removed(
    hypervisor: FakeHypervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its server was stopped, such as by ``sriov-manage -d``."""
    host = simulated_vgpus.make_host(tmp_path)
    host.redirect(monkeypatch.setattr)
    driver = simulated_vgpus.make_driver(host, f"address={simulated_vgpus.CARD},type=H200X-70C")
    backend = Backend(driver, 3600, 3600, lambda: None)
    discover(backend)
    (handle, *_) = backend.snapshot.devices[0].deployables[0].handles
    driver.prepare(simulated_vgpus.item(handle.address), SERVER)
    host.write_attribute(host.bus / handle.address / "nvidia/current_vgpu_type", "0")
    arq = {
        **make_arq(1),
        "attach_handle_type": str(handle.type),
        "attach_handle_info": dict(handle.info),
    }
    devices = GuestDevices(hypervisor, 1.0, make_ready=HostHandles("h", [backend]).make_ready)
    assert devices.plug(SERVER, [arq]) == 1
    assert host.current(handle.address) == simulated_vgpus.LARGE.name


def test_plug_attaches_what_is_missing(hypervisor: FakeHypervisor) -> None:
    devices, arqs = make_devices(hypervisor), [make_arq(1), make_arq(2)]
    assert devices.plug(SERVER, arqs[:1]) == 1
    assert devices.plug(SERVER, arqs) == 1
    assert devices.plug(SERVER, arqs) == 0
    assert hypervisor.count(SERVER) == 2


def test_device_that_nova_has_composed_is_there_already(hypervisor: FakeHypervisor) -> None:
    """Nova's element has no alias of ours."""
    hypervisor.start(SERVER, os_acc.detach(make_arq(1)))
    assert make_devices(hypervisor).plug(SERVER, [make_arq(1)]) == 0


@pytest.mark.parametrize("defined", [True, False])
def test_plug_into_a_guest_that_does_not_run_is_refused(
    hypervisor: FakeHypervisor, defined: bool
) -> None:
    hypervisor.guests[SERVER].runs = False
    if not defined:
        del hypervisor.guests[SERVER]
    with pytest.raises(NotRunning, match=f"server {SERVER} does not run on this host"):
        make_devices(hypervisor).plug(SERVER, [make_arq(1)])


def test_unplug_waits_until_the_guest_has_no_device(hypervisor: FakeHypervisor) -> None:
    devices, arqs = make_devices(hypervisor), [make_arq(1), make_arq(2)]
    devices.plug(SERVER, arqs)
    assert devices.unplug(SERVER, arqs)
    assert (hypervisor.count(SERVER), hypervisor.requests) == (0, 2)
    assert devices.unplug(SERVER, arqs)
    assert hypervisor.requests == 2


def test_unplug_also_removes_the_device_from_the_definition(hypervisor: FakeHypervisor) -> None:
    guest = hypervisor.start(SERVER, os_acc.attach(make_arq(1)))
    guest.runs = False
    assert make_devices(hypervisor).unplug(SERVER, [make_arq(1)])
    assert guest.defined == {}


def test_unplug_of_an_absent_guest_is_complete(hypervisor: FakeHypervisor) -> None:
    assert make_devices(hypervisor).unplug(OTHER, [make_arq(1)])


def test_guest_that_keeps_its_device_is_an_error_and_is_asked_once(
    hypervisor: FakeHypervisor,
) -> None:
    devices = make_devices(hypervisor)
    devices.plug(SERVER, [make_arq(1)])
    hypervisor.keeps = True
    with pytest.raises(DriverFailed, match="must confirm the removal") as found:
        devices.unplug(SERVER, [make_arq(1)])
    assert SERVER in found.value.message
    assert make_arq(1)["uuid"] in found.value.message
    assert hypervisor.requests == 1
    hypervisor.keeps = False
    assert devices.unplug(SERVER, [make_arq(1)])


def test_refused_request_is_shown_at_the_end(hypervisor: FakeHypervisor) -> None:
    """An earlier request may be in progress, for which libvirt refuses another one."""
    devices = make_devices(hypervisor)
    devices.plug(SERVER, [make_arq(1)])

    def refuse(instance: str, device: str, domain: Domain) -> None:
        raise DriverFailed("is already in the process of unplug")

    hypervisor.detach = refuse  # type: ignore[method-assign]
    with pytest.raises(DriverFailed, match="already in the process of unplug"):
        devices.unplug(SERVER, [make_arq(1)])


def test_busy_guest_is_asked_again(hypervisor: FakeHypervisor) -> None:
    """libvirt has not taken a request for which it could not lock the guest."""
    devices = make_devices(hypervisor)
    devices.clock = lambda: 0.0
    devices.plug(SERVER, [make_arq(1)])
    detach = hypervisor.detach

    def be_busy_once(instance: str, device: str, domain: Domain) -> None:
        hypervisor.detach = detach  # type: ignore[method-assign]
        raise GuestBusy("cannot acquire state change lock")

    hypervisor.detach = be_busy_once  # type: ignore[method-assign]
    assert devices.unplug(SERVER, [make_arq(1)])
    assert hypervisor.count(SERVER) == 0


def test_unplug_ends_when_the_agent_stops(hypervisor: FakeHypervisor) -> None:
    devices = make_devices(hypervisor)
    devices.plug(SERVER, [make_arq(1)])
    hypervisor.keeps = True
    assert not devices.unplug(SERVER, [make_arq(1)], lambda: False)


def test_device_that_was_taken_back_is_not_attached_by_a_late_request(
    hypervisor: FakeHypervisor,
) -> None:
    devices = make_devices(hypervisor)
    devices.unplug(SERVER, [make_arq(1)])
    with pytest.raises(WrongState, match="was detached from the guest"):
        devices.plug(SERVER, [make_arq(1)])
    assert devices.reassert([GuestDevice(SERVER, make_arq(1), True)]).is_complete
    assert hypervisor.count(SERVER) == 0


def test_reassert_continues_after_a_device_that_cannot_be_attached(
    hypervisor: FakeHypervisor,
) -> None:
    hypervisor.start(OTHER)
    attach = hypervisor.attach

    def refuse(instance: str, device: str) -> None:
        if instance == SERVER:
            raise DriverFailed("No more available PCI slots")
        attach(instance, device)

    hypervisor.attach = refuse  # type: ignore[method-assign]
    devices = make_devices(hypervisor)
    wanted = [GuestDevice(SERVER, make_arq(1), True), GuestDevice(OTHER, make_arq(2), True)]
    assert not devices.reassert(wanted).is_complete
    assert (hypervisor.count(SERVER), hypervisor.count(OTHER)) == (0, 1)
    hypervisor.attach = attach  # type: ignore[method-assign]
    assert devices.reassert(wanted).is_complete
    assert hypervisor.count(SERVER) == 1


def test_reassert_waits_for_devices_that_are_not_ready(hypervisor: FakeHypervisor) -> None:
    devices = make_devices(hypervisor)
    assert not devices.reassert([GuestDevice(SERVER, make_arq(1), False)]).is_complete
    assert hypervisor.count(SERVER) == 0


def test_device_of_no_backend_is_refused(hypervisor: FakeHypervisor) -> None:
    known = make_arq(1)["uuid"]
    devices = GuestDevices(hypervisor, 20.0, is_known=lambda arq: arq["uuid"] == known)
    with pytest.raises(NotFound, match="no backend of this host has the device"):
        devices.plug(SERVER, [make_arq(1), make_arq(2)])
    assert not devices.reassert([GuestDevice(SERVER, make_arq(2), True)]).is_complete
    assert hypervisor.count(SERVER) == 0
    assert devices.plug(SERVER, [make_arq(1)]) == 1


PCI_INFO = {"domain": "0000", "bus": "3d", "device": "01", "function": "1"}
MDEV_INFO = {"parent": "mtty", "asked_type": "mtty-2"}


def discover(backend: Backend) -> None:
    """Let a backend discover once."""
    found = threading.Event()
    backend.rediscover(lambda state: found.set())
    backend.start()
    assert found.wait(LONG)
    backend.stop()


@pytest.mark.parametrize(
    ("type_", "info", "changes", "expected"),
    [
        ("PCI", PCI_INFO, {}, True),
        ("PCI", PCI_INFO, {"attach_handle_uuid": OTHER}, True),
        ("PCI", PCI_INFO, {"attach_handle_type": "MDEV"}, False),
        ("PCI", PCI_INFO, {"attach_handle_info": {**PCI_INFO, "function": "2"}}, False),
        ("VFIO", PCI_INFO, {"attach_handle_info": {**PCI_INFO, "delivery": "agent"}}, True),
        ("VFIO", PCI_INFO, {"attach_handle_type": "PCI"}, False),
        ("MDEV", MDEV_INFO, {}, True),
        ("MDEV", MDEV_INFO, {"attach_handle_uuid": OTHER}, False),
    ],
)
def test_known_device_is_one_of_a_backend(
    type_: str, info: dict[str, str], changes: dict[str, Any], expected: bool
) -> None:
    handle = AttachHandle("h1", HandleType(type_), info)
    (deployable,) = card().deployables
    device = replace(card(), deployables=(replace(deployable, handles=(handle,)),))
    backend = Backend(ScriptedDriver("b0", devices=[device]), 3600, 3600, lambda: None)
    assert HostHandles("h", [backend]).is_pending()
    discover(backend)
    assert backend.snapshot.devices == (device,)
    arq = {
        **make_arq(1),
        "attach_handle_type": type_,
        "attach_handle_info": info,
        "attach_handle_uuid": handle_uuid("h", deployable.address, "h1"),
        **changes,
    }
    assert HostHandles("h", [backend]).is_known(arq) is expected
    assert not HostHandles("h", [backend]).is_pending()
    assert not HostHandles("h", []).is_known(arq)


def test_late_request_to_attach_is_over_before_the_device_is_free(
    hypervisor: FakeHypervisor,
) -> None:
    """The agent lost its connection with the request, which the hypervisor executes later."""
    device = os_acc.attach(make_arq(1))
    hypervisor.late = [(SERVER, device)]
    assert make_devices(hypervisor).unplug(SERVER, [make_arq(1)])
    assert (hypervisor.late, hypervisor.attached, hypervisor.count(SERVER)) == ([], 1, 0)


def test_absence_is_proven_by_a_request_that_waits_for_earlier_ones(
    hypervisor: FakeHypervisor,
) -> None:
    devices = make_devices(hypervisor)
    devices.plug(SERVER, [make_arq(1)])
    assert devices.unplug(SERVER, [make_arq(1), make_arq(2)])
    assert (hypervisor.requests, hypervisor.absent_proofs) == (1, 3)

    def refuse(instance: str, device: str, domain: Domain) -> None:
        raise GuestBusy("cannot acquire state change lock")

    hypervisor.detach = refuse  # type: ignore[method-assign]
    with pytest.raises(DriverFailed, match="cannot acquire state change lock"):
        devices.unplug(SERVER, [make_arq(1)])


def test_missing_guest_that_must_be_there_is_an_error(hypervisor: FakeHypervisor) -> None:
    with pytest.raises(DriverFailed, match=f"libvirt has no guest of server {OTHER}"):
        make_devices(hypervisor).unplug(OTHER, [make_arq(1)], guest_expected=True)


def test_plug_waits_for_the_discovery_of_a_backend(hypervisor: FakeHypervisor) -> None:
    discovered: set[str] = set()
    devices = GuestDevices(
        hypervisor,
        20.0,
        sleep=lambda seconds: discovered.add(make_arq(1)["uuid"]),
        is_known=lambda arq: arq["uuid"] in discovered,
        is_pending=lambda: not discovered,
    )
    with pytest.raises(Unavailable, match="the discovery of a backend has not succeeded"):
        devices.plug(SERVER, [make_arq(1)])
    assert devices.plug(SERVER, [make_arq(1)], seconds=60.0) == 1


def test_plug_waits_for_a_hypervisor_that_does_not_answer(hypervisor: FakeHypervisor) -> None:
    hypervisor.error = Unavailable("libvirt has not answered for 60 s")

    def answer(seconds: float) -> None:
        hypervisor.error = None

    devices = GuestDevices(hypervisor, 20.0, sleep=answer)
    assert devices.plug(SERVER, [make_arq(1)], seconds=60.0) == 1
    hypervisor.error = Unavailable("libvirt has not answered for 60 s")
    with pytest.raises(Unavailable, match="has not answered for 60 s"):
        devices.plug(SERVER, [make_arq(2)], seconds=0.0)
    assert devices.plug(SERVER, [make_arq(2)], lambda: False, 60.0) is None


@pytest.mark.parametrize(
    "error", [GuestBusy("cannot acquire state change lock"), Invalid("attach_handle_info")]
)
def test_reassert_continues_after_a_guest_that_is_not_available(
    hypervisor: FakeHypervisor, error: CyborgError
) -> None:
    hypervisor.start(OTHER)
    attach = hypervisor.attach

    def refuse(instance: str, device: str) -> None:
        if instance == SERVER:
            raise error
        attach(instance, device)

    hypervisor.attach = refuse  # type: ignore[method-assign]
    wanted = [GuestDevice(SERVER, make_arq(1), True), GuestDevice(OTHER, make_arq(2), True)]
    assert not make_devices(hypervisor).reassert(wanted).is_complete
    assert hypervisor.count(OTHER) == 1


def test_reassert_asks_once_for_each_guest(hypervisor: FakeHypervisor) -> None:
    devices, arqs = make_devices(hypervisor), [make_arq(number) for number in range(1, 4)]
    devices.plug(SERVER, arqs)
    described: list[str] = []
    describe = hypervisor.describe

    def count(instance: str) -> Domain | None:
        described.append(instance)
        return describe(instance)

    hypervisor.describe = count  # type: ignore[method-assign]
    assert devices.reassert([GuestDevice(SERVER, arq, True) for arq in arqs]).is_complete
    assert described == [SERVER]


def test_device_of_another_guest_is_refused(hypervisor: FakeHypervisor) -> None:
    hypervisor.start(OTHER, os_acc.attach(make_arq(1)))
    with pytest.raises(DriverFailed, match="in use by another guest"):
        make_devices(hypervisor).plug(SERVER, [make_arq(1)])


def test_reassert_leaves_stopped_guests_alone(hypervisor: FakeHypervisor) -> None:
    hypervisor.guests[SERVER].runs = False
    assert make_devices(hypervisor).reassert([GuestDevice(SERVER, make_arq(1), True)]).is_complete
    assert hypervisor.attached == 0


def test_hypervisor_that_does_not_answer_is_an_error(hypervisor: FakeHypervisor) -> None:
    hypervisor.error = Unavailable("libvirt has not answered for 60 s")
    devices = make_devices(hypervisor)
    with pytest.raises(Unavailable):
        devices.reassert([GuestDevice(SERVER, make_arq(1), True)])
    with pytest.raises(Unavailable):
        devices.unplug(SERVER, [make_arq(1)])

# SPDX-License-Identifier: Apache-2.0
"""The privileged function of the crypto driver: what it refuses, it does not write."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.kernel.crypto import QAT_LAYOUTS
from cyborg.drivers.privileged import CONTEXT, qat
from cyborg.testing.machine import HostTree
from cyborg.tests.unit.drivers.crypto.simulated_qat import (
    OLD_QAT,
    QAT,
    VIRTIO,
    SimulatedDevice,
    add_attributes,
    make_host,
)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostTree]:
    tree = make_host(tmp_path)
    monkeypatch.setattr(qat, "_SYS", tree.root)
    CONTEXT.set_client_mode(False)
    yield tree
    CONTEXT.set_client_mode(True)


def read(host: HostTree) -> tuple[str, str]:
    folder = host.bus / QAT / "qat"
    return (folder / "state").read_text(), (folder / "cfg_services").read_text()


@pytest.mark.parametrize("address", ["", f"../{QAT}", f"{QAT}\n", "qat0", f"{QAT}/../x"])
def test_set_services_malformed_address_is_invalid(host: HostTree, address: str) -> None:
    with pytest.raises(Invalid):
        qat.set_services(address, "dc")


@pytest.mark.parametrize("layout", ["", "sym;asym", "dc\n", "dc;", "SYM", "sym;asym;dc", "decomp"])
def test_set_services_unknown_layout_is_refused(host: HostTree, layout: str) -> None:
    with pytest.raises(DriverFailed, match="unknown layout"):
        qat.set_services(QAT, layout)
    assert read(host) == ("up\n", "sym;asym\n")


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("0000:0f:00.0", "there is no device"),
        (OLD_QAT, "expected the physical function"),
        (VIRTIO, "expected the physical function"),
    ],
)
def test_set_services_other_device_is_refused(host: HostTree, address: str, error: str) -> None:
    with pytest.raises(DriverFailed, match=error):
        qat.set_services(address, "dc")


def test_set_services_device_of_a_server_is_refused(host: HostTree) -> None:
    (host.bus / QAT / "driver").unlink()
    (host.bus / QAT / "driver").symlink_to("../../../bus/pci/drivers/vfio-pci")
    with pytest.raises(DriverFailed, match="bound to the kernel driver vfio-pci"):
        qat.set_services(QAT, "dc")
    assert read(host) == ("up\n", "sym;asym\n")


@pytest.mark.parametrize("count", [0, 2], ids=["listed", "counted"])
def test_set_services_device_with_virtual_functions_is_refused(host: HostTree, count: int) -> None:
    """The kernel creates virtual functions before it updates their number."""
    host.enable_virtual_functions(QAT, 2, "4941")
    add_attributes(host.bus / QAT, {"sriov_numvfs": str(count)})
    with pytest.raises(DriverFailed, match="has virtual functions"):
        qat.set_services(QAT, "dc")
    assert read(host) == ("up\n", "sym;asym\n")


def test_set_services_writes_the_files_of_the_device(host: HostTree) -> None:
    qat.set_services(QAT, "dc;sym")
    assert read(host) == ("up\n", "dc;sym\n")


def test_set_services_without_attributes_fails(host: HostTree) -> None:
    for path in (host.bus / QAT / "qat").iterdir():
        path.unlink()
    with pytest.raises(DriverFailed, match="qat/state is None"):
        qat.set_services(QAT, "dc")


@pytest.mark.parametrize("layout", sorted(set(QAT_LAYOUTS) - {"asym;sym"}))
def test_change_stops_writes_and_starts(layout: str) -> None:
    device = SimulatedDevice()
    qat.change(QAT, device, layout)
    value = QAT_LAYOUTS[layout]
    assert device.writes == [("state", "down"), ("cfg_services", value), ("state", "up")]


@pytest.mark.parametrize("value", ["sym;asym", "asym;sym"])
def test_change_to_current_services_writes_nothing(value: str) -> None:
    device = SimulatedDevice(value)
    qat.change(QAT, device, "asym;sym")
    assert device.writes == []


def test_change_stopped_device_is_started() -> None:
    device = SimulatedDevice(state="down")
    qat.change(QAT, device, "dc")
    assert device.values == {"cfg_services": "dc", "state": "up"}


def test_change_device_in_use_by_the_kernel_changes_nothing() -> None:
    device = SimulatedDevice()
    device.busy = True
    with pytest.raises(DriverFailed, match="resource busy; its services sym;asym were restored"):
        qat.change(QAT, device, "dc")
    assert device.writes == [("state", "down")]
    assert device.values == {"cfg_services": "sym;asym", "state": "up"}


def test_change_device_with_new_virtual_functions_is_not_stopped() -> None:
    device = SimulatedDevice()
    device.functions_after = 0
    with pytest.raises(DriverFailed, match=r"it has virtual functions.*were restored"):
        qat.change(QAT, device, "dc")
    assert device.writes == []


def test_change_is_not_undone_if_the_device_has_virtual_functions_then() -> None:
    """The kernel ignores the services, and a udev rule creates functions when the device starts."""

    class Ignores(SimulatedDevice):
        def write(self, name: str, value: str) -> None:
            super().write(name, "sym" if name == "cfg_services" else value)

    device = Ignores()
    device.functions_after = 3
    with pytest.raises(DriverFailed, match="could not be restored: it has virtual functions"):
        qat.change(QAT, device, "dc")
    assert [name for name, _ in device.writes] == ["state", "cfg_services", "state"]
    assert device.values == {"cfg_services": "sym", "state": "up"}


@pytest.mark.parametrize("found", ["sriov_numvfs", "virtfn0"])
def test_set_services_virtual_functions_since_the_first_check_are_kept(
    host: HostTree, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr(qat, "check_unused", lambda sysfs, function: None)
    (host.bus / QAT / found).write_text("1\n")
    with pytest.raises(DriverFailed, match="it has virtual functions"):
        qat.set_services(QAT, "dc")
    assert read(host) == ("up\n", "sym;asym\n")


@pytest.mark.parametrize("state", ["up", "down"])
def test_change_unsupported_by_the_kernel_is_undone(state: str) -> None:
    """Linux 6.0 knows only two sets of services."""
    device = SimulatedDevice(state=state)
    device.accepted = frozenset({"sym;asym", "dc"})
    with pytest.raises(DriverFailed, match="Invalid argument; its services"):
        qat.change(QAT, device, "dcc")
    assert device.values == {"cfg_services": "sym;asym", "state": state}


def test_change_device_that_does_not_start_is_undone() -> None:
    device = SimulatedDevice()
    device.broken = frozenset({"dc"})
    with pytest.raises(DriverFailed, match="Bad address; its services sym;asym were restored"):
        qat.change(QAT, device, "dc")
    assert device.values == {"cfg_services": "sym;asym", "state": "up"}


def test_change_device_that_never_starts_again_says_so() -> None:
    device = SimulatedDevice()
    device.stuck = True
    with pytest.raises(DriverFailed, match="sym;asym could not be restored: Bad address"):
        qat.change(QAT, device, "dc")
    assert device.values["cfg_services"] == "sym;asym"


def test_change_that_the_kernel_ignores_is_an_error() -> None:
    class Ignores(SimulatedDevice):
        def write(self, name: str, value: str) -> None:
            if name != "cfg_services" or value != "dc":
                super().write(name, value)

    device = Ignores()
    with pytest.raises(DriverFailed, match="the state is up and the services are asym;sym"):
        qat.change(QAT, device, "dc")
    assert device.values == {"cfg_services": "sym;asym", "state": "up"}

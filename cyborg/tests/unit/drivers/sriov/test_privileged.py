# SPDX-License-Identifier: Apache-2.0
"""The privileged function of SR-IOV layouts: what it refuses, it does not write."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.privileged import pci
from cyborg.tests.unit.drivers.sriov.simulated_sriov import CARD, VIRTUAL, SimulatedSriov

NO_SRIOV = "0000:04:00.0"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedSriov:
    kernel = SimulatedSriov(tmp_path)
    kernel.redirect(monkeypatch)
    kernel.add_card()
    kernel.add_interface("idle0", CARD, flags=0x1002)
    kernel.add_function(NO_SRIOV)
    return kernel


def set_count(count: int, *, autoprobe: bool = False, allow_network: bool = False) -> None:
    pci.set_count(CARD, count, autoprobe, allow_network)


def assert_refused(host: SimulatedSriov, count: int, error: str, **more: bool) -> None:
    """Check that a change is refused with an error and writes nothing."""
    before = host.numvfs()
    with pytest.raises(DriverFailed, match=error):
        set_count(count, **more)
    assert host.writes == []
    assert host.numvfs() == before


def test_set_count_creates_virtual_functions_without_kernel_drivers(host: SimulatedSriov) -> None:
    set_count(4)
    assert host.numvfs() == 4
    assert host.writes == [("sriov_drivers_autoprobe", "0"), ("sriov_numvfs", "4")]


def test_set_count_autoprobe_leaves_the_default(host: SimulatedSriov) -> None:
    set_count(2, autoprobe=True)
    assert host.writes == [("sriov_numvfs", "2")]


def test_set_count_other_number_writes_0_first(host: SimulatedSriov) -> None:
    host.enable(2)
    set_count(4, autoprobe=True)
    assert host.writes == [("sriov_numvfs", "0"), ("sriov_numvfs", "4")]
    set_count(0)
    assert (host.numvfs(), host.writes[-1]) == (0, ("sriov_numvfs", "0"))


def test_set_count_same_number_writes_nothing(host: SimulatedSriov) -> None:
    host.enable(2)
    set_count(2)
    assert host.writes == []


@pytest.mark.parametrize(
    ("address", "count", "autoprobe", "allow_network"),
    [
        ("", 1, False, False),
        (f"../{CARD}", 1, False, False),
        (f"{CARD}\n", 1, False, False),
        (f"{CARD}/../{NO_SRIOV}", 1, False, False),
        (CARD, -1, False, False),
        (CARD, 65536, False, False),
        (CARD, True, False, False),
        (CARD, "1", False, False),
        (CARD, 1.0, False, False),
        (CARD, 1, 1, False),
        (CARD, 1, False, None),
    ],
)
def test_set_count_malformed_argument_is_invalid(
    host: SimulatedSriov, address: Any, count: Any, autoprobe: Any, allow_network: Any
) -> None:
    with pytest.raises(Invalid):
        pci.set_count(address, count, autoprobe, allow_network)
    assert host.writes == []


@pytest.mark.parametrize("address", [NO_SRIOV, "0000:0f:00.0"])
def test_set_count_function_without_sriov_is_refused(host: SimulatedSriov, address: str) -> None:
    with pytest.raises(DriverFailed, match="no physical function with SR-IOV"):
        pci.set_count(address, 1, False, False)
    assert host.writes == []


def test_set_count_more_than_the_maximum_is_refused(host: SimulatedSriov) -> None:
    assert_refused(host, 5, "can have 4 virtual functions, not 5")


@pytest.mark.parametrize("driver", [None, "vfio-pci"])
def test_set_count_without_own_kernel_driver_is_refused(
    host: SimulatedSriov, driver: str | None
) -> None:
    host.bind(CARD, driver)
    assert_refused(host, 2, f"is bound to {driver or 'no kernel driver'}: bind it")


def add_default_route(host: SimulatedSriov, name: str, address: str) -> None:
    """Let the host use a function as its network interface."""
    host.add_interface(name, address)
    (host.bus / address / "net" / name).mkdir(parents=True)
    host.add_route(name)


def test_set_count_card_with_the_default_route_is_refused(host: SimulatedSriov) -> None:
    add_default_route(host, "ens1f0", CARD)
    assert_refused(host, 2, "the host uses it: ens1f0 has the default route")


def test_set_count_used_network_card_is_changed_if_allowed(host: SimulatedSriov) -> None:
    add_default_route(host, "ens1f0", CARD)
    set_count(2, allow_network=True)
    assert host.numvfs() == 2


def test_set_count_used_disk_is_refused_also_if_interfaces_are_allowed(
    host: SimulatedSriov,
) -> None:
    host.add_disk("nvme0n1", f"pci0000:00/{CARD}/nvme/nvme0")
    host.mount("nvme0n1", "/")
    assert_refused(host, 2, "nvme0n1 holds the root file system", allow_network=True)


@pytest.mark.parametrize("count", [0, 4])
def test_set_count_virtual_function_with_an_address_is_refused(
    host: SimulatedSriov, count: int
) -> None:
    host.virtual_driver = "iavf"
    host.enable(2)
    for number, address in enumerate(VIRTUAL[:2]):
        host.add_interface(f"ens1f0v{number}", address)
        (host.bus / address / "net" / f"ens1f0v{number}").mkdir(parents=True)
    host.add_route("ens1f0v1", "has a route")
    assert_refused(
        host, count, f"{VIRTUAL[1]} is or may be in use: ens1f0v1 has a route", allow_network=True
    )


@pytest.mark.parametrize(
    ("driver", "class_code"), [("iavf", "020000"), ("pci-stub", "020000"), ("mlx5_core", "020700")]
)
def test_set_count_virtual_function_of_a_container_is_refused(
    host: SimulatedSriov, driver: str, class_code: str
) -> None:
    (host.bus / CARD / "class").write_text(f"0x{class_code}\n")
    host.virtual_driver = driver
    host.enable(1)
    assert_refused(host, 0, f"bound to {driver} and has no network interface here")


@pytest.mark.parametrize("driver", ["uio_pci_generic", "igb_uio"])
def test_set_count_virtual_function_of_user_space_is_refused(
    host: SimulatedSriov, driver: str
) -> None:
    host.virtual_driver = driver
    host.enable(1)
    assert_refused(host, 0, f"bound to {driver}, for a driver in user space")


def test_set_count_open_vfio_group_is_refused(host: SimulatedSriov) -> None:
    host.virtual_driver = "vfio-pci"
    host.enable(2)
    (node,) = (host.root.parent / "dev/vfio").glob("1002")  # the groups are 1000, 1001, ...
    node.unlink()
    node.mkdir()  # open() fails, as with EBUSY
    assert_refused(host, 0, r"/dev/vfio/1002 cannot be opened")


def test_set_count_without_a_vfio_node_is_refused(host: SimulatedSriov) -> None:
    host.virtual_driver = "vfio-pci"
    host.enable(1)
    shutil.rmtree(host.root.parent / "dev/vfio")
    assert_refused(host, 0, "cannot be opened: No such file or directory")


def test_set_count_free_vfio_functions_are_held_during_the_removal(
    host: SimulatedSriov, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.virtual_driver = "vfio-pci"
    host.enable(2)
    opened: list[set[str]] = []

    def write(path: Path, text: str) -> None:
        folder = Path("/proc/self/fd")
        names = [os.readlink(link) for link in folder.iterdir() if link.is_symlink()]
        opened.append({n.rpartition("/")[2] for n in names if "/dev/vfio/" in n})
        host.write_attribute(path, text)

    monkeypatch.setattr(pci, "_write", write)
    set_count(0)
    assert host.numvfs() == 0
    assert [len(names) for names in opened] == [2]


def test_set_count_representor_in_a_bridge_is_refused(host: SimulatedSriov) -> None:
    host.enable(2)
    add_switch(host)
    host.add_interface("ovs-system")
    host.stack_interfaces("ovs-system", "ens1f0_1")
    assert_refused(host, 0, f"{VIRTUAL[1]} is or may be in use: ens1f0_1 is a port of ovs-system")


def add_switch(host: SimulatedSriov) -> None:
    """Let the card have the mode switchdev, with representors of its virtual functions."""
    (host.bus / CARD / "net/ens1f0").mkdir(parents=True)
    ports = {"ens1f0": "p0", "ens1f0_0": "pf0vf0", "ens1f0_1": "pf0vf1"}
    for name, port in ports.items():
        host.add_interface(name, flags=0x1002)
        (host.root / "class/net" / name / "phys_switch_id").write_text("b4a9fc\n")
        (host.root / "class/net" / name / "phys_port_name").write_text(f"{port}\n")


def test_set_count_that_fails_restores_the_previous_number(host: SimulatedSriov) -> None:
    host.enable(2)
    host.limit = 3
    with pytest.raises(
        DriverFailed, match="4 virtual functions: Cannot allocate memory; the previous 2 virtual"
    ):
        set_count(4)
    assert host.numvfs() == 2
    assert (host.bus / CARD / "sriov_drivers_autoprobe").read_text() == "1\n"


def test_set_count_that_cannot_be_restored_says_so(host: SimulatedSriov) -> None:
    host.enable(2)
    host.broken = True
    with pytest.raises(DriverFailed, match="its 2 virtual functions cannot be restored: Cannot al"):
        set_count(4)


def test_set_count_fewer_than_requested_is_an_error(
    host: SimulatedSriov, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pci, "_write", lambda path, text: host.write_attribute(path, "3" if text == "4" else text)
    )
    with pytest.raises(
        DriverFailed, match="it has 3 virtual functions after the change; the previous 0 virtual"
    ):
        set_count(4)
    assert host.numvfs() == 0


def test_set_count_leaves_virtual_functions_that_another_process_has_created(
    host: SimulatedSriov, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, text: str) -> None:
        if (path.name, text) == ("sriov_numvfs", "4"):
            host.enable(1)  # for example a rule of udev, a moment before
        host.write_attribute(path, text)

    monkeypatch.setattr(pci, "_write", write)
    with pytest.raises(DriverFailed, match="another process has created 1 in the meantime"):
        set_count(4)
    assert host.numvfs() == 1


def test_set_count_removal_that_the_kernel_refuses_is_an_error(
    host: SimulatedSriov, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.enable(2)

    def refuse(path: Path, text: str) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(pci, "_write", refuse)
    with pytest.raises(DriverFailed, match="cannot be removed: Operation not permitted"):
        set_count(0)
    assert host.numvfs() == 2


def test_set_count_function_of_another_vfio_driver_in_use_is_refused(host: SimulatedSriov) -> None:
    """The driver of a vendor registers its functions with VFIO, and keeps its own name."""
    host.virtual_driver = "nvidia"
    host.enable(2)
    for address in VIRTUAL[:2]:
        (host.bus / address / "class").write_text("0x030200\n")
    (host.bus / VIRTUAL[1] / "vfio-dev/vfio0").mkdir(parents=True)
    group = (host.bus / VIRTUAL[1] / "iommu_group").resolve().name
    node = host.root.parent / "dev/vfio" / group
    node.unlink(missing_ok=True)
    node.mkdir(parents=True)  # cannot be opened, as one that a process has open
    assert_refused(host, 0, f"{VIRTUAL[1]} is or may be in use", allow_network=True)

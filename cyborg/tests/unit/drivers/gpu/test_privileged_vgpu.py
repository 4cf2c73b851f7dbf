# SPDX-License-Identifier: Apache-2.0
"""The privileged functions for vGPUs: what they refuse, they do not write."""

import shutil
from pathlib import Path

import pytest

from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.host_use import open_nodes
from cyborg.drivers.privileged import vgpu
from cyborg.testing.vgpu_host import SimulatedVgpuHost
from cyborg.tests.unit.drivers.gpu.simulated_vgpus import CARD, LARGE, SMALL, make_host

FUNCTION = "0000:41:00.1"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedVgpuHost:
    found = make_host(tmp_path)
    found.redirect(monkeypatch.setattr)
    return found


@pytest.mark.parametrize(
    ("address", "type_", "parameters"),
    [
        ("..", LARGE.name, ""),
        (f"{FUNCTION}\n", LARGE.name, ""),
        (f"{FUNCTION}/../{FUNCTION}", LARGE.name, ""),
        (FUNCTION, "", ""),
        (FUNCTION, f"{LARGE.name}\n", ""),
        (FUNCTION, None, ""),
        (FUNCTION, 1420, ""),
        (FUNCTION, LARGE.name, "x"),
        (FUNCTION, LARGE.name, "a=1\nb=2"),
        (FUNCTION, LARGE.name, "a=1,b=2"),
        (FUNCTION, LARGE.name, None),
    ],
)
def test_create_malformed_argument_is_invalid(
    host: SimulatedVgpuHost, address: str, type_: str, parameters: str
) -> None:
    with pytest.raises(Invalid):
        vgpu.create(address, type_, parameters)
    assert host.writes == []


@pytest.mark.parametrize("address", ["..", f"{FUNCTION}\n", f"{FUNCTION}/.."])
def test_remove_malformed_address_is_invalid(host: SimulatedVgpuHost, address: str) -> None:
    with pytest.raises(Invalid):
        vgpu.remove(address)
    assert host.writes == []


@pytest.mark.parametrize("address", [CARD, "0000:77:00.1"])
def test_create_on_no_virtual_function_fails(host: SimulatedVgpuHost, address: str) -> None:
    with pytest.raises(DriverFailed, match=f"no virtual function of an NVIDIA GPU at {address}"):
        vgpu.create(address, LARGE.name, "")
    assert host.writes == []


def test_create_on_a_function_of_another_maker_fails(host: SimulatedVgpuHost) -> None:
    (host.bus / FUNCTION / "vendor").write_text("0x8086\n")
    with pytest.raises(DriverFailed, match="no virtual function of an NVIDIA GPU"):
        vgpu.create(FUNCTION, LARGE.name, "")


def test_create_without_the_attribute_fails(host: SimulatedVgpuHost) -> None:
    shutil.rmtree(host.bus / FUNCTION / "nvidia")
    with pytest.raises(DriverFailed, match="no attribute nvidia/current_vgpu_type"):
        vgpu.create(FUNCTION, LARGE.name, "")
    vgpu.remove(FUNCTION)
    assert host.writes == []


@pytest.mark.parametrize("name", [LARGE.name, "H200X-70C"])
def test_create_finds_the_id_by_name(host: SimulatedVgpuHost, name: str) -> None:
    vgpu.create(FUNCTION, name, "")
    assert host.writes == [(f"{FUNCTION}/current_vgpu_type", str(LARGE.id))]


def test_create_with_another_vgpu_removes_it_first(host: SimulatedVgpuHost) -> None:
    """The driver refuses a second vGPU, and the list has types of the first one's size only."""
    vgpu.create(FUNCTION, SMALL.name, "")
    vgpu.create(FUNCTION, LARGE.name, "")
    assert [text for _, text in host.writes] == [str(SMALL.id), "0", str(LARGE.id)]


def test_create_that_has_another_type_afterwards_fails(
    host: SimulatedVgpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, text: str) -> None:
        host.write_attribute(path, text if text == "0" else str(SMALL.id))

    monkeypatch.setattr(vgpu, "_write", write)
    with pytest.raises(DriverFailed, match="has the vGPU type 1414 after a write of 1420"):
        vgpu.create(FUNCTION, LARGE.name, "")
    assert host.current(FUNCTION) == ""


def test_remove_that_leaves_the_vgpu_fails(
    host: SimulatedVgpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    vgpu.create(FUNCTION, SMALL.name, "")
    monkeypatch.setattr(vgpu, "_write", lambda path, text: None)
    with pytest.raises(DriverFailed, match="still has the vGPU type 1414 after its removal"):
        vgpu.remove(FUNCTION)


def test_remove_without_sysfs_fails(
    host: SimulatedVgpuHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read is not absent."""
    monkeypatch.setattr(vgpu, "_SYS", tmp_path / "empty")
    with pytest.raises(DriverFailed, match="is not the root of a sysfs"):
        vgpu.remove(FUNCTION)


def test_remove_refused_by_the_kernel_driver_alone_fails(host: SimulatedVgpuHost) -> None:
    """A guest that opens the function after the check."""
    vgpu.create(FUNCTION, SMALL.name, "")
    host.opened.add(FUNCTION)
    with pytest.raises(DriverFailed, match=r"refused '0' .* Device or resource busy"):
        vgpu.remove(FUNCTION)
    assert host.current(FUNCTION) == SMALL.name


def test_remove_without_node_of_the_group_is_refused(host: SimulatedVgpuHost) -> None:
    """An agent in a container without /dev/vfio cannot find out the use."""
    vgpu.create(FUNCTION, SMALL.name, "")
    shutil.rmtree(host.dev / "vfio")
    with pytest.raises(DriverFailed, match="cannot be opened: No such file or directory"):
        vgpu.remove(FUNCTION)
    assert host.current(FUNCTION) == SMALL.name


def test_remove_on_a_kernel_without_groups_reads_the_processes(
    host: SimulatedVgpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    vgpu.create(FUNCTION, SMALL.name, "")
    shutil.rmtree(host.root / "class/vfio")
    with pytest.raises(DriverFailed, match="the processes of the host cannot be read"):
        vgpu.remove(FUNCTION)
    namespace = host.proc / "self/ns/pid"
    namespace.parent.mkdir(parents=True)
    namespace.touch()
    monkeypatch.setattr(open_nodes, "INITIAL_NAMESPACE", namespace.stat().st_ino)
    for number, node in (("1", "vfio1"), ("4711", "vfio0")):
        (host.proc / number / "fd").mkdir(parents=True)
        (host.proc / number / "fd/7").symlink_to(f"/dev/vfio/devices/{node}")
        (host.proc / number / "comm").write_text("qemu-system-x86\n")
        (host.proc / number / "stat").write_text(f"{number} (qemu) S 0 0\n")
    with pytest.raises(DriverFailed, match="qemu-system-x86 has /dev/vfio/devices/vfio0 open"):
        vgpu.remove(FUNCTION)
    shutil.rmtree(host.proc / "4711")
    vgpu.remove(FUNCTION)
    assert host.current(FUNCTION) == ""

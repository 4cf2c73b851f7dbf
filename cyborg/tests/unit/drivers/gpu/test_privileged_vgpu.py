# SPDX-License-Identifier: Apache-2.0
"""The privileged functions for vGPUs: what they refuse, they do not write."""

import os
import shutil
from pathlib import Path

import pytest

from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.host_use import open_nodes
from cyborg.drivers.kernel import nvml
from cyborg.drivers.privileged import programs, vgpu
from cyborg.testing.vgpu_host import SimulatedVgpuHost
from cyborg.tests.unit.drivers.gpu.simulated_vgpus import CARD, LARGE, SMALL, make_host

FUNCTION, SCRIPT = "0000:41:00.1", "/usr/lib/nvidia/sriov-manage"
# ``redirect`` replaces them.
RUN_SCRIPT, RESOLVE = vgpu._run_script, programs.resolve


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


@pytest.mark.parametrize(
    ("address", "enable", "script"),
    [
        ("..", True, SCRIPT),
        (CARD, 1, SCRIPT),
        (CARD, None, SCRIPT),
        (CARD, True, "sriov-manage"),
        (CARD, True, "/tmp/other"),
        (CARD, True, f"{SCRIPT}\n"),
        (CARD, True, f"{SCRIPT} -x"),
        (CARD, True, None),
    ],
)
def test_set_sriov_malformed_argument_is_invalid(
    host: SimulatedVgpuHost, address: str, enable: bool, script: str
) -> None:
    with pytest.raises(Invalid):
        vgpu.set_sriov(address, enable, script)
    assert host.commands == []


def test_set_sriov_runs_the_script_only_for_a_change(host: SimulatedVgpuHost) -> None:
    for enable in (True, False, False, True, True):
        vgpu.set_sriov(CARD, enable, SCRIPT)
        assert bool(host.cards[CARD].functions) is enable
    assert host.commands == [f"sriov-manage {option} {CARD}" for option in ("-d", "-e")]


def test_set_sriov_of_a_card_in_use_is_refused(host: SimulatedVgpuHost) -> None:
    vgpu.create(FUNCTION, LARGE.name, "")
    with pytest.raises(DriverFailed, match=f"{FUNCTION}: it is a vGPU, which a server may use"):
        vgpu.set_sriov(CARD, False, SCRIPT)
    vgpu.remove(FUNCTION)
    host.add_nvidia_gpu(CARD, 0)
    host.open_node("/dev/nvidia0", "python3")
    with pytest.raises(DriverFailed, match="the process python3 has /dev/nvidia0 open"):
        vgpu.set_sriov(CARD, False, SCRIPT)
    assert host.commands == []


def test_set_sriov_of_an_open_function_is_refused(host: SimulatedVgpuHost) -> None:
    """A process may have the group open, although the function has no vGPU."""
    vgpu.create(FUNCTION, LARGE.name, "")
    host.open_function(FUNCTION)
    host.cards[CARD].vgpus.clear()
    (host.bus / FUNCTION / "nvidia/current_vgpu_type").write_text("0\n")
    with pytest.raises(DriverFailed, match="may still be used by a process"):
        vgpu.set_sriov(CARD, False, SCRIPT)
    assert host.commands == []


@pytest.mark.parametrize("driver", ["vfio-pci", None])
def test_set_sriov_of_a_card_without_its_driver_is_refused(
    host: SimulatedVgpuHost, driver: str | None
) -> None:
    host.manage_sriov(CARD, enable=False)
    link = (host.bus / CARD).resolve() / "driver"
    link.unlink()
    if driver is not None:
        link.symlink_to(f"../../../bus/pci/drivers/{driver}")
    with pytest.raises(DriverFailed, match="expected nvidia, which creates virtual functions"):
        vgpu.set_sriov(CARD, True, SCRIPT)
    for address in (FUNCTION, "0000:77:00.0"):
        with pytest.raises(DriverFailed, match="no NVIDIA GPU with SR-IOV"):
            vgpu.set_sriov(address, True, SCRIPT)


def write_script(folder: Path, *lines: str) -> Path:
    path = folder / "sriov-manage"
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


@pytest.fixture
def real_script(host: SimulatedVgpuHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run real scripts; they are files of root."""
    if os.geteuid():
        pytest.skip("the scripts must be files of root")
    monkeypatch.setattr(vgpu, "_run_script", RUN_SCRIPT)
    monkeypatch.setattr(vgpu, "_resolve", RESOLVE)
    monkeypatch.setattr(vgpu, "_DELAY", 0.0)
    host.manage_sriov(CARD, enable=False)


@pytest.mark.usefixtures("real_script")
def test_set_sriov_retries_while_a_program_has_the_card_open(
    host: SimulatedVgpuHost, tmp_path: Path
) -> None:
    script = write_script(
        tmp_path,
        f"echo $1 $2 >> {tmp_path}/calls",
        f"if [ $(wc -l < {tmp_path}/calls) -lt 3 ]; then",
        "echo Cannot obtain unbindLock for $2; exit 1; fi",
        f"echo 4 > {host.bus}/$2/sriov_numvfs",
    )
    vgpu.set_sriov(CARD, True, str(script))
    assert (tmp_path / "calls").read_text().splitlines() == [f"-e {CARD}"] * 3


@pytest.mark.usefixtures("real_script")
@pytest.mark.parametrize(
    ("line", "calls", "expected"),
    [
        ("echo wrong; exit 3", 1, "sriov-manage failed with 3: wrong"),
        ("echo Cannot obtain unbindLock; exit 1", 5, "failed with 1: Cannot obtain unbindLock"),
        ("exit 0", 1, f"{CARD} has 0 virtual functions after .*/sriov-manage -e"),
    ],
)
def test_set_sriov_with_a_failing_script_fails(
    host: SimulatedVgpuHost, tmp_path: Path, line: str, calls: int, expected: str
) -> None:
    script = write_script(tmp_path, f"echo >> {tmp_path}/calls", line)
    with pytest.raises(DriverFailed, match=expected):
        vgpu.set_sriov(CARD, True, str(script))
    assert len((tmp_path / "calls").read_text().splitlines()) == calls


@pytest.mark.usefixtures("real_script")
def test_set_sriov_with_a_script_that_others_can_change_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DriverFailed, match="sriov-manage: No such file or directory"):
        vgpu.set_sriov(CARD, True, str(tmp_path / "sriov-manage"))
    script = write_script(tmp_path, f"echo >> {tmp_path}/calls")
    for change in (lambda p: p.chmod(0o775), lambda p: os.chown(p, 1000, 0)):
        for path in (script, tmp_path):
            change(path)
            with pytest.raises(DriverFailed, match=f"others than root can change {path}"):
                vgpu.set_sriov(CARD, True, str(script))
            path.chmod(0o755)
            os.chown(path, 0, 0)
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("arguments", [("..", True), (CARD, 1), (CARD, None)])
def test_set_heterogeneous_malformed_argument_is_invalid(
    host: SimulatedVgpuHost, arguments: tuple[str, bool]
) -> None:
    with pytest.raises(Invalid):
        vgpu.set_heterogeneous(*arguments)


def test_set_heterogeneous_is_refused_after_the_first_vgpu(host: SimulatedVgpuHost) -> None:
    vgpu.set_heterogeneous(CARD, True)
    vgpu.create(FUNCTION, LARGE.name, "")
    with pytest.raises(DriverFailed, match=f"its virtual function {FUNCTION} is a vGPU, which"):
        vgpu.set_heterogeneous(CARD, False)
    assert host.cards[CARD].heterogeneous is True


@pytest.mark.parametrize("address", [FUNCTION, "0000:77:00.0", "0000:42:00.0"])
def test_set_heterogeneous_of_no_card_of_nvidia_is_refused(
    host: SimulatedVgpuHost, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(nvml, "set_heterogeneous", lambda address, enable: calls.append(address))
    host.add_function("0000:42:00.0", "1002", "74a1", "120000", kernel_driver="nvidia")
    with pytest.raises(DriverFailed, match=f"there is no NVIDIA GPU at {address}"):
        vgpu.set_heterogeneous(address, True)
    assert calls == []


@pytest.mark.parametrize("driver", ["vfio-pci", None])
def test_set_heterogeneous_of_a_card_without_its_driver_is_refused(
    host: SimulatedVgpuHost, driver: str | None
) -> None:
    link = (host.bus / CARD).resolve() / "driver"
    link.unlink()
    if driver is not None:
        link.symlink_to(f"../../../bus/pci/drivers/{driver}")
    with pytest.raises(DriverFailed, match=f"bound to {driver or 'no kernel driver'}; expected"):
        vgpu.set_heterogeneous(CARD, True)
    assert host.cards[CARD].heterogeneous is False

# SPDX-License-Identifier: Apache-2.0
"""The privileged functions of the fpga driver: what they refuse, they do not write."""

import os
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.privileged import CONTEXT, fpga
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.unit.drivers.fpga.simulated_fpga import PAC, SimulatedKernel

IMAGE = "11111111-1111-4111-8111-111111111111"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedKernel:
    found = SimulatedKernel(tmp_path)
    found.add_plain_card()
    found.redirect(monkeypatch)

    def refuse(*arguments: Any) -> None:
        raise AssertionError(f"called with {arguments}")

    monkeypatch.setattr(fpga, "_ioctl", refuse)
    monkeypatch.setattr(fpga, "_run", refuse)
    return found


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "image"
    path.write_bytes(b"bits")
    return str(path)


@pytest.mark.parametrize(
    "manager", ["..", "", "fpga0/../fpga0", "fpga0\n", "/fpga0", "fpga0\0", "region0", None, 0]
)
def test_malformed_manager_is_invalid(kernel: SimulatedKernel, file: str, manager: Any) -> None:
    with pytest.raises(Invalid, match="is not the name of an FPGA manager"):
        fpga.load_firmware(manager, IMAGE, file, 4)
    assert kernel.writes == []


@pytest.mark.parametrize(
    "image",
    [
        *("..", "", "a/b", f"{IMAGE}\n", f"../{IMAGE}", f"{IMAGE}\0", IMAGE.replace("-", "")),
        *(IMAGE.replace("1", "A"), f"{{{IMAGE}}}", None, 7),
    ],
)
def test_malformed_image_is_invalid(kernel: SimulatedKernel, file: str, image: Any) -> None:
    with pytest.raises(Invalid, match="is not a uuid"):
        fpga.load_firmware("fpga0", image, file, 4)
    assert kernel.writes == []


@pytest.mark.parametrize(
    "path",
    [
        *("", "image", "/", "/etc/../etc/passwd", "/etc/./passwd", "//etc/passwd", "/etc/passwd/"),
        *("/etc/passwd\n", "/etc/pass\0wd", "/etc/\x1b[0m", "..", None, b"/etc/passwd"),
    ],
)
@pytest.mark.parametrize("act", ["load_firmware", "reconfigure", "run_tool"])
def test_malformed_path_is_invalid(
    kernel: SimulatedKernel, monkeypatch: pytest.MonkeyPatch, act: str, path: Any
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: True)
    with pytest.raises(Invalid, match="is not the absolute path of a file"):
        call(act, path, 4)
    assert kernel.writes == []


def call(act: str, path: Any, size: Any) -> None:
    if act == "load_firmware":
        fpga.load_firmware("fpga0", IMAGE, path, size)
    elif act == "reconfigure":
        fpga.reconfigure("dfl-fme.0", 0, path, size, 0)
    else:
        fpga.run_tool("xbmgmt", PAC, path, size, 1.0)


@pytest.mark.parametrize("size", [0, -1, 2**31, 10 * 2**30, "4", None])
def test_size_out_of_range_is_refused(kernel: SimulatedKernel, file: str, size: Any) -> None:
    with pytest.raises(DriverFailed, match="bytes cannot be loaded: the limit is 2147483647"):
        fpga.load_firmware("fpga0", IMAGE, file, size)
    assert kernel.writes == []


def test_file_of_another_size_or_kind_is_refused(
    kernel: SimulatedKernel, file: str, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (file, "is not a regular file of 5 bytes"),
        (str(tmp_path / "link"), "cannot be opened: Too many levels of symbolic links"),
        (str(tmp_path / "pipe"), "is not a regular file"),
        (str(tmp_path), "is not a regular file"),
        (str(tmp_path / "absent"), "cannot be opened: No such file or directory"),
    ):
        with pytest.raises(DriverFailed, match=message):
            fpga.load_firmware("fpga0", IMAGE, path, 5)
    assert kernel.writes == []


def test_manager_that_is_absent_is_refused(kernel: SimulatedKernel, file: str) -> None:
    with pytest.raises(DriverFailed, match="fpga7 does not exist or has no attribute firmware"):
        fpga.load_firmware("fpga7", IMAGE, file, 4)


def test_search_path_of_the_kernel_is_used_and_named(
    kernel: SimulatedKernel, file: str, tmp_path: Path
) -> None:
    """The simulated kernel searches another directory than its parameter says."""
    other = tmp_path / "other"
    other.mkdir()
    parameter = kernel.root / "module/firmware_class/parameters/path"
    parameter.parent.mkdir(parents=True)
    parameter.write_text(f"{other}\n")
    with pytest.raises(DriverFailed, match=f"the kernel did not find the file in {other}"):
        fpga.load_firmware("fpga0", IMAGE, file, 4)
    assert list(other.iterdir()) == []


def test_search_path_that_is_absent_is_an_error(kernel: SimulatedKernel, file: str) -> None:
    kernel.firmware.rmdir()
    with pytest.raises(DriverFailed, match="where the kernel searches it: No such file or direct"):
        fpga.load_firmware("fpga0", IMAGE, file, 4)
    assert kernel.writes == []


def test_copy_replaces_links_and_old_copies_for_the_manager(
    kernel: SimulatedKernel, file: str, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("unchanged")
    (kernel.firmware / f"cyborg-fpga0-{IMAGE.replace('1', '2')}.bin").touch()
    others = [kernel.firmware / name for name in (f"cyborg-fpga1-{IMAGE}.bin", "amd.bin")]
    for other in others:
        other.touch()
    (kernel.firmware / f"cyborg-fpga0-{IMAGE}.bin").symlink_to(victim)
    fpga.load_firmware("fpga0", IMAGE, file, 4)
    assert victim.read_text() == "unchanged"
    assert sorted(kernel.firmware.iterdir()) == sorted(others)


@pytest.mark.parametrize(
    "fme", ["..", "dfl-fme.0/..", "dfl-fme.0\n", "dfl-fme", "dfl-port.0", None]
)
def test_malformed_engine_is_invalid(kernel: SimulatedKernel, file: str, fme: Any) -> None:
    with pytest.raises(Invalid, match="is not the name of an FPGA management engine"):
        fpga.reconfigure(fme, 0, file, 4, 0)


@pytest.mark.parametrize("port", [-1, 256, "0", None])
def test_malformed_port_is_invalid(kernel: SimulatedKernel, file: str, port: Any) -> None:
    with pytest.raises(Invalid, match="is not the number of a port"):
        fpga.reconfigure("dfl-fme.0", port, file, 4, 0)


def test_engine_that_is_absent_or_another_device_is_refused(
    kernel: SimulatedKernel, file: str
) -> None:
    with pytest.raises(DriverFailed, match=r"there is no FPGA management engine dfl-fme\.0"):
        fpga.reconfigure("dfl-fme.0", 0, file, 4, 0)
    kernel.add_dfl_card()
    with pytest.raises(DriverFailed, match="cannot be opened: No such file"):
        fpga.reconfigure("dfl-fme.0", 0, file, 4, 0)
    (kernel.dev / "dfl-fme.0").touch()
    with pytest.raises(DriverFailed, match="is the node of another device"):
        fpga.reconfigure("dfl-fme.0", 0, file, 4, 0)


@pytest.mark.parametrize("offset", [-1, 4, 2**40, "0"])
def test_offset_outside_of_the_file_is_invalid(
    kernel: SimulatedKernel, file: str, offset: Any
) -> None:
    kernel.add_dfl_card()
    (kernel.dev / "dfl-fme.0").touch()
    (kernel.root / "bus/platform/devices/dfl-fme.0/dev").write_text("0:0\n")
    with pytest.raises(Invalid, match="is not an offset in a file of 4 bytes"):
        fpga.reconfigure("dfl-fme.0", 0, file, 4, offset)


@pytest.mark.parametrize(
    ("tool", "address", "timeout"),
    [
        ("/bin/sh", PAC, 1.0),
        ("sh", PAC, 1.0),
        ("../xbmgmt", PAC, 1.0),
        ("xbmgmt", "0000:5e:00.0 --force", 1.0),
        ("xbmgmt", "--help", 1.0),
        ("xbmgmt", PAC, 0.0),
        ("xbmgmt", PAC, 3601.0),
        ("xbmgmt", PAC, float("nan")),
    ],
)
def test_malformed_call_of_a_tool_is_refused(
    kernel: SimulatedKernel,
    file: str,
    monkeypatch: pytest.MonkeyPatch,
    tool: str,
    address: str,
    timeout: float,
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: True)
    with pytest.raises((Invalid, DriverFailed)):
        fpga.run_tool(tool, address, file, 4, timeout)


def test_tool_that_is_not_installed_is_named(kernel: SimulatedKernel, file: str) -> None:
    with pytest.raises(DriverFailed, match="xbmgmt is not installed"):
        fpga.run_tool("xbmgmt", PAC, file, 4, 1.0)


def test_tool_that_hangs_is_killed(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CONTEXT, "client_mode", False)
    monkeypatch.setattr(fpga, "_TOOL_FOLDERS", (str(tmp_path),))
    (tmp_path / "xbutil").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "xbutil").chmod(0o755)
    with pytest.raises(DriverFailed, match=r"xbutil did not end within 0\.2 s and was killed"):
        fpga.run_tool("xbutil", PAC, file, 4, 0.2)


def has_ended(stat: Path) -> bool:
    try:
        return stat.read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.slow
def test_process_that_a_tool_started_is_killed_too(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with XRT, whose tools are scripts around the program."""
    monkeypatch.setattr(CONTEXT, "client_mode", False)
    monkeypatch.setattr(fpga, "_TOOL_FOLDERS", (str(tmp_path),))
    script = f"#!/bin/sh\n/bin/sleep 60 &\necho $! >{tmp_path}/child\nwait\n"
    (tmp_path / "xbutil").write_text(script)
    (tmp_path / "xbutil").chmod(0o755)
    with pytest.raises(DriverFailed, match="and was killed"):
        fpga.run_tool("xbutil", PAC, file, 4, 1.0)
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    # The signal is sent; on a busy machine the process takes a moment to end. It is gone then, or
    # waits for the process that adopted it.
    wait_until("the process is gone", lambda: has_ended(child))

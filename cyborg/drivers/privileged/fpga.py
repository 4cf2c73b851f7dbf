# SPDX-License-Identifier: Apache-2.0
"""Programming of FPGA regions: the only privileged functions of the fpga driver.

The kernel describes the search path of firmware in
``Documentation/driver-api/firmware/fw_search_path.rst`` and the ioctl in
``include/uapi/linux/fpga-dfl.h``.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import stat
import struct
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from cyborg.core.address import PciAddress
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.privileged import CONTEXT, programs
from cyborg.drivers.privileged.files import write as _write
from cyborg.drivers.sysfs import Sysfs, open_node

# Bytes: INT_MAX is the limit of fw_get_filesystem_firmware (drivers/base/firmware_loader/main.c).
MAX_IMAGE = 2**31 - 1
MAX_PORTS = 256
_UUID_LENGTH = 36
MAX_TIMEOUT = 3600.0
_SYS, _DEV, _FIRMWARE = Path("/sys"), Path("/dev"), Path("/lib/firmware")
_SEARCH_PATH = Path("module/firmware_class/parameters/path")
_MANAGER, _FME = re.compile(r"fpga[0-9]{1,6}"), re.compile(r"dfl-fme\.[0-9]{1,6}")
_PATH = re.compile(r"(/[^/\x00-\x1f\x7f]+)+")
_READ_ERRORS = "firmware request error"  # a state of sysfs-class-fpga-manager

# _IO(DFL_FPGA_MAGIC, DFL_FME_BASE + 0) of fpga-dfl.h: _IO has neither a direction nor a size
# (include/uapi/asm-generic/ioctl.h), so the number is the magic number and the number of the call.
_DFL_FPGA_MAGIC, _DFL_FME_BASE = 0xB6, 0x80
DFL_FPGA_FME_PORT_PR = _DFL_FPGA_MAGIC << 8 | _DFL_FME_BASE
# struct dfl_fpga_fme_port_pr: argsz, flags, port_id, buffer_size, buffer_address.
_PORT_PR = struct.Struct("=IIIIQ")

_TOOL_FOLDERS = ("/usr/bin", "/usr/local/bin", "/usr/sbin", "/opt/xilinx/xrt/bin")
_TOOLS = ("fpgasupdate", "fpgaconf", "xbmgmt", "xbutil")


@CONTEXT.entrypoint
def load_firmware(manager: str, image: str, path: str, size: int) -> None:
    """Load the file of an image by the attribute ``firmware`` of an FPGA manager.

    During the call, a copy of the file of ``size`` bytes is in the search path of firmware. Raise
    DriverFailed if the manager or its attribute does not exist, or if the manager is not in the
    state ``operating`` afterwards.
    """
    name = _parse(manager, _MANAGER, "FPGA manager")
    firmware = f"cyborg-{name}-{_parse_uuid(image)}.bin"
    sysfs, folder = Sysfs(_SYS), _SYS / "class/fpga_manager" / name
    if "firmware" not in sysfs.list_names(folder):
        raise DriverFailed(f"the FPGA manager {name} does not exist or has no attribute firmware")
    # The kernel searches this directory first if it is set.
    search_path = Path(sysfs.read_text(_SEARCH_PATH) or _FIRMWARE)
    with _open_image(path, size) as descriptor, _copied(descriptor, search_path / firmware):
        try:
            _write(folder / "firmware", firmware)
        except OSError as exc:
            state = sysfs.read_text(folder / "state")
            hint = (
                f"; the kernel did not find the file in {search_path}"
                if state == _READ_ERRORS
                else ""
            )
            raise DriverFailed(
                f"the FPGA manager {name} refused the image: {exc.strerror}; its state is "
                f"{state!r}{hint}"
            ) from exc
    if (state := sysfs.read_text(folder / "state")) != "operating":
        raise DriverFailed(f"the FPGA manager {name} does not operate: its state is {state!r}")


@CONTEXT.entrypoint
def reconfigure(fme: str, port: int, path: str, size: int, offset: int) -> None:
    """Load an image into a port of a DFL card by the ioctl ``DFL_FPGA_FME_PORT_PR``.

    The image begins at byte ``offset`` of the file of ``size`` bytes. Raise DriverFailed if the
    management engine does not exist or the kernel refuses the image.
    """
    name = _parse(fme, _FME, "FPGA management engine")
    if not isinstance(port, int) or not 0 <= port < MAX_PORTS:
        raise Invalid(f"{port!r} is not the number of a port", field="port")
    with _open_image(path, size) as descriptor, _open_engine(name) as engine:
        # Only here: ``_open_image`` has checked the size.
        if not isinstance(offset, int) or not 0 <= offset < size:
            raise Invalid(f"{offset!r} is not an offset in a file of {size} bytes", field="offset")
        # A private copy, because only a writable buffer has an address in Python.
        with mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) as content:
            start = ctypes.c_char.from_buffer(content)
            argument = _PORT_PR.pack(
                _PORT_PR.size, 0, port, size - offset, ctypes.addressof(start) + offset
            )
            try:
                _ioctl(engine, DFL_FPGA_FME_PORT_PR, argument)
            except OSError as exc:
                raise DriverFailed(
                    f"port {port} of {name} refused the image: {exc.strerror}{_status(name)}"
                ) from exc
            finally:
                del start  # a mapping with a user cannot be closed


@CONTEXT.entrypoint
def run_tool(tool: str, address: str, path: str, size: int, timeout: float) -> None:
    """Load an image into the card at a PCI address by a tool of its vendor.

    Raise DriverFailed if the tool is not installed or fails. Kill the tool and raise DriverFailed
    if it does not end within ``timeout`` seconds.
    """
    if tool not in _TOOLS:
        raise Invalid(f"{tool!r} is not one of {', '.join(_TOOLS)}", field="tool")
    function = PciAddress.parse(address)
    if not 0 < float(timeout) <= MAX_TIMEOUT:
        raise DriverFailed(f"timeout {timeout:g} s out of range: expected up to {MAX_TIMEOUT:g} s")
    program = next((f for f in _TOOL_FOLDERS if os.access(f"{f}/{tool}", os.X_OK)), None)
    if program is None:
        raise DriverFailed(f"{tool} is not installed: it is in none of {', '.join(_TOOL_FOLDERS)}")
    with _open_image(path, size):
        _run([f"{program}/{tool}", *_arguments(tool, function, path)], timeout)


def _arguments(tool: str, function: PciAddress, path: str) -> list[str]:
    """Return the arguments of a tool."""
    # Sources: ``doc/src/fpga_tools/fpgasupdate/fpgasupdate.md`` and ``fpgaconf/fpgaconf.md`` of
    # OPAE, ``src/runtime_src/doc/toc/xbmgmt.rst`` of XRT, and ``SubCmdProgram.cpp`` of its xbutil2.
    match tool:
        case "fpgasupdate":
            return [path, str(function)]
        case "fpgaconf":
            numbers = {
                "--segment": function.domain,
                "-B": function.bus,
                "-D": function.device,
                "-F": function.function,
            }
            return [text for key, value in numbers.items() for text in (key, f"{value:#x}")] + [
                path
            ]
        case _:
            return ["program", "--device", str(function), "--user", path]


def _run(command: list[str], timeout: float) -> None:
    # XRT finds its libraries by its setup script (src/runtime_src/tools/scripts/setup.sh), or by
    # this variable.
    environment = {"PATH": ":".join(_TOOL_FOLDERS), "XILINX_XRT": "/opt/xilinx/xrt"}
    programs.run(command, environment, timeout)


def _parse(name: str, form: re.Pattern[str], kind: str) -> str:
    if not isinstance(name, str) or not form.fullmatch(name):
        raise Invalid(f"{name!r} is not the name of an {kind}", field="name")
    return name


def _parse_uuid(image: str) -> str:
    """Return the uuid of an image. Raise Invalid unless it is in the canonical form."""
    try:
        text = str(uuid.UUID(image))
    except (ValueError, AttributeError, TypeError):
        text = ""
    if not text or text != image:
        raise Invalid(f"{image!r} is not a uuid in the canonical form", field="image")
    return text


@contextlib.contextmanager
def _open_image(path: str, size: int) -> Iterator[int]:
    """Open the file of an image: a regular file of ``size`` bytes.

    Raise Invalid if the path is not absolute, and DriverFailed if there is no such file.
    """
    if not isinstance(size, int) or not 0 < size <= MAX_IMAGE:
        raise DriverFailed(f"an image of {size!r} bytes cannot be loaded: the limit is {MAX_IMAGE}")
    if not isinstance(path, str) or not _PATH.fullmatch(path) or {".", ".."} & set(path.split("/")):
        raise Invalid(f"{path!r} is not the absolute path of a file", field="path")
    try:
        # No link, and no wait for the writer of a FIFO, which is refused below.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except OSError as exc:
        raise DriverFailed(f"the image {path} cannot be opened: {exc.strerror}") from exc
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise DriverFailed(f"{path} is not a regular file of {size} bytes")
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _copied(source: int, path: Path) -> Iterator[None]:
    """Copy an open file to a path for the duration of a block. Raise DriverFailed.

    The name of the copy ends with the uuid of the image.
    """
    try:
        # Copies for the same manager that a killed process left.
        for old in path.parent.glob(f"{path.stem[:-_UUID_LENGTH]}*{path.suffix}"):
            old.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        target = os.open(path, flags, 0o600)
        try:
            while os.sendfile(target, source, None, mmap.PAGESIZE * 1024):
                pass
        finally:
            os.close(target)
        yield
    except OSError as exc:
        raise DriverFailed(
            f"the image cannot be copied to {path.parent}, where the kernel searches it: "
            f"{exc.strerror}"
        ) from exc
    finally:
        # If this fails, the copy stays until the next image of the manager.
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _open_engine(name: str) -> AbstractContextManager[int]:
    """Open the device node of a management engine, which has the name of the platform device.

    Raise DriverFailed if the node is absent or belongs to another device.
    """
    # dfl_get_devt of drivers/fpga/dfl.c of Linux gives it its number.
    number = Sysfs(_SYS).read_text(Path("bus/platform/devices") / name / "dev")
    if number is None:
        raise DriverFailed(f"there is no FPGA management engine {name}")
    return open_node(_DEV / name, os.O_RDWR, number)


def _status(fme: str) -> str:
    """Return the errors that the FPGA manager of an engine shows, as text to append."""
    # ``Documentation/ABI/testing/sysfs-class-fpga-manager`` describes ``status``.
    sysfs = Sysfs(_SYS)
    for manager in sysfs.list_names("class/fpga_manager"):
        folder = sysfs.resolve(Path("class/fpga_manager") / manager, strict=True)
        text = sysfs.read_text(Path("class/fpga_manager") / manager / "status")
        if folder is not None and fme in folder.parts and text:
            return f"; the manager {manager} shows {' '.join(text.split())!r:.200}"
    return ""


def _ioctl(descriptor: int, request: int, argument: bytes) -> None:
    fcntl.ioctl(descriptor, request, argument)

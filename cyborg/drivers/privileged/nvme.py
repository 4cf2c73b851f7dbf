# SPDX-License-Identifier: Apache-2.0
"""Erasure of an NVMe controller: the only privileged operation of the nvme driver.

Sources in Linux: ``Documentation/ABI/testing/sysfs-bus-pci`` (``unbind``, ``driver_override``),
``drivers_probe_store`` of ``drivers/base/bus.c``, ``drivers/nvme/host/sysfs.c`` (``state``,
``nsid``), ``drivers/nvme/host/core.c`` and ``multipath.c`` (names of disks and paths), and
``<linux/nvme_ioctl.h>``, which defines the admin commands.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cyborg.core.address import PciAddress
from cyborg.core.errors import DriverFailed
from cyborg.core.log import get_logger
from cyborg.core.text import describe
from cyborg.drivers.host_use.check import used_functions
from cyborg.drivers.kernel import nvme
from cyborg.drivers.kernel.nvme import Controller, Method
from cyborg.drivers.privileged import CONTEXT, files
from cyborg.drivers.sysfs import PciFunction, Sysfs, open_node

LOG = get_logger(__name__)

_T = TypeVar("_T")
MAX_TIMEOUT = 86400.0
_KERNEL_DRIVER = "nvme"
_CLASS = "010802"  # non-volatile memory, NVM Express I/O controller
_SYS, _DEV = Path("/sys"), Path("/dev")
# Seconds. At its timeout, the kernel resets a controller in the middle of its work.
_SHORTEST_FORMAT = 10.0
_BIND_TIMEOUT = 15.0  # seconds until the kernel driver has created its devices
_POLL_INTERVAL = 0.2
_SAMPLES = 16  # of each namespace
_SAMPLE_BYTES = 65536  # a multiple of the logical blocks of Linux (blk_validate_block_size)
_BLKRRPART = 0x125F  # <linux/fs.h>: read the partition table again
_CONTROLLER = re.compile(r"nvme[0-9]+")
_NAMESPACE = re.compile(r"nvme([0-9]+)(?:c[0-9]+)?n([0-9]+)")


@CONTEXT.entrypoint
def erase(address: str, timeout: float, methods: Sequence[str]) -> dict[str, Any]:
    """Erase the namespaces of the controller at a PCI address; verify the erasure with samples.

    Random samples are written before the erasure and must not be readable afterwards. ``timeout``
    is in seconds, ``methods`` are values of Method in the order of preference. Return the method
    (key ``method``) and the numbers of ``namespaces`` and ``samples``. Raise DriverFailed if the
    erasure fails or the host uses the controller. If the controller no longer exists, nothing is
    erased and the method is None.
    """
    function = str(PciAddress.parse(address))
    if not 0 < float(timeout) <= MAX_TIMEOUT:
        raise DriverFailed(f"timeout {timeout:g} s out of range: expected up to {MAX_TIMEOUT:g} s")
    permitted = _parse_methods(methods)
    try:
        return _erase(function, time.monotonic() + timeout, permitted)
    except OSError as exc:
        raise DriverFailed(f"{function} could not be erased: {exc}") from exc


def _parse_methods(values: Sequence[str]) -> tuple[Method, ...]:
    """Return the methods with these values. Raise DriverFailed for any other argument."""
    found = [method for value in values for method in Method if method.value == value]
    if not found or isinstance(values, str) or len(set(found)) != len(values):
        raise DriverFailed(
            f"methods of erasure: found {describe(str(values))}; expected different ones of: "
            f"{'; '.join(Method)}"
        )
    return tuple(found)


def _erase(function: str, end: float, permitted: Sequence[Method]) -> dict[str, Any]:
    """Check that nothing uses the drive, erase it, and restore its kernel driver."""
    drive = Sysfs(_SYS).pci_function(function)
    if drive is None:  # removed: the caller sees that by the method
        return {"method": None, "namespaces": 0, "samples": 0}
    if drive.class_code != _CLASS:
        raise DriverFailed(
            f"{function} is not an NVMe controller: its class is {drive.class_code}, "
            f"expected {_CLASS}"
        )
    if drive.numvfs:
        raise DriverFailed(f"{function} has virtual functions, which others may use")
    _check_unused(function)
    with _bound_to_nvme(_SYS / "bus/pci/devices" / function):
        # Only now the kernel shows what is on the disks.
        _check_unused(function)
        return _erase_bound(drive, end, permitted)


def _erase_bound(drive: PciFunction, end: float, permitted: Sequence[Method]) -> dict[str, Any]:
    """Erase a controller that is bound to nvme."""
    function = drive.address
    folder = _SYS / "bus/pci/devices" / function
    name = _wait_for(lambda: _controller_name(folder), f"{function} has no live NVMe device")
    with _open(name, os.O_RDWR, folder / "nvme") as descriptor:
        controller = Controller(descriptor)
        info = controller.identify()
        namespace_ids = controller.namespace_ids()
        namespaces = {id_: controller.identify_namespace(id_) for id_ in namespace_ids}
        exclusive = drive.physfn is None and controller.is_alone(info)
        method = nvme.choose_method(
            info, list(namespaces.values()), exclusive=exclusive, permitted=permitted
        )
        is_virtual = drive.physfn is not None
        _check_all_attached(controller, info, namespace_ids, method, virtual=is_virtual)
        disks = _wait_for(
            lambda: _block_devices(folder / "nvme" / name, namespace_ids),
            f"{function} has not all block devices of its namespaces",
        )
        with contextlib.ExitStack() as open_disks:
            # O_EXCL: the kernel refuses it while a disk is mounted or part of another device
            # (open(2) of the manual pages).
            flags = os.O_RDWR | os.O_EXCL | os.O_DIRECT
            descriptors = [
                open_disks.enter_context(_open(disk, flags, _SYS / "class/block")) for disk in disks
            ]
            erase_all = (
                _sanitize(controller, method, end)
                if method in nvme.SANITIZE_METHODS
                else _format(controller, namespaces, method, end)
            )
            _end_earlier_sanitize(controller, info, method, work=erase_all, end=end)
            # Checked again: the wait for an earlier operation may have taken hours.
            if Sysfs(_SYS).read_int(f"bus/pci/devices/{function}/sriov_numvfs"):
                raise DriverFailed(f"{function} has virtual functions, which others may use")
            for opened in descriptors:
                _wait_for(partial(_lock, opened), f"another program has locked a disk of {name}")
            count = _prove(descriptors, erase_all)
            for opened in descriptors:
                _read_partitions(opened)
    return {"method": str(method), "namespaces": len(namespaces), "samples": count}


def _check_unused(function: str) -> None:
    if (reason := used_functions(_SYS).get(function)) is not None:
        raise DriverFailed(f"{function} cannot be erased: {reason}")


def _check_all_attached(
    controller: Controller,
    info: nvme.ControllerInfo,
    numbers: list[int],
    method: Method,
    *,
    virtual: bool,
) -> None:
    """Raise DriverFailed if a namespace that the server could write is not erased.

    ``numbers`` are the namespaces of the controller, ``virtual`` is whether the controller is a
    virtual function.
    """
    if not numbers:
        raise DriverFailed(
            "the controller has no attached namespace: an erasure cannot be verified"
        )
    if method in nvme.SANITIZE_METHODS or not info.manages_namespaces:
        return
    # The server could have detached a namespace, or attached it to another controller: a format
    # does not erase it. Those of other virtual functions are not erased with this one; whoever has
    # the physical function has the whole drive.
    others = (
        controller.detached_namespace_ids()
        if virtual
        else sorted(set(controller.allocated_namespace_ids()) - set(numbers))
    )
    if others:
        raise DriverFailed(
            f"namespace {others[0]} is not attached to the controller, so it cannot be formatted: "
            "attach or delete it"
        )


def _end_earlier_sanitize(
    controller: Controller,
    info: nvme.ControllerInfo,
    method: Method,
    work: Callable[[], None],
    end: float,
) -> None:
    """Wait for the end of a sanitize operation that a server or a killed agent started.

    If that operation failed, call ``work`` once: it erases the controller by ``method``.
    """
    # A controller accepts no write after a failed sanitize operation until another one succeeds,
    # and the check of an erasure writes samples first.
    if not set(info.methods) & nvme.SANITIZE_METHODS:
        return
    if _wait_for_sanitize(controller, end) is nvme.SanitizeState.FAILED:
        if method not in nvme.SANITIZE_METHODS:
            raise DriverFailed(
                "an earlier sanitize operation failed, and the controller accepts no write until "
                f"another one succeeds, which {method!s} cannot replace: sanitize the drive by "
                "hand, or permit it in its rule if no other controller of the NVM subsystem is used"
            )
        work()


def _format(
    controller: Controller,
    namespaces: dict[int, nvme.NamespaceInfo],
    method: Method,
    end: float,
) -> Callable[[], None]:
    """Return the work that formats all namespaces until a time. It raises DriverFailed."""

    def work() -> None:
        # One by one, also where one command erases all: each keeps its own format.
        for number, namespace in namespaces.items():
            remaining = end - time.monotonic()
            if remaining < _SHORTEST_FORMAT:
                raise DriverFailed("the namespaces could not be formatted in time")
            controller.format(number, namespace.format_bits, method, remaining)

    return work


def _sanitize(controller: Controller, method: Method, end: float) -> Callable[[], None]:
    def work() -> None:
        controller.sanitize(method)
        if (state := _wait_for_sanitize(controller, end)) is not nvme.SanitizeState.DONE:
            raise DriverFailed(f"the sanitize operation did not succeed: {state}")

    return work


def _wait_for_sanitize(controller: Controller, end: float) -> nvme.SanitizeState:
    """Return the final state of a sanitize operation. Raise DriverFailed at ``end``."""
    has_ended_verification = False
    while True:
        state, progress = controller.sanitize_status()
        if state is nvme.SanitizeState.VERIFYING and not has_ended_verification:
            has_ended_verification = True
            # A verification lasts until a host ends it. It may end just now: the next state counts.
            with contextlib.suppress(DriverFailed):
                controller.end_verification()
        elif state not in (nvme.SanitizeState.RUNNING, nvme.SanitizeState.VERIFYING):
            return state
        if time.monotonic() >= end:
            raise DriverFailed(f"the sanitize operation did not end in time: {progress:.0%} done")
        time.sleep(_POLL_INTERVAL)


def _prove(descriptors: list[int], work: Callable[[], None]) -> int:
    """Write samples, call ``work``, check that no sample is left; return the number of samples."""
    samples: list[tuple[int, int, bytes]] = []
    for descriptor in descriptors:
        offsets = _offsets(os.lseek(descriptor, 0, os.SEEK_END))
        if not offsets:
            raise DriverFailed("the kernel cannot read a namespace: an erasure cannot be verified")
        samples += [(descriptor, offset, os.urandom(_SAMPLE_BYTES)) for offset in offsets]
    with mmap.mmap(-1, _SAMPLE_BYTES) as buffer:  # O_DIRECT needs an aligned buffer
        for descriptor, offset, sample in samples:
            buffer[:] = sample
            os.pwritev(descriptor, [buffer], offset)
        for descriptor in descriptors:
            os.fsync(descriptor)
        for descriptor, offset, sample in samples:
            if _read(descriptor, offset, buffer) != sample:
                raise DriverFailed(
                    f"a sample at byte {offset} cannot be read back: an erasure cannot be verified"
                )
        work()
        for descriptor, offset, sample in samples:
            if _read(descriptor, offset, buffer) == sample:
                raise DriverFailed(f"data at byte {offset} can still be read: nothing was erased")
    return len(samples)


def _read_partitions(descriptor: int) -> None:
    """Let the kernel read the partition table again, which is empty now."""
    try:
        fcntl.ioctl(descriptor, _BLKRRPART)
    except OSError as exc:
        # A program has a partition open: udev does the same when it has closed it.
        if exc.errno != errno.EBUSY:
            raise


def _lock(descriptor: int) -> bool | None:
    """Lock a disk; return None while another program has locked it."""
    # From then on udev does not read it, so neither LVM nor MD activates what a server left there
    # (``docs/BLOCK_DEVICE_LOCKING.md`` of systemd). What they activated before makes the exclusive
    # opening fail.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return True


def _offsets(size: int) -> list[int]:
    """Return the byte offsets of the samples: the first and the last block, and some between."""
    blocks = size // _SAMPLE_BYTES
    count = min(_SAMPLES, blocks)
    numbers = {(blocks - 1) * number // max(1, count - 1) for number in range(count)}
    return sorted(number * _SAMPLE_BYTES for number in numbers)


def _read(descriptor: int, offset: int, buffer: mmap.mmap) -> bytes:
    buffer[:] = bytes(_SAMPLE_BYTES)
    count = os.preadv(descriptor, [buffer], offset)
    if count != _SAMPLE_BYTES:
        raise DriverFailed(f"only {count} of {_SAMPLE_BYTES} bytes at byte {offset} can be read")
    return buffer[:]


@contextlib.contextmanager
def _bound_to_nvme(folder: Path) -> Iterator[None]:
    """Bind the function to the nvme driver, and in the end to vfio-pci if it was bound to that."""
    # libvirt binds it to nvme when a server is deleted, except if the function was bound to
    # vfio-pci before the server used it.
    driver = Sysfs(folder).read_link("driver")
    if driver == _KERNEL_DRIVER:
        yield
        return
    if driver not in (None, "vfio-pci"):
        raise DriverFailed(
            f"{folder.name} is bound to the kernel driver {driver}; expected {_KERNEL_DRIVER} or "
            "vfio-pci"
        )
    if driver is not None:
        # Only a test: it fails while a process uses the group, for whose end the unbind would wait.
        with files.hold_group(_DEV, folder.name, Sysfs(folder).read_link("iommu_group")):
            pass
        (folder / "driver/unbind").write_text(folder.name)
    erased = False
    try:
        _bind(folder, _KERNEL_DRIVER)
        yield
        erased = True
    finally:
        # A function without a driver stays with nvme once it is erased: libvirt may be about to
        # bind it. Any other is bound back: the host would read and keep the drive.
        stays = driver is None and erased
        if not stays and (error := _bind_again(folder, driver)) is not None:
            # The result of the erasure matters more.
            LOG.warning("%s was not bound to %s again: %s", folder.name, driver, error)


def _bind_again(folder: Path, driver: str | None) -> str | None:
    """Bind a function from nvme to the driver that it had, or to none; return an error, if any."""
    try:
        if Sysfs(folder).read_link("driver") == _KERNEL_DRIVER:
            (folder / "driver/unbind").write_text(folder.name)
        if driver is not None and folder.exists():
            _bind(folder, driver)
            # The write succeeds also if the probe of the driver fails.
            if Sysfs(folder).read_link("driver") != driver:
                return "its probe failed, see the kernel log"
    except OSError as exc:
        return str(exc)
    return None


def _bind(folder: Path, driver: str) -> None:
    override = Sysfs(folder).read_text("driver_override")
    (folder / "driver_override").write_text(driver)
    try:
        (_SYS / "bus/pci/drivers_probe").write_text(folder.name)
    finally:
        # The kernel shows an unset override as "(null)" (driver_override_show).
        previous = "" if override in (None, "(null)") else override
        (folder / "driver_override").write_text(f"{previous}\n")


def _controller_name(folder: Path) -> str | None:
    """Return the name of the controller; None while it does not accept commands."""
    sysfs = Sysfs(folder)
    names = [name for name in sysfs.list_names("nvme") if _CONTROLLER.fullmatch(name)]
    if not names or not (_DEV / names[0]).exists():
        return None
    return names[0] if sysfs.read_text(f"nvme/{names[0]}/state") == "live" else None


def _block_devices(folder: Path, numbers: list[int]) -> list[str] | None:
    """Return the block device names of the namespaces; None while a block device is missing."""
    disks_by_number: dict[int, str] = {}
    sysfs = Sysfs(folder)
    for name in sysfs.list_names("."):
        # With multi-path, nvme0c1n1 is a path to the block device nvme0n1.
        if (match := _NAMESPACE.fullmatch(name)) is None:
            continue
        disk = f"nvme{match[1]}n{match[2]}"
        number = sysfs.read_int(f"{name}/nsid")
        if number is not None and (_DEV / disk).exists():
            disks_by_number[number] = disk
    if not set(numbers) <= set(disks_by_number):
        return None
    return [disks_by_number[number] for number in numbers]


def _wait_for(read: Callable[[], _T | None], error: str) -> _T:
    end = time.monotonic() + _BIND_TIMEOUT
    while (value := read()) is None:
        if time.monotonic() >= end:
            raise DriverFailed(error)
        time.sleep(_POLL_INTERVAL)
    return value


def _open(name: str, flags: int, folder: Path) -> AbstractContextManager[int]:
    """Open the device node of a device, which has this name in a folder of sysfs."""
    return open_node(_DEV / name, flags, Sysfs(folder).read_text(f"{name}/dev"))

# SPDX-License-Identifier: Apache-2.0
"""Privileged changes of a PCI function: its reset, and the number of its virtual functions.

``Documentation/ABI/testing/sysfs-bus-pci`` of the Linux kernel describes ``reset`` and
``reset_method``, ``sriov_numvfs`` and ``sriov_drivers_autoprobe``; ``cyborg.drivers.kernel.reset``
says which functions can be reset. ``sriov_numvfs_store`` of ``drivers/pci/iov.c`` can change a
number only from 0 or to 0 (otherwise EBUSY), and needs a kernel driver that supports SR-IOV
(otherwise ENOENT). It also removes virtual functions that are in use; ``vfio-pci`` then waits until
the processes close them.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from cyborg.core.address import PciAddress
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.inventory.delivery import is_vfio
from cyborg.drivers.host_use.check import used_functions
from cyborg.drivers.host_use.networks import describe_missing_interface
from cyborg.drivers.kernel import interfaces
from cyborg.drivers.kernel.reset import find_current_obstacle
from cyborg.drivers.privileged import CONTEXT, files
from cyborg.drivers.privileged.files import CHECKED, answers, set_mark
from cyborg.drivers.privileged.files import write as _write
from cyborg.drivers.sysfs import PciFunction, Sysfs

_SYS, _DEV = Path("/sys"), Path("/dev")
_UNNAMED = "reset"  # before Linux 5.15 the methods have no names


@CONTEXT.entrypoint
def reset(address: str) -> str | None:
    """Reset the PCI function at an address; return its reset methods, the preferred one first.

    The methods are one text, separated by blanks; "; checked" follows if a mark in a register has
    shown that the function was reset. Return None if the PCI function does not exist. Raise
    DriverFailed without a reset if the host or a process uses the PCI function, if it is bound to a
    kernel driver that does not permit a reset, or if it has virtual functions. Raise DriverFailed
    also if the kernel fails to reset it, if the reset had no effect, and if the function does not
    answer afterwards.
    """
    parsed = str(PciAddress.parse(address))
    sysfs = Sysfs(_SYS)
    function = sysfs.pci_function(parsed)
    if function is None:
        return None
    obstacle = find_current_obstacle(sysfs, function, used_functions(_SYS))
    if obstacle is not None:
        raise DriverFailed(f"{parsed} cannot be reset: {obstacle}")
    folder = _SYS / "bus/pci/devices" / parsed
    methods = sysfs.read_text(folder / "reset_method") or _UNNAMED
    with _group_held(function):
        mark = None
        # With lockdown the kernel refuses writes to the configuration space, and permits resets.
        with contextlib.suppress(OSError):
            mark = set_mark(folder / "config") if CHECKED.issuperset(methods.split()) else None
        try:
            _write(folder / "reset", "1")
            is_ready = answers(folder / "config")
            is_unchanged = is_ready and mark is not None and mark.is_left()
        except OSError as exc:
            if sysfs.pci_function(parsed) is None:
                return None
            raise DriverFailed(f"{parsed} could not be reset: {exc.strerror} ({methods})") from exc
    if not is_ready:
        raise DriverFailed(f"{parsed} does not answer after its reset ({methods})")
    if is_unchanged:
        raise DriverFailed(
            f"the reset of {parsed} had no effect ({methods}): a register kept its value; choose "
            "another method in its reset_method"
        )
    return methods if mark is None else f"{methods}; checked"


def _group_held(function: PciFunction) -> AbstractContextManager[None]:
    """Keep the VFIO group of a function open; one without a VFIO driver has no group to open."""
    if not is_vfio(function.kernel_driver):
        return contextlib.nullcontext()
    return files.hold_group(_DEV, function.address, function.iommu_group)


_NETWORK = "02"  # base class code of network controllers


@dataclass(frozen=True, slots=True)
class Host:
    """A host to change: its sysfs, its device nodes, and the function that writes attributes."""

    sys: Path
    dev: Path
    write: Callable[[Path, str], None]


@CONTEXT.entrypoint
def set_count(address: str, count: int, autoprobe: bool, allow_network: bool) -> None:
    """Set the number of virtual functions of the physical function at a PCI address.

    Do nothing if the number is already ``count``. If ``autoprobe`` is True, kernel drivers bind to
    the new virtual functions. ``allow_network`` permits the change of a network card whose own
    interface the host uses. Raise DriverFailed if the host uses the physical function in another
    way, if a virtual function is or may be in use, or if the kernel refuses. If the change fails,
    the previous number is restored with new virtual functions; the error says so if this fails too.
    """
    change(Host(_SYS, _DEV, _write), address, count, autoprobe, allow_network)


def change(host: Host, address: str, count: int, autoprobe: bool, allow_network: bool) -> None:
    """Change the number of virtual functions of a host; see ``set_count``."""
    function = _parse(address, count, autoprobe, allow_network)
    sysfs = Sysfs(host.sys)
    card = sysfs.pci_function(function)
    if card is None or not card.totalvfs:
        raise DriverFailed(f"there is no physical function with SR-IOV at {function}")
    if card.numvfs == count:
        return
    if count > card.totalvfs:
        raise DriverFailed(f"{function} can have {card.totalvfs} virtual functions, not {count}")
    if card.kernel_driver is None or is_vfio(card.kernel_driver):
        raise DriverFailed(
            f"{function} is bound to {card.kernel_driver or 'no kernel driver'}: bind it to its "
            "own kernel driver, which creates virtual functions"
        )
    used = used_functions(host.sys)
    _check_physical(host, card, used, allow_network)
    folder = host.sys / "bus/pci/devices" / function
    # Until they are removed: otherwise a process could begin to use one after the check.
    with reserve_virtual_functions(host, card, used):
        if card.numvfs:
            try:
                host.write(folder / "sriov_numvfs", "0")
            except OSError as exc:
                raise DriverFailed(
                    f"the virtual functions of {function} cannot be removed: {exc.strerror or exc}"
                ) from exc
    _create(host, folder, previous=card.numvfs, count=count, autoprobe=autoprobe)


def find_card(sysfs: Sysfs, address: str, kind: str, vendor: str, driver: str) -> PciFunction:
    """Return a card of a vendor, no virtual function, that is bound to a kernel driver.

    ``kind`` is the name of such a card in errors. Raise DriverFailed for another function.
    """
    card = sysfs.pci_function(address)
    if card is None or card.vendor != vendor or card.physfn is not None:
        raise DriverFailed(f"there is no {kind} at {address}")
    if card.kernel_driver != driver:
        raise DriverFailed(
            f"{address} is bound to {card.kernel_driver or 'no kernel driver'}; expected {driver}"
        )
    return card


def _parse(address: str, count: int, autoprobe: bool, allow_network: bool) -> str:
    function = str(PciAddress.parse(address))
    if type(count) is not int or not 0 <= count <= 0xFFFF:
        raise Invalid(f"{count!r} is not a number of virtual functions", field="count")
    if type(autoprobe) is not bool or type(allow_network) is not bool:
        raise Invalid("autoprobe and allow_network must be true or false", field="autoprobe")
    return function


def _check_physical(
    host: Host, card: PciFunction, used: Mapping[str, str], allow_network: bool
) -> None:
    """Raise DriverFailed if the host uses a physical function in a way that forbids the change."""
    reason = used.get(card.address)
    if reason is not None and allow_network and card.class_code.startswith(_NETWORK):
        reason = used_functions(host.sys, interfaces=False).get(card.address)
    if reason is not None:
        raise DriverFailed(f"{card.address} cannot be changed: the host uses it: {reason}")


@contextlib.contextmanager
def reserve_virtual_functions(
    host: Host, card: PciFunction, used: Mapping[str, str]
) -> Iterator[None]:
    """Prevent that processes open the virtual functions of a card with VFIO during the block.

    Raise DriverFailed if a virtual function is or may be in use.
    """
    sysfs = Sysfs(host.sys)
    functions = interfaces.virtual_functions(sysfs, card.address)
    for number, name in interfaces.representors(sysfs, card.address).items():
        if (bridge := sysfs.read_link(f"class/net/{name}/master")) is not None:
            raise _used(functions.get(number, str(number)), f"{name} is a port of {bridge}")
    with contextlib.ExitStack() as stack:
        groups: set[str | None] = set()  # the kernel permits one open descriptor of each
        for address in functions.values():
            virtual = sysfs.pci_function(address)
            if virtual is None:
                continue
            if (reason := used.get(address) or _find_use(sysfs, virtual)) is not None:
                raise _used(address, reason)
            # A driver of a vendor can register a function with VFIO itself (vfio_main.c).
            registered = sysfs.list_names(f"bus/pci/devices/{address}/vfio-dev")
            has_vfio_driver = is_vfio(virtual.kernel_driver) or bool(registered)
            if has_vfio_driver and virtual.iommu_group not in groups:
                groups.add(virtual.iommu_group)
                descriptor = _open_group(host, address, virtual.iommu_group)
                stack.callback(os.close, descriptor)
        yield


def _used(address: str, reason: str) -> DriverFailed:
    return DriverFailed(
        f"the virtual function {address} is or may be in use: {reason}; free it before the change"
    )


def _find_use(sysfs: Sysfs, function: PciFunction) -> str | None:
    """Return why a virtual function may be in use although no other check shows it."""
    # Stricter than the check of what is offered: a removal cannot be undone. It has no exception
    # for InfiniBand without IPoIB, nor for drivers that keep a function for a guest, as of Xen.
    driver = function.kernel_driver
    if driver is None or is_vfio(driver) or not function.class_code.startswith(_NETWORK):
        return None
    if interfaces.of_function(sysfs, function.address):
        return None
    return describe_missing_interface(driver)


def _open_group(host: Host, address: str, group: str | None) -> int:
    """Open the VFIO group of a function. Raise DriverFailed if a process may use it."""
    path = files.group_path(host.dev, group)
    if path is None:
        raise _used(address, "it has no VFIO group, so its users cannot be determined")
    try:
        return files.open_group(path)
    except OSError as exc:
        raise _used(address, f"{path} cannot be opened: {exc.strerror}") from exc


def _create(host: Host, folder: Path, *, previous: int, count: int, autoprobe: bool) -> None:
    """Create virtual functions at a card that has none; restore the previous number on error."""
    previous_autoprobe = Sysfs(folder).read_text("sriov_drivers_autoprobe")
    try:
        if count:
            _set_autoprobe(host, folder, "1" if autoprobe else "0")
        _enable(host, folder, count)
        return
    except OSError as exc:
        error = f"{folder.name} cannot get {count} virtual functions: {exc.strerror or exc}"
        num_foreign = Sysfs(folder).read_int("sriov_numvfs") if exc.errno == errno.EBUSY else None
    if num_foreign:
        # Those can be in use already, and nothing of the previous ones is left to restore.
        raise DriverFailed(f"{error}; another process has created {num_foreign} in the meantime")
    try:
        # ``_enable`` also fails if the kernel driver creates some, but fewer than ``count``.
        if Sysfs(folder).read_int("sriov_numvfs"):
            host.write(folder / "sriov_numvfs", "0")
        _set_autoprobe(host, folder, previous_autoprobe)
        _enable(host, folder, previous)
    except OSError as exc:
        raise DriverFailed(
            f"{error}; its {previous} virtual functions cannot be restored: {exc.strerror or exc}"
        ) from exc
    raise DriverFailed(f"{error}; the previous {previous} virtual functions were restored")


def _set_autoprobe(host: Host, folder: Path, value: str | None) -> None:
    """Set whether kernel drivers bind to new virtual functions.

    ``value`` is "1" or "0"; do nothing if it is None.
    """
    # Kernels before 4.12 have no such setting.
    found = Sysfs(folder).read_text("sriov_drivers_autoprobe")
    if value is not None and found not in (None, value):
        host.write(folder / "sriov_drivers_autoprobe", value)


def _enable(host: Host, folder: Path, count: int) -> None:
    """Create virtual functions at a card that has none. Raise OSError if it then has fewer."""
    if count:
        host.write(folder / "sriov_numvfs", str(count))
    # A kernel driver may create fewer, and the kernel then reports success.
    if (found := Sysfs(folder).read_int("sriov_numvfs")) != count:
        raise OSError(f"it has {found} virtual functions after the change")

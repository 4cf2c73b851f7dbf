# SPDX-License-Identifier: Apache-2.0
"""Reader of sysfs with bounded reads, no privileges, and tolerance of devices that disappear.

Sources in Linux: ``Documentation/PCI/sysfs-pci.rst`` (ids, class and ``config`` of a PCI function),
``Documentation/ABI/testing/sysfs-bus-pci`` (``driver``, ``numa_node``, ``physfn``,
``sriov_numvfs``, ``sriov_totalvfs``) and ``Documentation/ABI/testing/sysfs-kernel-iommu_groups``.
``pci_iov_add_virtfn`` of ``drivers/pci/iov.c`` adds virtual functions one by one, and
``sriov_enable`` sets their number after the last one.
"""

import contextlib
import errno
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from cyborg.core.address import PciAddress, is_pci_address
from cyborg.core.codec import Serializable
from cyborg.core.errors import DriverFailed, Invalid

# The tree of this machine; others are simulated or replayed.
LOCAL_ROOT = Path("/sys")
# Folder with a link to each PCI function, relative to the root of sysfs.
PCI_DEVICES = Path("bus/pci/devices")
MAX_BYTES = 4096  # of one attribute: at most one page (Documentation/filesystems/sysfs.rst)
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
MAX_FACTS = 4 * 1024 * 1024  # bytes of a file of a capture
MAX_SCANS = 3  # of the bus while virtual functions are created or removed

_Facts = TypeVar("_Facts", bound=Serializable)


@dataclass(frozen=True, slots=True)
class PciFunction:
    """A PCI function; ids are lower-case hexadecimal numbers without ``0x``.

    ``class_code`` has six digits: base class, sub-class, programming interface. ``physfn`` is the
    address of the physical function if this is a virtual function. ``numvfs`` and ``totalvfs`` are
    the current and the maximum number of virtual functions, 0 without SR-IOV.
    """

    address: str
    vendor: str
    product: str
    class_code: str
    revision: str | None = None
    subsystem_vendor: str | None = None
    subsystem_product: str | None = None
    kernel_driver: str | None = None
    iommu_group: str | None = None
    numa_node: int | None = None
    physfn: str | None = None
    numvfs: int = 0
    totalvfs: int = 0


class ReadObserver(Protocol):
    """Observer of what a Sysfs object reads, such as the recorder of a capture."""

    def on_read(self, path: Path, content: bytes | None, error: int) -> None:
        """Record the first bytes of a file, or the error number of a failed read."""

    def on_facts(self, place: str, content: bytes) -> None:
        """Record facts that were not read from a file, as the content of a file."""

    def on_list(self, path: Path) -> None:
        """Record that a directory is listed."""

    def on_link(self, path: Path) -> None:
        """Record that a symbolic link is read."""


_OBSERVER: ContextVar[ReadObserver | None] = ContextVar("sysfs_observer", default=None)


@contextlib.contextmanager
def observed_by(observer: ReadObserver) -> Iterator[None]:
    """Notify an observer of everything that this thread reads in the block."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def read_file(path: Path, size: int) -> bytes:
    """Return the first ``size`` bytes of a file outside of sysfs; read several times if needed.

    Raise OSError.
    """
    # One read of a file in ``/proc`` can return fewer bytes than the file has (``seq_read_iter`` of
    # ``fs/seq_file.c`` of Linux).
    try:
        with open(path, "rb") as file:
            content = file.read(size)
    except OSError as exc:
        if (observer := _OBSERVER.get()) is not None:
            observer.on_read(path, None, exc.errno or errno.EIO)
        raise
    if (observer := _OBSERVER.get()) is not None:
        observer.on_read(path, content, 0)
    return content


def notify_facts(place: str, facts: Serializable) -> None:
    """Notify the observer of facts that were not read from a file.

    ``place`` is the file that has them in a capture, relative to the root directory of the host.
    The kernel has no such file.
    """
    if (observer := _OBSERVER.get()) is not None:
        observer.on_facts(place, json.dumps(facts.to_dict()).encode())


def read_facts(
    sysfs_root: Path,
    place: str,
    kind: type[_Facts],
    failed: Callable[[str], _Facts],
    read_local: Callable[[], _Facts],
) -> _Facts:
    """Return the facts of this host, or those of the tree that ``sysfs_root`` is in.

    A tree which is not /sys has them at ``place`` in its root directory. A tree without the file
    has none: ``kind()``. ``failed`` returns the facts with the error of a failed read.
    ``read_local`` returns those of this host.
    """
    if sysfs_root == LOCAL_ROOT:
        facts = read_local()
        notify_facts(place, facts)
        return facts
    try:
        body = json.loads(read_file(sysfs_root.parent / place, MAX_FACTS))
        # A message may have unknown keys. Here one may be a use that would not be seen.
        if unknown := set(body) - {item.name for item in fields(cast(Any, kind))}:
            raise ValueError(f"unknown keys: {', '.join(sorted(unknown))}")
        return kind.from_dict(body)
    except FileNotFoundError:
        return kind()
    except (Invalid, KeyError, OSError, RecursionError, TypeError, ValueError) as exc:
        # A capture is a file of somebody else: whatever is wrong with it, the facts are not known.
        return failed(f"{place}: {exc}")


@contextlib.contextmanager
def open_node(path: Path, flags: int, number: str | None) -> Iterator[int]:
    """Open a device node; ``number`` is the content of the file ``dev`` of its device in sysfs.

    Raise DriverFailed if it cannot be opened, or if it belongs to another device, as after a
    hot-plug.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
    except OSError as exc:
        raise DriverFailed(f"{path} cannot be opened: {exc.strerror}") from exc
    try:
        # After the opening, not before: the node may be replaced in between.
        device = os.fstat(descriptor).st_rdev
        if f"{os.major(device)}:{os.minor(device)}" != number:
            raise DriverFailed(f"{path} is the node of another device")
        yield descriptor
    finally:
        os.close(descriptor)


def canonical_address(text: str) -> str | None:
    """Return a PCI address in the kernel's notation; None if the text is no PCI address."""
    try:
        return str(PciAddress.parse(text))
    except Invalid:
        return None


def functions_on(path: Path) -> list[str]:
    """Return the addresses of the PCI functions on a sysfs path, the last one on the path first.

    The first address is the device itself.
    """
    # The others are bridges or, for NVMe drives behind Intel VMD, a controller that is not a bridge
    # (``drivers/pci/controller/vmd.c`` of Linux).
    return [a for part in reversed(path.parts) if (a := canonical_address(part)) is not None]


class Sysfs:
    """Reader of a sysfs tree. No method raises for a missing file or directory."""

    def __init__(self, root: str | Path = "/sys") -> None:
        self.root = Path(root)

    def read_text(self, path: str | Path) -> str | None:
        """Return an attribute, stripped of white space; None if it cannot be read."""
        raw = self.read_bytes(path)
        return None if raw is None else raw.decode(errors="replace").strip()

    def read_bytes(self, path: str | Path, size: int = MAX_BYTES) -> bytes | None:
        """Return the first bytes of an attribute, up to ``size``; None if it cannot be read."""
        # Strings: a discovery reads thousands of attributes, and a Path costs more than its read.
        content, error = self._read(os.path.join(self.root, path), size)
        if (observer := _OBSERVER.get()) is not None:
            observer.on_read(self.root / path, content, error)
        return content

    @staticmethod
    def _read(path: str, size: int) -> tuple[bytes | None, int]:
        """Return the first bytes of a file and 0, or None and the error number."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as exc:
            return None, exc.errno or errno.EIO
        try:
            return os.read(handle, size), 0
        except OSError as exc:
            return None, exc.errno or errno.EIO
        finally:
            os.close(handle)

    def read_int(self, path: str | Path) -> int | None:
        """Return a decimal or, with ``0x``, hexadecimal attribute; None if it is not a number."""
        text = self.read_text(path)
        try:
            return None if text is None else int(text, 0)
        except ValueError:
            return None

    def read_link(self, path: str | Path) -> str | None:
        """Return the last component of the target of a symbolic link; None if there is none."""
        target = self._link_target(path)
        return None if target is None else target.rpartition("/")[2] or None

    def resolve(self, path: str | Path, *, strict: bool = False) -> Path | None:
        """Return a path with its symbolic links resolved; None if the links form a loop.

        With ``strict``, return None too if there is no file or directory at the path.
        """
        if (observer := _OBSERVER.get()) is not None:
            observer.on_link(self.root / path)
        try:
            return (self.root / path).resolve(strict=strict)
        except (OSError, RuntimeError):
            # Python before 3.13 raises RuntimeError for a loop of links.
            return None

    def list_names(self, path: str | Path) -> list[str]:
        """Return the sorted names in a directory; an empty list if it does not exist."""
        if (observer := _OBSERVER.get()) is not None:
            observer.on_list(self.root / path)
        try:
            return sorted(os.listdir(os.path.join(self.root, path)))
        except OSError:
            return []

    def identity(self, path: str | Path, *, of_link: bool = False) -> int | None:
        """Return the inode number of a directory, or of a link to one; None if it is absent."""
        # If the kernel removes a device and creates it again, its directory has another number.
        try:
            return (self.root / path).stat(follow_symlinks=not of_link).st_ino
        except OSError:
            return None

    def _link_target(self, path: str | Path) -> str | None:
        if (observer := _OBSERVER.get()) is not None:
            observer.on_link(self.root / path)
        try:
            return os.readlink(os.path.join(self.root, path))
        except OSError:
            return None

    def functions_of(self, path: str | Path) -> list[str]:
        """Return the addresses of the PCI functions on the resolved path; see ``functions_on``."""
        return functions_on(self.resolve(path) or self.root)

    def pci_functions(self) -> list[PciFunction]:
        """Return all PCI functions, sorted by address."""
        # The kernel creates and removes virtual functions one by one, and updates sriov_numvfs
        # after the last one. So the bus is scanned again until both numbers are equal. The uevents
        # of a removal arrive about one second before its end, so they cannot be used for this.
        for _ in range(MAX_SCANS):
            functions = self._functions()
            counts = Counter(function.physfn for function in functions)
            if all(function.numvfs == counts[function.address] for function in functions):
                break
        return functions

    def _functions(self) -> list[PciFunction]:
        names = filter(is_pci_address, self.list_names(PCI_DEVICES))
        found = (self.pci_function(str(a)) for a in sorted(map(PciAddress.parse, names)))
        return [function for function in found if function is not None]

    def pci_function(self, address: str) -> PciFunction | None:
        """Return the PCI function at an address; None if there is none."""
        folder = f"bus/pci/devices/{address}"
        vendor = self._hex(f"{folder}/vendor", 4)
        product = self._hex(f"{folder}/device", 4)
        class_code = self._hex(f"{folder}/class", 6)
        # A function that is being removed has an entry on the bus, and no ids.
        if vendor is None or product is None or class_code is None:
            return None
        numa = self.read_int(f"{folder}/numa_node")
        return PciFunction(
            address=address,
            vendor=vendor,
            product=product,
            class_code=class_code,
            revision=self._hex(f"{folder}/revision", 2),
            subsystem_vendor=self._hex(f"{folder}/subsystem_vendor", 4),
            subsystem_product=self._hex(f"{folder}/subsystem_device", 4),
            kernel_driver=self.read_link(f"{folder}/driver"),
            iommu_group=self.read_link(f"{folder}/iommu_group"),
            # -1 if the firmware does not provide the node (numa_node_show of pci-sysfs.c).
            numa_node=None if numa is None or numa < 0 else numa,
            physfn=self.read_link(f"{folder}/physfn"),
            numvfs=self.read_int(f"{folder}/sriov_numvfs") or 0,
            totalvfs=self.read_int(f"{folder}/sriov_totalvfs") or 0,
        )

    def pci_path(self, address: str) -> tuple[str | None, list[str]]:
        """Return the host bridge of a PCI function and the addresses from there to the function.

        The entry of a PCI function on the bus is a link, such as
        ``../../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0``. The host bridge is ``0000:3a``.
        """
        target = self._link_target(f"bus/pci/devices/{address}")
        if target is None:
            return None, []
        parts = target.split("/")
        path = [a for part in parts if (a := canonical_address(part)) is not None]
        # Behind Intel VMD the path has a second root: the first is the host bridge.
        roots = [p.removeprefix("pci") for p in parts if _ROOT.fullmatch(p)]
        return (roots[0] if roots else None), path

    def _hex(self, path: str, digits: int) -> str | None:
        value = self.read_int(path)
        return None if value is None or value < 0 else f"{value:0{digits}x}"[-digits:]

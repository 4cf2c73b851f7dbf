# SPDX-License-Identifier: Apache-2.0
"""Captures of hosts: their files, and the recorder of what drivers read while they discover.

The recorder writes nothing. It runs each installed driver with options that select every device,
and records the files, folders and links that ``drivers.sysfs`` reads. So the capture has what these
drivers need, and a driver that reads more than these did needs a new capture.
"""

import contextlib
import errno
import gzip
import io
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cyborg.core.capture import model
from cyborg.core.drivers.registry import Support
from cyborg.core.errors import CyborgError, Invalid
from cyborg.core.inventory.device import Device
from cyborg.core.log import get_logger
from cyborg.drivers.base import Driver, MeasureInterface, PartitionInterface
from cyborg.drivers.kernel.nvml import ReadFacts, is_known
from cyborg.drivers.pci import classes, health
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.pci.driver import PciDriver
from cyborg.drivers.sysfs import Sysfs, observed_by

LOG = get_logger(__name__)

_GZIP = b"\x1f\x8b"
# Files with this suffix are written with compression.
SUFFIX = ".gz"


def load_capture(path: Path) -> model.Capture:
    """Return the capture in a file. Raise Invalid with the reason, or OSError."""
    with path.open("rb") as file:
        data = file.read(model.MAX_TEXT + 1)
    if data.startswith(_GZIP):
        try:
            with gzip.open(io.BytesIO(data)) as stream:
                data = stream.read(model.MAX_TEXT + 1)
        except (OSError, EOFError, zlib.error) as exc:
            raise Invalid(f"{path}: {exc}", field="capture") from exc
    try:
        return model.parse(data.decode())
    except UnicodeDecodeError as exc:
        raise Invalid(f"{path}: it is no text in UTF-8", field="capture") from exc
    except Invalid as exc:
        raise Invalid(f"{path}: {exc.message}", field="capture") from exc


def save_capture(capture: model.Capture, path: Path) -> int:
    """Write a capture to a new file that only its owner can read; return its size in bytes.

    Raise Invalid if it is too large, and OSError, also if the file exists.
    """
    # Checked before the file is created: a capture that is too large could not be loaded.
    data = "".join(model.dump(capture)).encode()
    if len(data) > model.MAX_TEXT:
        raise Invalid(
            f"the capture has {len(data)} bytes, expected up to {model.MAX_TEXT}", field="capture"
        )
    if path.name.endswith(SUFFIX):
        data = gzip.compress(data, mtime=0)  # the same bytes for the same capture
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    return len(data)


def unpack(capture: model.Capture, root: Path) -> None:
    """Write the tree of a capture below a folder; links that exist stay. Raise OSError."""
    for path, folder in capture.folders.items():
        here = root / path
        here.mkdir(parents=True, exist_ok=True)
        for name, content in folder.files.items():
            if content is None:
                # Its content is unknown: the name exists, and reading it fails.
                (here / name).mkdir(exist_ok=True)
            else:
                (here / name).write_bytes(content)
    # Links last, so that nothing is written through a link.
    for path, folder in capture.folders.items():
        for name, target in folder.links.items():
            with contextlib.suppress(FileExistsError):
                (root / path / name).symlink_to(target)
    for top in ("sys/bus/pci/devices", "proc"):
        (root / top).mkdir(parents=True, exist_ok=True)


_MAX_LINKS = 40  # on one path, as the kernel permits
_MODULES = "lib/modules/"
_DENIED = (errno.EACCES, errno.EPERM)


@dataclass
class _Folder:
    files: dict[str, bytes | None] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)


class Recorder:
    """Observer of reads below the root directory of a host."""

    def __init__(self, root: Path) -> None:
        """``root`` is the directory that contains ``sys`` and ``proc``."""
        self._root = root
        self._folders: dict[str, _Folder] = {}
        self._targets: dict[str, str | None] = {}
        self._places: dict[str, str | None] = {}
        self.unreadable: dict[str, str] = {}

    @property
    def folders(self) -> dict[str, model.Folder]:
        """Return what was recorded so far."""
        return {path: model.Folder(f.files, f.links) for path, f in self._folders.items() if path}

    def on_read(self, path: Path, content: bytes | None, error: int) -> None:
        """Record the content of a file, or, if it is None, the error number of the read."""
        place = self._find(path)
        if place is None:
            return
        folder, _, name = place.rpartition("/")
        if content is None:
            if error in _DENIED:
                self.unreadable[place] = errno.errorcode[error]
            if (self._root / place).is_file():
                self._folder(folder).files.setdefault(name, None)  # the name alone: it exists
            return
        if _MODULES in place:
            # modules.dep has every module of the kernel; only VFIO is of interest.
            lines = content.splitlines(keepends=True)
            content = b"".join(line for line in lines if b"vfio" in line)
        files = self._folder(folder).files
        # The longest of several reads; a capture refuses larger files.
        if len(content) <= model.MAX_FILE and len(files.get(name) or b"") <= len(content):
            files[name] = content

    def on_facts(self, place: str, content: bytes) -> None:
        """Record facts that were not read from a file, as the content of a file."""
        folder, _, name = place.rpartition("/")
        self._folder(folder).files[name] = content

    def on_list(self, path: Path) -> None:
        """Record the names in a folder."""
        place = self._find(path)
        if place is None:
            return
        try:
            with os.scandir(self._root / place) as entries:
                found = list(entries)
        except OSError as exc:
            if exc.errno in _DENIED:
                self.unreadable[place] = errno.errorcode[exc.errno]
            return
        folder = self._folder(place)
        for entry in found:
            if entry.is_symlink():
                self._target(f"{place}/{entry.name}")
            elif entry.is_dir(follow_symlinks=False):
                self._folder(f"{place}/{entry.name}")
            else:
                folder.files.setdefault(entry.name, None)

    def on_link(self, path: Path) -> None:
        """Record the links on a path."""
        place = self._find(path)
        if place is not None and (self._root / place).is_dir():
            self._folder(place)

    def _find(self, path: Path) -> str | None:
        """Return a path without links, relative to the root; record the links on it.

        Return None for a path that does not exist in the tree.
        """
        text = os.fspath(path)
        if text not in self._places:
            self._places[text] = self._resolve(path)
        place = self._places[text]
        return place if place and os.path.lexists(self._root / place) else None

    def _resolve(self, path: Path) -> str | None:
        """Return a path without links, relative to the root; record the links on it."""
        try:
            parts = [p for p in os.fspath(path.relative_to(self._root)).split("/") if p]
        except ValueError:
            return None
        resolved: list[str] = []
        links = 0
        while parts:
            part = parts.pop(0)
            if part == ".":
                continue
            if part == "..":
                if not resolved:
                    return None
                resolved.pop()
                continue
            place = "/".join([*resolved, part])
            target = self._target(place)
            if target is None:
                resolved.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                return None
            parts = [*target.split("/"), *parts]
        return "/".join(resolved)

    def _target(self, place: str) -> str | None:
        """Return the relative target of a link and record it; None if it is no link."""
        if place in self._targets:
            return self._targets[place]
        target: str | None = None
        # This link names the process that reads it.
        if place != "proc/self":
            with contextlib.suppress(OSError):
                target = os.readlink(self._root / place)
        folder, _, name = place.rpartition("/")
        if target is not None:
            if target.startswith("/"):
                target = os.path.relpath(target, f"/{folder}")
            target = target.rstrip("/")
            # Links in the root directory, such as /lib, are left out: see ``record_host``.
            if folder:
                self._folder(folder).links[name] = target
        self._targets[place] = target
        return target

    def _folder(self, place: str) -> _Folder:
        return self._folders.setdefault(place, _Folder())


def options_for_capture(driver: type[Driver], sysfs: Sysfs) -> dict[str, Any]:
    """Return options with which a driver looks at every device of a host.

    They follow from the names of its options: ``devices`` selects all functions, ``health`` has all
    checks, ``vf_counts`` and ``class_by_capacity`` are set, and ``mdev_types`` names all parents.
    """
    functions = set(sysfs.list_names("bus/pci/devices"))
    every = {
        "devices": ["address=*"],
        "health": list(health.CHECKS),
        "vf_counts": ["1"],
        "class_by_capacity": True,
        "mdev_types": [
            f"{'address' if name in functions else 'parent'}={name},type=any"
            for name in sysfs.list_names("class/mdev_bus")
        ],
    }
    return {option.name: every[option.name] for option in driver.OPTIONS if option.name in every}


def record_host(
    drivers: Sequence[type[Driver]],
    source: str,
    sysfs_root: Path = Path("/sys"),
    access: HostAccess | None = None,
) -> tuple[model.Capture, list[str]]:
    """Return the capture of a host, and the errors of drivers, one sentence each.

    ``access`` has the names of the devices and the facts about GPUs; the default is that of the
    drivers.
    """
    root, access = sysfs_root.parent, access or HostAccess.of(sysfs_root)
    recorder = Recorder(root)
    errors: list[str] = []
    sysfs = Sysfs(sysfs_root)
    with observed_by(recorder):
        kernel = Sysfs(root).read_text("proc/sys/kernel/osrelease")
        for driver in drivers:
            if driver.SUPPORT_LEVEL is Support.REFERENCE:
                continue  # its devices are no devices of the host
            for options in _option_sets(driver, sysfs):
                try:
                    _run(driver(driver.name, options, sysfs_root))
                except (CyborgError, OSError, ValueError) as exc:
                    # One driver that fails must not lose what the others read.
                    errors.append(f"driver {driver.name}: {type(exc).__name__}: {exc}")
    # Where /lib is a link to /usr/lib, the capture has /lib as the folder.
    folders = {path.removeprefix("usr/"): folder for path, folder in recorder.folders.items()}
    folders = dict(_without_empty_parents(folders))
    model.check(folders)
    return (
        model.Capture(
            source=source,
            folders=folders,
            kernel=kernel,
            names=dict(_names(sysfs, access.lookup)),
            unreadable=recorder.unreadable,
            nvml=dict(_facts(sysfs, access.nvml)),
        ),
        errors,
    )


def _option_sets(driver: type[Driver], sysfs: Sysfs) -> Iterator[dict[str, Any]]:
    """Yield the options for each run of a driver."""
    # A parent of mediated devices is discovered as a parent, and in another run as a whole. A GPU
    # with virtual functions is discovered without them, and in another run with them: a driver
    # reads more about the layouts of a card whose virtual functions it offers.
    options = options_for_capture(driver, sysfs)
    yield options
    if options.get("mdev_types"):
        options = {**options, "mdev_types": []}
        yield options
    if issubclass(driver, PciDriver) and any(map(classes.is_gpu_vf, sysfs.pci_functions())):
        yield {**options, "devices": ["address=*,functions=all"]}


def _run(driver: Driver) -> None:
    devices: Sequence[Device] = driver.discover()
    if isinstance(driver, MeasureInterface):
        driver.measure(devices)
    if isinstance(driver, PartitionInterface):
        for device in devices:
            driver.layouts(device)


def _without_empty_parents(
    folders: Mapping[str, model.Folder],
) -> Iterator[tuple[str, model.Folder]]:
    """Yield the folders, without empty ones that another folder's path contains."""
    parents = {path.rpartition("/")[0] for path in folders}
    for path, folder in folders.items():
        # "usr" is no parent any more: ``record_host`` has removed it from the paths.
        if (folder.files or folder.links or path not in parents) and path != "usr":
            yield path, folder


def _facts(sysfs: Sysfs, nvml: ReadFacts) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the answers of NVML about the GPUs that it knows, by address."""
    for function in sysfs.pci_functions():
        if is_known(function) and (facts := nvml(function.address)) is not None:
            yield function.address, facts.to_dict()


def _names(sysfs: Sysfs, lookup: classes.Lookup) -> Iterator[tuple[str, classes.Names]]:
    for address in sysfs.list_names("bus/pci/devices"):
        if (names := lookup(address)) != classes.Names():
            yield address, names

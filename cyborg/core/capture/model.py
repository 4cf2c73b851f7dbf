# SPDX-License-Identifier: Apache-2.0
"""Capture of a host: the files, links and folders that its drivers read, and its uevents.

A capture is a text of JSON lines. The first line is the header, each other line is a folder or a
uevent. ``doc/source/contributor/captures.rst`` describes the format. A file is text, or
``{"base64": ...}``, or null: it exists, and its content is unknown.

A capture may come from a person who is not trusted. This module refuses a path or a link that
points outside of the tree, and a path that passes through a link, so that unpacking a capture
cannot write outside of its folder.

A replayed host can show faults: ``ADDRESS:FAULT[=COUNT][@OPERATION]``. ``0000:3b:00.0:eio=2@erase``
lets the first two erasures of a drive fail with EIO. Without a count a fault is permanent, and
without an operation it affects each.
"""

import base64
import binascii
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from cyborg.core.address import PciAddress
from cyborg.core.errors import Invalid
from cyborg.core.validation import boolean, number, optional, string

_V = TypeVar("_V")
FORMAT = "cyborg-capture"
VERSION = 1
# Anybody may have written a capture: without these limits a short file could fill the memory.

# Bytes of a capture without compression.
MAX_TEXT = 64 * 1024 * 1024
MAX_FOLDERS = 100_000
# Files and links of a capture.
MAX_NAMES = 400_000
# Bytes of one file.
MAX_FILE = 4 * 1024 * 1024
MAX_UEVENTS = 100_000
MAX_SECONDS = 366 * 24 * 3600
MAX_SOURCE = 1000
_MAX_PATH = 1024
_MAX_NAME = 255
# Drivers read nothing else, and unpacking must write nowhere else.
_TOPS = frozenset({"sys", "proc", "lib"})
_GROUP = "iommu_group"  # link of a device
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Folder:
    """The files and symbolic links in a folder; a file with None has an unknown content."""

    files: Mapping[str, bytes | None] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Uevent:
    """An event of the kernel, with the seconds since the start of the watch."""

    seconds: float
    action: str
    subsystem: str
    path: str


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured host; ``folders`` are by path, relative to the root directory of the host.

    ``source`` tells people where the files come from. ``names`` are the names of the vendor and the
    model by PCI address, ``nvml`` the answers of NVML by PCI address, as the driver ``gpu`` stores
    them, ``fabric`` the partitions of Fabric Manager, as ``drivers.replay.fabric`` writes them, and
    ``unreadable`` the errors by path.
    """

    source: str
    folders: Mapping[str, Folder]
    kernel: str | None = None
    scrubbed: bool = False
    names: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)
    uevents: tuple[Uevent, ...] = ()
    nvml: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fabric: Mapping[str, Any] = field(default_factory=dict)


def dump(capture: Capture) -> Iterator[str]:
    """Yield the lines of a capture, each with its line feed."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "source": capture.source,
        "kernel": capture.kernel,
        "scrubbed": capture.scrubbed,
        "names": {key: list(names) for key, names in sorted(capture.names.items())},
        "unreadable": dict(sorted(capture.unreadable.items())),
        # Left out if they are empty, because most hosts have neither.
        **({"nvml": dict(sorted(capture.nvml.items()))} if capture.nvml else {}),
        **({"fabric": dict(capture.fabric)} if capture.fabric else {}),
    }
    yield f"{json.dumps(header)}\n"
    for path, folder in sorted(capture.folders.items()):
        line: dict[str, Any] = {"dir": path}
        if folder.files:
            line["files"] = {n: _dump_content(c) for n, c in sorted(folder.files.items())}
        if folder.links:
            line["links"] = dict(sorted(folder.links.items()))
        yield f"{json.dumps(line)}\n"
    for event in capture.uevents:
        values = [event.seconds, event.action, event.subsystem, event.path]
        yield f"{json.dumps({'uevent': values})}\n"


def parse(text: str) -> Capture:
    """Return the capture of a text. Raise Invalid with the number of the line that is wrong."""
    if len(text) > MAX_TEXT:
        raise Invalid(f"the capture has more than {MAX_TEXT} bytes", field="capture")
    # Empty lines are skipped and counted, so that an editor shows the same numbers.
    lines = [(number_, line) for number_, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise Invalid("the capture is empty", field="capture")
    header = _parse_line(*lines[0], _check_header)
    folders: dict[str, Folder] = {}
    uevents: list[Uevent] = []
    for number_, line in lines[1:]:
        record = _parse_line(number_, line, _parse_record)
        if isinstance(record, Uevent):
            uevents.append(record)
            continue
        path, folder = record
        if path in folders:
            raise Invalid(f"line {number_}: {path} occurs twice", field="capture")
        folders[path] = folder
    # After all lines: a folder may come before the link that would lead into it.
    check(folders, len(uevents))
    return Capture(folders=folders, uevents=tuple(uevents), **header)


def merge(source: str, captures: Sequence[Capture]) -> Capture:
    """Return one host with all devices of several captures.

    Raise Invalid if a file differs, or if several captures have a fabric: a host has one.

    The host has no uevents: the captures were watched at different times.
    """
    files: dict[str, dict[str, bytes | None]] = {}
    links: dict[str, dict[str, str]] = {}
    for capture in captures:
        for path, folder in capture.folders.items():
            _unite(files.setdefault(path, {}), folder.files, path)
            _unite(links.setdefault(path, {}), folder.links, path)
    folders = {path: Folder(files[path], links[path]) for path in files}
    check(folders)
    fabrics = [capture.fabric for capture in captures if capture.fabric]
    if len(fabrics) > 1:
        raise Invalid("more than one of the captures has a fabric", field="capture")
    return Capture(
        source=source,
        folders=folders,
        kernel=next((c.kernel for c in captures if c.kernel is not None), None),
        # One part that is not scrubbed is enough to identify a host.
        scrubbed=all(c.scrubbed for c in captures),
        names={address: names for c in captures for address, names in c.names.items()},
        unreadable={path: error for c in captures for path, error in c.unreadable.items()},
        nvml={address: facts for c in captures for address, facts in c.nvml.items()},
        fabric=fabrics[0] if fabrics else {},
    )


def select_device(capture: Capture, device: str) -> Capture:
    """Return the part of a capture about a device: its folders, IOMMU group and links to it.

    ``device`` is the path of its folder.
    """
    device_folders = {path: f for path, f in capture.folders.items() if _is_below(path, device)}
    iommu_groups = {
        _target(path, folder.links[_GROUP])
        for path, folder in device_folders.items()
        if _GROUP in folder.links
    }
    folders: dict[str, Folder] = {}
    for path, folder in capture.folders.items():
        # The kernel shows a device in several places by links to its folder.
        links = {n: t for n, t in folder.links.items() if _is_below(_target(path, t), device)}
        if path in device_folders or path in iommu_groups:
            folders[path] = folder
        elif links:
            folders[path] = Folder(files={}, links=links)
    return replace(capture, folders=folders, uevents=())


def _target(folder: str, link: str) -> str:
    return posixpath.normpath(f"{folder}/{link}")


def _is_below(path: str, device: str) -> bool:
    return path == device or path.startswith(f"{device}/")


def _unite(merged: dict[str, _V], added: Mapping[str, _V], path: str) -> None:
    for name, value in added.items():
        if merged.setdefault(name, value) != value:
            raise Invalid(f"the captures differ in {path}/{name}", field="capture")


def check(folders: Mapping[str, Folder], uevents: int = 0) -> None:
    """Raise Invalid if a limit is exceeded, or if the path of a folder contains a file or link."""
    names = sum(len(folder.files) + len(folder.links) for folder in folders.values())
    for count, limit, unit in (
        (len(folders), MAX_FOLDERS, "folders"),
        (names, MAX_NAMES, "files and links"),
        (uevents, MAX_UEVENTS, "uevents"),
    ):
        if count > limit:
            raise Invalid(f"the capture has {count} {unit}, expected up to {limit}", field=unit)
    for path, folder in folders.items():
        if both := sorted(folder.files.keys() & folder.links.keys()):
            raise Invalid(f"{path}/{both[0]} is a file and a link", field="capture")
        # Otherwise unpacking would write through a link, out of its folder.
        for parent, name in _ancestors(path):
            above = folders.get(parent)
            if above is not None and (name in above.links or name in above.files):
                raise Invalid(f"{path} is below {parent}/{name}, which is no folder", field="dir")


def _ancestors(path: str) -> Iterator[tuple[str, str]]:
    """Yield each folder above a path, and the name in it that leads to the path."""
    while "/" in path:
        path, _, name = path.rpartition("/")
        yield path, name


def _parse_line(number_: int, line: str, parse_body: Any) -> Any:
    """Return what ``parse_body`` makes of the object in a line. Raise Invalid with the number."""
    try:
        body = json.loads(line)
        if not isinstance(body, dict):
            raise TypeError("expected an object")
        return parse_body(body)
    except Invalid as exc:
        raise Invalid(f"line {number_}: {exc.message}", field="capture") from exc
    except (KeyError, TypeError, ValueError, RecursionError) as exc:
        raise Invalid(f"line {number_}: {type(exc).__name__}: {exc}", field="capture") from exc


def _check_header(body: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the first line of a capture: the fields that are not in folders."""
    if body.get("format") != FORMAT:
        raise Invalid(f"it is no capture: expected the format {FORMAT!r}", field="format")
    # Not ignored: a newer format may give the same keys another meaning.
    if body.get("version") != VERSION:
        raise Invalid(
            f"version {body.get('version')!r} is unknown: expected {VERSION}", field="version"
        )
    source = string(body["source"])
    if not source.strip() or len(source) > MAX_SOURCE or not source.isprintable():
        raise Invalid(f"source: expected 1 to {MAX_SOURCE} printable characters", field="source")
    names: dict[str, tuple[str | None, str | None]] = {}
    for address, value in _items(body.get("names", {}), MAX_NAMES):
        vendor, model = value
        names[address] = optional(_short, vendor), optional(_short, model)
    return {
        "source": source,
        "kernel": optional(_short, body.get("kernel")),
        "scrubbed": boolean(body.get("scrubbed", False)),
        "names": names,
        "unreadable": {p: _short(e) for p, e in _items(body.get("unreadable", {}), MAX_NAMES)},
        "nvml": {a: dict(_items(f, MAX_NAMES)) for a, f in _items(body.get("nvml", {}), MAX_NAMES)},
        "fabric": dict(_items(body.get("fabric", {}), MAX_NAMES)),
    }


def _parse_record(body: Mapping[str, Any]) -> Uevent | tuple[str, Folder]:
    """Parse a line of a capture: a uevent, or a folder with its path. Raise Invalid."""
    if "uevent" in body:
        seconds, *texts = body["uevent"]
        action, subsystem, path = map(_short, texts)
        if not 0 <= number(seconds) <= MAX_SECONDS:  # refuses NaN too
            raise Invalid(f"uevent: expected 0 to {MAX_SECONDS} seconds", field="uevent")
        return Uevent(number(seconds), action, subsystem, path)
    path = string(body["dir"])
    components = path.split("/")
    if len(path) > _MAX_PATH or components[0] not in _TOPS:
        raise Invalid(f"{path!r:.100} is no folder in {', '.join(sorted(_TOPS))}", field="dir")
    for component in components:
        _check_name(component)
    files = {name: _load_content(c) for name, c in _items(body.get("files", {}), MAX_NAMES)}
    links = {name: string(target) for name, target in _items(body.get("links", {}), MAX_NAMES)}
    for name in (*files, *links):
        _check_name(name)
    for target in links.values():
        check_link(path, target)
    return path, Folder(files, links)


def check_link(folder: str, target: str) -> None:
    """Raise Invalid if a link in a folder may lead out of the tree.

    ``..`` is permitted at the start only, where it follows a path without links.
    """
    parts = target.split("/")
    # Counted, and not resolved: the capture is no file system, and its links may have no target.
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    if len(target) > _MAX_PATH or ups > folder.count("/") + 1:
        raise Invalid(f"the link to {target!r:.100} leaves the tree", field="links")
    for part in parts[ups:]:
        _check_name(part)


def _check_name(name: str) -> None:
    # In bytes, as the kernel counts (NAME_MAX of limits.h).
    if name in ("", ".", "..") or "/" in name or len(name.encode()) > _MAX_NAME:
        raise Invalid(f"{name!r:.100} is not a valid file name", field="name")
    if _CONTROL.search(name):
        raise Invalid(f"{name!r:.100} has a control character", field="name")


def _items(value: Any, limit: int) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, dict) or len(value) > limit:
        raise TypeError(f"expected an object with up to {limit} members")
    return [(string(key), member) for key, member in value.items()]


def _short(value: Any) -> str:
    text = string(value)
    if len(text) > _MAX_PATH or _CONTROL.search(text):
        raise ValueError(f"{text!r:.100} is too long or has control characters")
    return text


def _dump_content(content: bytes | None) -> Any:
    if content is None:
        return None
    # Text where possible, so that people can read a capture and see what it tells of a host.
    try:
        text = content.decode()
        if "\x00" not in text:
            return text
    except UnicodeDecodeError:
        pass
    return {"base64": base64.b64encode(content).decode()}


def _load_content(value: Any) -> bytes | None:
    """Return the content of a captured file, None if it has none. Raise ValueError."""
    if value is None:
        return None
    if isinstance(value, str):
        content = value.encode()
    else:
        try:
            content = base64.b64decode(string(value["base64"]), validate=True)
        except binascii.Error as exc:
            raise ValueError(f"base64: {exc}") from exc
    if len(content) > MAX_FILE:
        raise ValueError(f"a file has {len(content)} bytes, expected up to {MAX_FILE}")
    return content


class FaultKind(StrEnum):
    """What goes wrong in an operation on a device."""

    EIO = "eio"
    EBUSY = "ebusy"
    STUCK_RESET = "stuck_reset"
    DISAPPEARS = "disappears"


class Operation(StrEnum):
    """Simulated host work."""

    CREATE = "create"  # of a mediated device, or of virtual functions
    REMOVE = "remove"  # of a mediated device, or of virtual functions
    ERASE = "erase"  # of a drive
    CONFIGURE = "configure"  # services of a crypto accelerator
    RESET = "reset"  # of a PCI function
    PROGRAM = "program"  # of a region of an FPGA card


# Greedy: an address has colons too, and the last one ends it.
_FAULT = re.compile(r"(.+):([a-z_]+)(?:=([1-9][0-9]{0,3}))?(?:@([a-z]+))?")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the device at a PCI address; ``count`` is None for a permanent one."""

    address: str
    kind: FaultKind
    count: int | None = None
    operation: Operation | None = None


def parse_fault(text: str) -> Fault:
    """Return the fault of a text. Raise Invalid."""
    expected = (
        f"{text!r} is no fault: expected ADDRESS:FAULT[=COUNT][@OPERATION], such as "
        f"0000:3b:00.0:eio=2, with a fault of {', '.join(FaultKind)} and an operation of "
        f"{', '.join(Operation)}"
    )
    match = _FAULT.fullmatch(text.strip())
    if match is None:
        raise Invalid(expected, field="replay_faults")
    address, kind, count, operation = match.groups()
    try:
        return Fault(
            str(PciAddress.parse(address)),
            FaultKind(kind),
            None if count is None else int(count),
            None if operation is None else Operation(operation),
        )
    except (Invalid, ValueError) as exc:
        raise Invalid(expected, field="replay_faults") from exc

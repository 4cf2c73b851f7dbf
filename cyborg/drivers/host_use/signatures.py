# SPDX-License-Identifier: Apache-2.0
"""Signatures on disks: partition tables, file systems, members of volumes, encrypted data.

libblkid belongs to util-linux and is on each host with udev, which uses it too. Its header
``blkid.h`` (``libblkid/src/blkid.h.in``) documents the values below, and the comments of
``libblkid/src/superblocks/superblocks.c`` and ``partitions/partitions.c`` TYPE, USAGE and PTTYPE.
``ctypes`` calls it: the program ``blkid`` has the same exit code for a disk without a signature and
for one that it could not read.

A disk with a signature may hold data of the host although nothing uses the disk now: a volume group
that is not active, a pool of ZFS, an OSD of Ceph, a half of a mirror. udev probes each disk when it
appears, and again after a program wrote to it, and stores the result in ``/run/udev/data``: the
properties ``ID_PART_TABLE_TYPE``, ``ID_FS_TYPE`` and ``ID_FS_USAGE``
(``src/udev/udev-builtin-blkid.c`` of systemd; ``handle_db_line`` and ``device_get_device_id`` of
``src/libsystemd/sd-device/sd-device.c`` for the format and the name of a record). For a disk with
several signatures systemd stores none, ``blkid -o udev`` of util-linux, which a rule may call,
``ID_FS_AMBIVALENT`` (blkid(8)). Where udev has no record of a disk, as in a container, or no
signature in it, the disk itself is probed.

A tree that is not /sys has the signatures as a file: so does a capture.
"""

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cyborg.core.codec import Serializable
from cyborg.drivers.host_use.disks import DiskReader
from cyborg.drivers.sysfs import Sysfs, read_facts

_LIBRARY = "libblkid.so.1"
_TYPE = 1 << 5  # BLKID_SUBLKS_TYPE
_USAGE = 1 << 7  # BLKID_SUBLKS_USAGE
# BLKID_SUBLKS_BADCSUM: without it libblkid, from 2.39 on for each kind, takes a disk whose file
# system is damaged for an empty one.
_ANY_CHECKSUM = 1 << 10
_FOUND, _NOTHING, _AMBIVALENT = 0, 1, -2  # results of blkid_do_safeprobe


def probe(node: Path, number: str | None = None) -> dict[str, str]:
    """Return TYPE, USAGE, PTTYPE and AMBIVALENT of a disk or file, each if there is one.

    ``number`` is the number of the device, such as ``259:0``: the node may be of another device.
    Raise OSError if the node cannot be read or is of another device, or if there is no libblkid.
    """
    library = ctypes.CDLL(_LIBRARY, use_errno=True)
    library.blkid_new_probe.restype = ctypes.c_void_p
    value = ctypes.c_char_p()
    # Without O_NONBLOCK, the kernel would wait for the medium of a drive.
    with open(os.open(node, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as disk:
        status = os.fstat(disk.fileno())
        node_number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        if number is not None and (not stat.S_ISBLK(status.st_mode) or node_number != number):
            raise OSError(errno.ENODEV, f"the node of another device; expected {number}", node)
        probe_ = ctypes.c_void_p(library.blkid_new_probe())
        try:
            # From offset 0; the size 0 is that of the whole device.
            if library.blkid_probe_set_device(
                probe_, disk.fileno(), ctypes.c_int64(0), ctypes.c_int64(0)
            ):
                raise OSError(ctypes.get_errno(), f"{node} cannot be probed")
            library.blkid_probe_enable_superblocks(probe_, 1)
            library.blkid_probe_set_superblocks_flags(probe_, _TYPE | _USAGE | _ANY_CHECKSUM)
            library.blkid_probe_enable_partitions(probe_, 1)
            result = library.blkid_do_safeprobe(probe_)
            if result == _AMBIVALENT:
                return {"AMBIVALENT": "several types"}
            if result not in (_FOUND, _NOTHING):
                raise OSError(ctypes.get_errno(), f"{node} cannot be read")
            values: dict[str, str] = {}
            for name in ("TYPE", "USAGE", "PTTYPE"):
                has_failed = library.blkid_probe_lookup_value(
                    probe_, name.encode(), ctypes.byref(value), None
                )
                if not has_failed:
                    values[name] = (value.value or b"").decode(errors="replace")
            return values
        finally:
            library.blkid_free_probe(probe_)


# Path of the facts below the directory that contains ``sys``.
FILE = "proc/disk_signatures.json"

_UDEV = Path("/run/udev/data")
# Disks without a signature, by node: the record of udev then, and its time in ns. A disk that may
# not be read is one of them if udev has found none.
_EMPTY: dict[str, tuple[str, int]] = {}
_DEV = Path("/dev")
# What a disk holds, by the value USAGE of libblkid (``superblocks.c`` of util-linux).
_KINDS = {
    "filesystem": "a file system",
    "raid": "a part of a volume",
    "crypto": "encrypted data",
}


@dataclass(frozen=True, slots=True)
class SignatureFacts(Serializable):
    """What disks hold, such as "a partition table (gpt)", by the name of the disk.

    ``errors``: why a disk could not be read, by name.
    """

    signatures: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DiskContents:
    """What the disks of a PCI function hold, or why they could not be read; None without both."""

    signature: str | None = None
    error: str | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was found on the disks: by udev alone if they may not be read."""
        return self.signature is None and self.error is None


def whole_disks(sysfs: Sysfs) -> Iterator[str]:
    """Yield the names of the disks of a host, without partitions and without volumes of disks."""
    # Sources in Linux: ``Documentation/ABI/stable/sysfs-block`` (``hidden``),
    # ``block/partitions/core.c`` (``partition``), ``block/genhd.c`` (``size``, ``removable``).
    for name in sysfs.list_names("class/block"):
        folder = sysfs.resolve(f"class/block/{name}", strict=True)
        # Volumes and loop devices are in virtual/block; a drive with several controllers is in
        # virtual/nvme-subsystem, and each path to it (nvme0c1n1) is a hidden disk.
        if folder is None or folder.parent == sysfs.root / "devices/virtual/block":
            continue
        if name.startswith(("sr", "fd")):
            continue  # the medium of a drive is not a disk of the host
        if sysfs.read_text(folder / "partition") is None and not sysfs.read_int(folder / "hidden"):
            yield name


def read(sysfs_root: Path) -> SignatureFacts:
    """Return the signatures on the disks of this host, or of the tree that ``sysfs_root`` is in.

    A tree without the file has none.
    """
    sysfs = Sysfs(sysfs_root)
    return read_facts(
        sysfs_root,
        FILE,
        SignatureFacts,
        lambda error: SignatureFacts(errors=dict.fromkeys(whole_disks(sysfs), error)),
        lambda: read_local(sysfs),
    )


def read_local(sysfs: Sysfs, udev: Path = _UDEV, dev: Path = _DEV) -> SignatureFacts:
    """Return what udev knows of the disks of this host, or what is on them."""
    signatures: dict[str, str] = {}
    errors: dict[str, str] = {}
    reader = DiskReader(sysfs)
    for name in whole_disks(sysfs):
        if not reader.functions_of_disk(name):
            continue  # a disk of the network, for example
        if not sysfs.read_int(f"class/block/{name}/size"):
            is_removable = bool(sysfs.read_int(f"class/block/{name}/removable"))
            if not is_removable:  # a removable one has no medium, such as a reader without a card
                errors[name] = "the kernel shows no capacity"
            continue
        number = sysfs.read_text(f"class/block/{name}/dev")
        node = dev / name.replace("!", "/")  # sysfs writes the slash of a name as "!"
        try:
            text = _read_disk(udev / f"b{number}", node, number)
        except OSError as exc:
            errors[name] = f"{exc.filename or name}: {exc.strerror or exc}"
            continue
        if text is not None:
            signatures[name] = text
    return SignatureFacts(signatures, errors)


def _read_disk(record: Path, node: Path, number: str | None) -> str | None:
    """Return what a disk holds, by its record of udev and, without a signature there, the disk.

    Raise OSError if the record or the disk cannot be read.
    """
    # udev also has a record of a disk that it did not probe, or could not read.
    try:
        text = describe(_read_record(record))
        version = (str(record), record.stat().st_mtime_ns)
    except FileNotFoundError:
        return describe(probe(node, number))
    if text is not None or _EMPTY.get(str(node)) == version:
        return text
    # An agent without privileges may not read disks, as with DevicePolicy=closed of its unit: what
    # udev says is all that it knows.
    with contextlib.suppress(PermissionError):
        text = describe(probe(node, number))
    if text is None:
        _EMPTY[str(node)] = version  # until udev writes the record again
    return text


def _read_record(path: Path) -> dict[str, str]:
    """Return the properties of a record of udev with the names that libblkid gives them."""
    names = {
        "E:ID_FS_TYPE": "TYPE",
        "E:ID_FS_USAGE": "USAGE",
        "E:ID_FS_AMBIVALENT": "AMBIVALENT",
        "E:ID_PART_TABLE_TYPE": "PTTYPE",
    }
    properties: dict[str, str] = {}
    for line in path.read_text(errors="replace").splitlines():
        key, _, value = line.partition("=")
        if key in names:
            properties[names[key]] = value
    return properties


def describe(properties: Mapping[str, str]) -> str | None:
    """Return what a disk with these properties of libblkid holds; None if it holds nothing."""
    type_, usage = properties.get("TYPE"), properties.get("USAGE")
    if type_ is not None:
        return f"{_KINDS.get(usage or '', 'data')} ({type_})"
    if (table := properties.get("PTTYPE")) is not None:
        return f"a partition table ({table})"
    if (types := properties.get("AMBIVALENT")) is not None:
        return f"data of {types}"
    return None


def contents_by_function(sysfs: Sysfs, facts: SignatureFacts) -> dict[str, DiskContents]:
    """Return what the disks of each PCI function with disks hold, by address."""
    reader = DiskReader(sysfs)
    contents: dict[str, DiskContents] = {}
    for name in whole_disks(sysfs):
        signature, error = facts.signatures.get(name), facts.errors.get(name)
        if signature is None and _has_partitions(sysfs, name):
            signature = "a partition table"
        disk = DiskContents(
            f"{name} holds {signature}" if signature else None,
            f"the contents of {name} are unknown: {error}" if error else None,
        )
        for address in reader.functions_of_disk(name):
            earlier_disks = contents.get(address, DiskContents())
            contents[address] = DiskContents(
                earlier_disks.signature or disk.signature, earlier_disks.error or disk.error
            )
    return contents


def _has_partitions(sysfs: Sysfs, name: str) -> bool:
    return any(
        sysfs.read_text(f"class/block/{name}/{partition}/partition") is not None
        for partition in sysfs.list_names(f"class/block/{name}")
        if partition.startswith(name)
    )

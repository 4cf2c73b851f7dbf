# SPDX-License-Identifier: Apache-2.0
"""Signatures on a disk, as libblkid finds them on the disk itself.

libblkid belongs to util-linux and is on each host with udev, which uses it too. Its header
``blkid.h`` (``libblkid/src/blkid.h.in``) documents the values below, and the comments of
``libblkid/src/superblocks/superblocks.c`` and ``partitions/partitions.c`` TYPE, USAGE and PTTYPE.
``ctypes`` calls it: the program ``blkid`` has the same exit code for a disk without a signature and
for one that it could not read.
"""

import ctypes
import errno
import os
import stat
from pathlib import Path

_LIBRARY = "libblkid.so.1"
_TYPE = 1 << 5  # BLKID_SUBLKS_TYPE
_USAGE = 1 << 7  # BLKID_SUBLKS_USAGE
_FOUND, _NOTHING, _AMBIVALENT = 0, 1, -2  # results of blkid_do_safeprobe


def probe(node: Path, number: str | None = None) -> dict[str, str]:
    """Return TYPE, USAGE, PTTYPE and AMBIVALENT of a disk or file, each if there is one.

    ``number`` is the number of the device, such as ``259:0``: the node may be that of another one.
    Raise OSError if it cannot be read, if it is another one, or if there is no libblkid.
    """
    library = ctypes.CDLL(_LIBRARY, use_errno=True)
    library.blkid_new_probe.restype = ctypes.c_void_p
    found = ctypes.c_char_p()
    # Without O_NONBLOCK, the kernel would wait for the medium of a drive.
    with open(os.open(node, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as disk:
        status = os.fstat(disk.fileno())
        found_number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        if number is not None and (not stat.S_ISBLK(status.st_mode) or found_number != number):
            raise OSError(errno.ENODEV, f"the node of another device; expected {number}", node)
        probe_ = ctypes.c_void_p(library.blkid_new_probe())
        try:
            if library.blkid_probe_set_device(
                probe_, disk.fileno(), ctypes.c_int64(0), ctypes.c_int64(0)
            ):
                raise OSError(ctypes.get_errno(), f"{node} cannot be probed")
            library.blkid_probe_enable_superblocks(probe_, 1)
            library.blkid_probe_set_superblocks_flags(probe_, _TYPE | _USAGE)
            library.blkid_probe_enable_partitions(probe_, 1)
            result = library.blkid_do_safeprobe(probe_)
            if result == _AMBIVALENT:
                return {"AMBIVALENT": "several types"}
            if result not in (_FOUND, _NOTHING):
                raise OSError(ctypes.get_errno(), f"{node} cannot be read")
            values: dict[str, str] = {}
            for name in ("TYPE", "USAGE", "PTTYPE"):
                if not library.blkid_probe_lookup_value(
                    probe_, name.encode(), ctypes.byref(found), None
                ):
                    values[name] = (found.value or b"").decode(errors="replace")
            return values
        finally:
            library.blkid_free_probe(probe_)

# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's Xids in the kernel log: what the GPU driver says that went wrong, and with which GPU.

How the log is read is told by ``Documentation/ABI/testing/dev-kmsg`` of the Linux kernel. Reading
it may need a privilege (``kernel.dmesg_restrict``). What an Xid means, and what is to be done, is
told by NVIDIA's "Xid Errors", in the chapter on the Xid catalog; a log has a line such as
``NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.``
"""

import logging
import os
import re
import weakref
from collections.abc import Mapping
from pathlib import Path

from cyborg.core.device import Health
from cyborg.core.health import WELL, Measurement

LOG = logging.getLogger(__name__)

SICK: Mapping[int, str] = {
    46: "GPU stopped processing",
    48: "double bit ECC error",
    62: "internal micro-controller halt",
    64: "memory remapping failure",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    119: "GSP RPC timeout",
    120: "GSP error",
    140: "unrecovered ECC error",
}
"""The Xids after which a GPU must be reset, its host booted, or its maker asked.

Not among them are those that a faulty program causes (13, 31, 43, 45), and those after which the
GPU goes on by itself: a row that was remapped (63), an error that hit one program alone (94).
"""
RECOVERY = 154
"""The Xid that says what must be done for the GPU to recover; ``None`` when nothing must."""

MAX_RECORDS = 100_000  # that one look reads: the log holds fewer
_RECORD = 8192  # bytes: more than the kernel makes a record
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]*\): (\d+)")
_RECOVERED = re.compile(r"to 0x0 \(None\)")


class Xids:
    """What the kernel log says of GPUs since it was cleared last (``dmesg --clear``), or the boot.

    An agent that begins anew learns it again. Whoever has reset a GPU clears the log and restarts
    the agent, unless the driver itself says that the GPU has recovered.
    """

    def __init__(self, path: str | Path = "/dev/kmsg") -> None:
        """Touch nothing yet."""
        self._path = path
        self._file: int | None = None
        self._complained = False
        self._sick: dict[str, set[int]] = {}

    def read(self) -> None:
        """Take in what is new in the log. One that cannot be read is said once, and has nothing."""
        if self._file is None:
            self._file = self._open()
        if self._file is None:
            return
        for _ in range(MAX_RECORDS):
            try:
                record = os.read(self._file, _RECORD)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # the oldest records were overwritten; the next read has what is left
            except OSError as bad:
                self._complain(bad)
                return
            if not record:
                return
            for line in record.decode(errors="replace").splitlines():
                self._take(line)

    def of(self, address: str) -> Measurement:
        """Return what the log says of the device at a PCI address, whichever its function."""
        codes = self._sick.get(address.rpartition(".")[0].lower())
        if not codes:
            return WELL
        said = ", ".join(f"Xid {code} ({SICK[code]})" for code in sorted(codes))
        return Measurement(Health.UNHEALTHY, said)

    def _open(self) -> int | None:
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as bad:
            self._complain(bad)
            return None
        weakref.finalize(self, os.close, file)
        try:
            # To the first record after the log was cleared.
            os.lseek(file, 0, os.SEEK_DATA)
        except OSError:
            LOG.debug("%s is read from its start", self._path)
        return file

    def _complain(self, bad: OSError) -> None:
        if not self._complained:
            self._complained = True
            LOG.warning("No Xid is seen: %s cannot be read: %s", self._path, bad)

    def _take(self, line: str) -> None:
        head, _, text = line.partition(";")
        found = _XID.match(text)
        if found is None or not _of_the_kernel(head):
            return
        where, code = found[1].lower(), int(found[2])
        if code in SICK:
            self._sick.setdefault(where, set()).add(code)
        elif code == RECOVERY and _RECOVERED.search(text):
            self._sick.pop(where, None)


def _of_the_kernel(head: str) -> bool:
    """Tell whether a record is the kernel's own: a program that writes has another facility."""
    level = head.partition(",")[0]
    return level.isdecimal() and int(level) >> 3 == 0

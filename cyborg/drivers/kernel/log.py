# SPDX-License-Identifier: Apache-2.0
"""The log of the kernel, from which drivers read errors that have no file in sysfs.

``Documentation/ABI/testing/dev-kmsg`` of the Linux kernel describes the format of the log. Reading
it may need a privilege (``dmesg_restrict`` of ``Documentation/admin-guide/sysctl/kernel.rst``).
"""

import os
import weakref
from collections.abc import Iterator
from pathlib import Path

from cyborg.core.log import get_logger

LOG = get_logger(__name__)

MAX_RECORDS = 100_000  # per read of the log; the kernel's buffer holds fewer
_RECORD = 8192  # bytes: more than the maximum size of a record


class KernelLog:
    """Reader of the kernel's records since the boot, or since the log was cleared.

    ``dmesg --clear`` clears it. A restarted agent reads the log again.
    """

    def __init__(self, path: str | Path, errors: str) -> None:
        """Store the path; the log is opened by the first ``read``.

        ``errors`` names what cannot be detected without the log, for the warning.
        """
        self._path = path
        self._errors = errors
        self._file: int | None = None
        self._warned = False

    def read(self) -> Iterator[str]:
        """Yield the lines that the kernel wrote since the last call.

        Warn once if the log cannot be read.
        """
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
                continue  # the oldest records were overwritten; the next read skips them
            except OSError as exc:
                self._warn_once(exc)
                return
            if not record:
                return  # the end of a file, such as a copy of the log; /dev/kmsg has none
            for line in record.decode(errors="replace").splitlines():
                head, _, text = line.partition(";")
                if _is_from_kernel(head):
                    yield text

    def _open(self) -> int | None:
        """Open the log of the kernel at its first record; return None if it cannot be opened."""
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as exc:
            self._warn_once(exc)
            return None
        weakref.finalize(self, os.close, file)
        try:
            # The first record after the log was cleared.
            os.lseek(file, 0, os.SEEK_DATA)
        except OSError:
            LOG.debug("Cannot seek in %s, reading it from its start", self._path)
        return file

    def _warn_once(self, exc: OSError) -> None:
        if not self._warned:
            self._warned = True
            LOG.warning(
                "Cannot read %s, %s errors will not be detected: %s", self._path, self._errors, exc
            )


def _is_from_kernel(head: str) -> bool:
    """Return whether the kernel wrote a record; records of programs have a syslog facility."""
    level = head.partition(",")[0]
    return level.isdecimal() and int(level) >> 3 == 0

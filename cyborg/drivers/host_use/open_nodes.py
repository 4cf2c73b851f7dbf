# SPDX-License-Identifier: Apache-2.0
"""Search for the processes that have device nodes open, in ``/proc``.

``Documentation/filesystems/proc.rst`` of Linux describes ``/proc/PID/fd``, ``comm``, ``stat`` and
the mount option ``hidepid``.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Collection
from pathlib import Path

from cyborg.core.errors import CyborgError, TimedOut
from cyborg.drivers.host_use.vendor_nodes import PATTERN

PROC = Path("/proc")
MAX_SECONDS = 5.0
MAX_AGE = 1.0
"""Seconds for which ``SharedScan`` keeps a result."""
MAX_NODES = 10_000
MAX_ANCESTORS = 32
INITIAL_NAMESPACE = 0xEFFFFFFC
"""Inode of the PID namespace of the host: PROC_PID_INIT_INO of ``include/linux/proc_ns.h``."""

NODE = re.compile(
    r"(?:/[^ ]*)?(/dev/(?:nvidia[0-9]+|dri/[a-zA-Z]+[0-9]+|accel/accel[0-9]+|uio[0-9]+"
    r"|hl(?:_controlD)?[0-9]+|infiniband/(?:uverbs|umad|issm)[0-9]+"
    r"|vfio/(?:noiommu-)?[0-9]+|vfio/devices/vfio[0-9]+"
    r"|(?:dsa|iax)/wq[0-9]+\.[0-9]+|dfl-(?:fme|port)\.[0-9]+"
    r"|(?:nvme|ng)[0-9][0-9np]*|sg[0-9]+|n?st[0-9]+[alm]?|(?:s|v|xv|h)d[a-z]+[0-9]*"
    rf"|{PATTERN}))"
)
"""Nodes of devices, also those of a container below another folder. A node of the device mapper or
of MD is not among them: ``holders`` in sysfs shows the devices below it.

The modules ``processes`` and ``vendor_nodes`` name the sources of most of them. Of VFIO:
``vfio_devnode`` of ``drivers/vfio/group.c`` and ``vfio_device_devnode`` of
``drivers/vfio/device_cdev.c``. Of disks and tapes: ``Documentation/admin-guide/devices.txt``.
"""


class SharedScan:
    """Search that threads share: each backend of an agent discovers at about the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, list[str]] = {}
        self._error: Exception | None = None
        self._end = 0.0

    def read(self) -> dict[str, list[str]]:
        """Return the result of ``scan`` without this process, or raise its error.

        Both are at most MAX_AGE old.
        """
        with self._lock:
            if time.monotonic() >= self._end:
                self._error = None
                try:
                    check_namespace()
                    self._found = scan({os.getpid()})
                except (CyborgError, OSError) as exc:
                    self._error = exc
                self._end = time.monotonic() + MAX_AGE
            if self._error is not None:
                raise self._error
            return self._found


def check_namespace(proc: Path = PROC) -> None:
    """Raise PermissionError where ``proc`` does not show all processes of the host.

    That is so in another PID namespace, and where ``/proc`` is mounted with ``hidepid``.
    """
    namespace = os.stat(proc / "self/ns/pid").st_ino
    if namespace != INITIAL_NAMESPACE or not (proc / "1").exists():
        raise PermissionError(
            "this process does not see the processes of the host: it needs their PID namespace, "
            "and a /proc without hidepid"
        )


def scan(
    ignored: Collection[int], proc: Path = PROC, max_seconds: float = MAX_SECONDS
) -> dict[str, list[str]]:
    """Return the names of the programs that have a device node open, by the path of the node.

    The processes with the ids ``ignored`` and their descendants are left out: the agent reads
    devices, and starts the tools of vendors. Raise TimedOut after ``max_seconds``, PermissionError
    for a process that cannot be read.
    """
    end = time.monotonic() + max_seconds
    found: dict[str, set[str]] = {}
    for name in os.listdir(proc):
        if not name.isdecimal() or int(name) in ignored:
            continue
        # A process may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            nodes = _nodes_of(proc / name / "fd")
            if nodes and not _descends(proc, int(name), ignored):
                program = (proc / name / "comm").read_text(errors="replace").rstrip("\n")
                for node in nodes:
                    if node in found or len(found) < MAX_NODES:
                        found.setdefault(node, set()).add(program)
        if time.monotonic() > end:
            raise TimedOut(f"the open files of all processes were not read in {max_seconds:g} s")
    return {node: sorted(programs) for node, programs in found.items()}


def _nodes_of(folder: Path) -> set[str]:
    """Return the device nodes among the open files of a process."""
    found: set[str] = set()
    with os.scandir(folder) as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if (match := NODE.fullmatch(os.readlink(file.path))) is not None:
                    found.add(match[1])
    return found


def _descends(proc: Path, process: int, ancestors: Collection[int]) -> bool:
    """Return whether a process was started by one of ``ancestors``, or by one of their children."""
    for _ in range(MAX_ANCESTORS):
        if process in ancestors:
            return True
        if process <= 1:
            break
        # The name, in parentheses, may contain spaces; the state and the parent follow.
        text = (proc / str(process) / "stat").read_text(errors="replace")
        process = int(text.rpartition(")")[2].split()[1])
    return False

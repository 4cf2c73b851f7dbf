# SPDX-License-Identifier: Apache-2.0
"""Search for the processes that have device nodes open, in ``/proc``."""

import contextlib
import os
import re
import time
from pathlib import Path

from cyborg.core.errors import TimedOut

PROC = Path("/proc")
MAX_SECONDS = 5.0
MAXNODES = 10_000

NODE = re.compile(
    r"/dev/(nvidia[0-9]+|dri/[a-zA-Z]+[0-9]+|accel/accel[0-9]+|uio[0-9]+"
    r"|infiniband/(uverbs|umad|issm)[0-9]+"
    r"|(nvme|ng)[0-9][0-9np]*|(s|v|xv|h)d[a-z]+[0-9]*)"
)
"""Nodes of devices. A node of the device mapper or of MD is not among them: ``holders`` in sysfs
shows the devices below it."""


def scan(
    *ignored: int, proc: Path = PROC, max_seconds: float = MAX_SECONDS
) -> dict[str, list[str]]:
    """Return the names of the programs that have a device node open, by the path of the node.

    The processes with the ids ``ignored`` are left out: the agent reads devices itself. Raise
    TimedOut after ``max_seconds``, PermissionError for a process that cannot be read.
    """
    end = time.monotonic() + max_seconds
    found: dict[str, set[str]] = {}
    for name in os.listdir(proc):
        if not name.isdecimal() or int(name) in ignored:
            continue
        # A process may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for node in _nodes_of(proc / name / "fd"):
                if node in found or len(found) < MAXNODES:
                    program = (proc / name / "comm").read_text(errors="replace").rstrip("\n")
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
                target = os.readlink(file.path)
                if NODE.fullmatch(target):
                    found.add(target)
    return found

# SPDX-License-Identifier: Apache-2.0
"""What ``tools/test`` asks of this machine: room in memory, workers, processes that are left.

usage: python3 tools/_machine.py room GIB | workers TIER WORKER_MB ROOM_GIB | processes RUN

``room`` prints nothing: its exit status is 0 if temporary files of that size fit into memory.
``workers`` leaves that much memory to them.
Only the standard library is imported: the environment may not exist yet.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Return how many MiB this machine can still give, and the control groups of this process have.

    They are those of version 1 or 2, each level up. ``root`` has the files of the kernel.
    """
    sizes = [sys.maxsize]
    try:
        meminfo = (root / "proc/meminfo").read_text()
        sizes += [int(size) << 10 for size in re.findall(r"MemAvailable:\s+(\d+) kB", meminfo)]
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for _, controllers, path in (line.split(":", 2) for line in groups):
        if controllers in ("", "memory"):
            sizes += _group_limits(root / "sys/fs/cgroup", controllers, path.lstrip("/"))
    return min(sizes) >> 20


def _group_limits(top: Path, controllers: str, path: str) -> Iterator[int]:
    top, name = (top / "memory", "memory.limit_in_bytes") if controllers else (top, "memory.max")
    # In a container the path may be that of the machine, of which only the last level is here, as
    # the top.
    for folder in (top / path, *(top / path).parents):
        with contextlib.suppress(OSError, ValueError):  # no limit
            yield int((folder / name).read_text())
        if folder == top:
            break


def has_room(folder: Path, gib: int, available: int) -> bool:
    """Return whether a folder in memory has this much room, and twice as much is available, in MiB.

    Programs in the folder must also run, which containers often forbid.
    """
    try:
        if shutil.disk_usage(folder).free < gib << 30 or available < 2 * gib << 10:
            return False
        with tempfile.TemporaryDirectory(prefix="cyborg-test.", dir=folder) as name:
            probe = Path(name, "probe")
            probe.write_text("#!/bin/sh\n")
            probe.chmod(0o700)
            return subprocess.run([probe], stderr=subprocess.DEVNULL, check=False).returncode == 0
    except OSError:
        return False


def count_workers(tier: str, worker_mb: int, cores: int, available: int) -> int:
    """Return how many workers run tests: two for each core, as many as there is memory for.

    Tests also wait for databases, the broker and processes; those of the tier ``fast`` only
    compute, so that one worker for each core is enough. ``available`` and ``worker_mb``, which is
    that of a worker with its daemons, are MiB.
    """
    return max(1, min(cores if tier == "fast" else 2 * cores, available // worker_mb))


def list_processes(run: str) -> Iterator[str]:
    """Yield the pid and the command of each process of a run, except this one and its parents.

    ``run`` is the value of CYBORG_TEST_RUN in their environment.
    """
    mark = f"CYBORG_TEST_RUN={run}".encode()
    own, pid = set(), os.getpid()
    while pid > 1:
        own.add(pid)
        # The name of a program may be any bytes. A parent of another user may be hidden: it and its
        # parents are none of this run.
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            break
        pid = int(stat.rpartition(b")")[2].split()[1])
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) in own or mark not in (folder / "environ").read_bytes().split(
                b"\0"
            ):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:  # it has ended, or is one of another user
            continue
        if command:
            yield f"{folder.name} {command.decode(errors='replace')[:120]}"


def main(arguments: list[str]) -> int:
    """Print the answer; return the exit status."""
    match arguments:
        case ["room", gib]:
            return int(not has_room(Path("/dev/shm"), int(gib), available_memory()))
        case ["workers", tier, worker_mb, room_gib]:
            cores = len(os.sched_getaffinity(0))
            available = available_memory() - (int(room_gib) << 10)
            lines = [str(count_workers(tier, int(worker_mb), cores, available))]
        case ["processes", run]:
            lines = list(list_processes(run))
        case _:
            sys.stderr.write(f"unexpected arguments {arguments}; see {__file__}\n")
            return 2
    for line in lines:
        sys.stdout.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

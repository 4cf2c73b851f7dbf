# SPDX-License-Identifier: Apache-2.0
"""Looking at processes from outside: CPU time, memory, and what ``_bench_counted`` counts there."""

import collections
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Counted:
    """Statements by (database, thread, shape), RPC calls by (thread, method), the last ones."""

    statements: collections.Counter[tuple[str, str, str]]
    calls: collections.Counter[tuple[str, str]]
    last: list[tuple[float, str, str, str, str]]

    def since(self, before: "Counted") -> "Counted":
        """Return what was counted after ``before``."""
        return Counted(self.statements - before.statements, self.calls - before.calls, self.last)


def counted(folder: Path) -> Counted:
    """Ask every process that has counted anything; add up, and put the last ones in order."""
    statements: collections.Counter[tuple[str, str, str]] = collections.Counter()
    calls: collections.Counter[tuple[str, str]] = collections.Counter()
    last: list[tuple[float, str, str, str, str]] = []
    for path in sorted(folder.iterdir()):
        if (told := _ask(path)) is None:
            continue
        for database, thread, shape, count in told["statements"]:
            statements[database, thread, shape] += count
        for thread, method, count in told["calls"]:
            calls[thread, method] += count
        group = path.name.partition(".")[0]
        last += [(when, group, db, thread, text) for when, db, thread, text in told["last"]]
    return Counted(statements, calls, sorted(last))


def _ask(path: Path) -> Any:
    with socket.socket(socket.AF_UNIX) as line:
        try:
            line.connect(str(path))
        except ConnectionRefusedError:  # a worker that has ended
            return None
        with line.makefile("rb") as answer:
            return json.loads(answer.read())


def sessions() -> Mapping[int, list[int]]:
    """Return the processes of every session by the pid of its leader."""
    found: dict[int, list[int]] = collections.defaultdict(list)
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (fields := _stat(int(folder.name))):
            found[int(fields[3])].append(int(folder.name))
    return found


def cpu_ms(pids: Iterable[int]) -> float:
    """Return the CPU time of processes, and of their children that have ended, in ms."""
    ticks = 0
    for pid in pids:
        if fields := _stat(pid):
            ticks += sum(int(field) for field in fields[11:15])
    return ticks * 1000 / _TICK


def memory_mb(pid: int) -> tuple[float, float]:
    """Return the resident and the proportional memory of a process in MB (10^6 bytes)."""
    rss = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        text = ""
    pss = re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)
    return tuple(int(one[1]) * 1024 / 1e6 if one else 0.0 for one in (rss, pss))  # type: ignore[return-value]


def listener(port: int) -> list[int]:
    """Return the process that listens on a TCP port of this machine, [] if none can be seen."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            if any(os.readlink(fd) in inodes for fd in (folder / "fd").iterdir()):
                return [int(folder.name)]
        except OSError:  # another user's, or gone
            continue
    return []


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, ppid, pgrp, session, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []

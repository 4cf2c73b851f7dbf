# SPDX-License-Identifier: Apache-2.0
"""CPU time and memory of processes, the counts of ``counter`` in them, and rates of threads."""

import collections
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Counts:
    """Statements by (database, thread, shape), calls by (thread, method), and the last ones."""

    statements: collections.Counter[tuple[str, str, str]]
    calls: collections.Counter[tuple[str, str]]
    last: list[tuple[float, str, str, str, str]]

    def since(self, before: "Counts") -> "Counts":
        """Return the counts since ``before``."""
        return Counts(self.statements - before.statements, self.calls - before.calls, self.last)


def read_counts(folder: Path) -> Counts:
    """Return the sum of the counts of all processes, with the last messages in order."""
    counts = Counts(collections.Counter(), collections.Counter(), [])
    for path in sorted(folder.iterdir()):
        answer = _fetch(path)
        for *key, count in answer["statements"]:
            counts.statements[tuple(key)] += count
        for *key, count in answer["calls"]:
            counts.calls[tuple(key)] += count
        group = path.name.partition(".")[0]
        counts.last.extend((when, group, *message) for when, *message in answer["last"])
    counts.last.sort()
    return counts


def _fetch(path: Path) -> Any:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:  # a worker that has ended
            return {"statements": [], "calls": [], "last": []}
        with connection.makefile("rb") as answer:
            return json.loads(answer.read())


def list_sessions() -> Mapping[int, list[int]]:
    """Return the processes of every session by the pid of its leader."""
    sessions: dict[int, list[int]] = collections.defaultdict(list)
    for pid in _list_pids():
        if fields := _stat(pid):
            sessions[int(fields[3])].append(pid)
    return sessions


def parent(pid: int) -> int:
    """Return the parent of a process, 0 if the process has ended."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def cpu_ms(pids: Iterable[int]) -> float:
    """Return the CPU time in ms of processes and their ended children."""
    ticks = sum(int(field) for pid in pids for field in _stat(pid)[11:15])
    return ticks * 1000 / _TICK


def memory_mb(pid: int) -> tuple[float, float]:
    """Return the resident and the proportional memory of a process in MB (10^6 bytes)."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    rss, pss = (re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE) for name in ("Rss", "Pss"))
    return tuple(int(match[1]) * 1024 / 1e6 if match else 0.0 for match in (rss, pss))  # type: ignore[return-value]


def find_listener(port: int) -> list[int]:
    """Return the process that listens on a local TCP port; an empty list if none is visible."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for pid in _list_pids():
        try:
            if any(os.readlink(fd) in inodes for fd in Path(f"/proc/{pid}/fd").iterdir()):
                return [pid]
        except OSError:  # of another user, or ended
            continue
    return []


def _list_pids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, ppid, pgrp, session, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def run_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work`` with each number in a thread; raise the first exception after all ended."""
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work, number) for number in range(count)]:
            future.result()


@dataclass(frozen=True)
class Rate:
    """Calls per second, and the CPU time of one call in ms."""

    per_second: float
    cpu_ms: float


def measure_rate(
    make: Callable[[int], Callable[[], None]],
    count: int,
    seconds: float,
    read_cpu: Callable[[], float],
) -> Rate:
    """Return the rate of functions that ``make`` returns, one for each thread.

    ``read_cpu`` returns the CPU time in ms that the processes of interest have used.
    """
    calls, limits, cpu = [0] * count, [0.0, 0.0], [0.0]

    def start() -> None:
        cpu[0] = read_cpu()
        limits[:] = time.perf_counter(), time.perf_counter() + seconds

    barrier = threading.Barrier(count, start, timeout=30)

    def work(number: int) -> None:
        try:
            call = make(number)
            call()
        except BaseException:
            barrier.abort()
            raise
        barrier.wait()
        while time.perf_counter() < limits[1]:
            call()
            calls[number] += 1

    run_threads(count, work)
    took, used = time.perf_counter() - limits[0], read_cpu() - cpu[0]
    return Rate(sum(calls) / took, used / max(1, sum(calls)))

# SPDX-License-Identifier: Apache-2.0
"""Booting and deleting servers as Nova does, over HTTP, and measuring all that it costs."""

import collections
import http.client
import json
import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import _bench_watch as watch
import sqlalchemy as sa
from _bench_stack import HOST, PROJECT, Bed

from cyborg.db import schema
from cyborg.fixtures.processes import until
from cyborg.fixtures.rows import GROUPS

PROFILE = "bench-fpga"
PING = "PING"
PATH = "/v2/accelerator_requests"


class Client:
    """One persistent connection."""

    def __init__(self, endpoint: str, headers: Mapping[str, str]) -> None:
        self._line = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=60)
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        self._headers |= headers

    def ask(self, status: int, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the body; raise unless the answer has this status."""
        text = None if body is None else json.dumps(body)
        self._line.request(method, path, text, self._headers)
        answer = self._line.getresponse()
        got = answer.read()
        if answer.status != status:
            raise RuntimeError(f"{method} {path}: {answer.status} {got.decode()[:500]}")
        return json.loads(got) if got else None

    def close(self) -> None:
        """Close the connection."""
        self._line.close()


def cycle(client: Client, provider: str) -> None:
    """Boot one server with one accelerator and delete it."""
    instance = str(uuid4())
    (arq,) = client.ask(201, "POST", PATH, {"device_profile_name": PROFILE})["arqs"]
    values = {"hostname": HOST, "device_rp_uuid": provider, "instance_uuid": instance}
    if PROJECT not in (arq["project_id"], None):
        raise RuntimeError(f"the request is of project {arq['project_id']}")
    patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]
    client.ask(202, "PATCH", PATH, {arq["uuid"]: patch})
    (bound,) = client.ask(200, "GET", f"{PATH}?instance={instance}")["arqs"]
    if (bound["state"], bound["attach_handle_type"]) != ("Bound", "TEST_PCI"):
        raise RuntimeError(f"not bound: {bound}")
    client.ask(204, "DELETE", f"{PATH}?instance={instance}")


def make_profile(bed: Bed) -> None:
    """Make the profile that all requests are made from."""
    client = Client(bed.endpoint, bed.admin)
    body = [{"name": PROFILE, "groups": [dict(group) for group in GROUPS]}]
    client.ask(201, "POST", "/v2/device_profiles", body)
    client.close()


@dataclass
class Limit:
    """When a run ends: after so many cycles in all, or else after so many seconds."""

    cycles: int | None
    seconds: float


def drive(bed: Bed, concurrency: int, limit: Limit) -> tuple[list[float], float]:
    """Run cycles from so many clients; return the seconds of each cycle and those of all."""
    took: list[float] = []
    failures: list[BaseException] = []
    lock, end = threading.Lock(), threading.Event()
    left = collections.deque(range(limit.cycles)) if limit.cycles else None
    begin = time.perf_counter()

    def work(number: int) -> None:
        client = Client(bed.endpoint, bed.headers)
        provider = bed.providers[number % len(bed.providers)]
        try:
            while not end.is_set():
                if left is not None:
                    try:
                        left.pop()
                    except IndexError:
                        return
                elif time.perf_counter() - begin > limit.seconds:
                    return
                started = time.perf_counter()
                cycle(client, provider)
                with lock:
                    took.append(time.perf_counter() - started)
        except BaseException as bad:  # noqa: BLE001  told below
            failures.append(bad)
            end.set()
        finally:
            client.close()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    if failures:
        raise RuntimeError(f"{len(failures)} of {concurrency} clients failed") from failures[0]
    return took, seconds


def measure(bed: Bed, others: int, concurrency: int, limit: Limit) -> dict[str, Any]:
    """Measure one cell."""
    before, cpu_before = watch.counted(bed.counters), cpu(bed)
    took, seconds = drive(bed, concurrency, limit)
    until("Nova has been told of all", lambda: _outbox(bed) == 0)
    cpu_after = cpu(bed)
    done = watch.counted(bed.counters).since(before)
    cycles = len(took)
    ordered = sorted(took)
    mine = str(bed.engine.url.database).rpartition("/")[2]
    by_thread: collections.Counter[str] = collections.Counter()
    pings = 0
    for (database, thread, shape), count in done.statements.items():
        if database != mine:
            continue
        if shape == PING:
            pings += count
        else:
            by_thread[thread] += count
    of_calls = by_thread.pop("calls", 0)
    of_outbox = by_thread.pop("outbox", 0)
    calls = collections.Counter({m: n for (t, m), n in done.calls.items() if t == "calls"})
    return {
        "mode": bed.mode,
        "others": others,
        "concurrency": concurrency,
        "cycles": cycles,
        "cycles_per_second": cycles / seconds,
        "p50_ms": statistics.median(ordered) * 1000,
        "p99_ms": ordered[min(cycles - 1, int(cycles * 0.99))] * 1000,
        "statements": of_calls / cycles,
        "statements_outbox": of_outbox / cycles,
        "statements_other": by_thread.total() / cycles,
        "pings": pings / cycles,
        "rpc": {method: count / cycles for method, count in sorted(calls.items())},
        "cpu_ms": {group: (cpu_after[group] - cpu_before[group]) / cycles for group in cpu_after},
    }


def versions(bed: Bed) -> list[str]:
    """Name the database server with its version."""
    with bed.engine.connect() as connection:
        name = bed.engine.dialect.name
        query = "SELECT sqlite_version()" if name == "sqlite" else "SELECT version()"
        version = connection.exec_driver_sql(query).scalar_one()
    return [version if "MariaDB" in version else f"{name} {version}"]


def cpu(bed: Bed) -> dict[str, float]:
    """Return the CPU time so far, in ms, of each group of processes that can be seen."""
    found = watch.sessions()
    spent = {
        group: watch.cpu_ms(pid for leader in leaders for pid in found[leader])
        for group, leaders in bed.groups.items()
    }
    for name, port in bed.servers.items():
        if pids := watch.listener(port):
            spent[name] = watch.cpu_ms(pids)
    return spent


def memory(bed: Bed) -> dict[str, tuple[float, float]]:
    """Return RSS and PSS in MB of the largest worker of each group."""
    found = watch.sessions()
    largest = {}
    for group, leaders in bed.groups.items():
        pids = [pid for leader in leaders for pid in found[leader] if pid not in leaders]
        largest[group] = max(watch.memory_mb(pid) for pid in pids or leaders)
    return largest


def trace(bed: Bed) -> list[tuple[str, str, str]]:
    """Return what one cycle sends, in order: the group of the process, the thread, the text."""
    begin = time.time()
    drive(bed, 1, Limit(1, 0))
    until("Nova has been told of all", lambda: _outbox(bed) == 0)
    mine = str(bed.engine.url.database).rpartition("/")[2]
    return [
        (group, thread, " ".join(text.split()))
        for when, group, database, thread, text in watch.counted(bed.counters).last
        if when >= begin and database in ("", mine)
    ]


def _outbox(bed: Bed) -> int:
    with bed.engine.connect() as connection:
        return connection.execute(
            sa.select(sa.func.count()).select_from(schema.outbox)
        ).scalar_one()

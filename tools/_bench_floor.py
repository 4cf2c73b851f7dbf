#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the machine gives at best: bare commits, bare calls of the bus, bare answers of pecan.

Run by itself, as ``_bench_floor.py bus URL TOPIC`` or ``_bench_floor.py http THREADS``, it is the
other side of the calls, in a process of its own as in an installation.
"""

import contextlib
import http.client
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import oslo_messaging
import pecan
import sqlalchemy as sa
from wsme import types as wtypes
from wsmeext import pecan as wsme_pecan

from cyborg.fixtures.broker import MEMORY, open_bus
from cyborg.fixtures.databases import engine_of
from cyborg.fixtures.processes import BIN, Daemon, free_port, until
from cyborg.standalone.http import HttpServer

NAME = "floor"


def rate(work: Callable[[Any], None], open_one: Callable[[int], Any], n: int, secs: float) -> float:
    """Return how often a second n threads do some work, each with what ``open_one`` gives it."""
    counts = [0] * n
    failures: list[BaseException] = []
    ready, go = threading.Barrier(n + 1), threading.Event()
    end = [float("inf")]

    def loop(number: int) -> None:
        try:
            mine = open_one(number)
            work(mine)
            ready.wait(30)
            go.wait()
            while time.perf_counter() < end[0]:
                work(mine)
                counts[number] += 1
        except BaseException as bad:  # noqa: BLE001  told below
            failures.append(bad)
            end[0] = 0.0
            ready.abort()

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(n)]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        ready.wait(30)
    begin = time.perf_counter()
    if not failures:
        end[0] = begin + secs
    go.set()
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError("the floor gave way") from failures[0]
    return sum(counts) / (time.perf_counter() - begin)


def commits(url: str, n: int, seconds: float) -> float:
    """Return transactions a second, each of one statement: a row is inserted, or it is changed."""
    table = f"floor_{uuid4().hex[:8]}"
    with engine_of(url) as engine, contextlib.ExitStack() as undo:
        key = "INTEGER PRIMARY KEY AUTOINCREMENT"
        if engine.dialect.name == "mysql":
            key = "BIGINT PRIMARY KEY AUTO_INCREMENT"
        _tell(engine, f"CREATE TABLE {table} (id {key}, uuid VARCHAR(36), value INTEGER)")
        undo.callback(_tell, engine, f"DROP TABLE {table}")
        if engine.dialect.name == "sqlite":
            # As the service has it, and not as the tests do.
            sa.event.listen(
                engine, "checkout", lambda c, *_: c.execute("PRAGMA synchronous = FULL")
            )
        lines: list[Any] = []
        undo.callback(lambda: [line.close() for line in lines])

        def open_one(_: int) -> dict[str, Any]:
            line = engine.raw_connection()
            lines.append(line)
            return {"line": line, "cursor": line.cursor(), "row": 0}

        def work(mine: dict[str, Any]) -> None:
            if engine.dialect.name == "sqlite":
                mine["cursor"].execute("BEGIN IMMEDIATE")
            if mine["row"]:
                mine["cursor"].execute(f"UPDATE {table} SET value = 1 WHERE id = {mine['row']}")
                mine["row"] = 0
            else:
                mine["cursor"].execute(f"INSERT INTO {table} (uuid, value) VALUES ('{uuid4()}', 0)")
                mine["row"] = mine["cursor"].lastrowid
            mine["line"].commit()

        return rate(work, open_one, n, seconds)


def _tell(engine: sa.Engine, statement: str) -> None:
    with engine.begin() as tx:
        tx.exec_driver_sql(statement)


class Nothing:
    """The emptiest server of the bus."""

    target = oslo_messaging.Target()

    @oslo_messaging.expose  # type: ignore[untyped-decorator]
    def nothing(self, ctxt: Any) -> None:
        """Answer nothing."""


@contextlib.contextmanager
def answering(url: str, topic: str) -> Iterator[Any]:
    """Answer on the bus; give the bus."""
    with open_bus(url) as bus:
        target = oslo_messaging.Target(exchange=topic, topic=topic, server=NAME)
        policy = oslo_messaging.ExplicitRPCAccessPolicy
        server = oslo_messaging.get_rpc_server(
            bus.transport.oslo, target, [Nothing()], access_policy=policy
        )
        server.start()
        try:
            yield bus
        finally:
            server.stop()
            server.wait()


def calls(url: str, folder: Path, n: int, seconds: float) -> float:
    """Return calls a second of a method that does nothing, of one server."""
    topic = f"floor-{uuid4().hex[:12]}"
    with contextlib.ExitStack() as undo:
        if url == MEMORY:
            bus = undo.enter_context(answering(url, topic))
        else:
            server = undo.enter_context(_side(folder, "bus", url, topic))
            until("the floor's server answers", lambda: "floor is ready" in server.log.read_text())
            bus = undo.enter_context(open_bus(url))
        target = oslo_messaging.Target(exchange=topic, topic=topic)
        client = oslo_messaging.get_rpc_client(bus.transport.oslo, target, timeout=30)
        return rate(lambda _: client.call({}, "nothing"), lambda _: None, n, seconds)


class _Answer(wtypes.Base):  # type: ignore[misc]
    uuid = wtypes.wsattr(str, mandatory=True)
    state = wtypes.wsattr(str, mandatory=True)


class _Root:
    @pecan.expose(generic=True)  # type: ignore[untyped-decorator]
    def index(self) -> str:
        return ""

    @wsme_pecan.wsexpose(_Answer)  # type: ignore[untyped-decorator]
    def floor(self) -> _Answer:
        return _Answer(uuid="00000000-0000-0000-0000-000000000000", state="Bound")


def trivial() -> Any:
    """Return the WSGI application of the floor: one route with one answer of two fields."""
    return pecan.make_app(_Root(), debug=False)


def answers(folder: Path, workers: int, threads: int, n: int, seconds: float) -> float:
    """Return answers a second over persistent connections: of gunicorn, or of waitress (0)."""
    port = free_port()
    tools = str(Path(__file__).parent)
    if workers:
        command = [
            *(BIN / "gunicorn", "--workers", workers, "--worker-class", "gthread"),
            *("--threads", threads, "--keep-alive", "75", "--no-control-socket"),
            *("--pythonpath", tools, "--bind", f"127.0.0.1:{port}", "_bench_floor:trivial()"),
        ]
        side = _running(Daemon("floor-http", command, folder, {}))
    else:
        side = _side(folder, "http", str(threads))
    with side as server:
        if not workers:
            ready = re.compile(r"floor is ready http://127.0.0.1:(\d+)")
            until("the floor's server answers", lambda: ready.search(server.log.read_text()))
            port = int(ready.findall(server.log.read_text())[-1])
        until("the floor answers", lambda: _answers(port))

        def work(line: http.client.HTTPConnection) -> None:
            line.request("GET", "/floor", headers={"Accept": "application/json"})
            answer = line.getresponse()
            body = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status} {body!r}")

        def open_one(_: int) -> http.client.HTTPConnection:
            return http.client.HTTPConnection("127.0.0.1", port, timeout=30)

        return rate(work, open_one, n, seconds)


def _answers(port: int) -> bool:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        line.request("GET", "/floor")
        return line.getresponse().status == 200
    except OSError:
        return False
    finally:
        line.close()


def _side(folder: Path, *words: str) -> contextlib.AbstractContextManager[Daemon]:
    return _running(Daemon(f"floor-{words[0]}", [sys.executable, __file__, *words], folder, {}))


@contextlib.contextmanager
def _running(daemon: Daemon) -> Iterator[Daemon]:
    daemon.log.unlink(missing_ok=True)
    daemon.start()
    try:
        yield daemon
    except BaseException:
        sys.stderr.write(daemon.tail())
        raise
    finally:
        daemon.stop()


def main() -> None:
    kind, *words = sys.argv[1:]
    if kind == "bus":
        with answering(*words):
            print("floor is ready", flush=True)
            threading.Event().wait()
    else:
        server = HttpServer("127.0.0.1", 0, "port")
        server.start(trivial(), int(words[0]))
        print("floor is ready", server.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()

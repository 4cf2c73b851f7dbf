# SPDX-License-Identifier: Apache-2.0
"""Limits of the machine: rates and CPU times of minimal commits, RPC calls and HTTP responses.

As a program, ``floor bus URL TOPIC`` or ``floor http PORT THREADS`` is the server of the calls, in
a separate process as in an installation.
"""

import contextlib
import http.client
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import oslo_messaging
import pecan
import sqlalchemy as sa
from wsme import types as wtypes
from wsmeext import pecan as wsme_pecan

from benchmarks import processes
from benchmarks.processes import Rate, measure_rate
from cyborg.standalone.http import HttpServer
from cyborg.tests.fixtures.bus.broker import MEMORY, open_bus
from cyborg.tests.fixtures.databases.databases import engine_of
from cyborg.tests.fixtures.machine.processes import BIN, Daemon, free_port, wait_until

READY = "floor is ready"
# What a boot cycle cannot do without: POST, PATCH, two GETs and DELETE; a call for each change; the
# commits of these calls and that of the delivery to Nova.
CYCLE: Mapping[str, int] = {"answers": 5, "calls": 3, "commits": 4}


def own_cpu_ms() -> float:
    """Return the CPU time of this process in ms."""
    return time.process_time() * 1000


def measure_commits(url: str, threads: int, seconds: float) -> Rate:
    """Return the rate of transactions; each is one INSERT or UPDATE of a row.

    The CPU time is that of the client and the server.
    """
    name = f"floor_{uuid4().hex[:8]}"
    with engine_of(url) as engine, contextlib.ExitStack() as stack:
        sqlite = engine.dialect.name == "sqlite"
        key = sa.Column("id", sa.Integer if sqlite else sa.BigInteger, primary_key=True)
        columns = (key, sa.Column("uuid", sa.String(36)), sa.Column("value", sa.Integer))
        table = sa.Table(name, sa.MetaData(), *columns, sqlite_autoincrement=True)
        table.create(engine)
        stack.callback(table.drop, engine)
        if sqlite:
            # The setting of the service, not that of the tests.
            pragma = "PRAGMA synchronous = FULL"
            sa.event.listen(engine, "checkout", lambda connection, *_: connection.execute(pragma))

        def make(_: int) -> Callable[[], None]:
            connection = engine.raw_connection()
            stack.callback(connection.close)
            cursor, row = connection.cursor(), 0

            def commit() -> None:
                nonlocal row
                if sqlite:
                    cursor.execute("BEGIN IMMEDIATE")
                if row:
                    cursor.execute(f"UPDATE {name} SET value = 1 WHERE id = {row}")
                    row = 0
                else:
                    cursor.execute(f"INSERT INTO {name} (uuid, value) VALUES ('{uuid4()}', 0)")
                    row = cursor.lastrowid or 0
                connection.commit()

            return commit

        servers = [] if sqlite else processes.find_listener(engine.url.port or 3306)
        return measure_rate(
            make, threads, seconds, lambda: own_cpu_ms() + processes.cpu_ms(servers)
        )


class EmptyEndpoint:
    """RPC endpoint with a method that does nothing."""

    target = oslo_messaging.Target()

    @oslo_messaging.expose  # type: ignore[untyped-decorator]
    def nothing(self, ctxt: Any) -> None:
        """Return None."""


@contextlib.contextmanager
def serve_bus(url: str, topic: str) -> Iterator[Any]:
    """Run the RPC server and yield the bus."""
    with open_bus(url) as bus:
        target = oslo_messaging.Target(exchange=topic, topic=topic, server="floor")
        policy = oslo_messaging.ExplicitRPCAccessPolicy
        server = oslo_messaging.get_rpc_server(
            bus.transport.oslo, target, [EmptyEndpoint()], access_policy=policy
        )
        server.start()
        try:
            yield bus
        finally:
            server.stop()
            server.wait()


def measure_calls(url: str, folder: Path, threads: int, seconds: float) -> Rate:
    """Return the rate of RPC calls of a method that does nothing, with one server.

    The CPU time is that of the client and the server.
    """
    topic = f"floor-{uuid4().hex[:12]}"
    servers: list[int] = []
    with contextlib.ExitStack() as stack:
        if url == MEMORY:
            bus = stack.enter_context(serve_bus(url, topic))
        else:
            server = stack.enter_context(_run_server(folder, "bus", url, topic))
            wait_until("the floor's server is ready", lambda: READY in server.log.read_text())
            servers.append(server.pid)
            bus = stack.enter_context(open_bus(url))
        target = oslo_messaging.Target(exchange=topic, topic=topic)
        client = oslo_messaging.get_rpc_client(bus.transport.oslo, target, timeout=30)
        return measure_rate(
            lambda _: lambda: client.call({}, "nothing"),
            threads,
            seconds,
            lambda: own_cpu_ms() + processes.cpu_ms(servers),
        )


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


def make_app() -> Any:
    """Return a minimal WSGI application: one route whose response has two fields."""
    return pecan.make_app(_Root(), debug=False)


def measure_answers(
    folder: Path, gunicorn: tuple[Any, ...], server_threads: int, threads: int, seconds: float
) -> Rate:
    """Return the rate of responses over persistent connections, of gunicorn or waitress (()).

    The CPU time is that of the server.
    """
    port = free_port()
    app = (*gunicorn, "--bind", f"127.0.0.1:{port}", "benchmarks.floor:make_app()")
    command = (BIN / "gunicorn", *app) if gunicorn else ()
    words = ("http", str(port), str(server_threads))

    def request(connection: http.client.HTTPConnection) -> None:
        connection.request("GET", "/floor", headers={"Accept": "application/json"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status} {body!r}")

    def is_ready() -> bool:
        try:
            request(http.client.HTTPConnection("127.0.0.1", port, timeout=5))
        except OSError:
            return False
        return True

    def make(_: int) -> Callable[[], None]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        return lambda: request(connection)

    with _run_server(folder, *words, command=command) as server:
        wait_until("the floor answers", is_ready)
        members = processes.list_sessions()[server.pid]
        return measure_rate(make, threads, seconds, lambda: processes.cpu_ms(members))


@contextlib.contextmanager
def _run_server(folder: Path, *words: str, command: tuple[Any, ...] = ()) -> Iterator[Daemon]:
    command = command or (sys.executable, "-m", "benchmarks.floor", *words)
    daemon = Daemon(f"floor-{words[0]}", command, folder, {})
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
    """Run the server of the calls until it is killed."""
    kind, *words = sys.argv[1:]
    if kind == "bus":
        with serve_bus(*words):
            print(READY, flush=True)
            threading.Event().wait()
    else:
        HttpServer("127.0.0.1", int(words[0]), "port").start(make_app(), int(words[1]))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Pages, periodic tasks, metrics, and memory of the API, of a large cloud at rest.

The database is filled directly. The CPU time of the database is that of the whole server, so that
nothing else may use it. A page of each list is read with each filter and in each order.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from oslo_utils import timeutils

from benchmarks import memory, processes, report
from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor.metrics import read_totals
from cyborg.conductor.wiring import build_conductor
from cyborg.db import schema
from cyborg.db.engine import Reader
from cyborg.db.totals import read as totals
from cyborg.db.totals.cache import CountCache
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.standalone import placement as embedded
from cyborg.testing.fake_nova import FakeNova, serve_nova
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.scale import lists
from cyborg.tests.fixtures.scale.fill import Size, fill
from cyborg.threads.heap import exclude_startup_objects

KINDS = ("mysql", "postgresql")
PORTS = {"mysql": 3306, "postgresql": 5432}
PAGES = (100, 1000)
# Something is repeated for this time, as the kernel counts CPU time in steps of 10 ms, and so often
# at least, as other work of the machine delays one execution.
MIN_SECONDS, MIN_TIMES = 0.2, 3


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("--database", choices=KINDS, default="mysql", help="a local server (%(default)s)")
    add("--hosts", type=int, default=1000, help="(%(default)s)")
    add("--devices", type=int, default=8, help="of each host (%(default)s)")
    add("--handles", type=int, default=16, help="of each device (%(default)s)")
    add("--arqs", type=int, default=100_000, help="accelerator requests (%(default)s)")


def measure(args: argparse.Namespace, folder: Path) -> report.Results:
    """Fill a database and measure what reads it."""
    size = Size(args.hosts, args.devices, args.handles, args.arqs)
    with (
        fresh_database(args.database, folder) as url,
        engine_of(url) as engine,
    ):
        schema.metadata.create_all(engine)
        report.say(f"filling {args.hosts} hosts and {args.arqs} accelerator requests")
        begin = time.monotonic()
        fill(engine, size)
        filled = time.monotonic() - begin
        report.say(f"filled after {filled:.0f} s")
        exclude_startup_objects()  # as each daemon
        server = _Server(engine)
        return {
            "options": {key: value for key, value in vars(args).items() if key != "benchmark"},
            "fill_s": filled,
            "database_mb": _read_size(engine) / 1e6,
            "pages": list(_measure_pages(engine, server)),
            "tasks": list(_measure_tasks(engine, server, folder)),
            "scrapes": list(_measure_scrapes(engine, server)),
            "memory": memory.measure(url),
        }


class _Server:
    """The process or processes of the database server."""

    def __init__(self, engine: sa.Engine) -> None:
        self._listeners = processes.find_listener(engine.url.port or PORTS[engine.dialect.name])

    def cpu_ms(self) -> float:
        """Return the CPU time of the server, with the connections that have ended."""
        sessions = processes.list_sessions()
        # PostgreSQL has a process, in the session of its parent or its own, for each connection.
        pids = {
            pid
            for members in sessions.values()
            for pid in members
            if pid in self._listeners or processes.parent(pid) in self._listeners
        }
        return processes.cpu_ms(pids)


def _repeat(server: _Server, work: Callable[[], object]) -> report.Results:
    """Return the least wall time and the mean CPU time of an execution."""
    work()  # the first one prepares statements and fills caches
    walls, cpu, end = list[float](), server.cpu_ms(), time.monotonic() + MIN_SECONDS
    while len(walls) < MIN_TIMES or time.monotonic() < end:
        begin = time.perf_counter()
        work()
        walls.append(time.perf_counter() - begin)
    used = (server.cpu_ms() - cpu) / len(walls)
    return {"wall_ms": min(walls) * 1000, "database_ms": used}


def _measure_pages(engine: sa.Engine, server: _Server) -> Iterator[report.Results]:
    """Yield the most expensive filter or order of each list, for each size of a page."""
    for name in lists.LISTS:
        with engine.connect() as connection:
            middle = lists.find_middle(connection, name)
        for limit in PAGES:
            cells = []
            for request in lists.list_requests(name, limit, middle):

                def read(request: lists.Request = request, name: str = name) -> None:
                    with engine.connect() as connection:
                        lists.read_page(connection, name, request)
                        connection.rollback()

                key, page, _ = request
                start = "" if page.marker is None else ", marker"
                cells.append({"what": f"{key or 'default order'}{start}", **_repeat(server, read)})
            by_wall = sorted(cells, key=lambda cell: cell["wall_ms"])
            report.say(f"{name}, {limit} rows: {len(cells)} filters and orders")
            yield {
                "list": name,
                "rows": limit,
                "median_wall_ms": by_wall[len(by_wall) // 2]["wall_ms"],
                "median_database_ms": sorted(c["database_ms"] for c in cells)[len(cells) // 2],
                "slowest": by_wall[-1]["what"],
                **by_wall[-1],
                "cells": cells,
            }


def _measure_tasks(engine: sa.Engine, server: _Server, folder: Path) -> Iterator[report.Results]:
    """Yield each periodic task of a conductor."""
    with contextlib.ExitStack() as stack:
        app = embedded.make_app(stack.enter_context(fresh_database("sqlite", folder)))
        stack.enter_context(contextlib.closing(app))
        placement = Placement(embedded.make_adapter(app, raise_exc=False))
        nova = Nova(stack.enter_context(serve_nova(FakeNova())).adapter(), 5.0)
        agents: Any = None  # no task calls an agent of a cloud at rest
        conf = make_conf(conductor={"orphan_scan_interval": 0})
        conductor = build_conductor(conf, UnitOfWork(engine), agents, placement, nova)
        for task in conductor.tasks:
            yield {"task": task.name, **_repeat(server, task.run_once)}
        conductor.stop()


def _measure_scrapes(engine: sa.Engine, server: _Server) -> Iterator[report.Results]:
    """Yield the first and the later reads of the metrics."""
    reader = Reader(engine)
    cache = CountCache(reader)

    def count() -> None:
        with engine.connect() as connection:
            totals.count(connection)

    def find() -> None:
        CountCache(reader).read()

    def read() -> None:
        cache.read()
        read_totals(reader, timeutils.utcnow())

    yield {"what": "numbers of objects, counted", **_repeat(server, count)}
    # Those that the periodic task has stored.
    yield {"what": "numbers of objects, in a new process", **_repeat(server, find)}
    cache.read()
    yield {"what": "a scrape", **_repeat(server, read)}
    cache.stop()


def _read_size(engine: sa.Engine) -> int:
    """Return the size of the database in bytes, as its server estimates it."""
    query = "SELECT pg_database_size(current_database())"
    if engine.dialect.name == "mysql":
        query = (
            "SELECT sum(data_length + index_length) FROM information_schema.tables "
            "WHERE table_schema = database()"
        )
    with engine.connect() as connection:
        return int(connection.exec_driver_sql(query).scalar_one())


def summarize(results: report.Results) -> str:
    """Return the rest of the first line."""
    options = results["options"]
    handles = options["hosts"] * options["devices"] * options["handles"]
    return (
        f"; {options['database']}; {options['hosts']} hosts, {handles} handles, "
        f"{options['arqs']} accelerator requests; filled in {results['fill_s']:.0f} s, "
        f"{results['database_mb']:.0f} MB."
    )


def tables(results: report.Results) -> Iterator[report.Table]:
    """Yield the tables of pages, tasks and metrics."""
    columns = {
        "List": "{list}",
        "Rows": "{rows}",
        "Median, ms": "{median_wall_ms:.1f}",
        "Of the database": "{median_database_ms:.1f}",
        "Slowest, ms": "{wall_ms:.1f}",
        "Of the database ": "{database_ms:.1f}",
        "Its filter or order": "{slowest}",
    }
    yield report.make_table(
        "Pages: wall time and CPU time of the database", columns, results["pages"]
    )
    costs = {"Wall, ms": "{wall_ms:.1f}", "CPU of the database, ms": "{database_ms:.1f}"}
    yield report.make_table("Periodic tasks", {"Task": "{task}", **costs}, results["tasks"])
    yield report.make_table("Metrics", {"What": "{what}", **costs}, results["scrapes"])
    sizes = {
        "Path": "{path}",
        "Answer, MB": "{body_mb:.1f}",
        "Wall, ms": "{wall_ms:.0f}",
        "Peak RSS, MB": "{rss_mb:.0f}",
    }
    yield report.make_table("Answers of a worker of the API", sizes, results["memory"])

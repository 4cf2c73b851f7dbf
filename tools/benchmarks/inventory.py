# SPDX-License-Identifier: Apache-2.0
"""Heartbeat and report of a host, up to a real Placement in the same process."""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from benchmarks import report
from cyborg.core.inventory.device import Health
from cyborg.db import schema
from cyborg.standalone import placement as embedded
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.databases import KINDS, engine_of, fresh_database
from cyborg.tests.fixtures.databases.placement import Node
from cyborg.tests.fixtures.databases.publisher_setup import make_publisher
from cyborg.tests.fixtures.hosts.hosts import Host, card, make_hosts

TIMES = 5
STEPS = ("hello", "report", "publishing")

Steps = dict[str, Callable[[], Any]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("--devices", type=int, nargs="+", default=[1, 8, 64, 256], help="of one host")
    add("--handles", type=int, default=16, help="of each device (%(default)s)")
    add("--database", choices=KINDS, default="sqlite", help="a new database of a local server")


def measure(args: argparse.Namespace, folder: Path) -> report.Results:
    """Measure hosts with these numbers of devices, each with a database of its own."""
    cells = []
    for devices in args.devices:
        with _open_environment(folder, args.database) as env:
            for cell in _measure_host(env, devices, args.handles):
                cells.append(cell)
                report.say(f"{cell['devices']} devices, {cell['what']}: done")
    return {"database": args.database, "cells": cells}


@dataclass
class Environment:
    """A database, a compute node in a real Placement, and recorded calls and commits."""

    engine: sa.Engine
    node: Node
    calls: list[str] = field(default_factory=list)
    commits: list[None] = field(default_factory=list)


@contextlib.contextmanager
def _open_environment(folder: Path, kind: str) -> Iterator[Environment]:
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(engine_of(stack.enter_context(fresh_database(kind, folder))))
        schema.metadata.create_all(engine)
        placement = stack.enter_context(fresh_database("sqlite", folder))
        app = stack.enter_context(contextlib.closing(embedded.make_app(placement)))
        adapter = embedded.make_adapter(app, raise_exc=False)
        env = Environment(engine, Node(adapter))
        sa.event.listen(engine, "commit", lambda _: env.commits.append(None))
        request = adapter.request

        def record(path: str, method: str, **options: Any) -> Any:
            env.calls.append(f"{method} {path}")
            return request(path, method, **options)

        setattr(adapter, "request", record)  # noqa: B010  mypy rejects an assignment
        yield env


def _measure_host(env: Environment, devices: int, handles: int) -> Iterator[report.Results]:
    # The client reads version, classes and traits of Placement once, which is not measured.
    publisher = make_publisher(env.engine, env.node.placement)
    Host(Node(env.node.client).name).send(make_hosts(env.engine), card(0, 1))
    publisher.run_once()
    hosts = make_hosts(env.engine)
    host = Host(env.node.name, devices=[card(n, handles) for n in range(devices)], backends=())

    def cell(what: str, runs: list[dict[str, float]], rows: int) -> report.Results:
        size = {"devices": devices, "handles": devices * handles, "what": what}
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        return {**size, **medians, "floor_ms": _measure_insert(env, rows)}

    def run_steps(*names: str) -> dict[str, float]:
        """Prepare a new report, run the steps once, and count and time each."""
        host.generation += 1
        # The agent computes the digest, so it is not measured.
        message, endpoint = host.message(), f"{host.name}:agent"
        drivers: list[Any] = []
        heartbeat = (host.name, host.epoch, endpoint, "READY", drivers, host.digest, {"rpc": "1"})
        steps: Steps = {
            "hello": lambda: hosts.heartbeat(*heartbeat),
            "report": lambda: hosts.report(message),
            "publishing": publisher.run_once,
        }
        values: dict[str, float] = {"calls": 0}
        for name in names:
            env.calls.clear()
            env.commits.clear()
            with count_statements(env.engine) as count:
                begin = time.perf_counter()
                steps[name]()
                values[f"{name}_ms"] = (time.perf_counter() - begin) * 1000
            values[f"{name}_statements"] = len(count)
            values[f"{name}_commits"] = len(env.commits)
            values["calls"] += len(env.calls)
        return values

    yield cell("first report", [run_steps(*STEPS)], devices * (3 + handles))
    yield cell("unchanged hello", [run_steps("hello") for _ in range(TIMES)], 1)
    # An agent with a known epoch reports changes without a heartbeat.
    runs = []
    for n in range(TIMES):
        changed = replace(host.devices[0], health=(Health.UNHEALTHY, Health.OK)[n % 2])
        host.devices = [changed, *host.devices[1:]]
        runs.append(run_steps("report", "publishing"))
    yield cell("one device changed", runs, 2)


def _measure_insert(env: Environment, rows: int) -> float:
    """Return the median ms of one plain transaction that inserts this number of rows."""
    types = {"a": sa.String(36), "b": sa.String(120), "c": sa.String(255)}
    table = sa.Table("floor", sa.MetaData(), *(sa.Column(*item) for item in types.items()))
    table.create(env.engine)
    took = []
    values = [{"a": f"{n:036}", "b": "0000:00:00.0", "c": '{"function": "0"}'} for n in range(rows)]
    for _ in range(TIMES):
        begin = time.perf_counter()
        with env.engine.begin() as tx:
            tx.execute(sa.insert(table), values)
        took.append((time.perf_counter() - begin) * 1000)
    table.drop(env.engine)
    return statistics.median(took)


def summarize(results: report.Results) -> str:
    """Return the rest of the first line."""
    return f"; {results['database']}; Placement in this process."


def tables(results: report.Results) -> Iterator[report.Table]:
    """Yield the table of all hosts."""
    columns = {"Devices": "{devices}", "Handles": "{handles}", "What": "{what}"}
    columns |= {"Statements": "{statements}", "Commits": "{commits:.0f}"}
    columns |= {"Placement calls": "{calls:.0f}"}
    columns |= {f"{step.title()} ms": f"{{{step}}}" for step in STEPS}
    columns |= {"Floor ms": "{floor_ms:.1f}"}
    records = []
    for cell in results["cells"]:
        steps = [step for step in STEPS if f"{step}_ms" in cell]
        counts = [cell[f"{step}_statements"] for step in steps]
        total = f" = {sum(counts):.0f}" if len(counts) > 1 else ""
        record = cell | {"commits": sum(cell[f"{step}_commits"] for step in steps)}
        record |= {"statements": " + ".join(f"{count:.0f}" for count in counts) + total}
        record |= {step: f"{cell[f'{step}_ms']:.1f}" if step in steps else "" for step in STEPS}
        records.append(record)
    title = "One host: statements of hello + report + publishing"
    yield report.make_table(title, columns, records)

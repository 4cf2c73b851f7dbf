# SPDX-License-Identifier: Apache-2.0
"""``tools/bench inventory``: what a host's hello and report cost, up to Placement."""

import argparse
import contextlib
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import _bench_boot as boot
import _bench_table as table
import sqlalchemy as sa

from cyborg.core.device import Health
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.fixtures.databases import KINDS, engine_of, fresh_database
from cyborg.fixtures.embedded import Node
from cyborg.fixtures.hosts import Host, card, rooms
from cyborg.fixtures.publishing import publisher
from cyborg.standalone import placement as embedded

TIMES = 5
FIRST, UNCHANGED, CHANGED = "first report", "unchanged hello", "one device changed"
STEPS = ("hello", "report", "publishing")

Steps = dict[str, Callable[[], None]]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    add = parser.add_argument
    add("--devices", type=int, nargs="+", default=[1, 8, 64, 256], help="of one host")
    add("--handles", type=int, default=16, help="of each device (%(default)s)")
    add("--database", choices=KINDS, default="sqlite", help="a new one of a local server")
    add("--format", choices=("table", "json", "rst"), default="table")


def run(args: argparse.Namespace) -> int:
    """Run it and print what was found; return the exit status."""
    logging.disable(logging.CRITICAL)
    found: dict[str, Any] = {"machine": boot.machine(), "database": args.database, "cells": []}
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        for devices in args.devices:
            with _bed(folder, args.database) as bed:
                for cell in _host(bed, devices, args.handles):
                    found["cells"].append(cell)
                    boot.say(f"{cell['devices']} devices, {cell['what']}: done")
    if args.format == "json":
        print(json.dumps(found, indent=2))
        return 0
    print(f"{table.processors(found['machine'])}; {args.database}; Placement in this process.")
    render = table.as_rst if args.format == "rst" else table.as_text
    print("\n".join(render([_table(found["cells"])])))
    return 0


@dataclass
class Bed:
    """A database, a compute node in a real Placement, and the calls that were made to it."""

    engine: sa.Engine
    node: Node
    calls: list[str] = field(default_factory=list)
    commits: list[None] = field(default_factory=list)


@contextlib.contextmanager
def _bed(folder: Path, kind: str) -> Iterator[Bed]:
    with (
        tempfile.TemporaryDirectory(dir=folder) as own,
        fresh_database(kind, Path(own)) as url,
        engine_of(url) as engine,
    ):
        schema.metadata.create_all(engine)
        app = embedded.make_app(f"sqlite:///{own}/placement.db")
        adapter = embedded.make_adapter(app, raise_exc=False)
        try:
            bed = Bed(engine, Node(adapter))
            sa.event.listen(engine, "commit", lambda _: bed.commits.append(None))
            ask = adapter.request

            def counted(path: str, method: str, **more: Any) -> Any:
                bed.calls.append(f"{method} {path}")
                return ask(path, method, **more)

            adapter.request = counted
            yield bed
        finally:
            app.close()


def _host(bed: Bed, devices: int, handles: int) -> Iterator[dict[str, Any]]:
    """Measure one host of so many devices."""
    # The client learns Placement's version, and its classes and traits, once in its life.
    warm = publisher(bed.engine, bed.node.placement)
    other = Node(bed.node.client)
    Host(other.name).tell(rooms(bed.engine), card(0, 1))
    warm.run_once()
    hosts, telling = rooms(bed.engine), warm
    host = Host(bed.node.name, devices=[card(n, handles) for n in range(devices)])
    said = {"devices": devices, "handles": devices * handles}

    def hello() -> None:
        # The digest is the agent's work, and not what is measured here.
        drivers: list[Any] = []
        hosts.hello(
            host.name, host.epoch, f"{host.name}:agent", "READY", drivers, digest, {"rpc": "1"}
        )

    def report() -> None:
        hosts.report(message)

    def publish() -> None:
        telling.run_once()

    def ready() -> tuple[str, dict[str, Any]]:
        host.backends = ()
        host.generation += 1
        return host.digest, host.message()

    digest, message = ready()
    steps: Steps = {"hello": hello, "report": report, "publishing": publish}
    rows = devices * (3 + handles)
    yield {**said, "what": FIRST, **_measured(bed, steps), "floor_ms": _floor(bed, rows)}
    runs = [_measured(bed, {"hello": hello}) for _ in range(TIMES)]
    yield {**said, "what": UNCHANGED, **_median(runs), "floor_ms": _floor(bed, 1)}
    # An agent whose life is known reports news without a hello before.
    del steps["hello"]
    runs = []
    for n in range(TIMES):
        odd = replace(host.devices[0], health=(Health.UNHEALTHY, Health.OK)[n % 2])
        host.devices = [odd, *host.devices[1:]]
        digest, message = ready()
        runs.append(_measured(bed, steps))
    yield {**said, "what": CHANGED, **_median(runs), "floor_ms": _floor(bed, 2)}


def _measured(bed: Bed, steps: Steps) -> dict[str, Any]:
    """Run the steps once; count and time each."""
    found: dict[str, Any] = {"calls": 0}
    for name, step in steps.items():
        bed.calls.clear()
        bed.commits.clear()
        with counting(bed.engine) as count:
            begin = time.perf_counter()
            step()
            found[f"{name}_ms"] = (time.perf_counter() - begin) * 1000
        found[f"{name}_statements"] = len(count)
        found[f"{name}_commits"] = len(bed.commits)
        found["calls"] += len(bed.calls)
    return found


def _median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def _floor(bed: Bed, rows: int) -> float:
    """Return the median ms of one bare transaction that inserts so many rows."""
    name = "floor"
    with bed.engine.begin() as tx:
        tx.exec_driver_sql(f"CREATE TABLE {name} (a VARCHAR(36), b VARCHAR(120), c VARCHAR(255))")
    took = []
    bare = sa.table(name, sa.column("a"), sa.column("b"), sa.column("c"))
    values = [{"a": f"{n:036}", "b": "0000:00:00.0", "c": '{"function": "0"}'} for n in range(rows)]
    for _ in range(TIMES):
        begin = time.perf_counter()
        with bed.engine.begin() as tx:
            tx.execute(sa.insert(bare), values)
        took.append((time.perf_counter() - begin) * 1000)
    with bed.engine.begin() as tx:
        tx.exec_driver_sql(f"DROP TABLE {name}")
    return statistics.median(took)


def _table(cells: Sequence[dict[str, Any]]) -> table.Table:
    head = ["Devices", "Handles", "What", "Statements", "Commits", "Placement calls"]
    head += ["Hello ms", "Report ms", "Publishing ms", "Floor ms"]
    rows = []
    for cell in cells:
        done = [step for step in STEPS if f"{step}_ms" in cell]
        parts = [f"{cell[f'{step}_statements']:.0f}" for step in done]
        total = sum(cell[f"{step}_statements"] for step in done)
        rows.append(
            [
                *(str(cell["devices"]), str(cell["handles"]), cell["what"]),
                f"{' + '.join(parts)} = {total:.0f}" if len(parts) > 1 else parts[0],
                f"{sum(cell[f'{step}_commits'] for step in done):.0f}",
                f"{cell['calls']:.0f}",
                *(f"{cell[f'{s}_ms']:.1f}" if s in done else "" for s in STEPS),
                f"{cell['floor_ms']:.1f}",
            ]
        )
    return "One host: statements of hello + report + publishing", head, rows

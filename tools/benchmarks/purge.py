# SPDX-License-Identifier: Apache-2.0
"""Boot and deletion of servers while cyborg-dbsync purge deletes many old rows.

A complete installation with MariaDB and RabbitMQ is measured, first at rest, then during the purge.
The conductor deletes old rows at the same time.
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_utils import timeutils

from benchmarks import installations, load, report
from benchmarks.installations import Installation
from cyborg.db import schema
from cyborg.db.old_rows import KINDS
from cyborg.tests.fixtures.machine.processes import BIN, ini

AGE = timedelta(days=60)
CHUNK = 5000  # rows of one INSERT
SLICE = 2.0  # seconds
# Share of each kind in the old rows.
SHARES = {"jobs": 0.6, "discoveries": 0.2, "dead-letters": 0.2}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("--rows", type=int, default=1_000_000, help="old rows (%(default)s)")
    add("--batch-size", type=int, default=1000, help="rows of a transaction (%(default)s)")
    add("--concurrency", type=int, default=2, help="concurrent clients (%(default)s)")
    add("--seconds", type=float, default=30.0, help="at rest (%(default)s)")


def measure(args: argparse.Namespace, folder: Path) -> report.Results:
    """Measure cycles at rest and during a purge."""
    (folder / "counters").mkdir()
    with installations.run_cloud(folder, "noauth") as env:
        load.make_profile(env)
        load.drive(env, args.concurrency, load.Limit(100, 0))
        begin = time.monotonic()
        counts = _fill(env.engine, args.rows)
        report.say(f"filled {sum(counts.values())} rows after {time.monotonic() - begin:.0f} s")
        rest, seconds = load.drive(env, args.concurrency, load.Limit(None, args.seconds))
        cells = [_summarize_cell("at rest", rest, seconds)]
        report.say(f"at rest: {cells[0]['cycles']} cycles")
        file = folder / "purge.conf"
        file.write_text(ini({"database": {"connection": env.url}}))
        command: list[str | Path] = [
            *(BIN / "cyborg-dbsync", "--config-file", file, "purge", "--older-than", "30"),
            *(f"--batch-size={args.batch_size}", "-f", "json"),
        ]
        begin = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as purge:
            during, seconds = list[float](), 0.0
            while purge.poll() is None:
                took, slice_seconds = load.drive(env, args.concurrency, load.Limit(None, SLICE))
                during += took
                seconds += slice_seconds
            output, _ = purge.communicate()
        took_purge = time.monotonic() - begin
        if purge.returncode:
            raise RuntimeError(f"the purge ended with {purge.returncode}")
        cells.append(_summarize_cell("during the purge", during, seconds))
        return {
            "cells": cells,
            "purge_s": took_purge,
            "kinds": [
                {
                    "kind": kind,
                    "inserted": counts.get(kind, 0),
                    **numbers,
                    "left": _count(env, kind),
                }
                for kind, numbers in json.loads(output).items()
            ],
            "ratios": {
                key: cells[1][key] / cells[0][key] for key in ("p50_ms", "p99_ms", "max_ms")
            },
        }


def summarize(results: report.Results) -> str:
    """Return the rest of the first line."""
    ratios = results["ratios"]
    return (
        f"; the purge took {results['purge_s']:.0f} s; a cycle during the purge took "
        f"{ratios['p50_ms']:.2f} x (p50), {ratios['p99_ms']:.2f} x (p99), "
        f"{ratios['max_ms']:.2f} x (max) of one at rest."
    )


def tables(results: report.Results) -> Iterator[report.Table]:
    """Yield the tables of the cycles and of the old rows."""
    columns = {"When": "{when}", "Cycles": "{cycles}", "Cycles/s": "{cycles_per_second:.1f}"}
    columns |= {"p50 ms": "{p50_ms:.1f}", "p99 ms": "{p99_ms:.1f}", "max ms": "{max_ms:.1f}"}
    yield report.make_table("Boot and deletion of a server", columns, results["cells"])
    columns = {"Kind": "{kind}", "Inserted": "{inserted}", "Found": "{found}"}
    columns |= {"Deleted by the command": "{deleted}", "Left": "{left}"}
    yield report.make_table("Old rows", columns, results["kinds"])


def _fill(engine: sa.Engine, rows: int) -> Mapping[str, int]:
    """Insert old rows of each kind; return their numbers."""
    moment = timeutils.utcnow() - AGE
    work: dict[str, Any] = {"kind": "k", "subject": "s", "updated_at": moment}
    values: Mapping[str, Mapping[str, Any]] = {
        "jobs": {**work, "host": "h", "arguments": {}, "state": "done", "next_try_at": moment},
        "discoveries": {"discovery_id": 1, "host": "h", "state": "DONE"},
        "dead-letters": {**work, "payload": {}, "state": "dead", "next_try_at": moment},
    }
    counts = {kind: int(rows * share) for kind, share in SHARES.items()}
    with engine.begin() as tx:
        discovery = {"id": 1, "uuid": str(uuid4()), "in_progress": 0, "done": 1}
        tx.execute(sa.insert(schema.discoveries), discovery)
    for kind, count in counts.items():
        table = KINDS[kind].table
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            # Of a job or a message; of a discovery it is the name of the backend.
            name = "uuid" if "uuid" in table.c else "backend"
            batch = [
                {name: str(uuid4()), "created_at": moment, **values[kind]} for _ in range(size)
            ]
            with engine.begin() as tx:
                tx.execute(sa.insert(table), batch)
    return counts


def _count(env: Installation, kind: str) -> int:
    with env.engine.connect() as connection:
        return KINDS[kind].count(connection, timeutils.utcnow() - AGE / 2)


def _summarize_cell(when: str, took: list[float], seconds: float) -> report.Results:
    if not took:
        raise RuntimeError(f"no cycle ended {when}: use more rows")
    return {
        "when": when,
        "cycles": len(took),
        "cycles_per_second": len(took) / seconds,
        "p50_ms": statistics.median(took) * 1000,
        "p99_ms": sorted(took)[int(len(took) * 0.99)] * 1000,
        "max_ms": max(took) * 1000,
    }

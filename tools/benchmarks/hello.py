# SPDX-License-Identifier: Apache-2.0
"""First report of a host, and an unchanged heartbeat.

The database is SQLite: compare times only on one machine; counts of statements are the same
everywhere.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import report
from cyborg.db import schema
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.hosts.hosts import Host, card, make_hosts

TIMES = 20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--handles", type=int, default=16, help="of each device (%(default)s)")


def measure(args: argparse.Namespace, folder: Path) -> report.Results:
    """Measure hosts with these numbers of devices."""
    cells = [cell for n in args.devices for cell in _measure_host(folder, n, args.handles)]
    return {"cells": cells}


def _measure_host(folder: Path, devices: int, handles: int) -> Iterator[report.Results]:
    with fresh_database("sqlite", folder) as url, engine_of(url) as engine:
        schema.metadata.create_all(engine)
        hosts = make_hosts(engine)
        host = Host(devices=[card(n, handles) for n in range(devices)])

        def run(what: str, work: Callable[[], Any], times: int = TIMES) -> report.Results:
            """Return the statements of one run, and the median duration of several."""
            took = []
            with count_statements(engine) as count:
                for _ in range(times):
                    begin = time.perf_counter()
                    work()
                    took.append((time.perf_counter() - begin) * 1000)
            size = {"devices": devices, "handles": devices * handles, "what": what}
            return {**size, "statements": len(count) // times, "ms": statistics.median(took)}

        host.hello(hosts)
        yield run("first report", lambda: host.report(hosts), 1)
        if host.hello(hosts)["report"]:
            raise RuntimeError("the conductor requests a report that it has just received")
        # The agent computes the digest, so it is not measured.
        endpoint = f"{host.name}:agent"
        drivers: list[Any] = []
        arguments = (host.name, host.epoch, endpoint, "READY", drivers, host.digest, {"rpc": "1"})
        yield run("unchanged hello", lambda: hosts.heartbeat(*arguments))


def summarize(results: report.Results) -> str:
    """Return the rest of the first line."""
    del results
    return "; SQLite."


def tables(results: report.Results) -> Iterator[report.Table]:
    """Yield the table of all hosts."""
    columns = {
        **{"devices": "{devices}", "handles": "{handles}", "what": "{what}"},
        **{"statements": "{statements}", "ms": "{ms:.2f}"},
    }
    yield report.make_table("One host: report and heartbeat", columns, results["cells"])

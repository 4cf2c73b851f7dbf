# SPDX-License-Identifier: Apache-2.0
"""A day on replayed hosts: binds, releases and changes of layouts.

The agents, conductor, API and Placement are in one process, with SQLite. Each host has the cards of
all captures. At the end an audit runs and all custody chains are checked.
"""

import argparse
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import report
from cyborg.tests.fixtures.hosts import replayed_hosts
from cyborg.tests.fixtures.hosts.replayed_day import Day


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("--hosts", type=int, default=64, help="(%(default)s)")
    add("--binds", type=int, default=2000, help="each is also released (%(default)s)")
    add("--threads", type=int, default=3, help="that boot servers (%(default)s)")
    add("--interval", type=float, default=10.0, help="seconds between heartbeats (%(default)s)")
    add("--seed", type=int, default=1, help="of the choices (%(default)s)")


def measure(args: argparse.Namespace, folder: Path) -> report.Results:
    """Run the day; fail if a check fails."""
    names = [f"compute-{n:02}" for n in range(args.hosts)]
    begin = time.monotonic()
    # Host work is discovered at once. In one process, 400 backends that are also measured every ten
    # seconds and discovered every minute would leave no time for the work that is to be measured.
    intervals = {
        "interval": args.interval,
        "discovery_interval": 60 * args.interval,
        "health_interval": 6 * args.interval,
    }
    with replayed_hosts.running(folder, names, **intervals, report=report.say) as cloud:
        start = time.monotonic() - begin
        report.say(f"all devices are published after {start:.1f} s; {args.binds} binds begin")
        cpu, begin = time.process_time(), time.monotonic()
        day = Day(cloud, args.binds, args.threads, args.seed)
        figures = day.run()
        seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
        threads = threading.active_count()
        report.say(f"done after {seconds:.1f} s; waiting for the last cleaning and publication")
        end = time.monotonic() + 300
        while (left := _find_left_overs(cloud, day)) and time.monotonic() < end:
            time.sleep(0.5)
        report.say("the audit begins")
        findings = cloud.audit()
        chains, records = cloud.verify_custody()
        devices = len(cloud.devices())
    if left or findings or figures.violations:
        problems = [*left, *map(str, findings), *figures.violations]
        raise OSError(f"{len(problems)} problems, the first: {problems[0]}")
    return {
        "options": {key: value for key, value in vars(args).items() if key != "benchmark"},
        "devices": devices - 1,  # without the card of the stand-alone agent
        "start_s": start,
        "seconds": seconds,
        "binds": len(figures.binds),
        "releases": len(figures.releases),
        "layouts": len(figures.layouts),
        "families": dict(sorted(figures.families.items())),
        "refusals": sum(figures.refusals.values()),
        "binds_per_second": len(figures.binds) / seconds,
        **{f"bind_{k}": v for k, v in _quantiles(figures.binds).items()},
        **{f"release_{k}": v for k, v in _quantiles(figures.releases).items()},
        **{f"layout_{k}": v for k, v in _quantiles(figures.layouts).items()},
        "cores": cpu / seconds,
        "threads": threads,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "findings": len(findings),
        "violations": len(figures.violations),
        "chains": chains,
        "records": records,
        "processors": os.cpu_count(),
    }


def _find_left_overs(cloud: replayed_hosts.ReplayedCloud, day: Day) -> list[str]:
    """Return what is not released, cleaned or published yet."""
    stale = cloud.count_stale()
    return day.find_left_overs() + ([f"{stale} providers to publish"] if stale else [])


def _quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [0.0]
    last = len(ordered) - 1
    return {
        "p50": ordered[last // 2] * 1000,
        "p99": ordered[int(last * 0.99)] * 1000,
        "max": ordered[last] * 1000,
    }


def summarize(results: report.Results) -> str:
    """Return the rest of the first line."""
    del results
    return "; one process, SQLite, in-process bus."


def tables(results: report.Results) -> Iterator[report.Table]:
    """Yield the table of the day."""
    points = ", ".join
    rows = {
        "Hosts; devices": f"{results['options']['hosts']}; {{devices}}",
        "Start until all devices are in Placement, s": "{start_s:.1f}",
        "Binds; releases; changes of layouts": "{binds}; {releases}; {layouts}",
        "Binds by driver": "{families}",
        "Refused binds (the device was being cleaned or changed), repeated": "{refusals}",
        "Duration, s; binds a second": "{seconds:.1f}; {binds_per_second:.1f}",
    }
    for name in ("bind", "release", "layout"):
        values = points(f"{{{name}_{point}:.0f}}" for point in ("p50", "p99", "max"))
        rows[f"{name.capitalize()}, ms: p50, p99, max"] = values
    rows |= {
        "CPU, cores; threads; RSS, MB": "{cores:.2f}; {threads}; {rss_mb:.0f}",
        "Handles with data of another server, or not prepared": "{violations}",
        "Findings of the audit": "{findings}",
        "Custody chains that are whole; their records": "{chains}; {records}",
    }
    yield report.make_record_table("A day on replayed hosts", rows, results)

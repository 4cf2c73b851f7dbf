# SPDX-License-Identifier: Apache-2.0
"""Boot and deletion of a server with an accelerator, from POST to DELETE.

Complete installations are measured; the mode ``cloud`` needs MariaDB and RabbitMQ.
"""

import argparse
import collections
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import floor, installations, load, other_arqs, processes, report
from benchmarks.installations import Installation

FLOOR_SECONDS = 2.0
MAX_WARM_UP = 100
WORKERS = ("--workers", "2", *installations.WORKER_OPTIONS)
TITLES = {"cloud": "MariaDB and RabbitMQ", "standalone": "Stand-alone"}
CELL = "each figure but the first three is of one cycle"
# Groups whose CPU time is summed for the goal; stand-alone is one process.
SUMMED_GROUPS = ("api", "conductor", "database", "standalone")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("--mode", choices=sorted(installations.MODES), action="append", help="both by default")
    add("--concurrency", type=_numbers, default=(1, 8, 32), help="concurrent clients (1,8,32)")
    others = "numbers of other ARQs (0,1000,10000)"
    add("--others", type=_numbers, default=(0, 1000, 10000), help=others)
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--cycles", type=int, help="of each cell, instead of --seconds")
    limit.add_argument("--seconds", type=float, default=10.0, help="of each cell (%(default)s)")
    auth = (
        "keystone: a member's token and Nova's service token; noauth: every caller is an "
        "administrator and Placement provides the owner; stand-alone has only noauth (%(default)s)"
    )
    add("--auth", choices=("keystone", "noauth"), default="keystone", help=auth)
    add("--no-floor", action="store_true", help="do not measure the floor")
    trace = "print all statements and calls of one cycle on stderr"
    add("--trace", action="store_true", help=trace)


def measure(args: argparse.Namespace, folder: Path) -> report.Results:
    """Measure the modes one after another."""
    results: report.Results = {"machine": {}, "cells": [], "memory": {}, "floor": []}
    for mode in args.mode or tuple(TITLES):
        (folder / mode / "counters").mkdir(parents=True)
        report.say(f"{mode}: starting")
        with installations.MODES[mode](folder / mode, args.auth) as env:
            _measure_mode(args, env, folder, results)
    results["ratios"] = _compare(results["cells"])
    return results


def _measure_mode(
    args: argparse.Namespace, env: Installation, folder: Path, results: report.Results
) -> None:
    results["machine"][env.mode] = [_read_version(env)]
    load.make_profile(env)
    warm_up = min(MAX_WARM_UP, 4 * (args.cycles or MAX_WARM_UP))
    load.drive(env, max(args.concurrency), load.Limit(warm_up, 0))
    idle = _read_memory(env)
    if args.trace:
        _trace(env)
    present = 0
    for count in sorted(args.others):
        if count > present:
            report.say(f"{env.mode}: adding {count - present} other requests")
            other_arqs.insert(env.engine, load.PROFILE, installations.PROJECT, present, count)
            present = count
        for concurrency in args.concurrency:
            limit = load.Limit(args.cycles, args.seconds)
            cell = {"mode": env.mode, "others": count, "concurrency": concurrency}
            results["cells"].append(cell | _measure_cell(env, concurrency, limit))
            line = (
                "{mode}: {others} others, {concurrency} at once: {cycles} cycles, "
                "{cycles_per_second:.1f}/s, p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms, statements "
                "{statements:.1f} + {statements_outbox:.1f}, CPU {cpu_sum:.1f} ms"
            )
            report.say(line.format_map(_with_cpu_sum(results["cells"][-1])))
    results["memory"][env.mode] = {"idle": idle, "after": _read_memory(env)}
    if args.no_floor:
        return
    seconds = min(FLOOR_SECONDS, args.seconds)
    workers = WORKERS if env.mode == "cloud" else ()
    for n in args.concurrency:
        threads = installations.THREADS
        rates = {
            "commits": floor.measure_commits(env.url, n, seconds),
            "calls": floor.measure_calls(env.bus, folder, n, seconds),
            "answers": floor.measure_answers(folder, workers, threads, n, seconds),
        }
        found: report.Results = {"mode": env.mode, "concurrency": n}
        for name, rate in rates.items():
            found |= {f"{name}_per_second": rate.per_second, f"{name}_cpu_ms": rate.cpu_ms}
        found["cpu_ms"] = sum(rates[name].cpu_ms * count for name, count in floor.CYCLE.items())
        same = [cell for cell in results["cells"] if _has_same_place(cell, found)]
        found["ratio"] = min(_with_cpu_sum(cell)["cpu_sum"] for cell in same) / found["cpu_ms"]
        results["floor"].append(found)
        line = "{commits_per_second:.0f} commits/s, {calls_per_second:.0f} calls/s, "
        line += "{answers_per_second:.0f} answers/s, {cpu_ms:.1f} ms of CPU for those of a cycle, "
        line += "which takes {ratio:.1f} x"
        report.say(f"{env.mode}: floor at {n}: {line.format_map(found)}")


def _has_same_place(cell: report.Results, other: report.Results) -> bool:
    return all(cell[key] == other[key] for key in ("mode", "concurrency"))


# Statements that are none of a boot: of the pool, and those without a table, which are of the clock
# of the database. Each process measures it every 20 seconds, in any of its threads.
_APART = {"PING": "pings", "SELECT": "clock"}


def _measure_cell(env: Installation, concurrency: int, limit: load.Limit) -> report.Results:
    before, cpu_before = processes.read_counts(env.counters), _read_cpu(env)
    took, seconds = load.drive(env, concurrency, limit)
    load.wait_for_outbox(env)
    cpu_after = _read_cpu(env)
    counts = processes.read_counts(env.counters).since(before)
    cycles = len(took)
    by_thread: collections.Counter[str] = collections.Counter()
    for (database, thread, shape), count in counts.statements.items():
        if database == _database(env):
            by_thread[_APART.get(shape, thread)] += count
    statements, outbox, pings = (by_thread.pop(key, 0) for key in ("calls", "outbox", "pings"))
    calls = sorted((method, n) for (thread, method), n in counts.calls.items() if thread == "calls")
    return {
        "cycles": cycles,
        "cycles_per_second": cycles / seconds,
        "p50_ms": statistics.median(took) * 1000,
        "p99_ms": sorted(took)[min(cycles - 1, int(cycles * 0.99))] * 1000,
        "statements": statements / cycles,
        "statements_outbox": outbox / cycles,
        "statements_other": by_thread.total() / cycles,
        "pings": pings / cycles,
        "rpc": {method: count / cycles for method, count in calls},
        "cpu_ms": {group: (cpu_after[group] - cpu_before[group]) / cycles for group in cpu_after},
    }


def _database(env: Installation) -> str:
    return Path(str(env.engine.url.database)).name


def _read_version(env: Installation) -> str:
    """Return the name and version of the database server."""
    name = env.engine.dialect.name
    query = "SELECT sqlite_version()" if name == "sqlite" else "SELECT version()"
    with env.engine.connect() as connection:
        version = str(connection.exec_driver_sql(query).scalar_one())
    return version if "MariaDB" in version else f"{name} {version}"


def _read_cpu(env: Installation) -> dict[str, float]:
    """Return the CPU time in ms of each group of visible processes."""
    sessions = processes.list_sessions()
    pids = {group: sessions[leader] for group, leader in env.groups.items()}
    pids |= {name: processes.find_listener(port) for name, port in env.servers.items()}
    return {group: processes.cpu_ms(members) for group, members in pids.items() if members}


def _read_memory(env: Installation) -> dict[str, tuple[float, float]]:
    """Return RSS and PSS in MB of the largest worker of each group."""
    sessions = processes.list_sessions()
    workers = {g: [p for p in sessions[leader] if p != leader] for g, leader in env.groups.items()}
    return {
        group: max(map(processes.memory_mb, workers[group] or [leader]))
        for group, leader in env.groups.items()
    }


def _trace(env: Installation) -> None:
    """Print the messages of one cycle in order: process group, thread and text."""
    begin = time.time()
    load.drive(env, 1, load.Limit(1, 0))
    load.wait_for_outbox(env)
    for when, group, database, thread, text in processes.read_counts(env.counters).last:
        if when >= begin and database in ("", _database(env)):
            report.say(f"  {group:<10} {thread:<8} {' '.join(text.split())}")


def _with_cpu_sum(cell: report.Results) -> report.Results:
    """Add the CPU time of API, conductor and database for one cycle, and the number of calls."""
    cpu = sum(ms for group, ms in cell["cpu_ms"].items() if group in SUMMED_GROUPS)
    return {**cell, "cpu_sum": cpu, "calls": sum(cell["rpc"].values())}


def _compare(cells: list[report.Results]) -> list[report.Results]:
    """Return the relative throughput with the most other ARQs, by mode and concurrency."""
    ratios = []
    for mode, concurrency in sorted({(c["mode"], c["concurrency"]) for c in cells}):
        row = [c for c in cells if (c["mode"], c["concurrency"]) == (mode, concurrency)]
        few, many = row[0], row[-1]
        if few is many:
            continue
        # Including the delivery of the event.
        counts = [cell["statements"] + cell["statements_outbox"] for cell in (many, few)]
        ratio = {"mode": mode, "concurrency": concurrency}
        ratio |= {"others": [few["others"], many["others"]], "statements": counts[0] / counts[1]}
        throughput = many["cycles_per_second"] / few["cycles_per_second"]
        ratios.append({**ratio, "throughput": throughput})
    return ratios


def summarize(results: report.Results) -> str:
    """Return the rest of the first line."""
    machine = results["machine"]
    names = {name for mode in TITLES for name in machine.get(mode, ())}
    servers = "".join(f", {name}" for name in sorted(names))
    cycles = statistics.median(cell["cycles"] for cell in results["cells"])
    before = f"the load was {machine['load']:.1f} before"
    return f"{servers}; {before}; a cell has {cycles:.0f} cycles (median)."


def tables(results: report.Results) -> Iterator[report.Table]:
    """Yield the tables of both modes, of the floor, of the ratios and of the memory."""
    cells = [_with_cpu_sum(cell) for cell in results["cells"]]
    at = {"Mode": "{mode}", "At once": "{concurrency}"}
    for mode, title in TITLES.items():
        records = [cell for cell in cells if cell["mode"] == mode]
        if not records:
            continue
        columns = {"Others": "{others}", "At once": "{concurrency}"}
        columns |= {"Cycles/s": "{cycles_per_second:.1f}", "p50 ms": "{p50_ms:.1f}"}
        columns |= {"p99 ms": "{p99_ms:.1f}", "Statements": "{statements:.2f}"}
        columns |= {"Outbox": "{statements_outbox:.2f}", "Other work": "{statements_other:.2f}"}
        columns |= {"Pings": "{pings:.2f}", "RPC": "{calls:.2f}"}
        groups = records[0]["cpu_ms"]
        columns |= {f"CPU {group}": f"{{cpu_ms[{group}]:.1f}}" for group in groups}
        columns |= {"CPU sum": "{cpu_sum:.1f}"}
        yield report.make_table(f"{title}: {CELL}", columns, records)
    if results["floor"]:
        columns = at | {"Commits/s": "{commits_per_second:.0f}"}
        columns |= {"Bare calls/s": "{calls_per_second:.0f}"}
        columns |= {"Bare answers/s": "{answers_per_second:.0f}"}
        # Machines of different speed are comparable in units of the CPU time of a bare answer.
        columns |= {"CPU commit": "{commits_cpu_ms:.2f}", "CPU call": "{calls_cpu_ms:.2f}"}
        columns |= {"CPU answer": "{answers_cpu_ms:.2f}", "CPU of a cycle": "{cpu_ms:.1f}"}
        columns |= {"CPU sum / floor": "{ratio:.2f}"}
        columns |= {"CPU sum in bare answers": "{cpu_in_answers:.0f}"}
        records = []
        for rates in results["floor"]:
            same = [cell for cell in cells if _has_same_place(cell, rates)]
            minimum = min(cell["cpu_sum"] for cell in same) / 1000
            records.append({**rates, "cpu_in_answers": minimum * rates["answers_per_second"]})
        yield report.make_table("The floor, measured in the same run", columns, records)
    if results["ratios"]:
        columns = at | {"Others": "{others[1]}/{others[0]}", "Throughput": "{throughput:.2f}"}
        columns |= {"Statements": "{statements:.2f}"}
        title = "Effect of other ARQs: values with many, divided by values with none"
        yield report.make_table(title, columns, results["ratios"])
    columns = {"Mode": "{mode}", "Process": "{group}"}
    for when in ("idle", "after"):
        columns |= {f"RSS {when}": f"{{{when}[0]:.0f}}", f"PSS {when}": f"{{{when}[1]:.0f}}"}
    records = [
        {"mode": mode, "group": group, "idle": idle, "after": memory["after"][group]}
        for mode, memory in results["memory"].items()
        for group, idle in memory["idle"].items()
    ]
    yield report.make_table("Memory of the largest process of a kind, MB", columns, records)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers separated by commas") from exc
    if min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: negative numbers are invalid")
    return numbers

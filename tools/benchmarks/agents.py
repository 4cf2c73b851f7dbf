# SPDX-License-Identifier: Apache-2.0
"""Many agents with one or more conductors.

The database is MariaDB, the broker RabbitMQ.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import sqlalchemy as sa

from benchmarks import processes, report
from benchmarks.simulated_agents import Agents, Fleet, Heartbeats, Timings, run_agents
from cyborg.core.hosts import AGENT
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db import schema
from cyborg.tests.fixtures.bus.broker import DEFAULT as RABBIT
from cyborg.tests.fixtures.clouds.cloud import Cloud
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.machine.processes import Daemon, wait_until
from cyborg.tests.fixtures.scale.fill import Size, fill

PUBLISH_TIMEOUT = 60.0  # seconds without progress after which the benchmark fails
RABBIT_PORT = 5672
MYSQL_PORT = 3306


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("--agents", type=int, default=1000, help="(%(default)s)")
    add("--devices", type=int, default=2, help="of each agent (%(default)s)")
    add("--handles", type=int, default=16, help="of each device (%(default)s)")
    add("--conductors", type=int, default=1, help="(%(default)s)")
    add(
        "--scale-to",
        type=int,
        metavar="N",
        help="run N conductors in the first interval of the restart of all agents; those above "
        "--conductors are not measured",
    )
    add("--interval", type=float, default=10.0, help="[conductor] hello_interval (%(default)s)")
    add("--seconds", type=float, default=60.0, help="of the steady state (%(default)s)")
    add("--processes", type=int, default=1, help="that simulate the agents (%(default)s)")
    add("--threads", type=int, default=64, help="of each of these processes (%(default)s)")
    add(
        "--filled",
        action="store_true",
        help="fill the database instead of starting the agents at once; Placement has no providers",
    )


def measure(args: argparse.Namespace, folder: Path) -> report.Results:
    """Measure the start of all agents at once, and then their heartbeats."""
    names = tuple(f"compute-{n:05}" for n in range(args.agents))
    options = {key: value for key, value in vars(args).items() if key != "benchmark"}
    with _run_conductors(args, folder, names) as env:
        fleet = Fleet(names, args.devices, args.handles, env.known)
        with run_agents(fleet, env.broker, env.topic, args.processes, args.threads) as agents:
            start: report.Results = {}
            if args.filled:
                agents.start()  # opens the connections
            else:
                start = _measure_start(agents, env, args.agents, args.devices)
                report.say(f"all providers are published after {start['published_s']:.1f} s")
            report.say(f"{args.seconds:g} s of heartbeats")
            order = Heartbeats(0.0, args.seconds, args.interval)
            steady = _measure_heartbeats(agents, env, order)
            report.say("all agents restart")
            # Two intervals: the first heartbeats, and those that follow them.
            again = Heartbeats(0.0, 2 * steady["interval_s"], steady["interval_s"], restart=True)
            repaired = _count_repaired(env)
            with _scaled(env, args.scale_to or args.conductors, steady["interval_s"]) as scaled:
                restart = _measure_heartbeats(agents, env, again)
            restart["scaled_s"] = scaled()
            if not args.filled:
                restart |= _measure_verification(env, args.agents * args.devices, repaired)
    return {"options": options, "cold": start, "steady": steady, "restart": restart}


@dataclass(frozen=True)
class _Env:
    """Conductors, their database, and the hosts that it has from the beginning."""

    cloud: Cloud
    conductors: Sequence[Daemon]
    engine: sa.Engine
    broker: str
    topic: str
    known: dict[str, tuple[str, str]]

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of the conductors, the database and the broker."""
        sessions = processes.list_sessions()
        pids = {
            "conductors": [pid for daemon in self.conductors for pid in sessions[daemon.pid]],
            "database": processes.find_listener(self.engine.url.port or MYSQL_PORT),
            "broker": processes.find_listener(RABBIT_PORT),
        }
        return {name: processes.cpu_ms(members) / 1000 for name, members in pids.items()}

    def rss_mb(self) -> float:
        """Return the resident memory of the largest conductor process in MB."""
        sessions = processes.list_sessions()
        pids = (pid for daemon in self.conductors for pid in sessions[daemon.pid])
        return max(processes.memory_mb(pid)[0] for pid in pids)


@contextlib.contextmanager
def _run_conductors(
    args: argparse.Namespace, folder: Path, names: tuple[str, ...]
) -> Iterator[_Env]:
    """Run conductors with their services; every host has a compute node in Placement.

    With ``--filled``, Placement is empty, and nothing is published or verified.
    """
    broker = os.environ.get("CYBORG_TEST_RABBIT", RABBIT)
    conductor = {"hello_interval": args.interval, "publish_interval": 5}
    if args.filled:
        conductor |= {
            "placement_verify_interval": 1e6,
            "compute_node_interval": 0,
            "orphan_scan_interval": 0,
        }
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(fresh_database("mysql", folder))
        engine = stack.enter_context(engine_of(url))
        hosts = () if args.filled else names
        cloud = Cloud(folder, url, broker, hosts, options={"conductor": conductor}, forked=False)
        stack.callback(cloud.stop)
        report.say(f"creating {len(hosts)} compute nodes in Placement")
        cloud.prepare()
        known = {}
        if args.filled:
            report.say(f"filling the database with {len(names)} hosts")
            fill(engine, Size(args.agents, args.devices, args.handles))
            known = _find_known(engine)
        daemons = [cloud.conductor(f"conductor-{n}") for n in range(args.conductors)]
        try:
            for daemon in daemons:
                wait_until("a conductor is ready", partial(_is_ready, daemon))
            yield _Env(cloud, daemons, engine, broker, cloud.topic, known)
        except BaseException:
            sys.stderr.writelines(daemon.tail() for daemon in daemons)
            raise


@contextlib.contextmanager
def _scaled(env: _Env, count: int, seconds: float) -> Iterator[Callable[[], float]]:
    """Start further conductors, up to ``count``, and stop them after ``seconds``.

    Yield a function that returns for how many seconds all of them were ready, after the end.
    """
    names = [f"conductor-{n}" for n in range(len(env.conductors), count)]
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(_run_for, env.cloud, names, seconds)
        yield done.result


def _run_for(cloud: Cloud, names: Sequence[str], seconds: float) -> float:
    """Run conductors; return for how many seconds all of them were ready."""
    end = time.monotonic() + seconds
    daemons = [cloud.conductor(name) for name in names]
    for daemon in daemons:
        wait_until("a further conductor is ready", partial(_is_ready, daemon))
    left = max(0.0, end - time.monotonic()) if daemons else 0.0
    time.sleep(left)
    for daemon in daemons:
        daemon.stop()
    return left


def _is_ready(daemon: Daemon) -> bool:
    return "is ready" in daemon.log.read_text()


def _find_known(engine: sa.Engine) -> dict[str, tuple[str, str]]:
    s = schema.services.c
    with engine.connect() as connection:
        rows = connection.execute(sa.select(s.host, s.epoch, s.digest).where(s.binary == AGENT))
        return {host: (epoch, digest) for host, epoch, digest in rows}


def _measure_start(agents: Agents, env: _Env, count: int, devices: int) -> report.Results:
    """Measure the simultaneous start of all agents with an empty database."""
    report.say(f"{count} agents start at once")
    cpu, begin = env.cpu_s(), time.monotonic()
    timings = agents.start()
    _show_errors(timings)
    reported = time.monotonic() - begin
    _wait_for_placement(env, count * devices)
    return {
        "reported_s": reported,
        "published_s": time.monotonic() - begin,
        "failed": timings.failed,
        "cpu_s": env.cpu_s()["conductors"] - cpu["conductors"],
        "rss_mb": env.rss_mb(),
    }


def _wait_for_placement(env: _Env, total: int) -> None:
    """Wait until so many providers are published, or verified after a restart of their agents."""
    fresh = schema.providers.c.stale_since.is_(None)
    query = sa.select(sa.func.count()).select_from(schema.providers).where(fresh)
    last, progress = -1, time.monotonic()
    while last < total:
        with env.engine.connect() as connection:
            found = connection.scalar(query) or 0
        # The number falls too, when providers become due for verification.
        if found != last:
            last, progress = found, time.monotonic()
        elif time.monotonic() - progress > PUBLISH_TIMEOUT:
            raise RuntimeError(f"{found} of {total} providers are published, without progress")
        else:
            time.sleep(0.5)


def _measure_verification(env: _Env, total: int, repaired: int) -> report.Results:
    """Measure what the verification after the restart of all agents finds, and its time.

    ``repaired`` is the number of repairs before the restart.
    """
    begin = time.monotonic()
    _wait_for_placement(env, total)
    return {"verified_s": time.monotonic() - begin, "repaired": _count_repaired(env) - repaired}


def _count_repaired(env: _Env) -> int:
    """Return the number of repairs of providers in Placement so far."""
    counters = schema.self_heal_counters.c
    query = sa.select(sa.func.sum(counters.count)).where(
        counters.kind == CorrectiveAction.DRIFT_REPAIRED
    )
    with env.engine.connect() as connection:
        return int(connection.scalar(query) or 0)


def _measure_heartbeats(agents: Agents, env: _Env, order: Heartbeats) -> report.Results:
    """Measure the heartbeats of all agents, from now."""
    cpu, begin = env.cpu_s(), time.monotonic()
    timings = agents.send_heartbeats(replace(order, begin=begin))
    _show_errors(timings)
    seconds, used = time.monotonic() - begin, env.cpu_s()
    return {
        "hellos": len(timings.delays),
        "hellos_per_second": len(timings.delays) / seconds,
        "failed": timings.failed,
        "late": timings.late,
        "interval_s": timings.interval,
        "busiest_second": max(timings.seconds.values()),
        **_quantiles("late", timings.delays),
        **_quantiles("answer", timings.durations),
        **{f"{name}_cores": (used[name] - cpu[name]) / seconds for name in cpu},
        "conductor_ms": (used["conductors"] - cpu["conductors"]) * 1000 / len(timings.delays),
        "rss_mb": env.rss_mb(),
        "load": os.getloadavg()[0],
    }


def _show_errors(timings: Timings) -> None:
    for error in sorted(timings.errors):
        report.say(f"a heartbeat failed: {error}")


def _quantiles(name: str, seconds: list[float]) -> dict[str, float]:
    last = len(seconds) - 1
    positions = {"p50": len(seconds) // 2, "p99": min(last, int(len(seconds) * 0.99)), "max": last}
    return {f"{name}_{key}_ms": sorted(seconds)[at] * 1000 for key, at in positions.items()}


def summarize(results: report.Results) -> str:
    """Return the rest of the first line."""
    return f"; MariaDB, RabbitMQ, Placement on SQLite; load {results['steady']['load']:.1f}."


def tables(results: report.Results) -> Iterator[report.Table]:
    """Yield the tables of the start and of the steady state."""
    options = results["options"]
    if results["cold"]:
        rows = {
            "All have reported, s": "{reported_s:.1f}",
            f"All {options['agents'] * options['devices']} providers are published, s": (
                "{published_s:.1f}"
            ),
            "Calls that failed": "{failed}",
            "CPU of the conductors, s": "{cpu_s:.1f}",
            "RSS of the largest process, MB": "{rss_mb:.0f}",
        }
        title = "{agents} agents of {devices} devices start at the same time".format_map(options)
        yield report.make_record_table(title, rows, results["cold"])
    rows = {
        "Interval that the agents were given, s": "{interval_s:g}",
        "Hellos": "{hellos}",
        "Hellos/s": "{hellos_per_second:.1f}",
        "Hellos due in the busiest second": "{busiest_second}",
        "Answered after the next one was due": "{late}",
        "Failed": "{failed}",
    }
    for what, key in (("Due to answer", "late"), ("Call to answer", "answer")):
        points = (f"{{{key}_{point}_ms:.1f}}" for point in ("p50", "p99", "max"))
        rows[f"{what}, ms: p50, p99, max"] = ", ".join(points)
    rows["CPU of the conductors, cores"] = "{conductors_cores:.2f}"
    rows["CPU of the conductors for a hello, ms"] = "{conductor_ms:.2f}"
    rows["CPU of the database, cores"] = "{database_cores:.2f}"
    rows["CPU of the broker, cores"] = "{broker_cores:.2f}"
    rows["RSS of the largest process, MB"] = "{rss_mb:.0f}"
    title = (
        "Hellos of {agents} agents with {devices} devices, conductors: {conductors}"
    ).format_map(options)
    yield report.make_record_table(title, rows, results["steady"])
    title = "Restart of {agents} agents at the same time, two intervals".format_map(options)
    if options["scale_to"]:
        rows["Seconds with {scale_to} conductors".format_map(options)] = "{scaled_s:.1f}"
    if "repaired" in results["restart"]:
        rows["Seconds after this until all providers were verified"] = "{verified_s:.1f}"
        rows["Providers that were repaired in Placement"] = "{repaired}"
    yield report.make_record_table(title, rows, results["restart"])

# SPDX-License-Identifier: Apache-2.0
"""Many agents with one conductor.

The database is MariaDB, the broker RabbitMQ.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa

from benchmarks import processes, report
from benchmarks.threads import run_threads
from cyborg.db import schema
from cyborg.rpc.contract import ConductorAPI
from cyborg.tests.fixtures.bus.broker import DEFAULT as RABBIT
from cyborg.tests.fixtures.bus.broker import open_bus
from cyborg.tests.fixtures.clouds.cloud import Cloud
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.hosts.hosts import READY, Host, card
from cyborg.tests.fixtures.machine.processes import Daemon, wait_until

PUBLISH_TIMEOUT = 60.0  # seconds without progress after which the benchmark fails


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("--agents", type=int, default=1000, help="(%(default)s)")
    add("--devices", type=int, default=2, help="of each agent (%(default)s)")
    add("--handles", type=int, default=16, help="of each device (%(default)s)")
    add("--interval", type=float, default=10.0, help="seconds between heartbeats (%(default)s)")
    add("--seconds", type=float, default=60.0, help="of the steady state (%(default)s)")
    add("--threads", type=int, default=64, help="that simulate the agents (%(default)s)")


def measure(args: argparse.Namespace, folder: Path) -> report.Results:
    """Measure the start of all agents at once, and then their heartbeats."""
    names = tuple(f"compute-{n:04}" for n in range(args.agents))
    agents = [Agent(name, args.devices, args.handles) for name in names]
    options = {key: value for key, value in vars(args).items() if key != "benchmark"}
    with _run_conductor(args.interval, folder, names) as (conductor, client, engine):
        play = Play(agents, client, args.threads)
        start = _measure_start(play, conductor, engine, args.agents * args.devices)
        report.say(f"all providers are published after {start['published_s']:.1f} s")
        report.say(f"{args.seconds:g} s of heartbeats")
        steady = _measure_heartbeats(play, conductor, args.interval, args.seconds)
    return {"options": options, "cold": start, "steady": steady}


class Agent:
    """Simulated agent: it sends heartbeats, and a report when the conductor requests one."""

    def __init__(self, name: str, devices: int, handles: int) -> None:
        self._host = host = Host(name, devices=[card(n, handles) for n in range(devices)])
        backends = [READY.without_details().to_dict()]
        endpoint = f"{name}:agent"
        self._heartbeat = (name, host.epoch, endpoint, "READY", backends, host.digest)
        self.registered = False

    def hello(self, client: ConductorAPI) -> None:
        """Send a heartbeat, and a report if the response requests one."""
        if client.hello(*self._heartbeat, {"rpc": "1.0"})["report"]:
            self._host.generation += 1
            client.report(self._host.message())
        self.registered = True


@dataclass
class Timings:
    """Seconds from due time to answer and from call to answer, and errors."""

    late: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass
class Play:
    """Agents that a number of threads simulate."""

    agents: Sequence[Agent]
    client: ConductorAPI
    threads: int

    def run(self, due: Callable[[int, int], float | None]) -> Timings:
        """Send the heartbeats at their due times, until no agent has a further one."""
        timings = Timings()

        def work(first: int) -> None:
            turn, pending = 0, True
            while pending:
                pending = False
                for number in range(first, len(self.agents), self.threads):
                    if (when := due(number, turn)) is None:
                        continue
                    pending = True
                    time.sleep(max(0.0, when - time.monotonic()))
                    begin = time.monotonic()
                    try:
                        self.agents[number].hello(self.client)
                    except Exception as exc:  # noqa: BLE001  counted and reported
                        timings.failed.append(f"{type(exc).__name__}: {exc}")
                    end = time.monotonic()
                    timings.late.append(end - when)
                    timings.took.append(end - begin)
                turn += 1

        run_threads(self.threads, work)
        for error in sorted(set(timings.failed))[:5]:
            report.say(f"a heartbeat failed: {error}")
        return timings


@contextlib.contextmanager
def _run_conductor(
    interval: float, folder: Path, names: tuple[str, ...]
) -> Iterator[tuple[Daemon, ConductorAPI, sa.Engine]]:
    """Run a conductor with its services; every host has a compute node in Placement."""
    broker = os.environ.get("CYBORG_TEST_RABBIT", RABBIT)
    options = {"conductor": {"hello_interval": interval, "publish_interval": 5}}
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(fresh_database("mysql", folder))
        engine = stack.enter_context(engine_of(url))
        cloud = Cloud(folder, url, broker, names, options=options, forked=False)
        stack.callback(cloud.stop)
        report.say(f"creating {len(names)} compute nodes in Placement")
        cloud.prepare()
        conductor = cloud.conductor("conductor")
        wait_until("the conductor is ready", lambda: "is ready" in conductor.log.read_text())
        bus = stack.enter_context(open_bus(broker, rpc={"topic": cloud.topic, "timeout": 60.0}))
        try:
            yield conductor, bus.conductor(), engine
        except BaseException:
            sys.stderr.write(conductor.tail())
            raise


def _measure_start(play: Play, conductor: Daemon, engine: sa.Engine, total: int) -> report.Results:
    """Measure the simultaneous start of all agents with an empty database."""
    report.say(f"{len(play.agents)} agents start at once")
    cpu, begin = _cpu_s(conductor), time.monotonic()
    # Like a real agent, an agent without a response retries.
    timings = play.run(lambda n, _: None if play.agents[n].registered else begin)
    reported = time.monotonic() - begin
    fresh = schema.providers.c.stale_since.is_(None)
    query = sa.select(sa.func.count()).select_from(schema.providers).where(fresh)
    published, progress = 0, time.monotonic()
    while published < total:
        with engine.connect() as connection:
            count = connection.scalar(query) or 0
        if count > published:
            published, progress = count, time.monotonic()
        elif time.monotonic() - progress > PUBLISH_TIMEOUT:
            raise RuntimeError(f"{count} of {total} providers are published, without progress")
        else:
            time.sleep(0.5)
    return {
        "reported_s": reported,
        "published_s": time.monotonic() - begin,
        "failed": len(timings.failed),
        "cpu_s": _cpu_s(conductor) - cpu,
        "rss_mb": _rss_mb(conductor),
    }


def _measure_heartbeats(
    play: Play, conductor: Daemon, interval: float, duration: float
) -> report.Results:
    """Measure the heartbeats of all agents, evenly distributed over the interval."""
    cpu, begin = _cpu_s(conductor), time.monotonic()

    def due(number: int, turn: int) -> float | None:
        after = (turn + number / len(play.agents)) * interval
        return begin + after if after < duration else None

    timings = play.run(due)
    seconds = time.monotonic() - begin
    return {
        "hellos": len(timings.late),
        "hellos_per_second": len(timings.late) / seconds,
        "failed": len(timings.failed),
        "late": sum(late > interval for late in timings.late),
        **_quantiles("late", timings.late),
        **_quantiles("answer", timings.took),
        "cores": (_cpu_s(conductor) - cpu) / seconds,
        "rss_mb": _rss_mb(conductor),
    }


def _quantiles(name: str, seconds: list[float]) -> dict[str, float]:
    last = len(seconds) - 1
    positions = {"p50": len(seconds) // 2, "p99": min(last, int(len(seconds) * 0.99)), "max": last}
    return {f"{name}_{key}_ms": sorted(seconds)[at] * 1000 for key, at in positions.items()}


def _cpu_s(daemon: Daemon) -> float:
    return processes.cpu_ms(processes.list_sessions()[daemon.pid]) / 1000


def _rss_mb(daemon: Daemon) -> float:
    return max(processes.memory_mb(pid)[0] for pid in processes.list_sessions()[daemon.pid])


def summarize(results: report.Results) -> str:
    """Return the rest of the first line."""
    del results
    return "; MariaDB, RabbitMQ, Placement on SQLite."


def tables(results: report.Results) -> Iterator[report.Table]:
    """Yield the tables of the start and of the steady state."""
    options = results["options"]
    rows = {
        "All have reported, s": "{reported_s:.1f}",
        f"All {options['agents'] * options['devices']} providers are published, s": (
            "{published_s:.1f}"
        ),
        "Calls that failed": "{failed}",
        "CPU of the conductor, s": "{cpu_s:.1f}",
        "RSS of its largest process, MB": "{rss_mb:.0f}",
    }
    title = "{agents} agents of {devices} devices start at the same time".format_map(options)
    yield report.make_record_table(title, rows, results["cold"])
    rows = {
        "Hellos": "{hellos}",
        "Hellos/s": "{hellos_per_second:.1f}",
        f"Answered later than {options['interval']:g} s after they were due": "{late}",
        "Failed": "{failed}",
    }
    for what, key in (("Due to answer", "late"), ("Call to answer", "answer")):
        points = (f"{{{key}_{point}_ms:.1f}}" for point in ("p50", "p99", "max"))
        rows[f"{what}, ms: p50, p99, max"] = ", ".join(points)
    rows["CPU of the conductor, cores"] = "{cores:.2f}"
    rows["RSS of its largest process, MB"] = "{rss_mb:.0f}"
    title = f"One hello of each agent every {options['interval']:g} s"
    yield report.make_record_table(title, rows, results["steady"])

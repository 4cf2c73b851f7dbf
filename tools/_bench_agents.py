# SPDX-License-Identifier: Apache-2.0
"""``tools/bench agents``: how many agents one conductor carries, over a real broker."""

import argparse
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _bench_boot as boot
import _bench_table as table
import _bench_watch as watch
import kombu
import pytest
import sqlalchemy as sa

from cyborg.core import wire
from cyborg.db import schema
from cyborg.fixtures.broker import DEFAULT as RABBIT
from cyborg.fixtures.broker import open_bus
from cyborg.fixtures.cloud import Cloud
from cyborg.fixtures.databases import engine_of, fresh_database
from cyborg.fixtures.hosts import READY, Host, card
from cyborg.fixtures.processes import BIN, Daemon, until
from cyborg.rpc.conductor import ConductorClient

CONDUCTOR = "conductor"
PATIENCE = 60.0  # seconds in which something more must be published


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    add = parser.add_argument
    add("--agents", type=int, default=1000, help="(%(default)s)")
    add("--devices", type=int, default=2, help="of each agent (%(default)s)")
    add("--handles", type=int, default=16, help="of each device (%(default)s)")
    add("--interval", type=float, default=10.0, help="seconds between hellos (%(default)s)")
    add("--seconds", type=float, default=60.0, help="of the steady state (%(default)s)")
    add("--threads", type=int, default=64, help="that play the agents (%(default)s)")
    add("--format", choices=("table", "json", "rst"), default="table")


def run(args: argparse.Namespace) -> int:
    """Run it and print what was found; return the exit status."""
    # oslo.messaging warns of more than ten calls at once, which is what is wanted here.
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found: dict[str, Any] = {"machine": boot.machine(), "options": dict(vars(args))}
    found["options"].pop("run")
    try:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            found |= _measure(args, Path(folder))
    except (
        pytest.skip.Exception,
        pytest.fail.Exception,
        OSError,
        kombu.exceptions.KombuError,
    ) as bad:
        boot.say(f"gave up: {bad}")
        return 1
    if args.format == "json":
        print(json.dumps(found, indent=2))
        return 0
    print(f"{table.processors(found['machine'])}; MariaDB, RabbitMQ, Placement on SQLite.")
    render = table.as_rst if args.format == "rst" else table.as_text
    print("\n".join(render(_tables(found))))
    return 0


@dataclass
class Answers:
    """Seconds from when a call was due, and from when it was made, to its answer."""

    late: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Agent:
    """One agent: it says hello on time, and reports when it is asked to."""

    def __init__(self, name: str, devices: int, handles: int) -> None:
        self._host = Host(name, devices=[card(n, handles) for n in range(devices)])
        self._digest = self._host.digest
        self._drivers = [wire.dump_backend(READY)]
        self.heard = False

    def hello(self, client: ConductorClient) -> None:
        """Say hello and do what the answer asks for."""
        host = self._host
        told = (host.name, host.epoch, f"{host.name}:agent", "READY", self._drivers, self._digest)
        if client.hello(*told, {"rpc": "1.0"})["report"]:
            host.generation += 1
            client.report(host.message())
        self.heard = True


def _measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    names = tuple(f"compute-{n:04}" for n in range(args.agents))
    agents = [Agent(name, args.devices, args.handles) for name in names]
    with _cloud(args, folder, names) as (conductor, client, engine):
        cold = _cold(args, agents, conductor, client, engine)
        boot.say(f"all is published after {cold['published_s']:.1f} s")
        steady = _steady(args, agents, conductor, client)
    return {"cold": cold, "steady": steady}


@contextlib.contextmanager
def _cloud(
    args: argparse.Namespace, folder: Path, names: tuple[str, ...]
) -> Iterator[tuple[Daemon, ConductorClient, sa.Engine]]:
    """Run one conductor with its neighbours; every host has a compute node in Placement."""
    broker = os.environ.get("CYBORG_TEST_RABBIT", RABBIT)
    intervals = {"hello_interval": args.interval, "publish_interval": 5}
    with contextlib.ExitStack() as undo:
        url = undo.enter_context(fresh_database("mysql", folder))
        engine = undo.enter_context(engine_of(url))
        cloud = Cloud(folder, url, broker, names, options={"conductor": intervals})
        undo.callback(cloud.stop)
        config = cloud.config("api", host="controller")
        upgrade = [BIN / "cyborg-dbsync", "--config-file", config, "upgrade"]
        # What it prints is no part of the tables.
        subprocess.run(upgrade, check=True, stdout=sys.stderr)
        boot.say(f"making {len(names)} compute nodes in Placement")
        cloud._start_placement()
        conductor = cloud.conductor(CONDUCTOR)
        until("the conductor is ready", lambda: "is ready" in conductor.log.read_text())
        topic = cloud._common["rpc"]["topic"]
        bus = undo.enter_context(open_bus(broker, rpc={"topic": topic, "timeout": 60.0}))
        try:
            yield conductor, bus.conductor(), engine
        except BaseException:
            sys.stderr.write(conductor.tail())
            raise


def _cold(
    args: argparse.Namespace,
    agents: Sequence[Agent],
    conductor: Daemon,
    client: ConductorClient,
    engine: sa.Engine,
) -> dict[str, Any]:
    """Have all agents come at once, to a conductor that knows nothing."""
    before, begin = _cpu(conductor), time.monotonic()
    boot.say(f"{len(agents)} agents come at once")
    # As a real one does, an agent that is not heard tries again.
    answers = _play(agents, client, args.threads, lambda n, _: None if agents[n].heard else begin)
    reported = time.monotonic() - begin
    wanted = args.agents * args.devices
    most, since = 0, time.monotonic()
    while (done := _published(engine)) < wanted:
        if done > most:
            most, since = done, time.monotonic()
        if time.monotonic() - since > PATIENCE:
            raise RuntimeError(f"{done} of {wanted} providers are published, and no more follow")
        time.sleep(0.5)
    return {
        "reported_s": reported,
        "published_s": time.monotonic() - begin,
        "failed": len(answers.failed),
        "cpu_s": (_cpu(conductor) - before) / 1000,
        "rss_mb": _memory(conductor),
    }


def _steady(
    args: argparse.Namespace, agents: Sequence[Agent], conductor: Daemon, client: ConductorClient
) -> dict[str, Any]:
    """Have all agents say hello on time, evenly spread."""
    boot.say(f"{args.seconds:g} s of hellos")
    before, begin = _cpu(conductor), time.monotonic()

    def due(number: int, turn: int) -> float | None:
        after = (turn + number / len(agents)) * args.interval
        return begin + after if after < args.seconds else None

    answers = _play(agents, client, args.threads, due)
    seconds = time.monotonic() - begin
    late, took = sorted(answers.late), sorted(answers.took)
    return {
        "hellos": len(late),
        "hellos_per_second": len(late) / seconds,
        "failed": len(answers.failed),
        "late": sum(one > args.interval for one in late),
        **{f"late_{k}_ms": v * 1000 for k, v in _points(late).items()},
        **{f"answer_{k}_ms": v * 1000 for k, v in _points(took).items()},
        "cores": (_cpu(conductor) - before) / 1000 / seconds,
        "rss_mb": _memory(conductor),
    }


def _play(
    agents: Sequence[Agent],
    client: ConductorClient,
    threads: int,
    due: Callable[[int, int], float | None],
) -> Answers:
    """Have each agent say hello whenever it is due, until it never is any more."""
    answers, lock = Answers(), threading.Lock()

    def work(first: int) -> None:
        turn = 0
        while True:
            left = False
            for number in range(first, len(agents), threads):
                if (when := due(number, turn)) is None:
                    continue
                left = True
                time.sleep(max(0.0, when - time.monotonic()))
                begin = time.monotonic()
                try:
                    agents[number].hello(client)
                except Exception as bad:  # noqa: BLE001  counted and told
                    with lock:
                        answers.failed.append(f"{type(bad).__name__}: {bad}")
                end = time.monotonic()
                with lock:
                    answers.late.append(end - when)
                    answers.took.append(end - begin)
            if not left:
                return
            turn += 1

    players = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for player in players:
        player.start()
    for player in players:
        player.join()
    for why in sorted(set(answers.failed))[:5]:
        boot.say(f"a hello failed: {why}")
    return answers


def _points(ordered: Sequence[float]) -> dict[str, float]:
    last = len(ordered) - 1
    places = {"p50": len(ordered) // 2, "p99": min(last, int(len(ordered) * 0.99)), "max": last}
    return {name: ordered[place] for name, place in places.items()}


def _published(engine: sa.Engine) -> int:
    fresh = schema.providers.c.stale_since.is_(None)
    with engine.connect() as line:
        return (
            line.scalar(sa.select(sa.func.count()).select_from(schema.providers).where(fresh)) or 0
        )


def _cpu(daemon: Daemon) -> float:
    return watch.cpu_ms(watch.sessions()[daemon.pid])


def _memory(daemon: Daemon) -> float:
    return max(watch.memory_mb(pid)[0] for pid in watch.sessions()[daemon.pid])


def _tables(found: dict[str, Any]) -> Iterator[table.Table]:
    told, cold, steady = found["options"], found["cold"], found["steady"]
    parts = told["agents"] * told["devices"]
    rows = [
        ["All have reported, s", f"{cold['reported_s']:.1f}"],
        [f"All {parts} providers are published, s", f"{cold['published_s']:.1f}"],
        ["Calls that failed", str(cold["failed"])],
        ["CPU of the conductor, s", f"{cold['cpu_s']:.1f}"],
        ["RSS of its largest process, MB", f"{cold['rss_mb']:.0f}"],
    ]
    yield (
        f"{told['agents']} agents of {told['devices']} devices come at once",
        ["Figure", "Value"],
        rows,
    )
    rows = [
        ["Hellos", str(steady["hellos"])],
        ["Hellos/s", f"{steady['hellos_per_second']:.1f}"],
        [f"Answered later than {told['interval']:g} s after they were due", str(steady["late"])],
        ["Failed", str(steady["failed"])],
        *(
            [f"{what}, ms: p50, p99, max", ", ".join(f"{steady[f'{k}_{p}_ms']:.1f}" for p in _P)]
            for what, k in (("Due to answer", "late"), ("Call to answer", "answer"))
        ),
        ["CPU of the conductor, cores", f"{steady['cores']:.2f}"],
        ["RSS of its largest process, MB", f"{steady['rss_mb']:.0f}"],
    ]
    yield f"A hello of each every {told['interval']:g} s", ["Figure", "Value"], rows


_P = ("p50", "p99", "max")

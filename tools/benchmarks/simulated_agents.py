# SPDX-License-Identifier: Apache-2.0
"""Agents that processes and threads simulate: heartbeats and reports over a real broker."""

import contextlib
import heapq
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any
from uuid import uuid4

from benchmarks.processes import run_threads
from cyborg.agent.report.heartbeat import HeartbeatSchedule
from cyborg.rpc.contract import ConductorAPI
from cyborg.tests.fixtures.bus.broker import open_bus
from cyborg.tests.fixtures.hosts.hosts import READY, Host, card

# Seconds for a call; the agents of a cold start wait for each other.
CALL_TIMEOUT = 60.0

# Seconds before the next attempts of the agents that a conductor could not serve.
RETRY_PAUSE = 0.2

# Maximum number of error texts that a process returns.
MAX_ERRORS = 5


@dataclass(frozen=True, slots=True)
class Fleet:
    """Simulated agents: the names of their hosts, and what each host has.

    ``known`` has the epoch and the digest of each host that the database has already.
    """

    names: Sequence[str]
    devices: int
    handles: int
    known: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(slots=True)
class Timings:
    """Seconds from due time to answer and from call to answer, late heartbeats, and errors.

    ``seconds`` counts the heartbeats that were due in each second of the order.
    """

    delays: list[float] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    late: int = 0
    failed: int = 0
    errors: set[str] = field(default_factory=set)
    interval: float = 0.0
    seconds: Counter[int] = field(default_factory=Counter)

    def add(self, other: "Timings") -> None:
        """Add the timings of another process."""
        self.delays += other.delays
        self.durations += other.durations
        self.late += other.late
        self.failed += other.failed
        self.errors |= other.errors
        self.interval = max(self.interval, other.interval)
        self.seconds += other.seconds


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """Order to send heartbeats from ``begin`` for ``duration`` seconds.

    ``begin`` is of the monotonic clock, which all processes share. The first heartbeats are evenly
    spread over ``interval``; each further one is due after the interval of the last answer. With
    ``restart`` all agents restart at ``begin``, and spread their heartbeats as agents do.
    """

    begin: float
    duration: float
    interval: float
    restart: bool = False


class Agent:
    """Simulated agent: it sends heartbeats, and a report when the conductor requests one."""

    def __init__(self, name: str, fleet: Fleet) -> None:
        backends = [READY.without_details().to_dict()]
        self._host: Host | None = None
        if name in fleet.known:
            epoch, digest = fleet.known[name]
        else:
            devices = [card(n, fleet.handles) for n in range(fleet.devices)]
            self._host = host = Host(name, devices=devices)
            epoch, digest = host.epoch, host.digest
        self._heartbeat = (name, epoch, f"{name}:agent", "READY", backends, digest)
        self.registered = False

    def restart(self) -> None:
        """Begin a new epoch."""
        name, _, endpoint, status, backends, digest = self._heartbeat
        epoch = str(uuid4())
        self._heartbeat = (name, epoch, endpoint, status, backends, digest)
        if self._host is not None:
            self._host.epoch, self._host.generation = epoch, 0

    def hello(self, client: ConductorAPI) -> float:
        """Send a heartbeat, and a report if the answer requests one; return the next interval."""
        answer = client.hello(*self._heartbeat, {"rpc": "1.0"})
        if answer["report"]:
            if self._host is None:
                raise RuntimeError("the conductor does not know this host's inventory")
            self._host.generation += 1
            client.report(self._host.message())
        self.registered = True
        return float(answer["interval"])


class _Threads:
    """The agents of one process, divided among threads."""

    def __init__(self, agents: Sequence[Agent], client: ConductorAPI, threads: int) -> None:
        self._agents = agents
        self._client = client
        self._threads = min(threads, len(agents))

    def start(self, begin: float) -> Timings:
        """Register all agents; like a real agent, one without an answer retries."""

        def work(first: int, timings: Timings) -> None:
            pending = list(self._agents[first :: self._threads])
            while pending:
                for agent in pending:
                    self._call(agent, begin, timings)
                pending = [agent for agent in pending if not agent.registered]
                time.sleep(RETRY_PAUSE if pending else 0)

        return self._run(work)

    def send_heartbeats(self, order: Heartbeats) -> Timings:
        """Send the heartbeats of all agents when they are due."""
        end = order.begin + order.duration

        def work(first: int, timings: Timings) -> None:
            numbers = range(first, len(self._agents), self._threads)
            schedules = {number: HeartbeatSchedule(order.interval) for number in numbers}
            queue = [
                (self._first_due(order, number, schedules[number]), number) for number in numbers
            ]
            heapq.heapify(queue)
            while queue and queue[0][0] < end:
                due, number = queue[0]
                time.sleep(max(0.0, due - time.monotonic()))
                timings.seconds[int(due - order.begin)] += 1
                interval = self._call(self._agents[number], due, timings) or order.interval
                following = due + interval
                if order.restart:
                    following = schedules[number].next_heartbeat(time.monotonic(), interval)
                heapq.heapreplace(queue, (following, number))

        return self._run(work)

    def _first_due(self, order: Heartbeats, number: int, schedule: HeartbeatSchedule) -> float:
        if not order.restart:
            return order.begin + number / len(self._agents) * order.interval
        self._agents[number].restart()
        return order.begin + schedule.first_delay

    def _call(self, agent: Agent, due: float, timings: Timings) -> float | None:
        begin = time.monotonic()
        interval = None
        try:
            interval = agent.hello(self._client)
        except Exception as exc:  # noqa: BLE001  counted and reported
            timings.failed += 1
            if len(timings.errors) < MAX_ERRORS:
                timings.errors.add(f"{type(exc).__name__}: {exc}")
        end = time.monotonic()
        timings.delays.append(end - due)
        timings.durations.append(end - begin)
        timings.interval = max(timings.interval, interval or 0.0)
        timings.late += interval is not None and end - due > interval
        return interval

    def _run(self, work: Callable[[int, Timings], None]) -> Timings:
        found = [Timings() for _ in range(self._threads)]
        run_threads(self._threads, lambda number: work(number, found[number]))
        total = Timings()
        for timings in found:
            total.add(timings)
        return total


class Agents:
    """The agents of all processes."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections

    def start(self) -> Timings:
        """Start all agents at once."""
        return self._order(time.monotonic())

    def send_heartbeats(self, order: Heartbeats) -> Timings:
        """Send the heartbeats of all agents."""
        return self._order(order)

    def _order(self, order: float | Heartbeats) -> Timings:
        for connection in self._connections:
            connection.send(order)
        total = Timings()
        for connection in self._connections:
            found = connection.recv()
            if isinstance(found, str):
                raise RuntimeError(f"a process of simulated agents failed: {found}")
            total.add(found)
        return total


@contextlib.contextmanager
def run_agents(
    fleet: Fleet, broker: str, topic: str, processes: int, threads: int
) -> Iterator[Agents]:
    """Simulate the agents of a fleet in a number of processes, each with a number of threads."""
    # Spawned: a forked process would have the threads and connections of this one.
    context = multiprocessing.get_context("spawn")
    connections, running = [], []
    for first in range(processes):
        ours, theirs = context.Pipe()
        part = replace(fleet, names=list(fleet.names[first::processes]))
        process = context.Process(
            target=_run_process, args=(theirs, part, broker, topic, threads), daemon=True
        )
        process.start()
        connections.append(ours)
        running.append(process)
    try:
        yield Agents(connections)
    finally:
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in running:
            process.join(10)
            if process.is_alive():
                process.kill()


def _run_process(connection: Any, fleet: Fleet, broker: str, topic: str, threads: int) -> None:
    """Execute orders until None comes; answer each with its timings, or with an error."""
    agents = [Agent(name, fleet) for name in fleet.names]
    with open_bus(broker, rpc={"topic": topic, "timeout": CALL_TIMEOUT}) as bus:
        pool = _Threads(agents, bus.conductor(), threads)
        while (order := connection.recv()) is not None:
            try:
                if isinstance(order, Heartbeats):
                    connection.send(pool.send_heartbeats(order))
                else:
                    connection.send(pool.start(order))
            except Exception as exc:  # noqa: BLE001  the parent raises it
                connection.send(f"{type(exc).__name__}: {exc}")

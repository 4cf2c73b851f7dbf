# SPDX-License-Identifier: Apache-2.0
"""Two conductors on hosts whose clocks differ by 120 seconds, on each kind of database."""

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.api.controller import ApiContext, Resource
from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.hosts.failure_detector import FailureDetector
from cyborg.conductor.hosts.heartbeats import Hosts
from cyborg.conductor.jobs.dispatcher import JobDispatcher
from cyborg.core.hosts import Liveness
from cyborg.db import schema
from cyborg.db.clock import DatabaseClock
from cyborg.db.engine import Reader
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.host_time import host_clock_off
from cyborg.tests.fixtures.hosts.hosts import Host, card
from cyborg.tests.fixtures.machine.options import make_conf

AHEAD = 120.0
INTERVAL, SILENCE, WINDOW = 10.0, 70.0, 145.0


class Elapsed:
    """Seconds since the start of the test, advanced by the test."""

    seconds = 0.0


class Machine:
    """A conductor and an API on a host with its own wall clock and monotonic clock."""

    def __init__(self, engine: sa.Engine, elapsed: Elapsed, ahead: float, booted: float) -> None:
        def monotonic() -> float:
            return booted + elapsed.seconds + time.monotonic()

        self._ahead, self._elapsed = ahead, elapsed
        conf = make_conf()
        clock = DatabaseClock(Reader(engine).connect, monotonic)
        uow = UnitOfWork(engine, clock=clock)
        agents: Any = None
        self.hosts = build(Hosts, conf, uow)
        self.watch = build(FailureDetector, conf, uow, clock=monotonic)
        self.jobs = build(JobDispatcher, conf, uow, agents, lambda settled: None)
        self.requests = Arqs(conf, uow)
        reader = Reader(engine)
        reader.clock = clock
        conductor: Any = None
        self.resource = Resource(ApiContext(conf, conductor, reader))

    @contextlib.contextmanager
    def running(self) -> Iterator["Machine"]:
        """Make this host's wall clock that of the process."""
        with host_clock_off(self._ahead + self._elapsed.seconds):
            yield self


@pytest.fixture
def elapsed() -> Elapsed:
    return Elapsed()


@pytest.fixture
def exact(engine: sa.Engine, elapsed: Elapsed) -> Machine:
    return Machine(engine, elapsed, 0.0, 100_000.0)


@pytest.fixture(params=[AHEAD, -AHEAD], ids=["ahead", "behind"])
def skewed(request: pytest.FixtureRequest, engine: sa.Engine, elapsed: Elapsed) -> Machine:
    return Machine(engine, elapsed, request.param, 50.0)


def send_report(machine: Machine, host: Host) -> None:
    with machine.running() as by:
        host.send(by.hosts, card(0, 4))


def test_bind_with_clock_skew_leases_the_job_once(
    engine: sa.Engine, exact: Machine, skewed: Machine, elapsed: Elapsed
) -> None:
    host = Host("compute-1")
    send_report(exact, host)
    device = rows.insert_card(engine, address="0000:99:00.0", abilities=["prepares"])
    profile = rows.insert_profile(engine)
    for first, second in ((exact, skewed), (skewed, exact)):
        uuid, instance = rows.insert_arq(engine, profile), str(uuid4())
        bind_request = {
            "request": uuid,
            "hostname": device.host,
            "device_rp_uuid": device.provider,
            "instance_uuid": instance,
        }
        with first.running() as by:
            by.requests.bind([bind_request], None)
        (row,) = rows.read(engine, schema.arqs, uuid=uuid)
        assert row["state"] == "BindStarted"
        with second.running() as by:
            assert [job["subject"] for job in by.jobs._lease(5)] == [instance]
        with first.running() as by:
            assert by.jobs._lease(5) == []
        elapsed.seconds += 5
    # Any conductor can take an expired lease, at the same time for both clocks.
    elapsed.seconds += 600
    with skewed.running() as by:
        assert len(by.jobs._lease(5)) == 2


def test_failure_detector_with_clock_skew_marks_only_unreachable_agents_down(
    engine: sa.Engine, exact: Machine, skewed: Machine, elapsed: Elapsed
) -> None:
    up_host, down_host = Host("compute-1"), Host("compute-2")
    send_report(exact, up_host)
    send_report(exact, down_host)
    epoch = str(uuid4())
    silent_for = 0.0
    while silent_for <= SILENCE + WINDOW:
        with exact.running() as by:
            up_host.hello(by.hosts)
        with skewed.running() as judging:
            # The other conductor answers its own heartbeat, as the broker may decide.
            judging.watch.self_heartbeat(
                lambda: exact.hosts.service_heartbeat("cyborg-conductor", "c2", epoch, {})
            )
            judging.watch.sweep()
        down = [row["host"] for row in rows.read(engine, schema.services) if row["down_since"]]
        assert down == (["compute-2"] if silent_for >= WINDOW else [])
        elapsed.seconds += INTERVAL
        silent_for += INTERVAL


def test_liveness_evaluator_with_clock_skew_returns_the_same_state(
    engine: sa.Engine, exact: Machine, skewed: Machine
) -> None:
    send_report(exact, Host("compute-1"))
    (row,) = rows.read(engine, schema.services)
    for seconds, state in ((0, Liveness.UP), (35, Liveness.LATE), (85, Liveness.DOWN)):
        times = rows.heartbeat(row["last_seen_at"] - timedelta(seconds=seconds))
        for machine in (exact, skewed):
            with machine.running() as by:
                evaluate = by.resource.liveness_evaluator()
                assert evaluate(times["late_at"], times["down_at"]) is state

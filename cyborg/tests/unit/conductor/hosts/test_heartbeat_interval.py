# SPDX-License-Identifier: Apache-2.0
"""Interval that a conductor gives to agents, by the daemons in the database."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.hosts.failure_detector import MAX_COUNT_AGE, HeartbeatInterval
from cyborg.conductor.hosts.heartbeats import Hosts
from cyborg.core.hosts import AGENT, CONDUCTOR
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.outbox import Clock
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.hosts import Host, card
from cyborg.tests.fixtures.machine.options import make_conf


class Env:
    """Interval of a conductor, with a clock of the test."""

    def __init__(self, engine: sa.Engine, workers: int = 1) -> None:
        self.engine, self.clock = engine, Clock()
        conf = make_conf(conductor={"workers": workers})
        uow, now = UnitOfWork(engine), self.clock.now
        self.interval = build(
            HeartbeatInterval, conf, uow, now=now, clock=lambda: self.clock.seconds
        )
        self.hosts = build(Hosts, conf, uow, now=now)
        self.hosts.interval = self.interval

    def add(self, count: int, binary: str = AGENT, age: float = 0.0, **values: object) -> None:
        """Insert daemons that sent a heartbeat some seconds ago."""
        times = rows.heartbeat(self.clock.now() - timedelta(seconds=age))
        facts: dict[str, Any] = {
            "binary": binary,
            "epoch": "e",
            "status": "READY",
            "versions": {},
            "identity": {},
        }
        facts |= {"started_at": self.clock.now(), **times, **values}
        found = [{**facts, "host": str(uuid4()), "uuid": str(uuid4())} for _ in range(count)]
        with self.engine.begin() as tx:
            tx.execute(sa.insert(schema.services), found)

    def sweep(self) -> float:
        """Count the daemons again and return the interval."""
        self.clock.seconds += MAX_COUNT_AGE
        self.interval.sweep()
        return self.interval.seconds


@pytest.fixture
def env(engine: sa.Engine) -> Env:
    return Env(engine)


def test_interval_follows_numbers_of_agents_and_conductors(env: Env) -> None:
    assert env.sweep() == 10.0
    env.add(3000)
    assert env.sweep() == pytest.approx(18.0)
    env.add(1, CONDUCTOR)
    assert env.sweep() == pytest.approx(18.0)
    env.add(1, CONDUCTOR)
    assert env.sweep() == 10.0
    env.add(9000)
    assert env.sweep() == 30.0, "the maximum"


def test_agents_marked_down_and_lost_conductors_do_not_count(env: Env) -> None:
    env.add(3000)
    env.add(3000, down_since=env.clock.now())
    env.add(5, CONDUCTOR, age=200)
    assert env.sweep() == pytest.approx(18.0)


def test_agents_that_are_late_count(env: Env) -> None:
    """After an outage of all conductors, all agents return at once."""
    env.add(3000, age=10_000)
    assert env.sweep() == pytest.approx(18.0)


def test_workers_share_the_heartbeats(sqlite_engine: sa.Engine) -> None:
    env = Env(sqlite_engine, workers=2)
    env.add(4000)
    env.add(1, CONDUCTOR)
    assert env.sweep() == pytest.approx(12.0)


def test_count_is_used_for_a_while(sqlite_engine: sa.Engine) -> None:
    env = Env(sqlite_engine)
    env.sweep()
    with count_statements(sqlite_engine) as counted:
        env.interval.sweep()
        env.clock.seconds += MAX_COUNT_AGE - 1
        env.interval.sweep()
    assert len(counted) == 0
    env.clock.seconds += 1
    with count_statements(sqlite_engine) as counted:
        env.interval.sweep()
    assert len(counted) == 1


def test_heartbeat_stores_deadlines_of_the_interval_in_the_answer(env: Env) -> None:
    host = Host("h1")
    host.send(env.hosts, card())
    env.add(3000)
    env.sweep()
    for answer in (host.hello(env.hosts), host.hello(env.hosts)):
        interval = answer["interval"]
        assert interval == pytest.approx(18.0, rel=0.01)
    (row,) = rows.read(env.engine, schema.services, host="h1")
    seconds = [(row[name] - row["last_seen_at"]).total_seconds() for name in ("late_at", "down_at")]
    assert row["last_seen_at"] == env.clock.now()
    assert seconds == pytest.approx([3 * interval, 7 * interval])


def test_other_daemons_keep_the_configured_interval(env: Env) -> None:
    env.add(3000)
    env.sweep()
    answer = env.hosts.service_heartbeat(CONDUCTOR, "c1", str(uuid4()), {})
    assert answer["interval"] == 10.0
    (row,) = rows.read(env.engine, schema.services, host="c1")
    assert row["down_at"] - row["last_seen_at"] == timedelta(seconds=70)

# SPDX-License-Identifier: Apache-2.0
"""Failure detection: unreachable agents, and outages that must not mark agents down."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.hosts.failure_detector import FailureDetector, HeartbeatInterval
from cyborg.conductor.hosts.heartbeats import Hosts
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.errors import TimedOut, Unavailable
from cyborg.core.text import to_iso
from cyborg.db import schema
from cyborg.db.services import write
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.notifications import GROUP, is_enabled
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.outbox import Clock
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.hosts import Host, card
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.tiers import sample, scale

INTERVAL, LIMIT, WINDOW = 10.0, 70.0, 145.0


class Conductor:
    """Services of one conductor, with a clock of the test and notifications enabled."""

    def __init__(self, engine: sa.Engine, clock: Clock) -> None:
        conf = make_conf()
        is_enabled(conf)
        conf.set_override("driver", ["messagingv2"], group=GROUP)
        self.clock, self.woken, self.ahead = clock, 0, 0.0
        uow, notices = UnitOfWork(engine), NotificationBuilder(conf, now=self.now)
        self.interval = build(HeartbeatInterval, conf, uow, now=self.now)
        self.hosts = build(Hosts, conf, uow, self._wake, notices, now=self.now)
        self.hosts.interval = self.interval
        self.detector = build(
            FailureDetector,
            conf,
            uow,
            self._wake,
            notices,
            now=self.now,
            clock=lambda: self.clock.seconds,
        )

    def now(self) -> datetime:
        return self.clock.now() + timedelta(seconds=self.ahead)

    def send_own_heartbeat(self, other: "Conductor | None" = None) -> None:
        """Send its own heartbeat, which it or another conductor answers."""
        receiver = (other or self).hosts
        self.detector.self_heartbeat(
            lambda: receiver.service_heartbeat("cyborg-conductor", "c1", EPOCH, {})
        )

    def _wake(self) -> None:
        self.woken += 1


EPOCH = str(uuid4())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def conductor(engine: sa.Engine, clock: Clock) -> Conductor:
    return Conductor(engine, clock)


def pass_time(conductor: Conductor, seconds: float, *up_hosts: Host) -> None:
    """Advance the clock while the conductor and these agents send heartbeats."""
    for _ in range(round(seconds / INTERVAL)):
        conductor.clock.seconds += INTERVAL
        conductor.send_own_heartbeat()
        for host in up_hosts:
            host.hello(conductor.hosts)


def two_hosts(conductor: Conductor) -> tuple[Host, Host]:
    first, second = Host("h1"), Host("h2")
    for host in (first, second):
        host.send(conductor.hosts, card(0), card(1))
    mark_published(conductor)
    return first, second


def mark_published(conductor: Conductor) -> None:
    """Mark all providers as published and empty the outbox."""
    conductor.woken = 0
    with conductor.hosts.uow._engine.begin() as tx:
        tx.execute(
            sa.update(schema.providers).values(
                published_revision=schema.providers.c.revision, stale_since=None
            )
        )
        tx.execute(sa.delete(schema.outbox))


def down(engine: sa.Engine) -> dict[str, Any]:
    agents = rows.read(engine, schema.services, binary="cyborg-agent")
    return {row["host"]: row["down_since"] for row in agents if row["down_since"] is not None}


def stale(engine: sa.Engine) -> set[str]:
    return {row["host"] for row in rows.read(engine, schema.providers) if row["stale_since"]}


def events(engine: sa.Engine) -> list[tuple[str, Mapping[str, Any]]]:
    messages = [row["payload"] for row in rows.read(engine, schema.outbox)]
    return [(m["event_type"], m["payload"]["data"]) for m in messages]


def test_unreachable_agent_is_cordoned_until_its_next_heartbeat(
    engine: sa.Engine, conductor: Conductor, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = two_hosts(conductor)
    last_seen = conductor.now()
    pass_time(conductor, 60, second)
    assert conductor.detector.sweep() == 0
    pass_time(conductor, 100, second)
    assert conductor.detector.sweep() == 1
    marked_down_at = conductor.now()
    assert down(engine) == {"h1": marked_down_at}
    assert stale(engine) == {"h1"}
    assert conductor.woken == 1
    assert "1 agents marked down" in caplog.text
    assert "h1" in caplog.text
    ((event, data),) = events(engine)
    assert event == "service.down.error"
    assert (data["hostname"], data["binary"]) == ("h1", "cyborg-agent")
    assert data["last_seen_at"] == to_iso(last_seen)
    assert data["down_since"] == to_iso(marked_down_at)

    pass_time(conductor, 30, second)
    assert conductor.detector.sweep() == 0, "it is marked down once"
    mark_published(conductor)
    assert first.hello(conductor.hosts)["report"] is False
    assert down(engine) == {}
    assert stale(engine) == {"h1"}
    assert conductor.woken == 1
    ((event, data),) = events(engine)
    assert (event, data["hostname"]) == ("service.up.end", "h1")
    assert data["last_seen_at"] == to_iso(conductor.now())
    assert data["down_since"] == to_iso(marked_down_at)
    mark_published(conductor)
    with count_statements(engine) as count:
        first.hello(conductor.hosts)
    assert len(count) == 1, "an agent that is up costs one statement again"
    assert not stale(engine)


@pytest.mark.slow
def test_sweep_runs_a_constant_number_of_statements(sqlite_engine: sa.Engine, clock: Clock) -> None:
    conductor = Conductor(sqlite_engine, clock)
    costs = []
    for hosts in (1, scale(200)):
        for n in range(hosts):
            Host(f"of-{hosts}-{n}").send(conductor.hosts, card())
        pass_time(conductor, 200)
        with count_statements(sqlite_engine) as count:
            assert conductor.detector.sweep() == hosts
        costs.append(len(count))
    assert costs[0] == costs[1]
    with count_statements(sqlite_engine) as count:
        assert conductor.detector.sweep() == 0
    assert len(count) == 1


def test_sweep_whose_second_batch_fails_reports_the_first(
    sqlite_engine: sa.Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    conductor = Conductor(sqlite_engine, clock)
    two_hosts(conductor)
    pass_time(conductor, 200)
    mark_down, batches = write.mark_down, [1]

    def fail(tx: sa.Connection, now: datetime, max_timeout: timedelta, limit: int) -> Any:
        if not batches:
            raise RuntimeError("the database fails over")
        return mark_down(tx, now, max_timeout, batches.pop())

    monkeypatch.setattr(write, "mark_down", fail)
    with pytest.raises(RuntimeError):
        conductor.detector.sweep()
    (host,) = down(sqlite_engine)
    assert "1 agents marked down" in caplog.text
    assert f"devices cordoned on: {host}" in caplog.text
    assert conductor.woken == 1


def test_sweep_in_two_conductors_marks_an_agent_down_once(engine: sa.Engine, clock: Clock) -> None:
    first, second = Conductor(engine, clock), Conductor(engine, clock)
    Host("h1").send(first.hosts, card())
    for _ in range(20):
        clock.seconds += INTERVAL
        first.send_own_heartbeat(second)
        second.send_own_heartbeat(first)
    assert (first.detector.sweep(), second.detector.sweep()) == (1, 0)
    assert [event for event, _ in events(engine)] == ["service.down.error"]


def test_agent_restart_marks_no_agent_down(engine: sa.Engine, conductor: Conductor) -> None:
    first, second = two_hosts(conductor)
    pass_time(conductor, 200, first, second)
    conductor.detector.sweep()
    pass_time(conductor, 30, second)
    first.epoch, first.generation = str(uuid4()), 0
    versions = {"rpc": "1.1", "drivers": {"fake": "2.0"}, "release": "next"}
    conductor.hosts.heartbeat("h1", first.epoch, "h1:agent", "READY", [], first.digest, versions)
    for _ in range(20):
        pass_time(conductor, 10, first, second)
        assert conductor.detector.sweep() == 0
    assert down(engine) == {}
    assert events(engine) == []


@pytest.mark.parametrize("outage", [Unavailable("no broker"), TimedOut("no answer"), OSError("?")])
def test_outage_of_bus_or_database_marks_no_agent_down(
    engine: sa.Engine, conductor: Conductor, outage: Exception
) -> None:
    hosts = two_hosts(conductor)
    pass_time(conductor, 200, *hosts)

    def fail() -> Mapping[str, Any]:
        raise outage

    for _ in range(360):
        conductor.clock.seconds += INTERVAL
        with pytest.raises(type(outage)):
            conductor.detector.self_heartbeat(fail)
        assert conductor.detector.sweep() == 0
    # The outage has ended; the agents reconnect one after another.
    pass_time(conductor, 70)
    assert conductor.detector.sweep() == 0
    pass_time(conductor, 30, *hosts)
    assert conductor.detector.sweep() == 0
    pass_time(conductor, 100, hosts[0])
    assert conductor.detector.sweep() == 1, "the agent that does not reconnect is down"
    assert set(down(engine)) == {"h2"}


def test_outage_of_conductors_marks_no_agent_down(
    engine: sa.Engine, conductor: Conductor, clock: Clock
) -> None:
    hosts = two_hosts(conductor)
    pass_time(conductor, 200, *hosts)
    clock.seconds += 3600
    # The same process after a stop, and a new process.
    for restarted in (conductor, Conductor(engine, clock)):
        assert restarted.detector.sweep() == 0
        restarted.send_own_heartbeat()
        assert restarted.detector.sweep() == 0
        pass_time(restarted, WINDOW - INTERVAL)
        assert restarted.detector.sweep() == 0
        clock.seconds += 3600
    assert down(engine) == {}


@pytest.mark.parametrize("seconds", sample([3600.0, -3600.0, 75.0], 3600.0))
def test_clock_step_marks_no_agent_down(
    engine: sa.Engine, conductor: Conductor, seconds: float
) -> None:
    hosts = two_hosts(conductor)
    pass_time(conductor, 200, *hosts)
    conductor.ahead = seconds
    assert conductor.detector.sweep() == 0
    for _ in range(30):
        pass_time(conductor, INTERVAL, *hosts)
        assert conductor.detector.sweep() == 0
    assert down(engine) == {}


def test_clock_skew_of_conductors_marks_no_agent_down(
    engine: sa.Engine, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    right, wrong = Conductor(engine, clock), Conductor(engine, clock)
    wrong.ahead = 3600.0
    host = Host("h1")
    host.send(right.hosts, card())
    for n in range(60):
        clock.seconds += INTERVAL
        # The broker distributes the messages in turn.
        for conductor in (right, wrong):
            conductor.send_own_heartbeat((right, wrong)[n // 3 % 2])
        host.hello(right.hosts)
        assert (right.detector.sweep(), wrong.detector.sweep()) == (0, 0)
    assert down(engine) == {}
    assert "differs by 3600 s" in caplog.text


def test_self_heartbeat_without_time_is_accepted(engine: sa.Engine, conductor: Conductor) -> None:
    Host("h1").send(conductor.hosts, card())
    for answer in ({"interval": 10.0}, {"interval": 10.0, "now": "yesterday"}):
        for _ in range(8):
            conductor.clock.seconds += INTERVAL
            conductor.detector.self_heartbeat(lambda answer=answer: answer)  # type: ignore[misc]
    assert conductor.detector.sweep() == 1


def test_sweep_ignores_daemons_other_than_agents(engine: sa.Engine, conductor: Conductor) -> None:
    conductor.hosts.service_heartbeat("cyborg-api", "h1", str(uuid4()), {})
    pass_time(conductor, 300)
    assert conductor.detector.sweep() == 0
    assert all(row["down_since"] is None for row in rows.read(engine, schema.services))


def test_agent_with_a_longer_interval_has_a_later_deadline(
    engine: sa.Engine, conductor: Conductor
) -> None:
    first, second = two_hosts(conductor)
    pass_time(conductor, 300, first, second)
    first.hello(conductor.hosts)
    conductor.interval.seconds = 30.0
    second.hello(conductor.hosts)
    pass_time(conductor, LIMIT)
    assert conductor.detector.sweep() == 1
    assert set(down(engine)) == {"h1"}
    pass_time(conductor, 3 * LIMIT - LIMIT - INTERVAL)
    assert conductor.detector.sweep() == 0
    pass_time(conductor, INTERVAL)
    assert conductor.detector.sweep() == 1
    assert set(down(engine)) == {"h1", "h2"}


def test_agent_with_a_longer_interval_gets_its_whole_deadline_after_an_outage(
    engine: sa.Engine, conductor: Conductor
) -> None:
    """A conductor that was connected for a shorter time could not receive its heartbeats."""
    _, second = two_hosts(conductor)
    conductor.interval.seconds = 30.0
    second.hello(conductor.hosts)
    conductor.clock.seconds += 3600  # no heartbeat of the conductor arrives
    conductor.send_own_heartbeat()
    pass_time(conductor, WINDOW + INTERVAL)
    assert conductor.detector.sweep() == 1
    assert set(down(engine)) == {"h1"}
    pass_time(conductor, 2 * LIMIT - 2 * INTERVAL)
    assert conductor.detector.sweep() == 0
    pass_time(conductor, INTERVAL)
    assert conductor.detector.sweep() == 1
    assert set(down(engine)) == {"h1", "h2"}

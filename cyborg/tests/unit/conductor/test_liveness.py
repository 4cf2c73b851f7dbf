# SPDX-License-Identifier: Apache-2.0
"""Agents that fall silent and speak again, and conductors that must not blame them instead."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.hosts import Hosts
from cyborg.conductor.liveness import Watch
from cyborg.conductor.notices import Notices
from cyborg.core.errors import TimedOut, Unavailable
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.hosts import Host, card
from cyborg.fixtures.options import make_conf
from cyborg.fixtures.outbox import Clock
from cyborg.rpc.notifier import GROUP, is_wanted

INTERVAL, LIMIT, WINDOW = 10.0, 70.0, 145.0


class Conductor:
    """One conductor's rooms, by a clock of the test's, with listeners to notifications."""

    def __init__(self, engine: sa.Engine, clock: Clock) -> None:
        conf = make_conf()
        is_wanted(conf)
        conf.set_override("driver", ["messagingv2"], group=GROUP)
        self.clock, self.woken, self.ahead = clock, 0, 0.0
        uow, notices = UnitOfWork(engine), Notices(conf, now=self.now)
        self.hosts = Hosts(conf, uow, self._wake, notices=notices, now=self.now)
        self.watch = Watch(
            conf, uow, self._wake, notices, now=self.now, clock=lambda: self.clock.seconds
        )

    def now(self) -> datetime:
        return self.clock.now() + timedelta(seconds=self.ahead)

    def hear_itself(self, other: "Conductor | None" = None) -> None:
        """Say its own hello, which it or another conductor answers."""
        by = (other or self).hosts
        self.watch.hello(lambda: by.service_hello("cyborg-conductor", "c1", EPOCH, {}))

    def _wake(self) -> None:
        self.woken += 1


EPOCH = str(uuid4())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def conductor(engine: sa.Engine, clock: Clock) -> Conductor:
    return Conductor(engine, clock)


def pass_time(conductor: Conductor, seconds: float, *living: Host) -> None:
    """Let time pass in which the conductor and these agents say their hellos."""
    for _ in range(round(seconds / INTERVAL)):
        conductor.clock.seconds += INTERVAL
        conductor.hear_itself()
        for host in living:
            host.hello(conductor.hosts)


def two_hosts(conductor: Conductor) -> tuple[Host, Host]:
    first, second = Host("h1"), Host("h2")
    for host in (first, second):
        host.tell(conductor.hosts, card(0), card(1))
    settle(conductor)
    return first, second


def settle(conductor: Conductor) -> None:
    """Have Placement told of everything."""
    conductor.woken = 0
    with conductor.hosts._uow._engine.begin() as tx:
        tx.execute(
            sa.update(schema.providers).values(
                published=schema.providers.c.revision, stale_since=None
            )
        )
        tx.execute(sa.delete(schema.outbox))


def down(engine: sa.Engine) -> dict[str, Any]:
    agents = rows.read(engine, schema.services, binary="cyborg-agent")
    return {row["host"]: row["down_since"] for row in agents if row["down_since"] is not None}


def stale(engine: sa.Engine) -> set[str]:
    return {row["host"] for row in rows.read(engine, schema.providers) if row["stale_since"]}


def told(engine: sa.Engine) -> list[tuple[str, Mapping[str, Any]]]:
    messages = [row["payload"] for row in rows.read(engine, schema.outbox)]
    return [(m["event_type"], m["payload"]["data"]) for m in messages]


def test_a_silent_agents_host_is_closed_and_opened_when_it_speaks(
    engine: sa.Engine, conductor: Conductor, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = two_hosts(conductor)
    silent_since = conductor.now()
    pass_time(conductor, 60, second)
    assert conductor.watch.sweep() == 0
    pass_time(conductor, 100, second)
    assert conductor.watch.sweep() == 1
    fell = conductor.now()
    assert down(engine) == {"h1": fell}
    assert stale(engine) == {"h1"}
    assert conductor.woken == 1
    assert "1 agents are down" in caplog.text
    assert "h1" in caplog.text
    ((event, data),) = told(engine)
    assert event == "service.down.error"
    assert (data["hostname"], data["binary"]) == ("h1", "cyborg-agent")
    assert data["last_seen_at"] == silent_since.replace(tzinfo=UTC).isoformat()
    assert data["down_since"] == fell.replace(tzinfo=UTC).isoformat()

    pass_time(conductor, 30, second)
    assert conductor.watch.sweep() == 0, "once is enough"
    settle(conductor)
    assert first.hello(conductor.hosts)["report"] is False
    assert down(engine) == {}
    assert stale(engine) == {"h1"}
    assert conductor.woken == 1
    ((event, data),) = told(engine)
    assert (event, data["hostname"]) == ("service.up.end", "h1")
    assert data["last_seen_at"] == conductor.now().replace(tzinfo=UTC).isoformat()
    assert data["down_since"] == fell.replace(tzinfo=UTC).isoformat()
    settle(conductor)
    with counting(engine) as count:
        first.hello(conductor.hosts)
    assert len(count) == 1, "an agent that is up costs one statement again"
    assert not stale(engine)


def test_what_it_costs_does_not_grow(sqlite_engine: sa.Engine, clock: Clock) -> None:
    conductor = Conductor(sqlite_engine, clock)
    costs = []
    for hosts in (1, 200):
        for n in range(hosts):
            Host(f"of-{hosts}-{n}").tell(conductor.hosts, card())
        pass_time(conductor, 200)
        with counting(sqlite_engine) as count:
            assert conductor.watch.sweep() == hosts
        costs.append(len(count))
    assert costs[0] == costs[1]
    with counting(sqlite_engine) as count:
        assert conductor.watch.sweep() == 0
    assert len(count) == 1


def test_two_conductors_hold_an_agent_for_down_once(engine: sa.Engine, clock: Clock) -> None:
    one, other = Conductor(engine, clock), Conductor(engine, clock)
    Host("h1").tell(one.hosts, card())
    for _ in range(20):
        clock.seconds += INTERVAL
        one.hear_itself(other)
        other.hear_itself(one)
    assert (one.watch.sweep(), other.watch.sweep()) == (1, 0)
    assert [event for event, _ in told(engine)] == ["service.down.error"]


def test_an_agent_that_restarts_closes_nothing(engine: sa.Engine, conductor: Conductor) -> None:
    first, second = two_hosts(conductor)
    pass_time(conductor, 200, first, second)
    conductor.watch.sweep()
    pass_time(conductor, 30, second)
    first.epoch, first.generation = str(uuid4()), 0
    said = {"rpc": "1.1", "drivers": {"fake": "2.0"}, "release": "next"}
    conductor.hosts.hello("h1", first.epoch, "h1:agent", "READY", [], first.digest, said)
    for _ in range(20):
        pass_time(conductor, 10, first, second)
        assert conductor.watch.sweep() == 0
    assert down(engine) == {}
    assert told(engine) == []


@pytest.mark.parametrize("away", [Unavailable("no broker"), TimedOut("no answer"), OSError("?")])
def test_a_bus_or_database_that_is_away_for_an_hour_closes_nothing(
    engine: sa.Engine, conductor: Conductor, away: Exception
) -> None:
    hosts = two_hosts(conductor)
    pass_time(conductor, 200, *hosts)

    def fail() -> Mapping[str, Any]:
        raise away

    for _ in range(360):
        conductor.clock.seconds += INTERVAL
        with pytest.raises(type(away)):
            conductor.watch.hello(fail)
        assert conductor.watch.sweep() == 0
    # It is back; the agents find that out one by one.
    pass_time(conductor, 70)
    assert conductor.watch.sweep() == 0
    pass_time(conductor, 30, *hosts)
    assert conductor.watch.sweep() == 0
    pass_time(conductor, 100, hosts[0])
    assert conductor.watch.sweep() == 1, "and who does not is down"
    assert set(down(engine)) == {"h2"}


def test_conductors_that_were_away_for_an_hour_close_nothing(
    engine: sa.Engine, conductor: Conductor, clock: Clock
) -> None:
    hosts = two_hosts(conductor)
    pass_time(conductor, 200, *hosts)
    clock.seconds += 3600
    # The same process, which was stopped, and a new one.
    for one in (conductor, Conductor(engine, clock)):
        assert one.watch.sweep() == 0
        one.hear_itself()
        assert one.watch.sweep() == 0
        pass_time(one, WINDOW - INTERVAL)
        assert one.watch.sweep() == 0
        clock.seconds += 3600
    assert down(engine) == {}


@pytest.mark.parametrize("seconds", [3600.0, -3600.0, 75.0])
def test_a_clock_that_steps_closes_nothing(
    engine: sa.Engine, conductor: Conductor, seconds: float
) -> None:
    hosts = two_hosts(conductor)
    pass_time(conductor, 200, *hosts)
    conductor.ahead = seconds
    assert conductor.watch.sweep() == 0
    for _ in range(30):
        pass_time(conductor, INTERVAL, *hosts)
        assert conductor.watch.sweep() == 0
    assert down(engine) == {}


def test_conductors_whose_clocks_differ_close_nothing(
    engine: sa.Engine, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    right, wrong = Conductor(engine, clock), Conductor(engine, clock)
    wrong.ahead = 3600.0
    host = Host("h1")
    host.tell(right.hosts, card())
    for n in range(60):
        clock.seconds += INTERVAL
        # The broker hands the messages out in turn.
        for one in (right, wrong):
            one.hear_itself((right, wrong)[n // 3 % 2])
        host.hello(right.hosts)
        assert (right.watch.sweep(), wrong.watch.sweep()) == (0, 0)
    assert down(engine) == {}
    assert "clock is 3600 s from this one's" in caplog.text


def test_a_conductor_of_the_release_before_says_no_time(
    engine: sa.Engine, conductor: Conductor
) -> None:
    Host("h1").tell(conductor.hosts, card())
    for answer in ({"interval": 10.0}, {"interval": 10.0, "now": "yesterday"}):
        for _ in range(8):
            conductor.clock.seconds += INTERVAL
            conductor.watch.hello(lambda answer=answer: answer)  # type: ignore[misc]
    assert conductor.watch.sweep() == 1


def test_only_agents_close_anything(engine: sa.Engine, conductor: Conductor) -> None:
    conductor.hosts.service_hello("cyborg-api", "h1", str(uuid4()), {})
    pass_time(conductor, 300)
    assert conductor.watch.sweep() == 0
    assert all(row["down_since"] is None for row in rows.read(engine, schema.services))

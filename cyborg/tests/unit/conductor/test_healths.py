# SPDX-License-Identifier: Apache-2.0
"""Devices that fall sick and get well: what is written, and who is told."""

from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.conductor.hosts import Hosts
from cyborg.conductor.metrics import FromDatabase
from cyborg.core.device import Device, Health
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.reader import Reader
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.hosts import Host, card
from cyborg.fixtures.options import make_conf
from cyborg.rpc.notifier import GROUP, is_wanted

START = datetime(2026, 5, 1)
PLACE = "0000:00:00.0"


class Clock:
    """Shows what it is told to."""

    now = START

    def __call__(self) -> datetime:
        return self.now

    def later(self, seconds: float = 10.0) -> datetime:
        self.now += timedelta(seconds=seconds)
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def room(engine: sa.Engine, clock: Clock, *drivers: str) -> Hosts:
    conf = make_conf()
    is_wanted(conf)
    conf.set_override("driver", list(drivers), group=GROUP)
    return Hosts(conf, UnitOfWork(engine), now=clock)


@pytest.fixture
def hosts(engine: sa.Engine, clock: Clock) -> Hosts:
    """The conductor's room, of a cloud that listens."""
    return room(engine, clock, "log")


def sick(n: int = 0, reason: str | None = "link down", **facts: Any) -> Device:
    return card(n, health=Health.UNHEALTHY, health_reason=reason, **facts)


def told(engine: sa.Engine) -> list[tuple[str, dict[str, Any]]]:
    """Return type and object of each notification that waits."""
    return [
        (row["payload"]["event_type"], row["payload"]["payload"]["data"])
        for row in rows.read(engine, schema.outbox)
    ]


def own(engine: sa.Engine, *which: int) -> list[str]:
    """Give handles, by their place among all, to a request each; return these's uuids."""
    profile = rows.profile(engine, f"p{which}")
    given = []
    for n in which:
        uuid = rows.request(engine, profile, state="Bound", hostname="compute-1")
        (row,) = rows.read(engine, schema.requests, uuid=uuid)
        handle = rows.read(engine, schema.attach_handles)[n]
        rows.change(engine, schema.attach_handles, handle["id"], request_id=row["id"])
        given.append(uuid)
    return given


def since(engine: sa.Engine) -> list[datetime]:
    return [row["health_since"] for row in rows.read(engine, schema.devices)]


def test_since_when_is_written_when_the_health_changes(
    engine: sa.Engine, hosts: Hosts, clock: Clock
) -> None:
    host = Host()
    host.tell(hosts, card(0), card(1))
    _, other = since(engine)
    began = clock.later()
    host.tell(hosts, sick(0), card(1, serial="S1"))
    assert since(engine) == [began, other]
    clock.later()
    host.tell(hosts, sick(0, "hot"), card(1, serial="S1"))
    assert since(engine) == [began, other], "another reason is no other health"
    (row, _) = rows.read(engine, schema.devices)
    assert (row["health"], row["health_reason"]) == ("unhealthy", "hot")
    ended = clock.later()
    host.tell(hosts, card(0), sick(1, serial="S1"))
    assert since(engine) == [ended, ended]


def test_owners_and_listeners_are_told_of_each_turn_once(
    engine: sa.Engine, hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host()
    host.tell(hosts, card(0), card(1))
    mine, other = own(engine, 1, 2)
    for reason in ("link down", "hot"):
        host.tell(hosts, sick(0, reason), card(1))
    ((first, device), (second, request)) = told(engine)
    assert (first, second) == ("device.health.error", "accelerator_request.health.error")
    assert (device["hostname"], device["address"]) == ("compute-1", PLACE)
    assert (device["health"], request["uuid"]) == ("unhealthy", mine)
    sentence = f"device {PLACE} is unhealthy: link down"
    assert request["error"] == sentence
    assert f"{sentence}; held by {mine} (instance None)" in caplog.text
    host.tell(hosts, card(0), sick(1, None))
    assert [(kind, data["uuid"]) for kind, data in told(engine)[2:] if "request" in kind] == [
        ("accelerator_request.health.error", other),
        ("accelerator_request.health.end", mine),
    ]
    assert [(kind, data["health"]) for kind, data in told(engine)[2:] if "device" in kind] == [
        ("device.health.error", "unhealthy"),
        ("device.health.end", "ok"),
    ]
    assert f"device {PLACE} is well again; held by {mine}" in caplog.text


def test_one_that_is_sick_when_it_is_found_is_told(engine: sa.Engine, hosts: Hosts) -> None:
    Host().tell(hosts, card(0), sick(1))
    ((kind, data),) = told(engine)
    assert (kind, data["address"]) == ("device.health.error", "0000:01:00.0")


@pytest.mark.parametrize("before", [Health.OK, Health.UNKNOWN])
@pytest.mark.parametrize("after", [Health.OK, Health.UNKNOWN])
def test_what_closes_nothing_is_not_told(
    sqlite_engine: sa.Engine, clock: Clock, before: Health, after: Health
) -> None:
    hosts, host = room(sqlite_engine, clock, "log"), Host()
    host.tell(hosts, card(health=before))
    host.tell(hosts, card(health=after))
    assert told(sqlite_engine) == []


def _cost(engine: sa.Engine, hosts: Hosts, host: Host, *devices: Device) -> int:
    with counting(engine) as counted:
        host.tell(hosts, *devices)
    return len(counted)


@pytest.mark.parametrize("drivers", [(), ("log",)])
def test_the_cost_does_not_grow_with_the_sick(
    engine: sa.Engine, clock: Clock, drivers: tuple[str, ...]
) -> None:
    hosts, host = room(engine, clock, *drivers), Host()
    host.tell(hosts, *map(card, range(8)))
    own(engine, *range(16))
    plain = _cost(engine, hosts, host, card(0, serial="S"), *map(card, range(1, 8)))
    one = _cost(engine, hosts, host, sick(0, serial="S"), *map(card, range(1, 8)))
    all_ = _cost(engine, hosts, host, sick(0, serial="S"), *map(sick, range(1, 8)))
    assert one == all_
    assert one - plain <= (3 if drivers else 1)
    assert len(told(engine)) == (24 if drivers else 0)


def test_the_sick_are_a_metric_each(sqlite_engine: sa.Engine) -> None:
    for n, health in enumerate(("ok", "unhealthy", "unknown")):
        began = START - timedelta(seconds=90)
        address = f"0000:0{n}:00.0"
        rows.card(sqlite_engine, address=address, health=health, health_since=began)
    collector = FromDatabase(make_conf(), Reader(sqlite_engine), now=lambda: START)
    (family,) = (f for f in collector.collect() if f.name == "cyborg_device_unhealthy")
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"host": "compute-1", "address": "0000:01:00.0"}, 90.0)
    ]

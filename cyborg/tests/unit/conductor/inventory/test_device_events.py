# SPDX-License-Identifier: Apache-2.0
"""Devices that become unhealthy or healthy: rows, notifications and log."""

from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.conductor.hosts.heartbeats import Hosts
from cyborg.conductor.metrics import DatabaseCollector
from cyborg.core.inventory.device import Device, Health
from cyborg.db import schema
from cyborg.db.engine import Reader
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.notifications import GROUP, is_enabled
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.services import at, build
from cyborg.tests.fixtures.hosts.hosts import Host, card
from cyborg.tests.fixtures.machine.options import make_conf

START = datetime(2026, 5, 1)
ADDRESS = "0000:00:00.0"


class Clock:
    """Clock that shows a set time."""

    now = START

    def __call__(self) -> datetime:
        return self.now

    def later(self, seconds: float = 10.0) -> datetime:
        self.now += timedelta(seconds=seconds)
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_service(engine: sa.Engine, clock: Clock, *drivers: str) -> Hosts:
    conf = make_conf()
    is_enabled(conf)
    conf.set_override("driver", list(drivers), group=GROUP)
    return build(Hosts, conf, UnitOfWork(engine), now=clock)


@pytest.fixture
def hosts(engine: sa.Engine, clock: Clock) -> Hosts:
    """Service of the conductor with notifications enabled."""
    return make_service(engine, clock, "log")


def unhealthy(n: int = 0, reason: str | None = "link down", **facts: Any) -> Device:
    return card(n, health=Health.UNHEALTHY, health_reason=reason, **facts)


def pending_notifications(engine: sa.Engine) -> list[tuple[str, dict[str, Any]]]:
    """Return type and object of each pending notification."""
    return [
        (row["payload"]["event_type"], row["payload"]["payload"]["data"])
        for row in rows.read(engine, schema.outbox)
    ]


def bind_handles(engine: sa.Engine, *positions: int) -> list[str]:
    """Bind an ARQ to each handle at these positions; return the uuids of the ARQs."""
    profile = rows.insert_profile(engine, f"p{positions}")
    uuids = []
    for n in positions:
        uuid = rows.insert_arq(engine, profile, state="Bound", hostname="compute-1")
        (row,) = rows.read(engine, schema.arqs, uuid=uuid)
        handle = rows.read(engine, schema.attach_handles)[n]
        rows.update(engine, schema.attach_handles, handle["id"], arq_id=row["id"])
        uuids.append(uuid)
    return uuids


def health_since_values(engine: sa.Engine) -> list[datetime]:
    return [row["health_since"] for row in rows.read(engine, schema.devices)]


@pytest.mark.slow
def test_health_since_is_updated_when_health_changes(
    engine: sa.Engine, hosts: Hosts, clock: Clock
) -> None:
    host = Host()
    host.send(hosts, card(0), card(1))
    _, other = health_since_values(engine)
    started = clock.later()
    host.send(hosts, unhealthy(0), card(1, serial="S1"))
    assert health_since_values(engine) == [started, other]
    clock.later()
    host.send(hosts, unhealthy(0, "hot"), card(1, serial="S1"))
    assert health_since_values(engine) == [started, other], (
        "a change of the reason is no change of the health"
    )
    (row, _) = rows.read(engine, schema.devices)
    assert (row["health"], row["health_reason"]) == ("unhealthy", "hot")
    ended = clock.later()
    host.send(hosts, card(0), unhealthy(1, serial="S1"))
    assert health_since_values(engine) == [ended, ended]


def test_health_change_notifies_owners_and_listeners_once(
    engine: sa.Engine, hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host()
    host.send(hosts, card(0), card(1))
    first_arq, other = bind_handles(engine, 1, 2)
    for reason in ("link down", "hot"):
        host.send(hosts, unhealthy(0, reason), card(1))
    ((first, device), (second, request)) = pending_notifications(engine)
    assert (first, second) == ("device.health.error", "accelerator_request.health.error")
    assert (device["hostname"], device["address"]) == ("compute-1", ADDRESS)
    assert (device["health"], request["uuid"]) == ("unhealthy", first_arq)
    sentence = f"device {ADDRESS} is unhealthy: link down"
    assert request["error"] == sentence
    assert f"{sentence}; used by ARQs {first_arq} (under a lease, or for its host)" in caplog.text
    host.send(hosts, card(0), unhealthy(1, None))
    assert [
        (kind, data["uuid"])
        for kind, data in pending_notifications(engine)[2:]
        if "request" in kind
    ] == [
        ("accelerator_request.health.error", other),
        ("accelerator_request.health.end", first_arq),
    ]
    assert [
        (kind, data["health"])
        for kind, data in pending_notifications(engine)[2:]
        if "device" in kind
    ] == [
        ("device.health.error", "unhealthy"),
        ("device.health.end", "ok"),
    ]
    assert f"device {ADDRESS} is healthy again; used by ARQs {first_arq}" in caplog.text


def test_new_unhealthy_device_is_notified(engine: sa.Engine, hosts: Hosts) -> None:
    Host().send(hosts, card(0), unhealthy(1))
    ((kind, data),) = pending_notifications(engine)
    assert (kind, data["address"]) == ("device.health.error", "0000:01:00.0")


@pytest.mark.parametrize("before", [Health.OK, Health.UNKNOWN])
@pytest.mark.parametrize("after", [Health.OK, Health.UNKNOWN])
def test_change_between_ok_and_unknown_is_not_notified(
    sqlite_engine: sa.Engine, clock: Clock, before: Health, after: Health
) -> None:
    hosts, host = make_service(sqlite_engine, clock, "log"), Host()
    host.send(hosts, card(health=before))
    host.send(hosts, card(health=after))
    assert pending_notifications(sqlite_engine) == []


def _cost(engine: sa.Engine, hosts: Hosts, host: Host, *devices: Device) -> int:
    with count_statements(engine) as counted:
        host.send(hosts, *devices)
    return len(counted)


@pytest.mark.parametrize("drivers", [(), ("log",)])
def test_statement_count_is_independent_of_unhealthy_devices(
    engine: sa.Engine, clock: Clock, drivers: tuple[str, ...]
) -> None:
    hosts, host = make_service(engine, clock, *drivers), Host()
    host.send(hosts, *map(card, range(8)))
    bind_handles(engine, *range(16))
    plain = _cost(engine, hosts, host, card(0, serial="S"), *map(card, range(1, 8)))
    single = _cost(engine, hosts, host, unhealthy(0, serial="S"), *map(card, range(1, 8)))
    all_ = _cost(engine, hosts, host, unhealthy(0, serial="S"), *map(unhealthy, range(1, 8)))
    assert single == all_
    assert single - plain <= (3 if drivers else 1)
    assert len(pending_notifications(engine)) == (24 if drivers else 0)


def test_each_unhealthy_device_has_a_metric(sqlite_engine: sa.Engine) -> None:
    for n, health in enumerate(("ok", "unhealthy", "unknown")):
        started = START - timedelta(seconds=90)
        address = f"0000:0{n}:00.0"
        rows.insert_card(sqlite_engine, address=address, health=health, health_since=started)
    collector = DatabaseCollector(at(Reader(sqlite_engine), lambda: START))
    (family,) = (f for f in collector.collect() if f.name == "cyborg_device_unhealthy_seconds")
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"host": "compute-1", "address": "0000:01:00.0"}, 90.0)
    ]

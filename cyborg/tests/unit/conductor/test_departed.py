# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.departed import BATCH, Departed
from cyborg.conductor.hosts import Hosts
from cyborg.core.report import BackendState, BackendStatus
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.hosts import Host, card, rooms
from cyborg.fixtures.options import make_conf


def said(engine: sa.Engine) -> list[tuple[str, str, str, list[tuple[str, str, str]]]]:
    """Return address, uuid, status of each device, and uuid and attributes of its deployables."""
    found = []
    for device in rows.read(engine, schema.devices):
        parts = rows.read(engine, schema.deployables, device_id=device["id"])
        own = [
            (p["uuid"], a["uuid"], a["key"] + a["value"])
            for p in parts
            for a in rows.read(engine, schema.attributes, deployable_id=p["id"])
        ]
        found.append((device["address"], device["uuid"], device["status"], own))
    return sorted(found)


def tended(engine: sa.Engine, hosts: Hosts, host: Host, count: int = 2) -> None:
    """Have a host with devices of which an operator has said something."""
    host.tell(hosts, *[card(n) for n in range(count)])
    (first, *_) = rows.read(engine, schema.devices)
    rows.change(engine, schema.devices, first["id"], status="maintaining")
    for part in rows.read(engine, schema.deployables)[-count:]:
        rows.insert(engine, schema.attributes, deployable_id=part["id"], key="rack", value="7")
        rows.insert(engine, schema.attributes, deployable_id=part["id"], key="row", value="b")


def test_a_device_that_returns_is_what_it_was(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    tended(engine, hosts, host)
    before = said(engine)
    assert before[0][2] == "maintaining"
    assert len(before[0][3]) == 2
    host.tell(hosts)
    assert said(engine) == []
    assert len(rows.read(engine, schema.departed)) == 2
    host.tell(hosts, card(1))
    host.tell(hosts, card(1), card(0))
    assert said(engine) == before
    assert rows.read(engine, schema.departed) == []


def test_each_host_has_its_own_memory(engine: sa.Engine) -> None:
    hosts, host, other = rooms(engine), Host(), Host("compute-2")
    tended(engine, hosts, host)
    host.tell(hosts)
    other.tell(hosts, card(0))
    ((_, uuid, status, own),) = said(engine)
    assert (status, own) == ("enabled", [])
    assert uuid not in {row["uuid"] for row in rows.read(engine, schema.departed)}


def test_a_part_that_leaves_its_device_is_remembered_too(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    tended(engine, hosts, host, 1)
    before = said(engine)
    host.tell(hosts, card(0, deployables=()))
    assert said(engine)[0][3] == []
    host.tell(hosts)
    host.tell(hosts, card(0))
    assert said(engine) == before


def test_a_part_that_moves_keeps_uuid_and_attributes(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    part = replace(card().deployables[0], address="part")
    host.tell(hosts, card(0, deployables=(part,)), card(1, deployables=()))
    (was,) = rows.read(engine, schema.deployables)
    rows.insert(engine, schema.attributes, deployable_id=was["id"], key="rack", value="7")
    host.tell(hosts, card(0, deployables=()), card(1, deployables=(part,)))
    (now,) = rows.read(engine, schema.deployables)
    assert now["uuid"] == was["uuid"]
    assert now["device_id"] != was["device_id"]
    assert [a["deployable_id"] for a in rows.read(engine, schema.attributes)] == [now["id"]]
    assert rows.read(engine, schema.departed) == []


def test_going_and_coming_cost_the_same_with_more_devices(engine: sa.Engine) -> None:
    hosts = rooms(engine)
    costs = []
    for name, count in (("a", 2), ("b", 64)):
        host = Host(name)
        tended(engine, hosts, host, count)
        with counting(engine) as going:
            host.tell(hosts)
        with counting(engine) as coming:
            host.tell(hosts, *[card(n) for n in range(count)])
        costs.append((len(going), len(coming)))
    assert costs[0] == costs[1]


def test_what_is_gone_for_long_is_forgotten_in_small_batches(engine: sa.Engine) -> None:
    clock = [timeutils.utcnow()]
    conf, uow = make_conf(), UnitOfWork(engine)
    hosts = Hosts(conf, uow, now=lambda: clock[0])
    room = Departed(conf, uow, now=lambda: clock[0])
    for name in ("a", "b"):
        host = Host(name)
        host.tell(hosts, *[card(n) for n in range(BATCH // 2 + 1)])
        host.tell(hosts)
        assert room.sweep() == 0
        clock[0] += timedelta(days=20)
    assert len(rows.read(engine, schema.departed)) == BATCH + 2
    assert room.sweep() == BATCH // 2 + 1
    clock[0] += timedelta(days=20)
    assert room.sweep() == BATCH // 2 + 1
    assert rows.read(engine, schema.departed) == []


def test_forgetting_takes_no_more_than_a_batch_at_a_time(sqlite_engine: sa.Engine) -> None:
    clock = [timeutils.utcnow()]
    conf, uow = make_conf(), UnitOfWork(sqlite_engine)
    hosts = Hosts(conf, uow, now=lambda: clock[0])
    host = Host()
    host.tell(hosts, *[replace(card(0), address=f"{n}", deployables=()) for n in range(BATCH + 1)])
    host.tell(hosts)
    clock[0] += timedelta(days=31)
    room = Departed(conf, uow, now=lambda: clock[0])
    assert [room.sweep() for _ in range(3)] == [BATCH, 1, 0]


def test_nothing_is_remembered_where_that_is_not_wanted(engine: sa.Engine) -> None:
    conf, uow = make_conf(conductor={"remember": 0}), UnitOfWork(engine)
    hosts, host = Hosts(conf, uow), Host()
    tended(engine, rooms(engine), host)
    before = said(engine)
    host.tell(rooms(engine), card(0))
    host.tell(hosts)
    assert [row["address"] for row in rows.read(engine, schema.departed)] == ["0000:01:00.0"]
    assert Departed(conf, uow).sweep() == 1
    host.tell(hosts, card(0))
    ((_, uuid, status, own),) = said(engine)
    assert (status, own) == ("enabled", [])
    assert uuid != before[0][1]


def test_a_driver_that_is_renamed_changes_nothing_but_its_name(engine: sa.Engine) -> None:
    """The configured name of a backend is no part of what a device is, a restart or not."""
    hosts, host = rooms(engine), Host()
    tended(engine, hosts, host)
    before = said(engine)
    providers = {p["uuid"] for p in rows.read(engine, schema.providers)}
    host.epoch, host.generation = str(uuid4()), 0
    host.backends = (BackendState("renamed", "other", BackendStatus.READY),)
    host.tell(hosts, *[card(n, backend="renamed") for n in range(2)])
    assert {d["backend"] for d in rows.read(engine, schema.devices)} == {"renamed"}
    assert said(engine) == before
    assert {p["uuid"] for p in rows.read(engine, schema.providers)} == providers

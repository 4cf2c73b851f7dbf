# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.hosts.heartbeats import Hosts
from cyborg.conductor.inventory.devices import BATCH, Tombstones
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.hosts import Host, card, make_hosts
from cyborg.tests.fixtures.machine.options import make_conf


def inventory(engine: sa.Engine) -> list[tuple[str, str, str, list[tuple[str, str, str]]]]:
    """Return address, uuid, status of each device, and uuid and attributes of its deployables."""
    items = []
    for device in rows.read(engine, schema.devices):
        deployables = rows.read(engine, schema.deployables, device_id=device["id"])
        attributes = [
            (p["uuid"], a["uuid"], a["key"] + a["value"])
            for p in deployables
            for a in rows.read(engine, schema.attributes, deployable_id=p["id"])
        ]
        items.append((device["address"], device["uuid"], device["status"], attributes))
    return sorted(items)


def report_and_customize(engine: sa.Engine, hosts: Hosts, host: Host, count: int = 2) -> None:
    """Report devices; set the status of the first and add attributes to all."""
    host.send(hosts, *[card(n) for n in range(count)])
    (first, *_) = rows.read(engine, schema.devices)
    rows.update(engine, schema.devices, first["id"], status="maintaining")
    for deployable in rows.read(engine, schema.deployables)[-count:]:
        rows.insert(
            engine, schema.attributes, deployable_id=deployable["id"], key="rack", value="7"
        )
        rows.insert(engine, schema.attributes, deployable_id=deployable["id"], key="row", value="b")


def test_returning_device_is_restored(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    report_and_customize(engine, hosts, host)
    before = inventory(engine)
    assert before[0][2] == "maintaining"
    assert len(before[0][3]) == 2
    host.send(hosts)
    assert inventory(engine) == []
    assert len(rows.read(engine, schema.device_tombstones)) == 2
    host.send(hosts, card(1))
    host.send(hosts, card(1), card(0))
    assert inventory(engine) == before
    assert rows.read(engine, schema.device_tombstones) == []


def test_tombstones_are_separate_for_each_host(engine: sa.Engine) -> None:
    hosts, host, other = make_hosts(engine), Host(), Host("compute-2")
    report_and_customize(engine, hosts, host)
    host.send(hosts)
    other.send(hosts, card(0))
    ((_, uuid, status, attributes),) = inventory(engine)
    assert (status, attributes) == ("enabled", [])
    assert uuid not in {row["uuid"] for row in rows.read(engine, schema.device_tombstones)}


def test_removed_deployable_has_a_tombstone(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    report_and_customize(engine, hosts, host, 1)
    before = inventory(engine)
    host.send(hosts, card(0, deployables=()))
    assert inventory(engine)[0][3] == []
    host.send(hosts)
    host.send(hosts, card(0))
    assert inventory(engine) == before


def test_moved_deployable_keeps_uuid_and_attributes(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    deployable = replace(card().deployables[0], address="part")
    host.send(hosts, card(0, deployables=(deployable,)), card(1, deployables=()))
    (old,) = rows.read(engine, schema.deployables)
    rows.insert(engine, schema.attributes, deployable_id=old["id"], key="rack", value="7")
    host.send(hosts, card(0, deployables=()), card(1, deployables=(deployable,)))
    (now,) = rows.read(engine, schema.deployables)
    assert now["uuid"] == old["uuid"]
    assert now["device_id"] != old["device_id"]
    assert [a["deployable_id"] for a in rows.read(engine, schema.attributes)] == [now["id"]]
    assert rows.read(engine, schema.device_tombstones) == []


def test_removal_and_return_statement_counts_are_constant(engine: sa.Engine) -> None:
    hosts = make_hosts(engine)
    costs = []
    for name, count in (("a", 2), ("b", 64)):
        host = Host(name)
        report_and_customize(engine, hosts, host, count)
        with count_statements(engine) as going:
            host.send(hosts)
        with count_statements(engine) as coming:
            host.send(hosts, *[card(n) for n in range(count)])
        costs.append((len(going), len(coming)))
    assert costs[0] == costs[1]


def test_sweep_deletes_expired_tombstones_in_batches(engine: sa.Engine) -> None:
    clock = [timeutils.utcnow()]
    conf, uow = make_conf(), UnitOfWork(engine)
    hosts = build(Hosts, conf, uow, now=lambda: clock[0])
    tombstones = build(Tombstones, conf, uow, now=lambda: clock[0])
    for name in ("a", "b"):
        host = Host(name)
        host.send(hosts, *[card(n) for n in range(BATCH // 2 + 1)])
        host.send(hosts)
        assert tombstones.sweep() == 0
        clock[0] += timedelta(days=20)
    assert len(rows.read(engine, schema.device_tombstones)) == BATCH + 2
    assert tombstones.sweep() == BATCH // 2 + 1
    clock[0] += timedelta(days=20)
    assert tombstones.sweep() == BATCH // 2 + 1
    assert rows.read(engine, schema.device_tombstones) == []


def test_sweep_deletes_at_most_one_batch(sqlite_engine: sa.Engine) -> None:
    clock = [timeutils.utcnow()]
    conf, uow = make_conf(), UnitOfWork(sqlite_engine)
    hosts = build(Hosts, conf, uow, now=lambda: clock[0])
    host = Host()
    host.send(hosts, *[replace(card(0), address=f"{n}", deployables=()) for n in range(BATCH + 1)])
    host.send(hosts)
    clock[0] += timedelta(days=31)
    tombstones = build(Tombstones, conf, uow, now=lambda: clock[0])
    assert [tombstones.sweep() for _ in range(3)] == [BATCH, 1, 0]


def test_remember_of_zero_keeps_no_tombstones(engine: sa.Engine) -> None:
    conf, uow = make_conf(conductor={"tombstone_ttl": 0}), UnitOfWork(engine)
    hosts, host = build(Hosts, conf, uow), Host()
    report_and_customize(engine, make_hosts(engine), host)
    before = inventory(engine)
    host.send(make_hosts(engine), card(0))
    host.send(hosts)
    assert [row["address"] for row in rows.read(engine, schema.device_tombstones)] == [
        "0000:01:00.0"
    ]
    assert Tombstones(conf, uow).sweep() == 1
    host.send(hosts, card(0))
    ((_, uuid, status, attributes),) = inventory(engine)
    assert (status, attributes) == ("enabled", [])
    assert uuid != before[0][1]


def test_renamed_backend_keeps_its_devices(engine: sa.Engine) -> None:
    """The configured name of a backend does not identify its devices, even after a restart."""
    hosts, host = make_hosts(engine), Host()
    report_and_customize(engine, hosts, host)
    before = inventory(engine)
    providers = {p["uuid"] for p in rows.read(engine, schema.providers)}
    host.epoch, host.generation = str(uuid4()), 0
    host.backends = (BackendState("renamed", "other", BackendStatus.READY),)
    host.send(hosts, *[card(n, backend="renamed") for n in range(2)])
    assert {d["backend"] for d in rows.read(engine, schema.devices)} == {"renamed"}
    assert inventory(engine) == before
    assert {p["uuid"] for p in rows.read(engine, schema.providers)} == providers

# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.hosts.heartbeats import Hosts
from cyborg.db import schema
from cyborg.db.binding import claims as handle_claims
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.notifications import GROUP, is_enabled
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.hosts import Host, card, handles
from cyborg.tests.fixtures.machine.options import make_conf


@pytest.fixture
def hosts(engine: sa.Engine) -> Hosts:
    """Service of the conductor with notifications enabled."""
    conf = make_conf()
    assert not is_enabled(conf)
    conf.set_override("driver", ["log"], group=GROUP)
    return build(Hosts, conf, UnitOfWork(engine))


def bind_handles(engine: sa.Engine, *positions: int) -> list[tuple[int, str]]:
    """Bind an ARQ to each handle at these positions; return ids and uuids of the ARQs."""
    profile = rows.insert_profile(engine, f"p{positions}")
    arqs = []
    for n in positions:
        uuid = rows.insert_arq(engine, profile, state="Bound", hostname="compute-1")
        (row,) = rows.read(engine, schema.arqs, uuid=uuid)
        handle = rows.read(engine, schema.attach_handles)[n]
        rows.update(engine, schema.attach_handles, handle["id"], arq_id=row["id"])
        arqs.append((row["id"], uuid))
    return arqs


def pending_notifications(engine: sa.Engine) -> list[tuple[str, str]]:
    """Return type and subject of each pending notification."""
    return [
        (row["payload"]["event_type"], row["subject"]) for row in rows.read(engine, schema.outbox)
    ]


def test_removed_device_notifies_its_owners_only_once(
    engine: sa.Engine, hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host()
    host.send(hosts, card(0), card(1))
    (_, uuid), (_, other) = bind_handles(engine, 0, 1)
    device = rows.read(engine, schema.devices)[0]["uuid"]
    host.send(hosts)
    assert pending_notifications(engine) == [
        ("device.lost.error", device),
        ("accelerator_request.lost.error", uuid),
        ("accelerator_request.lost.error", other),
    ]
    removed_device, first, _ = [
        row["payload"]["payload"]["data"] for row in rows.read(engine, schema.outbox)
    ]
    assert (removed_device["hostname"], removed_device["address"]) == ("compute-1", "0000:00:00.0")
    assert "0000:00:00.0" in first["error"]
    assert f"device 0000:00:00.0 was removed while in use by ARQs {uuid}" in caplog.text
    host.report(hosts)
    assert len(pending_notifications(engine)) == 3, "once"


def test_removed_handle_notifies_only_its_owner(engine: sa.Engine, hosts: Hosts) -> None:
    host = Host()
    host.send(hosts, card(0, 3))
    (_, _), (_, uuid) = bind_handles(engine, 0, 2)
    deployable = replace(card().deployables[0], handles=handles(2))
    host.send(hosts, card(0, deployables=(deployable,)))
    assert pending_notifications(engine) == [("accelerator_request.lost.error", uuid)]
    host.send(hosts)
    assert [kind for kind, _ in pending_notifications(engine)][1:] == [
        "device.lost.error",
        "accelerator_request.lost.error",
    ]


def test_removed_dirty_handle_is_not_notified(engine: sa.Engine, hosts: Hosts) -> None:
    host = Host()
    host.send(hosts, card(0))
    rows.update(engine, schema.attach_handles, 1, needs_cleaning=True)
    host.send(hosts)
    assert rows.read(engine, schema.devices)[0]["draining"]
    assert pending_notifications(engine) == []


def test_removal_statement_count_is_constant(engine: sa.Engine, hosts: Hosts) -> None:
    costs = []
    for name, count in (("a", 1), ("b", 24)):
        host = Host(name)
        before = len(rows.read(engine, schema.attach_handles))
        host.send(hosts, *[card(n, 2) for n in range(count)])
        bind_handles(engine, *range(before, before + 2 * count))
        host.devices = ()
        host.hello(hosts)
        with count_statements(engine) as count_of:
            host.report(hosts)
        costs.append(len(count_of))
        assert sum("INTO outbox" in s for s in count_of.statements) == 1
        assert sum("FROM arqs" in s for s in count_of.statements) == 1
    assert costs[0] == costs[1]
    without_arqs = Host("c")
    without_arqs.send(hosts, card(0))
    with count_statements(engine) as count_of:
        without_arqs.send(hosts)
    assert not [s for s in count_of.statements if "outbox" in s or "arqs" in s]


def test_released_draining_device_is_removed_within_one_interval(
    engine: sa.Engine, hosts: Hosts
) -> None:
    host = Host()
    host.send(hosts, card(0), card(1))
    ((request, _),) = bind_handles(engine, 0)
    host.send(hosts, card(1))
    assert hosts.sweep() == 0
    with engine.begin() as tx:
        assert handle_claims.release(tx, [request], timeutils.utcnow()) == []
    # One sweep and one heartbeat of the agent, which both run once in hello_interval.
    hosts.sweep()
    host.send(hosts, card(1))
    assert [d["address"] for d in rows.read(engine, schema.devices)] == ["0000:01:00.0"]
    assert len(rows.read(engine, schema.device_tombstones)) == 1

# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import sqlalchemy as sa

from cyborg.conductor.hosts import Hosts
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.store import claims
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.hosts import Host, card, handles
from cyborg.fixtures.options import make_conf
from cyborg.rpc.notifier import GROUP, is_wanted


@pytest.fixture
def hosts(engine: sa.Engine) -> Hosts:
    """The conductor's room, of a cloud that listens."""
    conf = make_conf()
    assert not is_wanted(conf)
    conf.set_override("driver", ["log"], group=GROUP)
    return Hosts(conf, UnitOfWork(engine))


def own(engine: sa.Engine, *which: int) -> list[tuple[int, str]]:
    """Give handles, by their place among all, to a request each; return these's ids and uuids."""
    profile = rows.profile(engine, f"p{which}")
    given = []
    for n in which:
        uuid = rows.request(engine, profile, state="Bound", hostname="compute-1")
        (row,) = rows.read(engine, schema.requests, uuid=uuid)
        handle = rows.read(engine, schema.attach_handles)[n]
        rows.change(engine, schema.attach_handles, handle["id"], request_id=row["id"])
        given.append((row["id"], uuid))
    return given


def told(engine: sa.Engine) -> list[tuple[str, str]]:
    """Return type and subject of each notification that waits."""
    return [
        (row["payload"]["event_type"], row["subject"]) for row in rows.read(engine, schema.outbox)
    ]


def test_owners_are_told_of_a_device_that_vanishes_and_nobody_of_a_free_one(
    engine: sa.Engine, hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host()
    host.tell(hosts, card(0), card(1))
    (_, uuid), (_, other) = own(engine, 0, 1)
    device = rows.read(engine, schema.devices)[0]["uuid"]
    host.tell(hosts)
    assert told(engine) == [
        ("device.lost.error", device),
        ("accelerator_request.lost.error", uuid),
        ("accelerator_request.lost.error", other),
    ]
    lost, first, _ = [row["payload"]["payload"]["data"] for row in rows.read(engine, schema.outbox)]
    assert (lost["hostname"], lost["address"]) == ("compute-1", "0000:00:00.0")
    assert "0000:00:00.0" in first["error"]
    assert f"device 0000:00:00.0 is gone while it is held by {uuid}" in caplog.text
    host.report(hosts)
    assert len(told(engine)) == 3, "once"


def test_of_a_part_that_vanishes_its_owner_alone_is_told(engine: sa.Engine, hosts: Hosts) -> None:
    host = Host()
    host.tell(hosts, card(0, 3))
    (_, _), (_, uuid) = own(engine, 0, 2)
    part = replace(card().deployables[0], handles=handles(2))
    host.tell(hosts, card(0, deployables=(part,)))
    assert told(engine) == [("accelerator_request.lost.error", uuid)]
    host.tell(hosts)
    assert [kind for kind, _ in told(engine)][1:] == [
        "device.lost.error",
        "accelerator_request.lost.error",
    ]


def test_what_is_only_being_cleaned_is_nobodys_loss(engine: sa.Engine, hosts: Hosts) -> None:
    host = Host()
    host.tell(hosts, card(0))
    rows.change(engine, schema.attach_handles, 1, prepared=True)
    host.tell(hosts)
    assert rows.read(engine, schema.devices)[0]["draining"]
    assert told(engine) == []


def test_telling_costs_two_statements_for_any_number_and_none_for_none(
    engine: sa.Engine, hosts: Hosts
) -> None:
    costs = []
    for name, count in (("a", 1), ("b", 24)):
        host = Host(name)
        before = len(rows.read(engine, schema.attach_handles))
        host.tell(hosts, *[card(n, 2) for n in range(count)])
        own(engine, *range(before, before + 2 * count))
        host.devices = ()
        host.hello(hosts)
        with counting(engine) as count_of:
            host.report(hosts)
        costs.append(len(count_of))
        assert sum("INTO outbox" in s for s in count_of.statements) == 1
        assert sum("FROM requests" in s for s in count_of.statements) == 1
    assert costs[0] == costs[1]
    quiet = Host("c")
    quiet.tell(hosts, card(0))
    with counting(engine) as count_of:
        quiet.tell(hosts)
    assert not [s for s in count_of.statements if "outbox" in s or "requests" in s]


def test_what_is_released_goes_within_one_interval(engine: sa.Engine, hosts: Hosts) -> None:
    host = Host()
    host.tell(hosts, card(0), card(1))
    ((request, _),) = own(engine, 0)
    host.tell(hosts, card(1))
    assert hosts.sweep() == 0
    with engine.begin() as tx:
        assert claims.release(tx, [request]) == []
    # One look of the sweep and one hello of the agent: each comes once in hello_interval.
    hosts.sweep()
    host.tell(hosts, card(1))
    assert [d["address"] for d in rows.read(engine, schema.devices)] == ["0000:01:00.0"]
    assert len(rows.read(engine, schema.departed)) == 1

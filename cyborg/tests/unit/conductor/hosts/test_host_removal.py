# SPDX-License-Identifier: Apache-2.0
"""Removing a host that left for good, with and without requests that hold its devices."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.hosts.services import HostRemoval
from cyborg.conductor.inventory.report_handler import ReportHandler
from cyborg.core.errors import CyborgError, InUse, Invalid, NotFound, WrongState
from cyborg.core.hosts import AGENT, CONDUCTOR
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.machine.options import make_conf

NOW = timeutils.utcnow()
HOST, OTHER = "compute-1", "compute-2"
TABLES = (
    schema.services,
    schema.backends,
    schema.devices,
    schema.attach_handles,
    schema.arqs,
    schema.device_tombstones,
    schema.discoveries,
    schema.discovery_backends,
    schema.device_maintenances,
    schema.jobs,
)


def forget(
    engine: sa.Engine, host: str = HOST, *, force: bool = False, dry_run: bool | None = None
) -> dict[str, Any]:
    conf, uow = make_conf(), UnitOfWork(engine)
    arqs = Arqs(conf, uow, now=lambda: NOW)
    return build(HostRemoval, conf, uow, arqs, now=lambda: NOW).forget(host, force, dry_run)


def add_agent(engine: sa.Engine, host: str, *, down: bool) -> None:
    id_ = rows.insert_agent(engine, host)
    seen = NOW - timedelta(hours=1) if down else NOW
    values = {**rows.heartbeat(seen), "down_since": NOW if down else None}
    rows.update(engine, schema.services, id_, **values)
    rows.insert(engine, schema.backends, service_id=id_, name="b", driver="d", status="READY")


def bind(engine: sa.Engine, card: rows.Card, *, needs_cleaning: bool = False) -> str:
    """Insert an ARQ that owns the first handle of a card, and return its uuid."""
    profile = rows.insert_profile(engine, f"profile-{card.host}")
    request = rows.insert_arq(
        engine,
        profile,
        state="Bound",
        hostname=card.host,
        instance_uuid=str(uuid4()),
        instance_slot=0,
        device_rp_uuid=card.provider,
    )
    (owner,) = rows.read(engine, schema.arqs, uuid=request)
    handle = rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id)[0]
    values = {"arq_id": owner["id"], "needs_cleaning": needs_cleaning}
    rows.update(engine, schema.attach_handles, handle["id"], **values)
    return request


def hosts(engine: sa.Engine, table: sa.Table) -> list[str]:
    return sorted(row["host"] for row in rows.read(engine, table))


def assert_refused(
    engine: sa.Engine, kind: type[CyborgError], message: str, *, force: bool = False
) -> None:
    before = [rows.read(engine, table) for table in TABLES]
    with pytest.raises(kind, match=message):
        forget(engine, force=force)
    assert [rows.read(engine, table) for table in TABLES] == before


def test_dry_run_returns_the_numbers_and_removes_nothing(sqlite_engine: sa.Engine) -> None:
    add_agent(sqlite_engine, HOST, down=True)
    bind(sqlite_engine, rows.insert_card(sqlite_engine, HOST, "0000:3b:00.0"))
    tables = (*TABLES, schema.outbox)
    before = [rows.read(sqlite_engine, table) for table in tables]
    with pytest.raises(InUse):
        forget(sqlite_engine, dry_run=True)
    counted = forget(sqlite_engine, force=True, dry_run=True)
    assert [rows.read(sqlite_engine, table) for table in tables] == before
    assert counted == forget(sqlite_engine, force=True)
    assert counted["accelerator_requests"] == 1
    with pytest.raises(NotFound):
        forget(sqlite_engine, OTHER, dry_run=True)
    with pytest.raises(Invalid, match=r"^dry_run: "):
        forget(sqlite_engine, dry_run=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("force", [False, True])
def test_everything_of_a_host_is_removed(engine: sa.Engine, force: bool) -> None:
    cards = {}
    for host in (HOST, OTHER):
        add_agent(engine, host, down=True)
        cards[host] = rows.insert_card(engine, host)
        (device,) = rows.read(engine, schema.devices, host=host)
        rows.insert(
            engine,
            schema.device_maintenances,
            device_uuid=device["uuid"],
            until=NOW + timedelta(days=1),
            next_status="enabled",
        )
        rows.insert_discovery(engine, (host, "b", "IN-PROGRESS"))
        rows.insert(
            engine,
            schema.device_tombstones,
            host=host,
            address="gone",
            status="enabled",
            deployables={},
        )
    expected = {
        "services": 1,
        "devices": 1,
        "accelerator_requests": 0,
        "tombstones": 2,
        "resource_providers": 1,
    }
    assert forget(engine, force=force) == expected
    for table in (
        schema.services,
        schema.devices,
        schema.device_tombstones,
        schema.discovery_backends,
    ):
        assert hosts(engine, table) == [OTHER]
    assert len(rows.read(engine, schema.discoveries)) == 1
    (window,) = rows.read(engine, schema.device_maintenances)
    (device,) = rows.read(engine, schema.devices)
    assert window["device_uuid"] == device["uuid"]
    assert len(rows.read(engine, schema.backends)) == 1
    (provider,) = rows.read(engine, schema.providers, uuid=cards[HOST].provider)
    assert provider["evict"] is force
    assert provider["published_revision"] < provider["revision"]
    assert not rows.read(engine, schema.providers, uuid=cards[OTHER].provider)[0]["evict"]


def test_second_removal_finds_the_providers_that_are_left(engine: sa.Engine) -> None:
    add_agent(engine, HOST, down=True)
    card = rows.insert_card(engine)
    forget(engine)
    assert forget(engine, force=True)["resource_providers"] == 1
    (provider,) = rows.read(engine, schema.providers, uuid=card.provider)
    assert provider["evict"]
    with engine.begin() as tx:
        tx.execute(sa.delete(schema.providers))
    assert_refused(engine, NotFound, "nothing is stored of host compute-1")


def test_host_whose_daemon_is_up_is_kept(engine: sa.Engine) -> None:
    add_agent(engine, HOST, down=False)
    rows.insert_card(engine)
    for force in (False, True):
        assert_refused(engine, WrongState, "cyborg-agent of host .* is not down", force=force)


def test_host_is_kept_until_its_agent_is_marked_down(engine: sa.Engine) -> None:
    """After an outage of the conductors the deadlines of agents that run have passed."""
    add_agent(engine, HOST, down=True)
    rows.update(engine, schema.services, 1, down_since=None)
    for force in (False, True):
        assert_refused(engine, WrongState, "wait until a conductor has marked it down", force=force)
    rows.update(engine, schema.services, 1, down_since=NOW)
    assert forget(engine)["services"] == 1


def test_host_with_a_conductor_that_is_up_is_kept(engine: sa.Engine) -> None:
    add_agent(engine, HOST, down=True)
    values = {"epoch": str(uuid4()), "status": "READY", "started_at": NOW, **rows.heartbeat(NOW)}
    rows.insert(engine, schema.services, binary=CONDUCTOR, host=HOST, **values)
    assert_refused(engine, WrongState, "cyborg-conductor of host compute-1 is not down", force=True)
    assert hosts(engine, schema.services) == [HOST, HOST]
    assert rows.read(engine, schema.services, binary=AGENT)


def test_host_in_a_rollout_is_kept_even_with_force(engine: sa.Engine) -> None:
    add_agent(engine, HOST, down=True)
    values = {"kind": "update", "host": "", "subject": "d", "arguments": {}, "state": "pending"}
    job = rows.insert(engine, schema.jobs, **values)
    rows.insert(engine, schema.job_steps, job_id=job, host=HOST, backend="b", state="waiting")
    for force in (False, True):
        assert_refused(engine, WrongState, "1 open jobs work on it", force=force)


def test_requests_keep_their_host_except_with_force(engine: sa.Engine) -> None:
    for host in (HOST, OTHER):
        add_agent(engine, host, down=True)
    card, other = (rows.insert_card(engine, host, handles=2) for host in (HOST, OTHER))
    bound, foreign = bind(engine, card), bind(engine, other)
    assert_refused(engine, InUse, f"1 requests hold devices of this host, such as {bound}")
    assert forget(engine, force=True)["accelerator_requests"] == 1
    assert [row["uuid"] for row in rows.read(engine, schema.arqs)] == [foreign]
    assert hosts(engine, schema.devices) == [OTHER]
    events = [row["event"] for row in rows.read(engine, schema.custody_records, host=HOST)]
    assert "released" in events


def test_device_with_dirty_handles_keeps_its_tombstone(engine: sa.Engine) -> None:
    """Data of a tenant may be on it: if it ever returns, it is cleaned before its next use.

    It returns with its status "maintaining", which only its maintenance window ends.
    """
    add_agent(engine, HOST, down=True)
    card = rows.insert_card(engine, handles=1)
    (device,) = rows.read(engine, schema.devices)
    window = {"until": NOW + timedelta(days=1), "next_status": "enabled"}
    rows.insert(engine, schema.device_maintenances, device_uuid=device["uuid"], **window)
    bound = bind(engine, card, needs_cleaning=True)
    (handle,) = rows.read(engine, schema.attach_handles)
    assert forget(engine, force=True)["tombstones"] == 0
    assert rows.read(engine, schema.arqs, uuid=bound) == []
    (tombstone,) = rows.read(engine, schema.device_tombstones)
    ((dirty,),) = [body["dirty"] for body in tombstone["deployables"].values()]
    assert dirty == handle["address"]
    assert tombstone["uuid"] == device["uuid"]
    assert len(rows.read(engine, schema.device_maintenances)) == 1
    assert {row["state"] for row in rows.read(engine, schema.jobs)} == {"failed"}


def test_agent_that_registers_meanwhile_waits_for_the_end(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An imported host has devices but no agent, so that there is no row of an agent to lock."""
    rows.insert_card(engine)
    real = ReportHandler.remove_backend
    with ThreadPoolExecutor(1) as pool:
        agents: list[Future[int]] = []

        def remove_while_agent_registers(*arguments: Any, **options: Any) -> Any:
            agents.append(pool.submit(rows.insert_agent, engine, HOST))
            assert wait(agents, timeout=0.5).done == set()
            return real(*arguments, **options)

        monkeypatch.setattr(ReportHandler, "remove_backend", remove_while_agent_registers)
        removed = forget(engine)
        assert (removed["devices"], removed["services"]) == (1, 0)
        agents[0].result()
    assert rows.read(engine, schema.devices) == []
    assert hosts(engine, schema.services) == [HOST]


def test_invalid_arguments_are_refused(engine: sa.Engine) -> None:
    with pytest.raises(Invalid, match="host"):
        forget(engine, "")
    with pytest.raises(Invalid, match="force"):
        forget(engine, HOST, force="yes")  # type: ignore[arg-type]

# SPDX-License-Identifier: Apache-2.0
"""Deleting daemons that are down, with what the host of an agent had."""

from datetime import timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.binding import release
from cyborg.conductor.hosts.services import Services
from cyborg.core.errors import CyborgError, InUse, Invalid, NotFound, WrongState
from cyborg.core.hosts import AGENT
from cyborg.db import schema
from cyborg.db.jobs import write as jobs
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.machine.options import make_conf

NOW = timeutils.utcnow()
HOST = "compute-1"


def services(engine: sa.Engine) -> Services:
    return build(Services, make_conf(), UnitOfWork(engine), now=lambda: NOW)


def add_down_agent(engine: sa.Engine, host: str = HOST, /, **values: object) -> str:
    """Insert an agent that is marked down, and return its uuid."""
    hour_ago = NOW - timedelta(hours=1)
    values = {**rows.heartbeat(hour_ago), "down_since": NOW, **values}
    id_ = rows.insert_agent(engine, host)
    rows.update(engine, schema.services, id_, **values)
    rows.insert(engine, schema.backends, service_id=id_, name="b", driver="d", status="READY")
    return str(rows.read(engine, schema.services, id=id_)[0]["uuid"])


def assert_delete_refused(
    engine: sa.Engine, uuid: str, kind: type[CyborgError], message: str
) -> None:
    tables = [schema.services, schema.backends, schema.devices, schema.attach_handles]
    before = [rows.read(engine, table) for table in tables]
    with pytest.raises(kind, match=message):
        services(engine).delete(uuid)
    assert [rows.read(engine, table) for table in tables] == before


def test_service_delete_of_an_agent_removes_the_inventory_of_its_host(engine: sa.Engine) -> None:
    uuid = add_down_agent(engine)
    card, other = rows.insert_card(engine), rows.insert_card(engine, "compute-2")
    rows.insert_agent(engine, "compute-2")
    services(engine).delete(uuid)
    assert [row["host"] for row in rows.read(engine, schema.services)] == ["compute-2"]
    assert rows.read(engine, schema.backends) == []
    assert [row["host"] for row in rows.read(engine, schema.devices)] == [other.host]
    (provider,) = rows.read(engine, schema.providers, uuid=card.provider)
    assert provider["published_revision"] < provider["revision"]
    # A tombstone keeps its uuid and the settings of operators for the return of the host.
    assert [row["host"] for row in rows.read(engine, schema.device_tombstones)] == [HOST]


def test_service_delete_of_another_daemon_keeps_the_inventory(engine: sa.Engine) -> None:
    uuid = add_down_agent(engine, binary="cyborg-api", down_since=None)
    rows.insert_card(engine)
    services(engine).delete(uuid)
    assert rows.read(engine, schema.services) == []
    assert len(rows.read(engine, schema.devices)) == 1


@pytest.mark.parametrize("seconds", [0, 30])
def test_service_delete_of_a_daemon_that_is_up_or_late_is_refused(
    engine: sa.Engine, seconds: float
) -> None:
    times = rows.heartbeat(NOW - timedelta(seconds=seconds))
    for binary in ("cyborg-api", AGENT):
        uuid = add_down_agent(engine, binary=binary, down_since=None, **times)
        assert_delete_refused(
            engine, uuid, WrongState, f"{binary} of host compute-1 is not down; stop it first"
        )


def test_service_delete_of_an_agent_after_an_outage_of_the_conductors_is_refused(
    engine: sa.Engine,
) -> None:
    """The deadlines of all agents have passed; none is marked down, because they may run."""
    uuid = add_down_agent(engine, down_since=None)
    rows.insert_card(engine)
    backend = rows.read(engine, schema.backends)[0]
    desired = {"backend": "b", "driver": "d", "status": "enabled", "config": {}, "generation": 1}
    rows.insert(engine, schema.desired_backends, service_id=backend["service_id"], **desired)
    message = "is not down; stop it first, and wait until a conductor has marked it down"
    assert_delete_refused(engine, uuid, WrongState, message)
    assert len(rows.read(engine, schema.desired_backends)) == 1
    rows.update(engine, schema.services, backend["service_id"], down_since=NOW)
    services(engine).delete(uuid)
    assert rows.read(engine, schema.services) == []


def test_service_delete_while_a_request_holds_a_device_is_refused(engine: sa.Engine) -> None:
    uuid = add_down_agent(engine)
    rows.insert_card(engine, handles=2)
    request = rows.insert_arq(engine, rows.insert_profile(engine), state="Bound", hostname=HOST)
    (owner,) = rows.read(engine, schema.arqs)
    handle = rows.read(engine, schema.attach_handles)[0]
    rows.update(
        engine, schema.attach_handles, handle["id"], arq_id=owner["id"], needs_cleaning=True
    )
    assert_delete_refused(
        engine, uuid, InUse, f"1 requests hold devices of this host, such as {request}"
    )


def test_service_delete_while_a_job_is_about_the_host_is_refused(engine: sa.Engine) -> None:
    uuid = add_down_agent(engine)
    values = {"kind": "update", "host": "", "subject": "d", "arguments": {}, "state": "pending"}
    job = rows.insert(engine, schema.jobs, **values)
    rows.insert(engine, schema.job_steps, job_id=job, host=HOST, backend="b", state="waiting")
    assert_delete_refused(engine, uuid, WrongState, "1 open jobs work on this host")


def test_service_delete_skips_the_steps_that_wait_for_the_agent(engine: sa.Engine) -> None:
    uuid = add_down_agent(engine)
    values = {"kind": "update", "host": "", "subject": "d", "arguments": {}, "state": "done"}
    job = rows.insert(engine, schema.jobs, **values)
    for host, state in ((HOST, "pending_agent"), ("compute-2", "pending_agent"), (HOST, "done")):
        step = {"job_id": job, "host": host, "backend": f"b-{state}", "state": state}
        rows.insert(engine, schema.job_steps, **step)
    services(engine).delete(uuid)
    states = [row["state"] for row in rows.read(engine, schema.job_steps)]
    assert states == ["skipped", "pending_agent", "done"]


def test_service_delete_abandons_dirty_handles(engine: sa.Engine) -> None:
    uuid = add_down_agent(engine)
    rows.insert_card(engine, handles=1)
    (handle,) = rows.read(engine, schema.attach_handles)
    rows.update(engine, schema.attach_handles, handle["id"], needs_cleaning=True)
    services(engine).delete(uuid)
    assert rows.read(engine, schema.devices) == []


def test_service_delete_fails_the_jobs_of_the_host(engine: sa.Engine) -> None:
    uuid = add_down_agent(engine)
    rows.insert_card(engine, handles=1)
    rows.insert_card(engine, "compute-2", handles=1)
    rows.insert_agent(engine, "compute-2")
    for handle in rows.read(engine, schema.attach_handles):
        rows.update(engine, schema.attach_handles, handle["id"], needs_cleaning=True)
    uow = UnitOfWork(engine)
    cleaning = uow.run(
        lambda tx: release.enqueue_cleaning(
            tx, jobs.unassigned_dirty(tx, 9), now=NOW, timeout=600.0
        )
    )
    assert len(set(cleaning.values())) == 2
    # An image that is loaded again after a reboot: such a job has no deadline.
    retried = {"kind": "program", "host": HOST, "subject": "s", "arguments": {}}
    rows.insert(engine, schema.jobs, **retried)
    services(engine).delete(uuid)
    states = {(row["host"], row["state"]) for row in rows.read(engine, schema.jobs)}
    assert states == {(HOST, "failed"), ("compute-2", "pending")}


def test_service_delete_of_an_unknown_service_is_refused(engine: sa.Engine) -> None:
    assert_delete_refused(engine, str(uuid4()), NotFound, "no service")
    assert_delete_refused(engine, "x", Invalid, "uuid")


def insert_daemon(engine: sa.Engine, host: str, age: timedelta, binary: str = AGENT) -> None:
    id_ = rows.insert_agent(engine, host)
    rows.update(engine, schema.services, id_, binary=binary, **rows.heartbeat(NOW - age))
    rows.insert(engine, schema.backends, service_id=id_, name="b", driver="d", status="READY")


def test_sweep_deletes_services_without_heartbeats(engine: sa.Engine) -> None:
    ttl = timedelta(seconds=make_conf().conductor.service_ttl)
    second = timedelta(seconds=1)
    insert_daemon(engine, "api-old", ttl + second, "cyborg-api")
    insert_daemon(engine, "api-new", ttl - second, "cyborg-api")
    insert_daemon(engine, "agent-old", ttl + second)
    insert_daemon(engine, "agent-new", ttl - second)
    insert_daemon(engine, "agent-with-devices", ttl + second)
    rows.insert_card(engine, "agent-with-devices")
    assert services(engine).sweep() == 2
    hosts = {row["host"] for row in rows.read(engine, schema.services)}
    assert hosts == {"api-new", "agent-new", "agent-with-devices"}
    assert len(rows.read(engine, schema.backends)) == 3
    assert services(engine).sweep() == 0


def test_sweep_keeps_services_if_their_age_is_not_limited(engine: sa.Engine) -> None:
    insert_daemon(engine, "api-old", timedelta(days=4000), "cyborg-api")
    conf = make_conf(conductor={"service_ttl": 0})
    assert build(Services, conf, UnitOfWork(engine), now=lambda: NOW).sweep() == 0
    assert len(rows.read(engine, schema.services)) == 1

# SPDX-License-Identifier: Apache-2.0
"""Copies of a call have one effect and one answer, on each kind of database."""

import sqlite3
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.common.calls import PURGE_BATCH, CallRecords, IdempotentEndpoint, make_key
from cyborg.conductor.manager import make_handlers
from cyborg.conductor.wiring import build_conductor
from cyborg.core.errors import Conflict, CyborgError, NoHandle, NotFound, TimedOut, Unavailable
from cyborg.db import schema
from cyborg.db import unit_of_work as idempotency
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.context import MAX_ID, CallContext, CallSerializer, ContextSerializer, current
from cyborg.rpc.contract import CONDUCTOR
from cyborg.rpc.publishing import DEDUPLICATED_METHODS, IDEMPOTENT_METHODS
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.machine.options import make_conf

PROFILE = {"name": "p", "groups": [{"resources:FPGA": "1"}]}


def conductor(engine: sa.Engine) -> IdempotentEndpoint:
    """Return the RPC endpoint of a conductor."""
    unused: Any = None
    conf, uow = make_conf(nova={"send_events": False}), UnitOfWork(engine)
    return IdempotentEndpoint(
        make_handlers(build_conductor(conf, uow, unused, unused, unused)), uow
    )


def call(request_id: str | None = None) -> CallContext:
    """Return the context of a new call."""
    context = CallSerializer().serialize_context(current())
    return ContextSerializer().deserialize_context(
        context if request_id is None else {**context, "request_id": request_id}
    )


def outcome(work: Callable[[], Any]) -> Any:
    """Return the answer, or the error as sent over the bus."""
    try:
        return work()
    except CyborgError as exc:
        return exc.to_wire()


def test_each_contract_method_is_deduplicated_or_idempotent() -> None:
    """A new method is deduplicated: this list is written a second time, as a decision."""
    assert set(CONDUCTOR.methods) == DEDUPLICATED_METHODS | IDEMPOTENT_METHODS
    assert {
        *("hello", "report", "service_hello", "discovery_done", "job_done", "limits_get"),
        *("get_desired_backends", "get_guest_devices", "find_function_owners"),
        *("report_backend_outcomes", "device_context_candidates", "report_active_partitions"),
    } == IDEMPOTENT_METHODS
    assert not DEDUPLICATED_METHODS & IDEMPOTENT_METHODS


def test_only_copies_of_a_call_share_its_key() -> None:
    keys = {
        make_key(*parts)
        for parts in (
            ("c1", "r1", "m", {"a": 1, "b": 2}),
            ("c1", "r1", "m", {"b": 2, "a": 1}),
            ("c2", "r1", "m", {"a": 1, "b": 2}),
            ("c1", "r2", "m", {"a": 1, "b": 2}),
            ("c1", None, "m", {"a": 1, "b": 2}),
            ("c1", "r1", "n", {"a": 1, "b": 2}),
            ("c1", "r1", "m", {"a": 1, "b": 3}),
        )
    }
    assert len(keys) == 6
    assert {len(key) for key in keys} == {64}


def test_call_id_is_unique_and_validated() -> None:
    first, second = call(), call()
    assert first.call_id
    assert first.call_id != second.call_id
    for malformed in ("", "x" * (MAX_ID + 1), 1, None, ["x"], "a\nb"):
        assert ContextSerializer().deserialize_context({"call_id": malformed}).call_id is None


def test_copy_of_create_gets_first_answer(engine: sa.Engine) -> None:
    rows.insert_profile(engine, "fpga")
    first, second = conductor(engine), conductor(engine)
    ctxt = call()
    created = first.arq_create(ctxt, device_profile_name="fpga", project_id="p")
    assert second.arq_create(ctxt, device_profile_name="fpga", project_id="p") == created
    assert [row["uuid"] for row in rows.read(engine, schema.arqs)] == [created["arqs"][0]["uuid"]]


def test_equal_calls_are_executed_separately(engine: sa.Engine) -> None:
    rows.insert_profile(engine, "fpga")
    endpoint = conductor(engine)
    # The same REST request twice, another REST request, and two calls without an id.
    old = CallContext(overwrite=False)
    for ctxt in (call("req-1"), call("req-1"), call("req-2"), old, old):
        endpoint.arq_create(ctxt, device_profile_name="fpga", project_id="p")
    assert len(rows.read(engine, schema.arqs)) == 5
    assert len(rows.read(engine, schema.idempotency_keys)) == 3


def test_copy_of_a_report_of_guests_records_nothing(sqlite_engine: sa.Engine) -> None:
    engine = sqlite_engine
    rows.insert_card(engine, handles=1)
    rows.insert_agent(engine)
    (agent,) = rows.read(engine, schema.services)
    uuid = rows.insert_arq(
        engine, rows.insert_profile(engine), state="Bound", instance_uuid=agent["uuid"]
    )
    (arq,) = rows.read(engine, schema.arqs)
    (handle,) = rows.read(engine, schema.attach_handles)
    rows.update(engine, schema.attach_handles, handle["id"], type="VFIO", arq_id=arq["id"])
    endpoint, ctxt = conductor(engine), call()
    report = {"host": "compute-1", "epoch": agent["epoch"], "devices": [{"arq": uuid}]}
    recorded = []
    for _ in range(2):
        endpoint.report_guest_devices(ctxt, **report)
        recorded += [row["attached_at"] for row in rows.read(engine, schema.arqs)]
        rows.update(engine, schema.arqs, arq["id"], attached_at=None)
    assert recorded[0] is not None
    assert recorded[1] is None


@pytest.mark.slow
def test_copy_that_would_fail_gets_first_answer(engine: sa.Engine) -> None:
    first, second = conductor(engine), conductor(engine)
    create, delete, missing = call(), call(), call()
    created = first.device_profile_create(create, profile=PROFILE)
    assert second.device_profile_create(create, profile=PROFILE) == created
    with pytest.raises(Conflict):
        second.device_profile_create(call(), profile=PROFILE)
    assert first.device_profile_delete(delete, keys=["p"]) is None
    assert second.device_profile_delete(delete, keys=["p"]) is None
    for endpoint in (first, second):
        with pytest.raises(NotFound):
            endpoint.device_profile_delete(missing, keys=["p"])


def test_copy_after_the_deadline_gets_first_answer(sqlite_engine: sa.Engine) -> None:
    rows.insert_profile(sqlite_engine, "fpga")
    endpoint, ctxt = conductor(sqlite_engine), call()
    request = {"device_profile_name": "fpga", "project_id": "p"}
    now = UnitOfWork(sqlite_engine).clock()
    ctxt.answer_by = now + timedelta(hours=1)
    created = endpoint.arq_create(ctxt, **request)
    ctxt.answer_by = now - timedelta(hours=1)
    assert endpoint.arq_create(ctxt, **request) == created
    late = call()
    late.answer_by = ctxt.answer_by
    with pytest.raises(Unavailable, match="nothing was changed"):
        endpoint.arq_create(late, **request)


def test_copies_of_the_calls_of_a_context_have_no_second_effect(engine: sa.Engine) -> None:
    first, second = conductor(engine), conductor(engine)
    create, update, delete = call(), call(), call()
    body = {"resources": "FPGA:1"}
    created = first.device_context_create(create, context=body, project_id="p")
    assert second.device_context_create(create, context=body, project_id="p") == created
    assert len(rows.read(engine, schema.device_contexts)) == 1
    change = {"uuid": created["uuid"], "changes": {"name": "n"}, "project_scope": "p"}
    changed = first.device_context_update(update, **change)
    assert second.device_context_update(update, **change) == changed
    for endpoint in (first, second):
        endpoint.device_context_delete(delete, uuid=created["uuid"], project_scope="p")
    with pytest.raises(NotFound):
        second.device_context_delete(call(), uuid=created["uuid"], project_scope="p")


def test_rejected_call_leaves_no_record_and_can_succeed_later(engine: sa.Engine) -> None:
    endpoint, ctxt = conductor(engine), call()
    card, uuid = (
        rows.insert_card(engine, handles=0),
        rows.insert_arq(engine, rows.insert_profile(engine)),
    )
    item = {
        "request": uuid,
        "hostname": card.host,
        "device_rp_uuid": card.provider,
        "instance_uuid": str(uuid4()),
    }
    bind = {"requests": [item], "project_scope": None}
    with pytest.raises(NoHandle):
        endpoint.arq_bind(ctxt, **bind)
    assert rows.read(engine, schema.idempotency_keys) == []
    free = {"uuid": str(uuid4()), "address": "0001", "type": "TEST_PCI", "info": {}}
    rows.insert(engine, schema.attach_handles, deployable_id=card.deployable_id, **free)
    endpoint.arq_bind(ctxt, **bind)
    (request,) = rows.read(engine, schema.arqs)
    assert request["state"] == "Bound"


def test_copy_of_partial_delete_gets_first_error(
    engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, ctxt = conductor(engine), conductor(engine), call()
    uuid, unknown = rows.insert_arq(engine, rows.insert_profile(engine)), str(uuid4())
    delete = {
        "uuids": [uuid, unknown],
        "instance": None,
        "project_scope": None,
        "allow_bound": True,
    }
    errors = [
        outcome(lambda endpoint=endpoint: endpoint.arq_delete(ctxt, **delete))  # type: ignore[misc]
        for endpoint in (first, second)
    ]
    assert errors[0] == errors[1]
    assert errors[0]["code"] == "not_found"
    assert uuid not in errors[0]["message"]
    assert rows.read(engine, schema.arqs) == []
    # The record that the first call finds is its own.
    assert caplog.text.count("Duplicate of call") == 1


def test_copy_of_service_delete_gets_first_answer(engine: sa.Engine) -> None:
    id_ = rows.insert_agent(engine)
    (row,) = rows.read(engine, schema.services)
    last_seen = row["last_seen_at"] - timedelta(hours=1)
    rows.update(engine, schema.services, id_, **rows.heartbeat(last_seen), down_since=last_seen)
    first, second, ctxt = conductor(engine), conductor(engine), call()
    assert first.service_delete(ctxt, uuid=row["uuid"]) is None
    assert second.service_delete(ctxt, uuid=row["uuid"]) is None
    with pytest.raises(NotFound):
        first.service_delete(call(), uuid=row["uuid"])


@pytest.mark.parametrize("stays_unavailable", [False, True])
def test_lost_commit_answer_returns_record_or_timed_out(
    sqlite_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, stays_unavailable: bool
) -> None:
    rows.insert_profile(sqlite_engine, "fpga")
    endpoint, dialect = conductor(sqlite_engine), sqlite_engine.dialect
    commit, execute, lost = dialect.do_commit, dialect.do_execute, threading.Event()

    def lose_answer(connection: Any) -> None:
        commit(connection)
        if not lost.is_set():
            lost.set()
            raise sqlite3.OperationalError("disk I/O error")

    def refuse(*arguments: Any, **keywords: Any) -> None:
        if lost.is_set():
            raise sqlite3.OperationalError("disk I/O error")
        execute(*arguments, **keywords)

    def create() -> Any:
        return endpoint.arq_create(call(), device_profile_name="fpga", project_id="p")

    monkeypatch.setattr(dialect, "do_commit", lose_answer)
    if not stays_unavailable:
        (arq,) = create()["arqs"]
        assert [row["uuid"] for row in rows.read(sqlite_engine, schema.arqs)] == [arq["uuid"]]
        return
    with monkeypatch.context() as patch:
        patch.setattr(dialect, "do_execute", refuse)
        # Not Unavailable, which means that nothing has changed.
        with pytest.raises(TimedOut, match="unknown whether the change was made"):
            create()
    assert len(rows.read(sqlite_engine, schema.arqs)) == 1


def test_concurrent_copies_have_one_effect(engine: sa.Engine) -> None:
    rows.insert_profile(engine, "fpga")
    ctxt, answers, start = call(), [], threading.Barrier(4)

    def execute_call(endpoint: IdempotentEndpoint) -> None:
        start.wait()
        answers.append(endpoint.arq_create(ctxt, device_profile_name="fpga", project_id="p"))

    threads = [threading.Thread(target=execute_call, args=(conductor(engine),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(rows.read(engine, schema.arqs)) == 1
    assert answers == [answers[0]] * 4


def test_record_adds_one_statement(engine: sa.Engine) -> None:
    rows.insert_profile(engine, "fpga")
    endpoint = conductor(engine)
    costs = []
    for ctxt in (CallContext(overwrite=False), call(), call()):
        with count_statements(engine) as count:
            endpoint.arq_create(ctxt, device_profile_name="fpga", project_id="p")
        costs.append(len(count))
    assert costs == [costs[0], costs[0] + 1, costs[0] + 1]


def test_too_large_answer_is_not_recorded(sqlite_engine: sa.Engine) -> None:
    uow, key = UnitOfWork(sqlite_engine), make_key("c", None, "m", {})
    with idempotency.call_context(key):
        uow.run_once(lambda tx: None, lambda _: "x" * (idempotency.MAX_ANSWER + 1))
    stored = uow.run(lambda tx: idempotency.find_answer(tx, key))
    assert stored is not None
    with pytest.raises(Unavailable, match="too large"):
        idempotency.unwrap_answer(stored)


def test_sweep_deletes_old_records_in_batches(engine: sa.Engine) -> None:
    conf, uow = make_conf(rpc={"timeout": 60.0}), UnitOfWork(engine)
    now = uow.clock()
    old = [
        {"key": f"old-{n}", "response": {}, "created_at": now - timedelta(seconds=700)}
        for n in range(PURGE_BATCH + 1)
    ]
    new = [{"key": "new", "response": {}, "created_at": now - timedelta(seconds=500)}]
    with engine.begin() as tx:
        tx.execute(sa.insert(schema.idempotency_keys), [*old, *new])
    with count_statements(engine) as count:
        assert CallRecords(conf, uow).sweep() == PURGE_BATCH + 1
    assert len(count) == 4
    assert [row["key"] for row in rows.read(engine, schema.idempotency_keys)] == ["new"]
    with count_statements(engine) as count:
        assert CallRecords(conf, uow).sweep() == 0
    assert len(count) == 1

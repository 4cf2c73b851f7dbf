# SPDX-License-Identifier: Apache-2.0
"""Old rows of each kind are deleted; newer rows, and those that are in use, stay."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.core.hosts import AGENT
from cyborg.db import schema
from cyborg.db.old_rows import KINDS, OldRows
from cyborg.tests.fixtures.databases import rows

NOW = timeutils.utcnow().replace(microsecond=0)
OLD, NEW = NOW - timedelta(days=40), NOW - timedelta(days=20)
CUTOFF = NOW - timedelta(days=30)
Values = dict[str, Any]


def _job(moment: Any, **values: Any) -> Values:
    job = {"kind": "release", "host": "h", "subject": "s", "arguments": {}, "state": "done"}
    return {**job, "next_try_at": moment, **values}


def _service(moment: Any, **values: Any) -> Values:
    service = {"binary": "cyborg-conductor", "host": f"h-{uuid4()}", "epoch": str(uuid4())}
    return {
        **service,
        "status": "READY",
        "started_at": moment,
        **rows.heartbeat(moment),
        **values,
    }


# By kind: the values of a row of an age, and values with which an old row stays.
EXAMPLES: dict[str, tuple[Callable[..., Values], list[Values]]] = {
    "jobs": (_job, [{"state": "pending"}]),
    "audits": (lambda t, **v: {"state": "DONE", "updated_at": t, **v}, [{"state": "RUNNING"}]),
    "discoveries": (
        lambda t, **v: {
            "discovery_id": 1,
            "host": str(uuid4()),
            "backend": "b",
            "state": "DONE",
            "created_at": t,
            **v,
        },
        [],
    ),
    "dead-letters": (
        lambda t, **v: {
            "kind": "k",
            "subject": "s",
            "payload": {},
            "state": "dead",
            "next_try_at": t,
            "updated_at": t,
            **v,
        },
        [{"state": "pending"}],
    ),
    "call-records": (
        lambda t, **v: {"key": str(uuid4()), "response": {}, "created_at": t, **v},
        [],
    ),
    "tombstones": (
        lambda t, **v: {
            "host": "h",
            "address": str(uuid4()),
            "status": "enabled",
            "deployables": {},
            "created_at": t,
            **v,
        },
        [],
    ),
    "services": (_service, []),
}


@pytest.mark.parametrize(
    ("state", "agent", "kept"),
    [("pending_agent", True, True), ("pending_agent", False, False), ("done", True, False)],
)
def test_job_with_a_step_that_waits_for_an_agent_stays(
    sqlite_engine: sa.Engine, state: str, agent: bool, kept: bool
) -> None:
    job = rows.insert(sqlite_engine, schema.jobs, **_job(OLD, kind="update"))
    step = {"job_id": job, "host": "h", "backend": "b", "state": state}
    rows.insert(sqlite_engine, schema.job_steps, **step)
    if agent:
        rows.insert_agent(sqlite_engine, "h")
    with sqlite_engine.begin() as tx:
        assert KINDS["jobs"].purge(tx, CUTOFF, 9) == (not kept)


@pytest.mark.parametrize(("seen", "state"), [(OLD, "skipped"), (NEW, "pending_agent")])
def test_purge_of_an_agent_ends_the_steps_that_wait_for_it(
    engine: sa.Engine, seen: datetime, state: str
) -> None:
    """The generations of the next agent of this host begin again."""
    rows.insert(engine, schema.services, **_service(seen, binary=AGENT, host="h"))
    rows.insert(engine, schema.services, **_service(OLD))
    job = rows.insert(engine, schema.jobs, **_job(OLD, kind="update"))
    step = {"job_id": job, "host": "h", "backend": "b", "state": "pending_agent"}
    rows.insert(engine, schema.job_steps, **step)
    with engine.begin() as tx:
        assert KINDS["services"].purge(tx, CUTOFF, 9) == (2 if seen == OLD else 1)
    assert [row["state"] for row in rows.read(engine, schema.job_steps)] == [state]


def ids(engine: sa.Engine, kind: OldRows) -> list[int]:
    return [row["id"] for row in rows.read(engine, kind.table)]


def test_each_kind_has_an_example() -> None:
    assert EXAMPLES.keys() == KINDS.keys()


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_old_rows_are_deleted_in_batches(engine: sa.Engine, name: str) -> None:
    kind, (make, others) = KINDS[name], EXAMPLES[name]
    rows.insert_discovery(engine)  # of the old rows of this kind
    old = [rows.insert(engine, kind.table, **make(OLD)) for _ in range(3)]
    kept = [rows.insert(engine, kind.table, **make(OLD, **values)) for values in others]
    kept.append(rows.insert(engine, kind.table, **make(NEW)))
    with engine.begin() as tx:
        assert kind.count(tx, CUTOFF) == 3
        assert kind.purge(tx, CUTOFF, 2) == 2
    assert len(set(ids(engine, kind)) & set(old)) == 1
    with engine.begin() as tx:
        assert kind.purge(tx, CUTOFF, 2) == 1
        assert kind.purge(tx, CUTOFF, 2) == 0
        assert kind.count(tx, CUTOFF) == 0
    assert ids(engine, kind) == sorted(kept)


def test_discovery_is_deleted_with_the_last_of_its_backends(engine: sa.Engine) -> None:
    backends = [(f"h{number}", "b", "DONE") for number in range(3)]
    old, new = (
        rows.insert_discovery(engine, *backends, created_at=moment) for moment in (OLD, NEW)
    )
    kind = KINDS["discoveries"]
    for limit, left in ((2, [old, new]), (1, [new]), (1, [new])):
        with engine.begin() as tx:
            kind.purge(tx, CUTOFF, limit)
        assert [row["id"] for row in rows.read(engine, schema.discoveries)] == left
    with engine.begin() as tx:
        assert kind.purge(tx, NOW, 9) == 3
    assert rows.read(engine, schema.discoveries) == []


def test_jobs_that_are_waited_for_do_not_hide_others(engine: sa.Engine) -> None:
    """If they were read first, no batch would ever come to the others."""
    waiting = [rows.insert(engine, schema.jobs, **_job(OLD, state="failed")) for _ in range(3)]
    profile = rows.insert_profile(engine)
    for job in waiting:
        rows.insert_arq(engine, profile, state="Unbound", job_id=job)
    # A layout was changed, and the host has not reported the device since.
    card = rows.insert_card(engine)
    waiting.append(rows.insert(engine, schema.jobs, **_job(OLD)))
    rows.update(engine, schema.deployables, card.deployable_id, job_id=waiting[-1])
    other = rows.insert(engine, schema.jobs, **_job(OLD))
    with engine.begin() as tx:
        assert KINDS["jobs"].count(tx, CUTOFF) == 1
        assert KINDS["jobs"].purge(tx, CUTOFF, 2) == 1
    assert other not in ids(engine, KINDS["jobs"])
    assert ids(engine, KINDS["jobs"]) == waiting


def test_agent_whose_host_has_devices_stays(engine: sa.Engine) -> None:
    for host in ("with", "without"):
        rows.insert(engine, schema.services, **_service(OLD, binary="cyborg-agent", host=host))
    rows.insert_card(engine, "with")
    with engine.begin() as tx:
        assert KINDS["services"].purge(tx, CUTOFF, 9) == 1
    assert [row["host"] for row in rows.read(engine, schema.services)] == ["with"]

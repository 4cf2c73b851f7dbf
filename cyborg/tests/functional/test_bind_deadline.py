# SPDX-License-Identifier: Apache-2.0
"""A bind never commits after its caller has got an error, whatever it waits for in the database."""

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.common.calls import IdempotentEndpoint
from cyborg.conductor.manager import make_handlers
from cyborg.conductor.wiring import build_conductor
from cyborg.core.errors import Unavailable
from cyborg.db import deadline, schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.context import CallContext, CallSerializer, ContextSerializer, for_call
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import ends_within

SECONDS = 2.0  # that a caller waits; less than the server's limits of a statement and of a lock

servers = pytest.mark.parametrize("database_kind", ["mysql", "postgresql"], indirect=True)


class Env:
    """A conductor, a device with free handles, and a call that binds an ARQ to it."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine, self.uow = engine, UnitOfWork(engine)
        unused: Any = None
        conf = make_conf(nova={"send_events": False})
        conductor = build_conductor(conf, self.uow, unused, unused, unused)
        self.endpoint = IdempotentEndpoint(make_handlers(conductor), self.uow)
        self.card = rows.insert_card(engine, handles=2)
        self.arq = str(uuid4())
        rows.insert(
            engine,
            schema.arqs,
            uuid=self.arq,
            state="Initial",
            profile_id=rows.insert_profile(engine),
            device_profile_name="fpga",
            device_profile_group_id=0,
            resource_class="FPGA",
            group=dict(rows.GROUPS[0]),
        )

    def bind(self, seconds: float = SECONDS) -> None:
        """Call as an API does whose caller waits so many seconds."""
        request = {
            "request": self.arq,
            "hostname": self.card.host,
            "device_rp_uuid": self.card.provider,
            "instance_uuid": str(uuid4()),
        }
        answer_by = self.uow.clock() + timedelta(seconds=seconds)
        self.endpoint.arq_bind(context(answer_by), requests=[request], project_scope=None)

    @contextlib.contextmanager
    def locked(self, table: sa.Table) -> Iterator[threading.Event]:
        """Lock the rows of a table in another connection until the event, or the block, ends."""
        locked, release = threading.Event(), threading.Event()

        def hold() -> None:
            with self.engine.begin() as tx:
                tx.execute(sa.select(table.c.id).with_for_update())
                locked.set()
                release.wait(120)

        holder = threading.Thread(target=hold)
        holder.start()
        assert locked.wait(60)
        try:
            yield release
        finally:
            release.set()
            holder.join(60)

    def owners(self) -> tuple[str, int]:
        """Return the state of the ARQ, and the number of its handles."""
        (arq,) = rows.read(self.engine, schema.arqs)
        handles = rows.read(self.engine, schema.attach_handles)
        return arq["state"], sum(row["arq_id"] is not None for row in handles)


def context(answer_by: Any) -> CallContext:
    """Return the context of a call as a conductor receives it."""
    return ContextSerializer().deserialize_context(
        CallSerializer().serialize_context(for_call(answer_by))
    )


@pytest.fixture
def env(engine: sa.Engine) -> Env:
    return Env(engine)


def read_limits(tx: sa.Connection) -> list[Any]:
    """Return the server's limits of a connection."""
    queries = ["SELECT @@innodb_lock_wait_timeout", "SELECT @@max_statement_time"]
    if tx.dialect.name == "postgresql":
        queries = ["SHOW lock_timeout", "SHOW statement_timeout"]
    return [tx.exec_driver_sql(query).scalar_one() for query in queries]


def limits(engine: sa.Engine) -> list[Any]:
    """Return the server's limits of the one connection in the pool."""
    with engine.connect() as connection:
        return read_limits(connection)


@servers
@pytest.mark.parametrize("table", [schema.arqs, schema.attach_handles], ids=["arqs", "handles"])
def test_bind_past_its_deadline_is_rolled_back(env: Env, table: sa.Table) -> None:
    """The lock of another connection is released after the caller has given up."""
    # The server cancels in whole seconds.
    with env.locked(table), ends_within(SECONDS + 2.0), pytest.raises(Unavailable):
        env.bind()
    time.sleep(0.5)
    assert env.owners() == ("Initial", 0)
    env.bind()
    assert env.owners() == ("Bound", 1)


@servers
def test_bind_that_waits_less_than_its_deadline_commits(env: Env) -> None:
    with env.locked(schema.arqs) as release:
        threading.Timer(0.5, release.set).start()
        env.bind(60.0)
    assert env.owners() == ("Bound", 1)


def test_bind_that_arrives_late_changes_nothing(env: Env) -> None:
    with count_statements(env.engine) as count, pytest.raises(Unavailable, match="nothing was"):
        env.bind(-1.0)
    # Only a lookup: the call may be a copy of one that was executed in time.
    (statement,) = count.statements
    assert statement.startswith("SELECT idempotency_keys.response")
    assert env.owners() == ("Initial", 0)


def test_work_that_ends_after_the_deadline_is_not_committed(env: Env) -> None:
    def write(tx: sa.Connection) -> None:
        tx.execute(sa.update(schema.arqs).values(state="Bound"))
        time.sleep(0.3)

    with deadline.call_deadline(time.monotonic() + 0.2), pytest.raises(Unavailable):
        env.uow.run(write)
    assert env.owners() == ("Initial", 0)


def test_deadline_that_is_far_costs_no_statement(env: Env) -> None:
    def read(tx: sa.Connection) -> None:
        tx.execute(sa.select(schema.arqs.c.id))

    with count_statements(env.engine) as count, deadline.call_deadline(time.monotonic() + 30):
        env.uow.run(read)
    assert len(count.statements) == 1


@servers
@pytest.mark.parametrize("fails", [False, True])
def test_connection_has_its_former_limits_after_a_call(engine: sa.Engine, fails: bool) -> None:
    before, within = limits(engine), list[Any]()

    def work(tx: sa.Connection) -> None:
        within.extend(read_limits(tx))
        if fails:
            raise KeyError

    with (
        contextlib.suppress(KeyError),
        deadline.call_deadline(time.monotonic() + SECONDS),
    ):
        UnitOfWork(engine).run(work)
    assert within != before
    assert limits(engine) == before

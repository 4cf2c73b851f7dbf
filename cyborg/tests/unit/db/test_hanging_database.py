# SPDX-License-Identifier: Apache-2.0
"""Tests of hanging databases: a connection without data fails within the configured time."""

import pytest
import sqlalchemy as sa

from cyborg.core.errors import TimedOut, Unavailable
from cyborg.db import schema
from cyborg.db.engine import Reader
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.bus.proxy import Fault
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.hanging_database import (
    SECONDS,
    SLACK,
    HangingDatabase,
    limited_engine,
)
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import ends_within
from cyborg.tests.fixtures.machine.tiers import sample

pytestmark = pytest.mark.services

FAULTS = (Fault.HALF_OPEN, Fault.FROZEN, Fault.RESET)


@pytest.mark.parametrize("fault", sample(FAULTS, Fault.HALF_OPEN))
def test_read_of_a_hanging_database_fails_and_recovers(
    hanging: HangingDatabase, fault: Fault
) -> None:
    url, proxy = hanging
    reader = Reader(make_conf(database={"connection": url}, api={"database_timeout": SECONDS}))
    count = sa.select(sa.func.count()).select_from(schema.services)
    with reader.connect() as connection:
        assert connection.scalar(count) == 0
    proxy.begin(fault)
    for _ in range(2):  # on an open connection, then on a new one
        with (
            ends_within(2 * SECONDS + SLACK),
            pytest.raises(Unavailable),
            reader.connect() as connection,
        ):
            connection.scalar(count)
    proxy.end()
    with reader.connect() as connection:
        assert connection.scalar(count) == 0
    reader.close()


def test_broken_idle_connection_is_replaced_before_use(
    hanging: HangingDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, proxy = hanging
    engine = limited_engine(url)
    with engine.connect() as connection:
        connection.execute(sa.select(1))
    proxy.begin(Fault.HALF_OPEN)
    proxy.end()
    monkeypatch.setattr("cyborg.db.engine.IDLE_SECONDS", 0.0)
    with engine.connect() as connection:
        assert connection.scalar(sa.select(1)) == 1
    engine.dispose()


@pytest.mark.parametrize("fault", sample(FAULTS, Fault.HALF_OPEN))
def test_transaction_that_hangs_before_its_commit_changes_nothing(
    hanging: HangingDatabase, fault: Fault
) -> None:
    url, proxy = hanging
    engine = limited_engine(url)
    calls = []

    def work(tx: sa.Connection) -> None:
        calls.append(1)
        tx.execute(sa.insert(schema.device_profiles).values(uuid="u", name="n", groups=[]))
        proxy.begin(fault)
        tx.execute(sa.select(schema.device_profiles)).all()

    with pytest.raises(Unavailable) as raised:
        UnitOfWork(engine).run(work)
    assert not isinstance(raised.value, TimedOut)
    assert len(calls) == 1
    proxy.end()
    assert rows.read(engine, schema.device_profiles) == []
    engine.dispose()


def test_commit_without_an_answer_raises_timed_out_without_retry(hanging: HangingDatabase) -> None:
    url, proxy = hanging
    engine = limited_engine(url)
    calls = []

    def work(tx: sa.Connection) -> None:
        calls.append(1)
        tx.execute(sa.insert(schema.device_profiles).values(uuid="u", name="n", groups=[]))
        proxy.begin(Fault.RESET)  # the commit arrives, its answer does not

    with pytest.raises(TimedOut, match="it is unknown whether the change was made"):
        UnitOfWork(engine).run(work)
    assert len(calls) == 1
    proxy.end()
    assert len(rows.read(engine, schema.device_profiles)) == 1
    engine.dispose()

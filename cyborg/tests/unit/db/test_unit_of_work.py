# SPDX-License-Identifier: Apache-2.0
"""Tests of UnitOfWork: atomic transactions, and retries after conflicts."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa
from oslo_db.exception import DBDeadlock, DBDuplicateEntry

from cyborg.core.errors import TimedOut, Unavailable, WrongState
from cyborg.db import schema
from cyborg.db.unit_of_work import MAX_ATTEMPTS, UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import engine_of

profiles = schema.device_profiles
servers = pytest.mark.parametrize(
    "database_kind",
    [pytest.param(kind, marks=pytest.mark.services) for kind in ("mysql", "postgresql")],
    indirect=True,
)


def _describe(tx: sa.Connection, id_: int, text: str) -> None:
    tx.execute(sa.update(profiles).where(profiles.c.id == id_).values(description=text))


def _descriptions(engine: sa.Engine) -> list[str | None]:
    return [row["description"] for row in rows.read(engine, profiles)]


def test_run_commits_and_returns_the_result(engine: sa.Engine) -> None:
    first = rows.insert_profile(engine)

    def describe(tx: sa.Connection) -> str:
        _describe(tx, first, "kept")
        return "answer"

    assert UnitOfWork(engine).run(describe) == "answer"
    assert _descriptions(engine) == ["kept"]


def test_error_rolls_back_and_propagates(engine: sa.Engine) -> None:
    first = rows.insert_profile(engine)
    calls = []

    def work(tx: sa.Connection) -> None:
        calls.append(1)
        _describe(tx, first, "half")
        raise WrongState("no")

    with pytest.raises(WrongState):
        UnitOfWork(engine).run(work)
    assert _descriptions(engine) == [None]
    assert len(calls) == 1


def test_duplicate_key_is_not_retried(engine: sa.Engine) -> None:
    rows.insert_profile(engine, "taken")
    calls = []

    def work(tx: sa.Connection) -> None:
        calls.append(1)
        row = {"uuid": "u", "name": "taken", "groups": []}
        tx.execute(sa.insert(profiles).values(row))

    with pytest.raises(DBDuplicateEntry):
        UnitOfWork(engine).run(work)
    assert len(calls) == 1


@servers
def test_deadlock_victim_is_retried(engine: sa.Engine) -> None:
    ids = [rows.insert_profile(engine, "one"), rows.insert_profile(engine, "two")]
    both_locked = threading.Barrier(2)
    pauses: list[float] = []
    uow = UnitOfWork(engine, sleep=pauses.append)

    def swap(order: list[int], text: str) -> int:
        calls = 0

        def work(tx: sa.Connection) -> int:
            nonlocal calls
            calls += 1
            _describe(tx, order[0], text)
            if calls == 1:
                both_locked.wait(30)
            _describe(tx, order[1], text)
            return calls

        return uow.run(work)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(swap, ids, "a"), pool.submit(swap, ids[::-1], "b")]
        retries = sum(future.result() for future in futures) - 2
    # Usually one: a victim that does not really pause can meet the other transaction again.
    assert retries >= 1
    assert len(pauses) == retries
    assert _descriptions(engine) in (["a", "a"], ["b", "b"])


def test_certification_failure_in_a_commit_is_retried(engine: sa.Engine) -> None:
    """Galera rolls a transaction back that conflicts with one of another node."""
    attempts: list[int] = []

    def refuse_first(connection: sa.Connection) -> None:
        if len(attempts) == 1:
            connection.connection.rollback()
            raise DBDeadlock

    def work(tx: sa.Connection) -> None:
        attempts.append(1)
        tx.execute(sa.insert(profiles).values(uuid="u", name="one", groups=[]))

    sa.event.listen(engine, "commit", refuse_first)
    UnitOfWork(engine, sleep=lambda seconds: None).run(work)
    assert len(attempts) == 2
    assert [row["name"] for row in rows.read(engine, profiles)] == ["one"]


@pytest.mark.parametrize("number", [1047, 1180])
def test_commit_without_quorum_is_not_retried(engine: sa.Engine, number: int) -> None:
    """A node of a Galera cluster may have sent the change to the others before it was cut off."""
    attempts: list[int] = []

    def refuse(connection: sa.Connection) -> None:
        connection.connection.rollback()
        origin = pymysql.err.OperationalError(number, "Got error 6 during COMMIT")
        raise sa.exc.OperationalError("COMMIT", None, origin)

    def work(tx: sa.Connection) -> None:
        attempts.append(1)
        tx.execute(sa.insert(profiles).values(uuid="u", name="one", groups=[]))

    sa.event.listen(engine, "commit", refuse)
    with pytest.raises(TimedOut, match="did not confirm a commit"):
        UnitOfWork(engine).run(work)
    assert len(attempts) == 1


def test_busy_sqlite_is_retried(sqlite_engine: sa.Engine) -> None:
    first = rows.insert_profile(sqlite_engine)
    url = sqlite_engine.url.update_query_dict({"timeout": "0.01"})
    with engine_of(str(url)) as busy_engine:
        holder = sqlite_engine.connect()
        holder.begin()
        # The other writer ends in the pause after the first failure.
        uow = UnitOfWork(busy_engine, sleep=lambda _: holder.close())
        uow.run(lambda tx: _describe(tx, first, "done"))
    assert _descriptions(sqlite_engine) == ["done"]


def test_database_that_stays_busy_is_unavailable(sqlite_engine: sa.Engine) -> None:
    url = sqlite_engine.url.update_query_dict({"timeout": "0.01"})
    pauses: list[float] = []
    with (
        engine_of(str(url)) as busy_engine,
        sqlite_engine.begin(),
        pytest.raises(Unavailable, match="busy"),
    ):
        UnitOfWork(busy_engine, sleep=pauses.append).run(lambda tx: None)
    assert len(pauses) == MAX_ATTEMPTS - 1


@pytest.mark.parametrize(
    "url",
    ["mysql+pymysql://root@127.0.0.1:1/x", "postgresql+psycopg2://postgres@127.0.0.1:1/x"],
)
def test_unreachable_database_is_unavailable(url: str) -> None:
    with engine_of(url) as engine, pytest.raises(Unavailable, match="does not answer"):
        UnitOfWork(engine).run(lambda tx: None)


def test_broken_idle_connection_is_replaced(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyborg.db.engine.IDLE_SECONDS", 0.0)
    first = rows.insert_profile(engine)
    uow = UnitOfWork(engine)
    uow.run(lambda tx: None)
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        driver.close()
    uow.run(lambda tx: _describe(tx, first, "done"))
    assert _descriptions(engine) == ["done"]


def test_database_without_tables_names_the_command(empty_engine: sa.Engine) -> None:
    with pytest.raises(Unavailable, match="cyborg-dbsync upgrade"):
        UnitOfWork(empty_engine).run(lambda tx: tx.execute(sa.select(profiles)))


def test_missing_directory_is_unavailable(tmp_path: Path) -> None:
    with engine_of(f"sqlite:///{tmp_path}/no/x.db") as engine, pytest.raises(Unavailable):
        UnitOfWork(engine).run(lambda tx: None)


def test_invalid_statement_is_not_unavailable(engine: sa.Engine) -> None:
    with pytest.raises(Exception, match="nonsense") as raised:
        UnitOfWork(engine).run(lambda tx: tx.execute(sa.text("SELECT nonsense FROM arqs")))
    assert not isinstance(raised.value, Unavailable)

# SPDX-License-Identifier: Apache-2.0
"""A transaction happens once and whole, whatever others do at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from oslo_db.exception import DBDuplicateEntry

from cyborg.core.errors import Unavailable, WrongState
from cyborg.db import schema
from cyborg.db.unit_of_work import ATTEMPTS, UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.databases import engine_of

profiles = schema.device_profiles
servers = pytest.mark.parametrize(
    "database_url",
    [pytest.param(kind, marks=pytest.mark.services) for kind in ("mysql", "postgresql")],
    indirect=True,
)


def _describe(tx: sa.Connection, id_: int, text: str) -> None:
    tx.execute(sa.update(profiles).where(profiles.c.id == id_).values(description=text))


def _descriptions(engine: sa.Engine) -> list[str | None]:
    return [row["description"] for row in rows.read(engine, profiles)]


def test_what_work_returns_comes_back_and_stays(engine: sa.Engine) -> None:
    first = rows.profile(engine)
    uow = UnitOfWork(engine)
    assert uow.run(lambda tx: _describe(tx, first, "kept") or "answer") == "answer"
    assert _descriptions(engine) == ["kept"]


def test_an_error_undoes_everything_and_passes_on(engine: sa.Engine) -> None:
    first = rows.profile(engine)
    calls = []

    def work(tx: sa.Connection) -> None:
        calls.append(1)
        _describe(tx, first, "half")
        raise WrongState("no")

    with pytest.raises(WrongState):
        UnitOfWork(engine).run(work)
    assert _descriptions(engine) == [None]
    assert len(calls) == 1


def test_a_duplicate_is_told_as_such_and_not_tried_again(engine: sa.Engine) -> None:
    rows.profile(engine, "taken")
    calls = []

    def work(tx: sa.Connection) -> None:
        calls.append(1)
        row = {"uuid": "u", "name": "taken", "groups": []}
        tx.execute(sa.insert(profiles).values(row))

    with pytest.raises(DBDuplicateEntry):
        UnitOfWork(engine).run(work)
    assert len(calls) == 1


@servers
def test_the_loser_of_a_deadlock_tries_again(engine: sa.Engine) -> None:
    ids = [rows.profile(engine, "one"), rows.profile(engine, "two")]
    both_hold_one = threading.Barrier(2)
    pauses: list[float] = []
    uow = UnitOfWork(engine, sleep=pauses.append)

    def swap(order: list[int], text: str) -> int:
        calls = 0

        def work(tx: sa.Connection) -> int:
            nonlocal calls
            calls += 1
            _describe(tx, order[0], text)
            if calls == 1:
                both_hold_one.wait(30)
            _describe(tx, order[1], text)
            return calls

        return uow.run(work)

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(swap, ids, "a"), pool.submit(swap, ids[::-1], "b")]
        calls = sorted(end.result() for end in ends)
    assert calls == [1, 2]
    assert len(pauses) == 1
    assert _descriptions(engine) in (["a", "a"], ["b", "b"])


def test_a_busy_sqlite_is_tried_again(sqlite_engine: sa.Engine) -> None:
    first = rows.profile(sqlite_engine)
    url = sqlite_engine.url.update_query_dict({"timeout": "0.01"})
    with engine_of(str(url)) as impatient:
        holder = sqlite_engine.connect()
        holder.begin()
        # The pause after the first failure is where the other writer comes to its end.
        uow = UnitOfWork(impatient, sleep=lambda _: holder.close())
        uow.run(lambda tx: _describe(tx, first, "done"))
    assert _descriptions(sqlite_engine) == ["done"]


def test_a_database_that_stays_busy_is_unavailable(sqlite_engine: sa.Engine) -> None:
    url = sqlite_engine.url.update_query_dict({"timeout": "0.01"})
    pauses: list[float] = []
    with (
        engine_of(str(url)) as impatient,
        sqlite_engine.begin(),
        pytest.raises(Unavailable, match="busy"),
    ):
        UnitOfWork(impatient, sleep=pauses.append).run(lambda tx: None)
    assert len(pauses) == ATTEMPTS - 1


@pytest.mark.parametrize(
    "url",
    ["mysql+pymysql://root@127.0.0.1:1/x", "postgresql+psycopg2://postgres@127.0.0.1:1/x"],
)
def test_a_database_that_is_away_is_unavailable(url: str) -> None:
    with engine_of(url) as engine, pytest.raises(Unavailable, match="does not answer"):
        UnitOfWork(engine).run(lambda tx: None)


def test_a_connection_that_broke_in_between_does_no_harm(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyborg.db.engine.IDLE_SECONDS", 0.0)
    first = rows.profile(engine)
    uow = UnitOfWork(engine)
    uow.run(lambda tx: None)
    with engine.connect() as connection:
        connection.connection.driver_connection.close()
    uow.run(lambda tx: _describe(tx, first, "done"))
    assert _descriptions(engine) == ["done"]


def test_a_database_without_tables_says_what_to_do(empty_engine: sa.Engine) -> None:
    with pytest.raises(Unavailable, match="cyborg-dbsync upgrade"):
        UnitOfWork(empty_engine).run(lambda tx: tx.execute(sa.select(profiles)))


def test_a_directory_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with engine_of(f"sqlite:///{tmp_path}/no/x.db") as engine, pytest.raises(Unavailable):
        UnitOfWork(engine).run(lambda tx: None)


def test_a_fault_of_ours_is_no_unavailability(engine: sa.Engine) -> None:
    with pytest.raises(Exception, match="nonsense") as raised:
        UnitOfWork(engine).run(lambda tx: tx.execute(sa.text("SELECT nonsense FROM requests")))
    assert not isinstance(raised.value, Unavailable)

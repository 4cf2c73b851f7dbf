# SPDX-License-Identifier: Apache-2.0
"""Tests of database engines: creation without a connection, equal behaviour on all databases."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from oslo_db.exception import DBReferenceError
from sqlalchemy.pool import QueuePool

from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.core.log import get_logger
from cyborg.db import schema
from cyborg.db.engine import Reader, make_engine, wait_until_ready
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.machine.options import make_conf

LOG = get_logger(__name__)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (None, "is not set"),
        ("", "is not set"),
        ("secret nonsense", "is not usable"),
        ("mysql+secret://u:secret@h/d", "is not usable"),
        ("mssql+pyodbc://u:secret@h/d", "expected mysql"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("mysql+pymysql://u:secret@h/d?init_command=SET+x", "init_command"),
    ],
)
def test_unusable_url_is_rejected_without_its_password(url: str | None, expected: str) -> None:
    with pytest.raises(Misconfigured, match=expected) as raised:
        make_engine(make_conf(database={"connection": url}))
    assert "[database] connection" in raised.value.message
    assert "secret" not in raised.value.message


def test_make_engine_does_not_connect() -> None:
    with engine_of("mysql+pymysql://root@127.0.0.1:1/x") as engine:
        assert isinstance(engine.pool, QueuePool)
        assert engine.pool.checkedout() == 0


def test_mariadb_url_uses_the_mysql_dialect() -> None:
    with engine_of("mariadb+pymysql://root@127.0.0.1:1/x") as engine:
        assert engine.dialect.name == "mysql"


def test_isolation_level_is_reset_after_a_reader(engine: sa.Engine) -> None:
    expected = "SERIALIZABLE" if engine.dialect.name == "sqlite" else "READ COMMITTED"
    for _ in range(2):
        with engine.connect() as connection:
            assert connection.get_isolation_level() == expected
        with Reader(engine).connect() as connection:
            connection.execute(sa.select(schema.services)).all()


@pytest.mark.services
@pytest.mark.parametrize(("options", "expected"), [("", "off"), ("-c jit=on", "on")])
def test_postgresql_does_not_compile_statements(
    tmp_path: Path, options: str, expected: str
) -> None:
    with fresh_database("postgresql", tmp_path) as text:
        url = sa.make_url(text).update_query_dict({"options": options} if options else {})
        with (
            engine_of(url.render_as_string(hide_password=False)) as engine,
            engine.connect() as connection,
        ):
            assert connection.exec_driver_sql("SHOW jit").scalar_one() == expected


def test_sqlite_is_configured_for_concurrency(sqlite_engine: sa.Engine) -> None:
    with sqlite_engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 10_000
    assert isinstance(sqlite_engine.pool, sa.QueuePool)


def test_concurrent_writes_are_serialized(sqlite_engine: sa.Engine) -> None:
    id_ = rows.insert_profile(sqlite_engine)
    profiles = schema.device_profiles
    uow = UnitOfWork(sqlite_engine)

    def append(_: int) -> None:
        def work(tx: sa.Connection) -> None:
            text = tx.scalar(sa.select(profiles.c.description)) or ""
            tx.execute(sa.update(profiles).values(description=text + "x"))

        uow.run(work)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(append, range(32)))
    assert rows.read(sqlite_engine, profiles, id=id_)[0]["description"] == "x" * 32


def test_reader_sees_committed_data_without_waiting(engine: sa.Engine) -> None:
    profiles = schema.device_profiles
    reader = Reader(engine)
    with engine.begin() as tx, reader.connect() as connection:
        tx.execute(sa.insert(profiles).values(uuid="u", name="n", groups=[]))
        assert connection.execute(sa.select(profiles.c.name)).all() == []
        tx.commit()
        assert connection.execute(sa.select(profiles.c.name)).all() == [("n",)]


def test_reader_from_configuration_cannot_write(engine: sa.Engine) -> None:
    rows.insert_profile(engine)
    url = engine.url.set(query={}).render_as_string(hide_password=False)
    reader = Reader(make_conf(database={"connection": url}))
    with reader.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(schema.device_profiles))
        with pytest.raises(Exception, match=r"(?i)read.?only"):
            connection.execute(sa.delete(schema.device_profiles))
    reader.close()
    assert len(rows.read(engine, schema.device_profiles)) == 1


def test_reader_uses_the_replica(sqlite_engine: sa.Engine) -> None:
    conf = make_conf(
        database={
            "connection": "mysql+pymysql://root@127.0.0.1:1/x",
            "slave_connection": str(sqlite_engine.url),
        }
    )
    reader = Reader(conf)
    with reader.connect() as connection:
        assert connection.execute(sa.select(schema.services)).all() == []
    reader.close()


@pytest.mark.parametrize(
    "url",
    ["mysql+pymysql://root@127.0.0.1:1/x", "postgresql+psycopg2://postgres@127.0.0.1:1/x"],
)
def test_reader_of_an_unreachable_database_raises_unavailable(url: str) -> None:
    reader = Reader(make_conf(database={"connection": url}))
    with pytest.raises(Unavailable, match="does not answer") as raised, reader.connect():
        pass
    assert "127.0.0.1" not in raised.value.message


def test_foreign_key_violation_raises_reference_error(engine: sa.Engine) -> None:
    with pytest.raises(DBReferenceError):
        rows.insert(
            engine, schema.backends, service_id=12345, name="b", driver="fake", status="READY"
        )


def test_wait_until_ready_waits_for_the_tables(
    empty_engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    class Stop(threading.Event):
        """Event whose wait creates the tables, as an operator's upgrade does."""

        def wait(self, timeout: float | None = None) -> bool:
            schema.metadata.create_all(empty_engine)
            return False

    with caplog.at_level(logging.INFO):
        assert wait_until_ready(empty_engine, Stop(), LOG) is True
    messages = [record.getMessage() for record in caplog.records if record.name == __name__]
    assert len(messages) == 2
    assert "cyborg-dbsync upgrade" in messages[0]


@pytest.mark.slow
def test_wait_until_ready_ends_when_stopped(caplog: pytest.LogCaptureFixture) -> None:
    class Stop(threading.Event):
        waits = 0

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            assert 0 < timeout <= 10
            self.waits += 1
            if self.waits == 6:
                self.set()
            return self.is_set()

    with engine_of("mysql+pymysql://root@127.0.0.1:1/x") as engine:
        assert wait_until_ready(engine, Stop(), LOG) is False
    assert len([r for r in caplog.records if r.name == __name__]) == 1  # once a minute

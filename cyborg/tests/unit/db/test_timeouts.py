# SPDX-License-Identifier: Apache-2.0
"""Tests of the time limits of servers and drivers, and of the operator's overrides."""

import threading
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Unavailable
from cyborg.db import schema
from cyborg.db.timeouts import Timeouts
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.bus.proxy import Fault
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.hanging_database import (
    SECONDS,
    SLACK,
    HangingDatabase,
    limited_engine,
)
from cyborg.tests.fixtures.machine.processes import ends_within

pytestmark = pytest.mark.services


def test_server_cancels_a_statement_at_its_limit(hanging: HangingDatabase) -> None:
    url, _ = hanging
    engine = limited_engine(url)
    # That of the client is only 0.2 s longer: a busy server can answer after it.
    sa.event.listen(engine, "connect", _extend_client_limit)
    sleep = "pg_sleep(30)" if engine.dialect.name == "postgresql" else "sleep(30)"
    # MariaDB's sleep() returns 1 when it is cancelled; any other statement fails.
    with ends_within(SECONDS + SLACK):
        try:
            found = UnitOfWork(engine).run(lambda tx: tx.exec_driver_sql(f"SELECT {sleep}").all())
        except Unavailable as exc:
            assert "timed out" in exc.message
        else:
            assert engine.dialect.name == "mysql"
            assert found == [(1,)]
    engine.dispose()


def _extend_client_limit(connection: Any, _record: object) -> None:
    name = "_read_timeout" if hasattr(connection, "_read_timeout") else "limit"
    assert getattr(connection, name) == SECONDS
    setattr(connection, name, 60.0)


def test_transaction_is_retried_after_a_lock_timeout(hanging: HangingDatabase) -> None:
    url, _ = hanging
    holder, engine = limited_engine(url, bounded=False), limited_engine(url)
    profile = rows.insert_profile(holder)
    profiles = schema.device_profiles
    update = sa.update(profiles).where(profiles.c.id == profile)
    locked, release = threading.Event(), threading.Event()

    def hold_lock() -> None:
        with holder.begin() as tx:
            tx.execute(update.values(description="first"))
            locked.set()
            release.wait(60)

    thread = threading.Thread(target=hold_lock)
    thread.start()
    assert locked.wait(120)

    # The other transaction ends in the pause after the lock timeout.
    def end_transaction(_seconds: float) -> None:
        release.set()
        thread.join()

    uow = UnitOfWork(engine, sleep=end_transaction)
    uow.run(lambda tx: tx.execute(update.values(description="second")))
    assert [row["description"] for row in rows.read(engine, profiles)] == ["second"]
    holder.dispose()
    engine.dispose()


def test_server_releases_the_locks_of_a_lost_client(
    hanging: HangingDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, proxy = hanging
    monkeypatch.setattr("cyborg.db.timeouts.MIN_TRANSACTION_SECONDS", 2.0)
    engine = limited_engine(url)
    profile = rows.insert_profile(engine)
    profiles = schema.device_profiles
    update = sa.update(profiles).where(profiles.c.id == profile)

    def work(tx: sa.Connection) -> None:
        tx.execute(update.values(description="lost"))
        proxy.begin(Fault.HALF_OPEN)
        tx.execute(sa.select(profiles)).all()

    with pytest.raises(Unavailable):
        UnitOfWork(engine).run(work)
    proxy.end()
    with ends_within(2.0 + 3 * SECONDS + SLACK):
        UnitOfWork(engine).run(lambda tx: tx.execute(update.values(description="kept")))
    engine.dispose()


def test_unbounded_engine_has_no_limits(hanging: HangingDatabase) -> None:
    url, _ = hanging
    engine = limited_engine(url, bounded=False)
    with engine.connect() as connection:
        assert _settings(connection) in ({"0"}, {"0.0"})
    engine.dispose()


def test_url_parameters_take_precedence(hanging: HangingDatabase) -> None:
    url = sa.make_url(hanging[0])
    if url.get_backend_name() == "mysql":
        engine = limited_engine(
            str(url.update_query_dict({"read_timeout": "77", "write_timeout": "78"}))
        )
        with engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            assert (driver._read_timeout, driver._write_timeout) == (77, 78)
    else:
        overrides = {"options": "-c statement_timeout=77000", "tcp_user_timeout": "78000"}
        engine = limited_engine(str(url.update_query_dict({**overrides, "keepalives_idle": "79"})))
        with engine.connect() as connection:
            assert _settings(connection) == {"77s"}
            driver = connection.connection.driver_connection
            assert driver is not None
            parameters = driver.get_dsn_parameters()
            assert (parameters["tcp_user_timeout"], parameters["keepalives_idle"]) == (
                "78000",
                "79",
            )
            assert parameters["keepalives_count"] == "3"
    engine.dispose()


def test_limits_are_ordered_for_each_timeout() -> None:
    for seconds in (2.0, 3.0, 10.0, 60.0):
        limits = Timeouts(seconds)
        assert limits.lock <= limits.server < limits.statement < limits.transaction
        assert limits.connect <= 5.0


def _settings(connection: sa.Connection) -> set[str]:
    name = "statement_timeout" if connection.dialect.name == "postgresql" else None
    query = f"SHOW {name}" if name else "SELECT @@max_statement_time"
    return {str(connection.exec_driver_sql(query).scalar())}

# SPDX-License-Identifier: Apache-2.0
"""Errors of the servers that stand for an outage, as the driver and oslo.db raise them."""

import os
from collections.abc import Iterator

import pymysql.err
import pytest
import sqlalchemy as sa
from oslo_db import exception as oslo

from cyborg.core.errors import Unavailable
from cyborg.db.engine import make_engine
from cyborg.db.errors import to_unavailable, translate
from cyborg.tests.fixtures.machine.options import make_conf


def raised(number: int, text: str) -> sa.exc.DBAPIError:
    """Return SQLAlchemy's form of an error of MariaDB or MySQL, which oslo.db passes on."""
    origin = pymysql.err.OperationalError(number, text)
    return sa.exc.OperationalError("UPDATE t SET a = 1", None, origin)


@pytest.mark.parametrize("wrap", [lambda error: error, oslo.DBError])
@pytest.mark.parametrize(
    ("number", "text", "message"),
    [
        (1040, "Too many connections", "accepts no more connections: increase its maximum"),
        (1047, "WSREP has not yet prepared node for application use", "does not answer"),
        (1180, "Error while appending streaming replication fragment", "does not answer"),
        (1290, "The MariaDB server is running with the --read-only option", "is read-only"),
        (1836, "Running in read-only mode", "is read-only"),
    ],
)
def test_outage_is_unavailable(number: int, text: str, message: str, wrap: object) -> None:
    assert callable(wrap)
    unavailable = to_unavailable(wrap(raised(number, text)))
    assert unavailable is not None
    assert message in unavailable.message


def test_bug_is_not_unavailable() -> None:
    assert to_unavailable(raised(1054, "Unknown column")) is None


_USER = "cyborg_one_connection"
_CREATE = {
    "mysql": (
        f"CREATE USER '{_USER}'@'%' IDENTIFIED BY 'secret' WITH MAX_USER_CONNECTIONS 1",
        f"GRANT SELECT ON *.* TO '{_USER}'@'%'",
    ),
    "postgresql": (f"CREATE ROLE {_USER} LOGIN PASSWORD 'secret' CONNECTION LIMIT 1",),
}
_DROP = {
    "mysql": f"DROP USER IF EXISTS '{_USER}'@'%'",
    "postgresql": f"DROP ROLE IF EXISTS {_USER}",
}


@pytest.fixture
def limited_url(engine: sa.Engine) -> Iterator[sa.URL]:
    """Return the URL of a user who may have one connection."""
    kind = engine.dialect.name
    if kind == "sqlite":
        pytest.skip("SQLite has no limit of connections")
    # Other workers of the tests have the same server.
    user = f"{_USER}_{os.getpid()}"
    with engine.begin() as tx:
        for statement in _CREATE[kind]:
            tx.execute(sa.text(statement.replace(_USER, user)))
    try:
        yield engine.url.set(username=user, password="secret", query={})
    finally:
        with engine.begin() as tx:
            tx.execute(sa.text(_DROP[kind].replace(_USER, user)))


def test_server_without_free_connections_is_named(limited_url: sa.URL) -> None:
    conf = make_conf(database={"connection": limited_url.render_as_string(hide_password=False)})
    first, second = make_engine(conf), make_engine(conf)
    try:
        with first.connect() as connection:
            assert connection.scalar(sa.text("SELECT 1")) == 1
            with pytest.raises(Unavailable, match="accepts no more connections"), translate():
                second.connect()
    finally:
        first.dispose()
        second.dispose()


def test_pools_of_three_processes_fit_into_the_default_of_mariadb() -> None:
    conf = make_conf()
    assert 3 * (conf.database.max_pool_size + conf.database.max_overflow) < 151


def test_write_to_a_standby_is_unavailable(engine: sa.Engine) -> None:
    if engine.dialect.name != "postgresql":
        pytest.skip("the errors of the other kinds are tested above")
    with engine.begin() as tx:
        # As on a standby, and on a primary that is being replaced.
        tx.execute(sa.text("SET TRANSACTION READ ONLY"))
        with pytest.raises(Unavailable, match="is read-only"), translate():
            tx.execute(sa.text("DELETE FROM services"))

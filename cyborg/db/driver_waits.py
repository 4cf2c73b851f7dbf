# SPDX-License-Identifier: Apache-2.0
"""Client-side time limits, set as each database driver supports them: see ``timeouts``."""

import contextlib
import select
import time
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from cyborg.db.timeouts import Timeouts

_PYMYSQL_LIMIT = "_read_timeout"
"""PyMySQL reads it before each read from its socket; there is no public way to change it."""


def limit_engine(engine: sa.Engine, limits: Timeouts) -> None:
    """Apply the limits to each new connection of an engine.

    PyMySQL, mysqlclient and psycopg2 support all limits. With any other driver only the limits
    apply that the database server enforces.
    """
    driver = engine.dialect.driver

    def connect_mysql(dialect: Any, record: Any, args: Any, arguments: dict[str, Any]) -> Any:
        configured = {name: arguments.pop(name, None) for name in ("read_timeout", "write_timeout")}
        arguments.setdefault("connect_timeout", _whole(limits.connect, driver))
        arguments["read_timeout"] = configured["read_timeout"] or _whole(limits.connect, driver)
        arguments["write_timeout"] = configured["write_timeout"] or _whole(limits.statement, driver)
        connection = dialect.connect(*args, **arguments)
        with contextlib.closing(connection.cursor()) as cursor:
            cursor.execute(_mysql_settings(limits))
        if configured["read_timeout"] is None and hasattr(connection, _PYMYSQL_LIMIT):
            setattr(connection, _PYMYSQL_LIMIT, limits.statement)
        return connection

    def connect_psycopg2(dialect: Any, record: Any, args: Any, arguments: dict[str, Any]) -> Any:
        connection = dialect.connect(*args, **arguments, connection_factory=factory)
        connection.limit = limits.statement
        return connection

    if engine.dialect.name == "mysql":
        sa.event.listen(engine, "do_connect", connect_mysql)
    elif driver == "psycopg2":
        factory = _psycopg2_factory(limits.connect)
        sa.event.listen(engine, "do_connect", connect_psycopg2)


@contextlib.contextmanager
def temporary_timeout(connection: Any, seconds: float) -> Iterator[None]:
    """Limit the wait for an answer on a driver's connection to ``seconds`` within the block."""
    name = "limit" if hasattr(connection, "limit") else _PYMYSQL_LIMIT
    previous = getattr(connection, name, None)
    if previous is None:
        yield
        return
    setattr(connection, name, min(previous, seconds))
    try:
        yield
    finally:
        setattr(connection, name, previous)


def _mysql_settings(limits: Timeouts) -> str:
    # MariaDB executes the text within /*M! */; MySQL ignores it as a comment.
    return (
        f"SET SESSION innodb_lock_wait_timeout = {max(1, round(limits.lock))} "
        f"/*M! , max_statement_time = {limits.server:.3f}"
        f" , idle_transaction_timeout = {round(limits.transaction)} */"
    )


def _whole(seconds: float, driver: str) -> float:
    """Return seconds in the form that a driver accepts: mysqlclient accepts only integers."""
    return seconds if driver == "pymysql" else max(1, round(seconds))


def _psycopg2_factory(connect_seconds: float) -> type:
    """Return a connection class that waits for the server no longer than its ``limit``.

    libpq itself waits without limit. psycopg2 accepts a callback that replaces this wait. The
    callback is global to the process, so it also serves connections of other code, without a limit.
    """
    import psycopg2
    from psycopg2 import extensions

    class Connection(extensions.connection):  # type: ignore[misc]
        """Connection that waits at most ``limit`` seconds for an answer of the server."""

        limit = connect_seconds

    def wait(connection: Any) -> None:
        seconds: float | None = getattr(connection, "limit", None)
        while (state := connection.poll()) != extensions.POLL_OK:
            # The limit restarts with each part of an answer, so that a long answer is no timeout.
            events = select.POLLIN if state == extensions.POLL_READ else select.POLLOUT
            if not _ready(connection.fileno(), events, seconds):
                # psycopg2 closes the connection if its callback raises.
                raise psycopg2.OperationalError(
                    f"no answer from the database server in {seconds:g} s"
                )

    extensions.set_wait_callback(wait)
    return Connection


def _ready(descriptor: int, events: int, seconds: float | None) -> bool:
    # Not select(), which fails for a descriptor above 1023.
    poller = select.poll()
    poller.register(descriptor, events)
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        left = None if end is None else max(0.0, end - time.monotonic())
        if poller.poll(None if left is None else left * 1000):
            return True
        if left is not None and left <= 0:
            return False

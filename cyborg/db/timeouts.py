# SPDX-License-Identifier: Apache-2.0
"""Time limits of a database connection: a connection that receives no data fails with an error.

Without time limits, a network that drops packets, or a stopped server process, blocks the waiting
thread until the kernel ends the connection, which takes minutes to hours. The limits, from the
shortest to the longest:

::

    lock          a row lock that another transaction holds       set in the server
    connect       the TCP connection, and each step of the login
    server        one statement                                   set in the server
    statement     an answer of which no further byte arrives      set in the client
    transaction   an open transaction without a statement         set in the server

A working server reaches its limits first, rolls back and keeps the connection. The client's limits
are for a server or a network that does not work. With the last limit the server releases the locks
of a client that has disappeared. ``limit_engine`` sets the limits in the client.

``StallDetector`` fails the transactions of a database that no longer answers within seconds. A
statement may wait for ``[conductor] database_timeout``: a row lock, or a node that leaves a
Galera cluster, blocks a database that works. So a transaction that takes long proves nothing by
itself. After PROBE_AFTER seconds a new connection is tried. If the database does not answer it
either, the waiting connections are closed, and further transactions fail at once until a probe is
answered. Alternative not taken: a shorter timeout of all statements, which fails those that only
wait.
"""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from cyborg.core.errors import Unavailable
from cyborg.core.log import get_logger
from cyborg.db import errors

LOG = get_logger(__name__)

MAX_CONNECT_SECONDS = 3.0
MIN_TRANSACTION_SECONDS = 15.0

_KEEPALIVE = {
    "keepalives": "1",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
}

_LIMITS = "cyborg_limits"  # the execution option of an engine that has its limits

_SERVER_SHARE = 0.9  # of the client's limit: the server gives up first, and keeps the connection

# PyMySQL reads it before each read from its socket; there is no public way to change it.
_PYMYSQL_LIMIT = "_read_timeout"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits derived from one configured value, all in seconds."""

    statement: float

    @property
    def connect(self) -> float:
        """Return the limit of the TCP connection and of each step of the login."""
        return min(MAX_CONNECT_SECONDS, self.statement * 2 / 3)

    @property
    def lock(self) -> float:
        """Return how long a statement waits for a row lock before the transaction is retried."""
        return self.statement / 2

    @property
    def server(self) -> float:
        """Return the limit of one statement in the server."""
        return self.statement * _SERVER_SHARE

    @property
    def transaction(self) -> float:
        """Return how long a transaction may stay open between two statements."""
        return max(MIN_TRANSACTION_SECONDS, 1.5 * self.statement)


# Limits of an engine without limits, such as that of migrations; MySQL knows no infinity.
UNLIMITED = Timeouts(86400.0)


def with_server_limit(seconds: float) -> Timeouts:
    """Return the limits under which the server cancels a statement after ``seconds``."""
    return Timeouts(seconds / _SERVER_SHARE)


def keep_alive(url: sa.URL) -> sa.URL:
    """Return a PostgreSQL URL with TCP keep-alive, to detect a lost peer within seconds.

    Parameters that the URL already has do not change.
    """
    missing = {name: value for name, value in _KEEPALIVE.items() if name not in url.query}
    return url.update_query_dict(missing)


def limit_url(url: sa.URL, limits: Timeouts) -> sa.URL:
    """Return a PostgreSQL URL with the limits of statements, locks and open transactions.

    Values that the URL already has take precedence: ``tcp_user_timeout``, and each setting in
    ``options``, since the last ``-c`` counts.
    """
    settings = {
        "lock_timeout": limits.lock,
        "statement_timeout": limits.server,
        "idle_in_transaction_session_timeout": limits.transaction,
    }
    flags = [f"-c {name}={_milliseconds(value)}" for name, value in settings.items()]
    query = {"options": " ".join([*flags, str(url.query.get("options", ""))]).strip()}
    if "tcp_user_timeout" not in url.query:
        query["tcp_user_timeout"] = str(_milliseconds(limits.statement))
    return url.update_query_dict(query)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def limit_engine(engine: sa.Engine, limits: Timeouts) -> None:
    """Apply the limits to each new connection of an engine.

    PyMySQL, mysqlclient and psycopg2 support all limits. With any other driver only the limits
    apply that the database server enforces.
    """
    engine.update_execution_options(**{_LIMITS: limits})
    driver = engine.dialect.driver

    def connect_mysql(dialect: Any, record: Any, args: Any, arguments: dict[str, Any]) -> Any:
        configured = {name: arguments.pop(name, None) for name in ("read_timeout", "write_timeout")}
        arguments.setdefault("connect_timeout", _whole(limits.connect, driver))
        # Each step of the login is a read. PyMySQL gets the limit of statements after the login;
        # mysqlclient cannot change its limit, so it has that of statements from the start.
        read = limits.connect if driver == "pymysql" else limits.statement
        arguments["read_timeout"] = configured["read_timeout"] or _whole(read, driver)
        arguments["write_timeout"] = configured["write_timeout"] or _whole(limits.statement, driver)
        connection = dialect.connect(*args, **arguments)
        with contextlib.closing(connection.cursor()) as cursor:
            cursor.execute(_mysql_settings(limits))
        if configured["read_timeout"] is None and hasattr(connection, _PYMYSQL_LIMIT):
            setattr(connection, _PYMYSQL_LIMIT, limits.statement)
        return connection

    def connect_psycopg2(dialect: Any, record: Any, args: Any, arguments: dict[str, Any]) -> Any:
        # ``factory`` is set below, for this driver only: without the driver it cannot be made.
        connection = dialect.connect(*args, **arguments, connection_factory=factory)
        # The login is over, for which the limit of the class has applied.
        connection.limit = limits.statement
        return connection

    if engine.dialect.name == "mysql":
        sa.event.listen(engine, "do_connect", connect_mysql)
    elif driver == "psycopg2":
        factory = _psycopg2_factory(limits.connect)
        sa.event.listen(engine, "do_connect", connect_psycopg2)


def limits_of(tx: sa.Connection) -> Timeouts:
    """Return the limits of a connection of an engine."""
    limits: Timeouts = tx.get_execution_options().get(_LIMITS, UNLIMITED)
    return limits


@contextlib.contextmanager
def statement_limits(tx: sa.Connection, limits: Timeouts) -> Iterator[None]:
    """Set the server's limits of the statements within the block; SQLite has none."""
    if tx.dialect.name == "postgresql":
        lock, server = _milliseconds(limits.lock), _milliseconds(limits.server)
        # One statement for both. "true" is SET LOCAL: the end of the transaction restores them.
        tx.exec_driver_sql(
            f"SELECT set_config('lock_timeout', '{lock}', true), "
            f"set_config('statement_timeout', '{server}', true)"
        )
    if tx.dialect.name not in ("mysql", "mariadb"):
        yield
        return
    former = limits_of(tx)
    tx.exec_driver_sql(_mysql_settings(limits))
    try:
        yield
    except BaseException:
        # The limits are of the session, and a connection whose transaction has failed may not take
        # the former ones: it must not return to the pool.
        tx.invalidate()
        raise
    tx.exec_driver_sql(_mysql_settings(former))


@contextlib.contextmanager
def temporary_timeout(connection: Any, seconds: float) -> Iterator[None]:
    """Limit the wait for an answer on a driver's connection to ``seconds`` within the block."""
    name = "limit" if hasattr(connection, "limit") else _PYMYSQL_LIMIT
    previous = getattr(connection, name, None)
    # The driver has no limit that can be changed, or the engine of the connection has no limits.
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
    # Here: the driver is installed only where PostgreSQL is used.
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
    """Return whether a descriptor is ready within ``seconds``; None waits without limit.

    ``events`` are those of ``poll``.
    """
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


# Seconds between two calls of ``run_once``.
PROBE_INTERVAL = 0.5

# Seconds of a transaction after which the database is probed.
PROBE_AFTER = 2.0


@dataclass(eq=False, slots=True)
class Transaction:
    """An open transaction; ``connection`` is that of the driver, None while it is opened."""

    started_at: float
    connection: Any = None


class StallDetector:
    """Detector of a database that does not answer. Thread-safe.

    Call ``run_once`` every PROBE_INTERVAL seconds.
    """

    def __init__(
        self, probe: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``probe`` returns whether the database answers. ``clock`` returns monotonic seconds."""
        self._probe = probe
        self._clock = clock
        self._lock = threading.Lock()
        self._open: set[Transaction] = set()
        self._stalled = False
        self._succeeded = 0

    @contextlib.contextmanager
    def watch(self) -> Iterator[Transaction]:
        """Watch a transaction within the block. Raise Unavailable if the database is stalled."""
        if self._stalled:
            raise Unavailable(errors.NO_ANSWER)
        transaction = Transaction(self._clock())
        with self._lock:
            self._open.add(transaction)
        succeeded = 0  # a failed one may have got no answer
        try:
            yield transaction
            succeeded = 1
        finally:
            with self._lock:
                self._open.discard(transaction)
                self._succeeded += succeeded

    def run_once(self) -> None:
        """Probe the database if a transaction takes long; close the slow ones without an answer."""
        started_before = self._clock() - PROBE_AFTER
        with self._lock:
            succeeded_before = self._succeeded
            is_slow = any(item.started_at <= started_before for item in self._open)
        if not is_slow and not self._stalled:
            return
        answers = self._probe()
        with self._lock:
            # A transaction that has succeeded meanwhile shows that the database only is slow. A
            # stall ends with an answered probe alone.
            stalled = not answers and (self._stalled or self._succeeded == succeeded_before)
            changed = stalled != self._stalled
            self._stalled = stalled
            slow = [item for item in self._open if item.started_at <= started_before]
            for item in slow if stalled else ():
                abort(item.connection)
        if changed and stalled:
            LOG.warning(
                "The database does not answer: closed the connections of %d transactions. Calls "
                "fail until it answers again",
                len(slow),
            )
        elif changed:
            LOG.warning("The database answers again.")


def abort(connection: Any) -> None:
    """Shut down the socket of a driver's connection: a thread that waits for it gets an error."""
    socket_or_connection = getattr(connection, "_sock", connection)  # PyMySQL has no fileno()
    # Not open yet, or closed meanwhile: nothing to shut down. Each driver has its own error.
    with contextlib.suppress(Exception):
        # A duplicate, whose close leaves the descriptor of the driver open.
        copy = socket.socket(fileno=os.dup(socket_or_connection.fileno()))
        with copy:
            copy.shutdown(socket.SHUT_RDWR)

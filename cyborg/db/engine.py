# SPDX-License-Identifier: Apache-2.0
"""Database engines: one connection pool each, with the same behaviour on all supported databases.

Creating an engine does not connect, so that a service can start while its database is down. Create
it after the fork of a worker: two processes must not share a connection.

::

    MariaDB, MySQL, PostgreSQL    READ COMMITTED, exceptions of oslo.db
    SQLite                        WAL, BEGIN IMMEDIATE, busy timeout, foreign keys

``Reader`` gives out connections for queries, ``unit_of_work.UnitOfWork`` transactions.
"""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db.sqlalchemy import engines, exc_filters

from cyborg import tracing
from cyborg.compat.database import cache_column_descriptions
from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.core.log import FieldLogger, drop_tracebacks
from cyborg.db import errors, timeouts
from cyborg.db.clock import DatabaseClock
from cyborg.db.schema import REVISION, services
from cyborg.db.timeouts import StallDetector, Timeouts
from cyborg.threads.failures import Backoff, RateLimitedLogger

# Seconds that a writer waits for another writer on SQLite.
BUSY_SECONDS = 10

# Alembic's table, which has one row with the revision of the database.
REVISIONS = "alembic_version"

# Connection timeout of PostgreSQL's client; MySQL's client has the same default.
CONNECT_SECONDS = 10

# A connection that was idle for longer is pinged before use.
IDLE_SECONDS = 5.0

# Timeout of that ping. A request waits for the ping and then for a new connection.
PING_SECONDS = 1.0

# Time limits of a probe: 1.5 s for a new connection, which is the first step of a probe.
# The limits of the detection and of the API's own work together are less than 6 seconds.
PROBE_LIMITS = Timeouts(statement=2.25)

# Loggers of errors at the end of a connection, which the loss of the connection causes.
_POOL_LOGGERS = ("sqlalchemy.pool.impl.QueuePool",)

_POOL = ("max_pool_size", "max_overflow", "pool_timeout", "connection_recycle_time")
_SERVER = (
    *_POOL,
    "mysql_sql_mode",
    "mysql_wsrep_sync_wait",
    "connection_debug",
    "connection_trace",
    "connection_parameters",
)
_RETURNED_AT = "cyborg-returned-at"  # key of the time at which a connection returned to its pool
_URL = "a URL such as mysql+pymysql://user:password@host/cyborg"
_PLUGIN, _READ_ONLY_PLUGIN = "cyborg", "cyborg-reading"


class ConnectionTuning(sa.engine.CreateEnginePlugin):
    """Engine plugin that avoids unnecessary round trips to the server.

    A context manager always ends the transaction before a connection returns to the pool, so the
    ROLLBACK of the pool is an unnecessary round trip in each transaction. It costs only on MySQL:
    PostgreSQL's client library knows that there is nothing to roll back. oslo.db creates the
    engine, so a plugin named in the URL is the way to pass such settings to SQLAlchemy.
    """

    def handle_pool_kwargs(self, pool_cls: Any, pool_args: dict[str, Any]) -> None:
        """Configure the reset on return and the ping of the pool."""
        if self.url.get_backend_name() == "mysql":
            pool_args["reset_on_return"] = None
        pool_args["pre_ping"] = False  # engine_created pings instead

    def engine_created(self, engine: sa.Engine) -> None:
        """Ping a connection before use only if it was idle for IDLE_SECONDS.

        A restart of the server takes longer than IDLE_SECONDS. If the server stops during use, the
        caller gets an error with or without a ping.
        """

        def note_return(connection: Any, record: Any) -> None:
            record.info[_RETURNED_AT] = time.monotonic()

        def ping_if_idle(connection: Any, record: Any, proxy: Any) -> None:
            # A new connection has no such time, and needs no ping.
            if time.monotonic() - record.info.get(_RETURNED_AT, float("inf")) < IDLE_SECONDS:
                return
            try:
                with timeouts.temporary_timeout(connection, PING_SECONDS):
                    alive = engine.dialect.do_ping(connection)
            except engine.dialect.loaded_dbapi.Error:
                alive = False
            if not alive:
                # All of the pool: what has closed this connection has closed the older ones as
                # well.
                raise sa.exc.InvalidatePoolError

        sa.event.listen(engine, "checkin", note_return)
        sa.event.listen(engine, "checkout", ping_if_idle)

    def update_url(self, url: sa.URL) -> sa.URL:
        """Return the URL without the plugin's name, which a driver would reject."""
        return url.difference_update_query(["plugin"])


class ReadOnlyTuning(ConnectionTuning):
    """Engine plugin for read-only connections in autocommit mode."""

    def handle_dialect_kwargs(self, dialect_cls: Any, dialect_args: dict[str, Any]) -> None:
        """Set autocommit once per connection, not at each use."""
        dialect_args["isolation_level"] = "AUTOCOMMIT"
        dialect_args["skip_autocommit_rollback"] = True


sa.dialects.plugins.register(_PLUGIN, __name__, ConnectionTuning.__name__)
sa.dialects.plugins.register(_READ_ONLY_PLUGIN, __name__, ReadOnlyTuning.__name__)


def make_engine(
    conf: cfg.ConfigOpts,
    *,
    read_only: bool = False,
    bounded: bool = True,
    limits: Timeouts | None = None,
    use_replica: bool = True,
) -> sa.Engine:
    """Return an engine for ``[database] connection``. Raise Misconfigured.

    If ``read_only`` is True, the database rejects every change (PostgreSQL:
    ``default_transaction_read_only``; MariaDB and MySQL: a session that is READ ONLY; SQLite:
    ``PRAGMA query_only``), each statement sees the data committed at its start, and
    ``slave_connection`` is used if set, unless ``use_replica`` is False. If ``bounded`` is False,
    statements have no time limit: migrations need this. ``limits`` replace those of ``conf``.
    """
    replica = conf.database.slave_connection if read_only and use_replica else None
    configured_url = replica or conf.database.connection
    if not configured_url:
        raise _misconfigured(f"is not set: expected {_URL}")
    url = _parse(configured_url)
    if url.get_backend_name() == "sqlite":
        return _sqlite(url, conf, read_only)
    drop_tracebacks(_POOL_LOGGERS, (Exception,))
    if url.get_driver_name() == "pymysql":
        cache_column_descriptions()
    seconds = conf.api.database_timeout if read_only else conf.conductor.database_timeout
    if bounded:
        limits = limits or Timeouts(seconds)
    engine: sa.Engine = engines.create_engine(
        _tuned(url, read_only, limits)
        .update_query_dict({"plugin": _READ_ONLY_PLUGIN if read_only else _PLUGIN})
        .render_as_string(hide_password=False),
        max_retries=0,  # otherwise oslo.db connects here, up to ten times, 10 s apart
        # Otherwise a thread yields after each transaction, which only green threads need.
        thread_checkin=False,
        **{name: conf.database[name] for name in _SERVER},
    )
    if limits is not None:
        timeouts.limit_engine(engine, limits)
    return engine


def wait_until_ready(
    engine: sa.Engine,
    stop: threading.Event,
    log: FieldLogger,
    requires_upgrade: Callable[[sa.Engine], bool] = lambda engine: False,
) -> bool:
    """Wait, with backoff, until the database answers and has the tables of this release.

    Log the wait once a minute. ``requires_upgrade`` returns whether this release lacks migrations
    in a database of another revision. Return False if ``stop`` was set before that.
    """
    backoff = Backoff(0.5, 10.0, jitter=True)
    failure_log = RateLimitedLogger(logger=log)
    while not stop.is_set():
        try:
            check(engine, requires_upgrade)
        except Unavailable as exc:
            error = f"{exc} ({errors.reason(exc)})" if exc.__cause__ else exc.message
        else:
            if failure_log.reset():
                log.warning("The database is available.")
            return True
        failure_log.warn("Waiting for the database: %s", error)
        stop.wait(backoff.next_delay())
    return False


def check(engine: sa.Engine, requires_upgrade: Callable[[sa.Engine], bool]) -> None:
    """Raise Unavailable unless the database answers and has the tables of this release.

    A database without a revision was not made by migrations.
    """
    with errors.translate(), engine.connect() as connection:
        # No row is read: only whether the table exists is of interest.
        connection.execute(sa.text("SELECT 1 FROM services WHERE 1 = 0"))
        has_revision = sa.inspect(connection).has_table(REVISIONS)
        query = sa.text(f"SELECT version_num FROM {REVISIONS}")  # noqa: S608  a constant
        revision = connection.scalar(query) if has_revision else None
    if revision not in (None, REVISION) and requires_upgrade(engine):
        raise Unavailable(
            f"the database has revision {revision}, and this release requires migrations that it "
            "lacks: run 'cyborg-dbsync upgrade'"
        )


def make_detector(conf: cfg.ConfigOpts) -> StallDetector:
    """Return a detector for ``[database] connection``."""
    engine = make_engine(conf, limits=PROBE_LIMITS)
    return StallDetector(lambda: answers(engine))


def answers(engine: sa.Engine) -> bool:
    """Return whether the database answers a new connection, be it with an error."""
    try:
        with engine.connect() as connection:
            connection.execute(sa.select(1))
    except errors.FAILURES as exc:
        unavailable = errors.to_unavailable(exc)
        return unavailable is None or unavailable.message != errors.NO_ANSWER
    finally:
        # The pool must keep no connection: the next call tries a new one.
        engine.dispose()
    return True


def _misconfigured(fault: str) -> Misconfigured:
    option = "[database] connection"
    return Misconfigured(f"{option} {fault}", option=option)


def _parse(text: str) -> sa.URL:
    """Return the URL of a supported database. Raise Misconfigured."""
    try:
        url = sa.make_url(text)
        url.get_dialect()
    except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ImportError) as exc:
        # Without the URL: it may contain a password.
        raise _misconfigured(f"is not usable ({type(exc).__name__}): expected {_URL}") from None
    if url.get_backend_name() not in ("mysql", "mariadb", "postgresql", "sqlite"):
        raise _misconfigured(
            f"names {url.get_backend_name()}: expected mysql+pymysql, postgresql+psycopg2 or sqlite"
        )
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise _misconfigured(
            "names SQLite in memory, which threads cannot share: expected a file, as in "
            "sqlite:////var/lib/cyborg/cyborg.db"
        )
    return url


def _tuned(url: sa.URL, read_only: bool, limits: Timeouts | None) -> sa.URL:
    """Return the URL with the session settings of every connection.

    The settings are parameters of the driver, so they apply before SQLAlchemy reads the defaults to
    which it resets a connection. Setting them on each checkout would cost two round trips.
    """
    if url.get_backend_name() == "postgresql":
        url = timeouts.keep_alive(url)
        url = url if limits is None else timeouts.limit_url(url, limits)
        # Without JIT: to compile the expressions of a statement takes longer than to run the
        # statements of this service. It stands first, because the last setting of a name applies:
        # the options of the URL can set it again, but not the isolation level.
        flags = [
            "-c jit=off",
            url.query.get("options", ""),
            r"-c default_transaction_isolation=read\ committed",
        ]
        if read_only:
            flags.append("-c default_transaction_read_only=on")
        options = " ".join(str(flag) for flag in flags if flag)
        timeout = url.query.get("connect_timeout", str(CONNECT_SECONDS))
        return url.update_query_dict({"options": options, "connect_timeout": timeout})
    if "init_command" in url.query:
        raise _misconfigured(
            "sets init_command, which this service sets for the isolation level: remove "
            "init_command from the URL"
        )
    characteristics = "ISOLATION LEVEL READ COMMITTED" + (", READ ONLY" if read_only else "")
    charset = url.query.get("charset", "utf8mb4")
    # oslo.db translates only the errors of "mysql"; SQLAlchemy detects MariaDB by itself.
    return url.set(drivername=url.drivername.replace("mariadb", "mysql", 1)).update_query_dict(
        {"init_command": f"SET SESSION TRANSACTION {characteristics}", "charset": charset}
    )


def _sqlite(url: sa.URL, conf: cfg.ConfigOpts, read_only: bool) -> sa.Engine:
    """Return an engine for a SQLite file, in WAL mode."""
    # Not the engine of oslo.db: it opens the file for each transaction, and the last close writes
    # the whole WAL back.
    pool_settings: dict[str, Any] = {
        "pool_size": conf.database.max_pool_size,
        "max_overflow": conf.database.max_overflow,
        "pool_timeout": conf.database.pool_timeout,
    }
    engine = sa.create_engine(
        url,
        poolclass=sa.QueuePool,
        connect_args={} if "timeout" in url.query else {"timeout": BUSY_SECONDS},
        **{name: value for name, value in pool_settings.items() if value is not None},
    )
    if read_only:
        engine = engine.execution_options(isolation_level="AUTOCOMMIT")
    # The exceptions are those of oslo.db, as on the other databases.
    exc_filters.register_engine(engine)
    synchronous = "FULL" if conf.database.sqlite_synchronous else "OFF"

    def configure(connection: sqlite3.Connection, record: Any) -> None:
        # Otherwise the driver opens transactions itself, and only before a change.
        connection.isolation_level = None
        # Queried first, because setting it needs an exclusive lock on the file.
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal" and not read_only:
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA foreign_keys = ON")
        if read_only:
            connection.execute("PRAGMA query_only = ON")

    def begin_immediate(connection: sa.Connection) -> None:
        # A transaction that starts with a read fails if another writer commits before its first
        # write. One that locks at its start waits instead.
        if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    sa.event.listen(engine, "connect", configure)
    sa.event.listen(engine, "begin", begin_immediate)
    return engine


class Reader:
    """Provider of connections for queries, in autocommit mode. Thread-safe.

    A reader that is created from configuration, as in the API, has its own engine, for which the
    database rejects changes; the engine connects to the replica if one is configured, unless
    ``use_replica`` is False. A reader that is created from an engine, as in the conductor, shares
    the pool of this engine: the database would accept a change there. ``clock`` is the
    clock of the database, which is the replica's own one if the engine connects to a replica.
    """

    def __init__(self, source: cfg.ConfigOpts | sa.Engine, *, use_replica: bool = True) -> None:
        self._owns_engine = not isinstance(source, sa.Engine)
        self._engine = (
            # Each use of a shared connection sets this level and resets it.
            source.execution_options(isolation_level="AUTOCOMMIT")
            if isinstance(source, sa.Engine)
            else make_engine(source, read_only=True, use_replica=use_replica)
        )
        self.clock = DatabaseClock(self.connect)

    @contextlib.contextmanager
    def connect(self) -> Iterator[sa.Connection]:
        """Yield a connection; each statement sees the data committed at its start.

        Raise Unavailable if the database is down.
        """
        span = tracing.child_span(
            "db.read", tracing.SpanKind.CLIENT, database=self._engine.dialect.name
        )
        with span, errors.translate(), self._engine.connect() as connection:
            yield connection

    def check(self, seconds: float) -> None:
        """Raise Unavailable unless the database has the tables and answers within ``seconds``.

        Opening a new connection has a separate limit.
        """
        with self.connect() as connection:
            driver = connection.connection.driver_connection
            with timeouts.temporary_timeout(driver, seconds):
                connection.execute(sa.select(services.c.id).where(sa.false()))

    def close(self) -> None:
        """Close the pool if the reader owns it."""
        if self._owns_engine:
            self._engine.dispose()

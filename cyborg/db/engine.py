# SPDX-License-Identifier: Apache-2.0
"""Engines: one connection pool to one database, the same behaviour on all three.

Making an engine does not connect, so that a service starts while its database is away. Make it
after the fork of a worker: two processes that share one connection break both.

::

    MariaDB, MySQL, PostgreSQL    READ COMMITTED, errors as oslo.db names them
    SQLite                        WAL, BEGIN IMMEDIATE, busy timeout, foreign keys
"""

import logging
import random
import sqlite3
import threading
import time
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db.sqlalchemy import engines, exc_filters

from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.db import trouble

BUSY_SECONDS = 10
"""How long a writer waits for another on SQLite."""

CONNECT_SECONDS = 10
"""How long PostgreSQL's client waits for a server; MySQL's has the same limit by itself."""

IDLE_SECONDS = 5.0
"""After how long in the pool a connection is tried before it is used."""

_POOL = ("max_pool_size", "max_overflow", "pool_timeout", "connection_recycle_time")
_SERVER = (
    *_POOL,
    "mysql_sql_mode",
    "mysql_wsrep_sync_wait",
    "connection_debug",
    "connection_trace",
    "connection_parameters",
)
_SAY_EVERY = 60.0
_LEFT = "cyborg-left"  # when a connection came back to its pool
_PLUGIN, _READING_PLUGIN = "cyborg", "cyborg-reading"


class Thrifty(sa.engine.CreateEnginePlugin):
    """Has a connection say nothing to its server that it need not.

    A connection leaves us with its transaction over, always by a context manager: the ROLLBACK that
    the pool would send to make sure is one round trip more in each transaction, on MySQL alone: the
    client library of PostgreSQL knows that there is nothing to roll back. SQLAlchemy takes such
    settings for an engine that others make, here oslo.db, from a plugin that the URL names.
    """

    def handle_pool_kwargs(self, pool_cls: Any, pool_args: dict[str, Any]) -> None:
        """Set how the pool takes connections back and gives them out."""
        if self.url.get_backend_name() == "mysql":
            pool_args["reset_on_return"] = None
        pool_args["pre_ping"] = False  # but see engine_created

    def engine_created(self, engine: sa.Engine) -> None:
        """Have a connection tried before use only if it has been idle for a while.

        A server that restarts takes longer than that. Whoever uses a connection while its server
        goes is told so with a ping or without.
        """

        def left(connection: Any, record: Any) -> None:
            record.info[_LEFT] = time.monotonic()

        def taken(connection: Any, record: Any, proxy: Any) -> None:
            if time.monotonic() - record.info.get(_LEFT, float("inf")) < IDLE_SECONDS:
                return
            try:
                alive = engine.dialect.do_ping(connection)
            except engine.dialect.loaded_dbapi.Error:
                alive = False
            if not alive:
                raise sa.exc.InvalidatePoolError

        sa.event.listen(engine, "checkin", left)
        sa.event.listen(engine, "checkout", taken)

    def update_url(self, url: sa.URL) -> sa.URL:
        """Return the URL without the plugin's name, which no driver knows."""
        return url.difference_update_query(["plugin"])


class Reading(Thrifty):
    """The same for connections that only read, each statement by itself."""

    def handle_dialect_kwargs(self, dialect_cls: Any, dialect_args: dict[str, Any]) -> None:
        """Set what each connection is told once, when it is opened, and not at each use."""
        dialect_args["isolation_level"] = "AUTOCOMMIT"
        dialect_args["skip_autocommit_rollback"] = True


sa.dialects.plugins.register(_PLUGIN, __name__, Thrifty.__name__)
sa.dialects.plugins.register(_READING_PLUGIN, __name__, Reading.__name__)


def make_engine(conf: cfg.ConfigOpts, *, read_only: bool = False) -> sa.Engine:
    """Return an engine for ``[database] connection``; raises Misconfigured.

    With ``read_only`` the database refuses every change, each statement sees what is committed at
    its start, and ``slave_connection`` is used if set.
    """
    text = (conf.database.slave_connection if read_only else None) or conf.database.connection
    if not text:
        raise Misconfigured(
            "[database] connection is not set: expected a URL such as "
            "mysql+pymysql://user:password@host/cyborg",
            option="[database] connection",
        )
    url = _parse(text)
    if url.get_backend_name() == "sqlite":
        return _sqlite(url, conf, read_only)
    engine: sa.Engine = engines.create_engine(
        _tuned(url, read_only)
        .update_query_dict({"plugin": _READING_PLUGIN if read_only else _PLUGIN})
        .render_as_string(hide_password=False),
        max_retries=0,  # it would connect here, ten times with ten seconds between
        **{name: conf.database[name] for name in _SERVER},
    )
    return engine


def wait_until_ready(engine: sa.Engine, stop: threading.Event, log: logging.Logger) -> bool:
    """Wait, with backoff, until the database answers and has tables; say so once a minute.

    Return False when ``stop`` was set before.
    """
    pause, said = 0.5, float("-inf")
    while not stop.is_set():
        try:
            check(engine)
        except Unavailable as away:
            if time.monotonic() - said >= _SAY_EVERY:
                log.warning("Waiting for the database: %s (%s)", away, trouble.reason(away))
                said = time.monotonic()
            stop.wait(pause * random.SystemRandom().uniform(0.5, 1.0))
            pause = min(pause * 2, 10.0)
        else:
            if said > float("-inf"):
                log.warning("The database is there.")
            return True
    return False


def check(engine: sa.Engine) -> None:
    """Raise Unavailable unless the database answers and has tables."""
    with trouble.explained(), engine.connect() as connection:
        connection.execute(sa.text("SELECT 1 FROM services WHERE 1 = 0"))


def _parse(text: str) -> sa.URL:
    try:
        url = sa.make_url(text)
        url.get_dialect()
    except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ImportError) as bad:
        # Without the text: it may hold a password.
        raise Misconfigured(
            f"[database] connection is not usable ({type(bad).__name__}): expected a URL such as "
            "mysql+pymysql://user:password@host/cyborg",
            option="[database] connection",
        ) from None
    if url.get_backend_name() not in ("mysql", "mariadb", "postgresql", "sqlite"):
        raise Misconfigured(
            f"[database] connection names {url.get_backend_name()}: expected mysql+pymysql, "
            "postgresql+psycopg2 or sqlite",
            option="[database] connection",
        )
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise Misconfigured(
            "[database] connection names SQLite in memory, where every thread would have a "
            "database of its own: expected a file, as in sqlite:////var/lib/cyborg/cyborg.db",
            option="[database] connection",
        )
    return url


def _tuned(url: sa.URL, read_only: bool) -> sa.URL:
    """Return the URL with what every connection must be set to.

    By the driver's own parameters, in force before SQLAlchemy asks for the defaults that it goes
    back to; setting them on each checkout would cost two round trips.
    """
    if url.get_backend_name() == "postgresql":
        flags = [url.query.get("options", ""), r"-c default_transaction_isolation=read\ committed"]
        if read_only:
            flags.append("-c default_transaction_read_only=on")
        options = " ".join(str(flag) for flag in flags if flag)
        timeout = url.query.get("connect_timeout", str(CONNECT_SECONDS))
        return url.update_query_dict({"options": options, "connect_timeout": timeout})
    if "init_command" in url.query:
        raise Misconfigured(
            "[database] connection sets init_command, which this service uses itself for the "
            "isolation level: leave it out",
            option="[database] connection",
        )
    how = "ISOLATION LEVEL READ COMMITTED" + (", READ ONLY" if read_only else "")
    charset = url.query.get("charset", "utf8mb4")
    # oslo.db knows the errors of "mysql" only; SQLAlchemy finds out that it is a MariaDB.
    return url.set(drivername=url.drivername.replace("mariadb", "mysql", 1)).update_query_dict(
        {"init_command": f"SET SESSION TRANSACTION {how}", "charset": charset}
    )


def _sqlite(url: sa.URL, conf: cfg.ConfigOpts, read_only: bool) -> sa.Engine:
    # Not oslo.db's: it opens the file anew for each transaction, and the last one that closes it
    # writes the whole WAL back.
    limits: dict[str, Any] = {
        "pool_size": conf.database.max_pool_size,
        "max_overflow": conf.database.max_overflow,
        "pool_timeout": conf.database.pool_timeout,
    }
    engine = sa.create_engine(
        url,
        poolclass=sa.QueuePool,
        connect_args={} if "timeout" in url.query else {"timeout": BUSY_SECONDS},
        **{name: value for name, value in limits.items() if value is not None},
    )
    if read_only:
        engine = engine.execution_options(isolation_level="AUTOCOMMIT")
    exc_filters.register_engine(engine)
    synchronous = "FULL" if conf.database.sqlite_synchronous else "OFF"

    def opened(connection: sqlite3.Connection, record: Any) -> None:
        # The driver would open transactions by itself, and only before a change.
        connection.isolation_level = None
        # Asked first: to set it needs the whole file for a moment.
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal" and not read_only:
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA foreign_keys = ON")
        if read_only:
            connection.execute("PRAGMA query_only = ON")

    def begun(connection: sa.Connection) -> None:
        # A transaction that reads first and then finds another writer in between can only fail;
        # one that takes its place at the start waits for its turn.
        if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    sa.event.listen(engine, "connect", opened)
    sa.event.listen(engine, "begin", begun)
    return engine

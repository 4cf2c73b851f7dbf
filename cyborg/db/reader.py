# SPDX-License-Identifier: Apache-2.0
"""Read-only connections."""

import contextlib
from collections.abc import Iterator

import sqlalchemy as sa
from oslo_config import cfg

from cyborg import tracing
from cyborg.db import errors, timeouts
from cyborg.db.clock import DatabaseClock
from cyborg.db.engine import make_engine
from cyborg.db.schema import services


class Reader:
    """Provider of read-only connections. Thread-safe.

    A reader that is created from configuration has its own engine, for which the database rejects
    changes; the engine connects to the replica if one is configured. A reader that is created from
    an engine shares the pool of this engine. ``clock`` is the clock of the database.
    """

    def __init__(self, source: cfg.ConfigOpts | sa.Engine) -> None:
        self._owns_engine = not isinstance(source, sa.Engine)
        self._engine = (
            # Each use of a shared connection sets this level and resets it.
            source.execution_options(isolation_level="AUTOCOMMIT")
            if isinstance(source, sa.Engine)
            else make_engine(source, read_only=True)
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

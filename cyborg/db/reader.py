# SPDX-License-Identifier: Apache-2.0
"""Connections that only read."""

import contextlib
from collections.abc import Iterator

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.db import trouble
from cyborg.db.engine import make_engine


class Reader:
    """The read side of the database; many threads may share it.

    Made from configuration, it has an engine of its own, on a replica if one is configured, whose
    database refuses changes. Made from an engine, it shares that engine's pool.
    """

    def __init__(self, source: cfg.ConfigOpts | sa.Engine) -> None:
        self._made = not isinstance(source, sa.Engine)
        self._engine = (
            # Each use of a shared connection sets it and sets it back.
            source.execution_options(isolation_level="AUTOCOMMIT")
            if isinstance(source, sa.Engine)
            else make_engine(source, read_only=True)
        )

    @contextlib.contextmanager
    def connect(self) -> Iterator[sa.Connection]:
        """Give a connection; each statement sees what is committed at its start.

        Raises Unavailable when the database is away.
        """
        with trouble.explained(), self._engine.connect() as connection:
            yield connection

    def close(self) -> None:
        """Close the pool, if it is the reader's own."""
        if self._made:
            self._engine.dispose()

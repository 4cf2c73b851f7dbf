# SPDX-License-Identifier: Apache-2.0
"""One piece of work, one transaction: all of it or nothing, tried again when others were faster."""

import contextlib
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa

from cyborg.db import trouble

T = TypeVar("T")

ATTEMPTS = 10
"""How often a transaction is tried that others keep breaking."""

PATIENCE = 30.0
"""Seconds after which it is not tried again, whatever the number of attempts."""

_random = random.SystemRandom()
_pause = threading.Event().wait


class UnitOfWork:
    """Runs work in transactions of one engine; many threads may share it."""

    def __init__(self, engine: sa.Engine, sleep: Callable[[float], object] = _pause) -> None:
        self._engine = engine
        self._sleep = sleep
        # SQLite lets one write at a time, and who finds it busy sleeps and tries again, so that the
        # unlucky wait for a second under load. A lock is a queue.
        self._turn: contextlib.AbstractContextManager[object] = (
            threading.RLock() if engine.dialect.name == "sqlite" else contextlib.nullcontext()
        )

    def run(self, work: Callable[[sa.Connection], T]) -> T:
        """Run ``work`` in a transaction, commit and return what it returned.

        An exception rolls everything back and passes on. ``work`` is called again after a deadlock,
        a serialization failure or SQLite's "locked", so that it must change nothing but the
        database. Raises Unavailable when the database is away, or busy for too long; a transaction
        that was just being committed may then have happened or not.
        """
        started = time.monotonic()
        attempt = 1
        while True:
            try:
                with self._turn, self._engine.begin() as tx:
                    return work(tx)
            except trouble.FAILURES as error:
                late = attempt >= ATTEMPTS or time.monotonic() - started > PATIENCE
                if late or not trouble.is_transient(error):
                    if (told := trouble.unavailable(error)) is not None:
                        raise told from error
                    raise
            # Those that met must not meet again: each waits for a time of its own.
            self._sleep(_random.uniform(0.0, 0.01 * 2**attempt))
            attempt += 1

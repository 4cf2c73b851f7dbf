# SPDX-License-Identifier: Apache-2.0
"""Unit of work: one transaction, retried after a conflict with a concurrent transaction."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import sqlalchemy as sa

from cyborg import tracing
from cyborg.core.errors import TimedOut
from cyborg.db import errors
from cyborg.db.clock import DatabaseClock
from cyborg.db.idempotency import current_key, record_answer
from cyborg.db.reader import Reader
from cyborg.db.stalls import StallDetector
from cyborg.threads.failures import JITTER

T = TypeVar("T")

MAX_ATTEMPTS = 10
"""Maximum attempts of a transaction that fails with transient errors."""

RETRY_DEADLINE = 30.0
"""Seconds after which a transaction is not retried, whatever the number of attempts."""

_pause = threading.Event().wait


class UnitOfWork:
    """Runner of transactions on one engine. Thread-safe.

    ``clock`` returns the database's time, for the times that a transaction writes and compares.
    """

    def __init__(
        self,
        engine: sa.Engine,
        sleep: Callable[[float], object] = _pause,
        clock: DatabaseClock | None = None,
        stalls: StallDetector | None = None,
    ) -> None:
        """``stalls`` fails the transactions of a database that does not answer, if it is given."""
        self._engine = engine
        self._stalls = stalls
        self.clock = clock or Reader(engine).clock
        self._sleep = sleep
        # SQLite allows one writer; a blocked one sleeps and polls, which takes up to a second under
        # load. A lock wakes the next writer at once.
        self._sqlite_write_lock: contextlib.AbstractContextManager[object] = (
            threading.RLock() if engine.dialect.name == "sqlite" else contextlib.nullcontext()
        )

    def run_once(
        self, work: Callable[[sa.Connection], T], answer: Callable[[T], Any] = lambda _: None
    ) -> T:
        """Run ``work`` as the only transaction of the call that this thread processes.

        The same transaction records the call and its answer: ``answer`` maps the result of ``work``
        to plain values or to the error for the caller. The record costs one INSERT. Outside of a
        call there is no record. Raise ``RepeatedCall`` if a copy of the call is already
        complete.
        """
        key = current_key()
        if key is None:
            return self.run(work)

        def work_and_record(tx: sa.Connection) -> T:
            result = work(tx)
            record_answer(tx, key, answer(result))
            return result

        return self.run(work_and_record)

    def run(self, work: Callable[[sa.Connection], T]) -> T:
        """Run ``work`` in a transaction, commit, and return its result.

        An exception rolls the transaction back and propagates. ``work`` must have no effect outside
        of the database, because it is retried after a deadlock, a serialization failure or SQLite's
        error "locked". Raise Unavailable if the database is down, or busy for too long. Raise
        TimedOut, without a retry, if the database did not confirm the commit, because its outcome
        is unknown.
        """
        with tracing.child_span(
            "db.transaction", tracing.SpanKind.CLIENT, database=self._engine.dialect.name
        ):
            return self._run_with_retries(work)

    @contextlib.contextmanager
    def _begin(self) -> Iterator[sa.Connection]:
        if self._stalls is None:
            with self._engine.begin() as tx:
                yield tx
            return
        with self._stalls.watch() as watched, self._engine.begin() as tx:
            watched.connection = tx.connection.driver_connection
            yield tx

    def _run_with_retries(self, work: Callable[[sa.Connection], T]) -> T:
        started_at = time.monotonic()
        attempt = 1
        while True:
            committing = False
            try:
                with self._sqlite_write_lock, self._begin() as tx:
                    answer = work(tx)
                    committing = True
                return answer
            except errors.FAILURES as error:
                exhausted = (
                    attempt >= MAX_ATTEMPTS or time.monotonic() - started_at > RETRY_DEADLINE
                )
                if exhausted or not errors.is_transient(error):
                    if (translated := errors.to_unavailable(error)) is None:
                        raise
                    if committing and not errors.is_transient(error):
                        raise TimedOut(
                            "the database did not confirm a commit: it is unknown whether the "
                            "change was made"
                        ) from error
                    raise translated from error
            # A random pause, so that the same transactions do not conflict again.
            self._sleep(JITTER.uniform(0.0, 0.01 * 2**attempt))
            attempt += 1

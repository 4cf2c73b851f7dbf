# SPDX-License-Identifier: Apache-2.0
"""Unit of work: one transaction, retried after a conflict with a concurrent transaction.

The transaction of a call records its answer, so that a copy of the call changes nothing. The key of
the record is UNIQUE. A concurrent copy of a call blocks at its INSERT until the first transaction
ends. After a commit the copy is rolled back and answered from the record; after a rollback the copy
continues.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg import tracing
from cyborg.core.errors import CyborgError, TimedOut, Unavailable, from_wire
from cyborg.db import deadline, errors
from cyborg.db.clock import DatabaseClock
from cyborg.db.engine import Reader
from cyborg.db.schema import idempotency_keys
from cyborg.db.timeouts import StallDetector
from cyborg.threads.failures import JITTER

# Maximum characters of an answer as JSON: the limit of a message.
MAX_ANSWER = 1024 * 1024

# Built once: SQLAlchemy needs more time to build such a statement than a database to run it.
_INSERT_ANSWER = sa.insert(idempotency_keys)

_current_key: ContextVar[str | None] = ContextVar("idempotency_key", default=None)


class RepeatedCall(Exception):
    """Error: a copy of this call is already complete, so this call changed nothing.

    ``key`` is the key of the record. The class is no ``CyborgError``, so that no code between the
    transaction and the server handles it as an error for the caller.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"call {key} was already processed")
        self.key = key


@contextlib.contextmanager
def call_context(key: str) -> Iterator[None]:
    """Set the key of the call that this thread processes within the block."""
    token = _current_key.set(key)
    try:
        yield
    finally:
        _current_key.reset(token)


def current_key() -> str | None:
    """Return the key of the call that this thread processes, None outside of a call."""
    return _current_key.get()


def record_answer(tx: sa.Connection, key: str, answer: Any) -> None:
    """Record a call with its answer: plain values, or the error to raise.

    Raise RepeatedCall if a copy of the call is already recorded.
    """
    body = {"error": answer.to_wire()} if isinstance(answer, CyborgError) else {"ok": answer}
    if len(json.dumps(body)) > MAX_ANSWER:
        # The change stays: only a copy of the call gets no answer.
        too_large = Unavailable("the call succeeded, but its answer is too large to be stored")
        body = {"error": too_large.to_wire()}
    try:
        tx.execute(_INSERT_ANSWER, {"key": key, "response": body})
    except db_exc.DBDuplicateEntry as exc:
        raise RepeatedCall(key) from exc


def find_answer(tx: sa.Connection, key: str) -> dict[str, Any] | None:
    """Return the record of a call, as input of ``unwrap_answer``; None if there is none."""
    found: dict[str, Any] | None = tx.scalar(
        sa.select(idempotency_keys.c.response).where(idempotency_keys.c.key == key)
    )
    return found


def unwrap_answer(body: dict[str, Any]) -> Any:
    """Return the answer in a record, or raise its error."""
    if "error" in body:
        raise from_wire(body["error"])
    return body["ok"]


T = TypeVar("T")

# Maximum attempts of a transaction that fails with transient errors.
MAX_ATTEMPTS = 10

# Seconds after which a transaction is not retried, whatever the number of attempts.
RETRY_DEADLINE = 30.0

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
        error "locked". Raise Unavailable if the database is down, or busy for too long, or after
        the deadline of the call (``deadline``). Raise TimedOut, without a retry, if the database
        did not confirm the commit, because its outcome is unknown.
        """
        with tracing.child_span(
            "db.transaction", tracing.SpanKind.CLIENT, database=self._engine.dialect.name
        ):
            return self._run_with_retries(work)

    @contextlib.contextmanager
    def _begin(self) -> Iterator[sa.Connection]:
        """Yield a connection in a transaction, which ``stalls`` can end if it was given."""
        if self._stalls is None:
            with self._engine.begin() as tx:
                yield tx
            return
        with self._stalls.watch() as watched, self._engine.begin() as tx:
            watched.connection = tx.connection.driver_connection
            yield tx

    def _run_with_retries(self, work: Callable[[sa.Connection], T]) -> T:
        """Run the work in a transaction, again after an error that may not recur."""
        started_at = time.monotonic()
        attempt = 1
        while True:
            committing = False
            deadline.check()
            try:
                with self._sqlite_write_lock, self._begin() as tx:
                    with deadline.limited(tx):
                        answer = work(tx)
                    # The caller may have given up meanwhile: an error rolls the transaction back.
                    deadline.check()
                    committing = True
                return answer
            except errors.FAILURES as error:
                # A transient error is retried while attempts and time are left. Another error is
                # that of an unavailable database, or else a mistake in the code. The outcome is
                # unknown if the database is lost during the commit.
                exhausted = (
                    attempt >= MAX_ATTEMPTS
                    or time.monotonic() - started_at > RETRY_DEADLINE
                    or not deadline.seconds_left()
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

# SPDX-License-Identifier: Apache-2.0
"""Idempotency records of completed calls, each written in the transaction of the call's change.

The key is UNIQUE. A concurrent copy of a call blocks at its INSERT until the first transaction
ends. After a commit the copy is rolled back and answered from the record; after a rollback the copy
continues.
"""

import contextlib
import json
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.core.errors import CyborgError, Unavailable, from_wire
from cyborg.db.schema import idempotency_keys

MAX_ANSWER = 1024 * 1024
"""Maximum characters of an answer as JSON: the limit of a message."""

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

# SPDX-License-Identifier: Apache-2.0
"""Deadline of the call that this thread serves: no transaction of the call commits after it.

The caller of a call waits for a limited time and then acts on an error: Nova chooses another host.
A bind that commits later would keep its handles for a server that does not come. One deadline
bounds everything that the call does, however deep its loops are nested:

::

    a statement     the server cancels it at the deadline, where the database can
    a transaction   is rolled back instead of committed after the deadline
    a retry         is not started after the deadline

Alternative not taken: a parameter of each function. It would have to pass through every frame
between the server and the transaction, and the one that forgets it has no bound.
"""

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

import sqlalchemy as sa

from cyborg.core.errors import Unavailable
from cyborg.db import timeouts

_end: ContextVar[float | None] = ContextVar("call_deadline", default=None)


@contextlib.contextmanager
def call_deadline(end: float | None) -> Iterator[None]:
    """Set the deadline of the call within the block, in monotonic seconds; None is no deadline."""
    token = _end.set(end)
    try:
        yield
    finally:
        _end.reset(token)


def seconds_left() -> float:
    """Return the seconds until the deadline, 0 after it, infinity without a deadline."""
    end = _end.get()
    return float("inf") if end is None else max(0.0, end - time.monotonic())


def check() -> None:
    """Raise Unavailable after the deadline."""
    if not seconds_left():
        # Not TimedOut, which leaves open whether the change was made: it was not.
        raise Unavailable("the call took longer than its caller waits: nothing was changed")


@contextlib.contextmanager
def limited(tx: sa.Connection) -> Iterator[None]:
    """Let the server cancel the statements of the block at the deadline, where it can.

    Most transactions begin long before the deadline and cost no statement here.
    """
    left = seconds_left()
    # What takes long is a wait for a lock, which has its own limit: it ends before the deadline
    # unless less is left. Setting the limits in each transaction would cost each boot 4 statements.
    if left >= timeouts.limits_of(tx).lock:
        yield
        return
    check()
    with timeouts.statement_limits(tx, timeouts.with_server_limit(left)):
        yield

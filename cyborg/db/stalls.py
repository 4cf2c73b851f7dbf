# SPDX-License-Identifier: Apache-2.0
"""Detect a database that no longer answers, and fail its transactions within seconds.

A statement may wait for ``[conductor] database_timeout``: a row lock, or a node that leaves a
Galera cluster, blocks a database that works. So a transaction that takes long proves nothing by
itself. After PROBE_AFTER seconds a new connection is tried. If the database does not answer it
either, the waiting connections are closed, and further transactions fail at once until a probe is
answered. Alternative not taken: a shorter timeout of all statements, which fails those that only
wait.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cyborg.core.errors import Unavailable
from cyborg.core.log import get_logger
from cyborg.db import errors

LOG = get_logger(__name__)

PROBE_INTERVAL = 0.5
"""Seconds between two calls of ``run_once``."""

PROBE_AFTER = 2.0
"""Seconds of a transaction after which the database is probed."""


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
        """Probe the database if a transaction takes long; if it does not answer, close them."""
        started_before = self._clock() - PROBE_AFTER
        with self._lock:
            succeeded = self._succeeded
            is_slow = any(item.started_at <= started_before for item in self._open)
        if not is_slow and not self._stalled:
            return
        answers = self._probe()
        with self._lock:
            # A transaction that has succeeded meanwhile shows that the database only is slow.
            stalled = not answers and (self._stalled or self._succeeded == succeeded)
            changed, self._stalled = stalled != self._stalled, stalled
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
    with contextlib.suppress(Exception):  # it was closed meanwhile; each driver has its own error
        copy = socket.socket(fileno=os.dup(socket_or_connection.fileno()))
        with copy:
            copy.shutdown(socket.SHUT_RDWR)

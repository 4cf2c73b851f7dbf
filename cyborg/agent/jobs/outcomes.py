# SPDX-License-Identifier: Apache-2.0
"""Outcomes of jobs and discoveries, stored until the conductor has accepted them."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from cyborg.core.errors import (
    Conflict,
    CyborgError,
    Forbidden,
    Invalid,
    NotFound,
    Stale,
    Unavailable,
)
from cyborg.core.log import get_logger

LOG = get_logger(__name__)

MAX_PENDING = 1024
"""Maximum of open or undelivered jobs, and of backends of discoveries; more requests are refused.
No outcome is dropped instead, because the conductor waits for each."""

REFUSALS = (Invalid, NotFound, Forbidden, Conflict, Stale)
"""Errors that a retry would get again."""

K = TypeVar("K")
V = TypeVar("V")


class Outcomes(Generic[K, V]):
    """Undelivered outcomes, the oldest first, at most one for each key. Thread-safe."""

    def __init__(self, subject: str) -> None:
        """``subject`` is the name of the log field that has the key, such as ``job``."""
        self._subject = subject
        self._lock = threading.Lock()
        self._pending: dict[K, V] = {}
        self._logged: set[K] = set()

    def __len__(self) -> int:
        with self._lock:
            return len(self._pending)

    def put(self, key: K, outcome: V) -> None:
        """Store an outcome until it is delivered; replace an undelivered one with the same key."""
        with self._lock:
            self._pending.pop(key, None)
            self._pending[key] = outcome

    def pending(self) -> list[tuple[K, V]]:
        """Return the undelivered outcomes with their keys."""
        with self._lock:
            return list(self._pending.items())

    def deliver(self, pending: Sequence[tuple[K, V]], send: Callable[[K, V], None]) -> None:
        """Send each outcome once; remove those that were accepted or permanently refused.

        If ``send`` raises Unavailable, or an exception that is not a CyborgError, raise it and send
        no more outcomes. After any other error, send the other outcomes. Outcomes that failed or
        were not sent stay for the next call.
        """
        for key, outcome in pending:
            failure: CyborgError | None = None
            try:
                send(key, outcome)
            except CyborgError as exc:
                if isinstance(exc, Unavailable):
                    raise
                failure = exc
            self._record(key, outcome, failure)

    def _record(self, key: K, outcome: V, failure: CyborgError | None) -> None:
        retry = failure is not None and not isinstance(failure, REFUSALS)
        with self._lock:
            # A newer outcome of the same key may have been added meanwhile; it is undelivered.
            if not retry and self._pending.get(key) is outcome:
                del self._pending[key]
            first = key not in self._logged
            if retry:
                self._logged.add(key)
            else:
                self._logged.discard(key)
        # The key of a discovery is its uuid and the backend.
        fields: dict[str, Any] = {self._subject: key[0] if isinstance(key, tuple) else key}
        if failure is not None and retry and first:
            LOG.warning(
                "Conductor failed to process an outcome, retrying: %s", failure.message, **fields
            )
        elif failure is not None and not retry:
            LOG.warning(
                "Conductor rejected an outcome, discarding it: %s", failure.message, **fields
            )

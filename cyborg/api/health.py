# SPDX-License-Identifier: Apache-2.0
"""Whether this API can do its work: what load balancers ask for, a few times a second."""

import threading
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from oslo_log import log

from cyborg.core.errors import Unavailable
from cyborg.db.reader import Reader
from cyborg.db.schema import services

LOG = log.getLogger(__name__)

FRESH_SECONDS = 1.0


class Health:
    """One look at the database a second at most, however many ask.

    The conductor's part is told and decides nothing: reads, most of the work, go on without it.
    """

    def __init__(self, reader: Reader, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader = reader
        self._clock = clock
        self._lock = threading.Lock()
        self._looked = float("-inf")
        self._away: str | None = "nobody has looked yet"
        self._conductor: bool | None = None

    def look(self) -> tuple[bool, dict[str, Any]]:
        """Return whether the API can serve, and the document that says so."""
        # Of many at once one looks: a database that hangs must not hold every thread of the server.
        if self._lock.acquire(blocking=False):
            try:
                if self._clock() - self._looked >= FRESH_SECONDS:
                    self._away = self._ask()
                    self._looked = self._clock()
            finally:
                self._lock.release()
        away = self._away
        return away is None, {
            "status": "healthy" if away is None else "unhealthy",
            "reason": away or "the database answers",
            "database": _word(away is None),
            "conductor": _word(self._conductor),
        }

    def heard(self, answered: bool) -> None:
        """Note whether the last call on the bus was answered."""
        self._conductor = answered

    def _ask(self) -> str | None:
        try:
            with self._reader.connect() as connection:
                connection.execute(sa.select(services.c.id).where(sa.false()))
        except Unavailable as away:
            LOG.warning("%s", away.message)
            return away.message
        return None


def _word(known: bool | None) -> str:
    return {True: "ok", False: "unavailable", None: "unknown"}[known]

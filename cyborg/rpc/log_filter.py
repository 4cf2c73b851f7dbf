# SPDX-License-Identifier: Apache-2.0
"""Filters for the log of oslo.messaging while the broker is unavailable.

The rabbit driver logs an error for each connection and each attempt, which is every second or two.
Other modules log the errors of the broker with a traceback.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cyborg.core.log import drop_tracebacks
from cyborg.rpc.faults import FAULTS

DRIVER = "oslo.messaging._drivers.impl_rabbit"
TRACEBACK_LOGGERS = (
    "oslo_messaging.rpc.server",
    "oslo_messaging._drivers.amqpdriver",
    "oslo_messaging._drivers.common",
    DRIVER,
)
INTERVAL = 60.0  # seconds between two lines from the same place in the source


class RateLimitFilter(logging.Filter):
    """Logging filter that passes one warning or error a minute from each place in the source."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns monotonic seconds."""
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the line."""
        if record.levelno < logging.WARNING:
            return True
        place = (record.pathname, record.lineno)
        now = self._clock()
        with self._lock:
            last = self._last.get(place)
            if last is not None and now - last < INTERVAL:
                return False
            self._last[place] = now
            return True


@contextmanager
def capture_warnings(callback: Callable[[str], None]) -> Iterator[None]:
    """Call ``callback`` with each warning of the rabbit driver in this thread, logged or not."""
    thread = threading.get_ident()

    def capture(record: logging.LogRecord) -> bool:
        if record.thread == thread and record.levelno >= logging.WARNING:
            callback(record.getMessage())
        return True

    logger = logging.getLogger(DRIVER)
    logger.filters.insert(0, capture)  # before the rate limit
    try:
        yield
    finally:
        logger.removeFilter(capture)


def limit_library_log() -> None:
    """Limit the log of oslo.messaging in this process. Idempotent."""
    drop_tracebacks(TRACEBACK_LOGGERS, FAULTS)
    logger = logging.getLogger(DRIVER)
    if not any(isinstance(item, RateLimitFilter) for item in logger.filters):
        logger.addFilter(RateLimitFilter())

# SPDX-License-Identifier: Apache-2.0
"""Saying that the broker is away once a minute.

The rabbit driver says it for each connection at each try, which is every second or two.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DRIVER = "oslo.messaging._drivers.impl_rabbit"
QUIET = 60.0  # seconds between two lines of one kind


class OnceAMinute(logging.Filter):
    """Passes a warning or an error when none of its kind was passed within the last minute.

    Lines of one kind are those that come from the same place in the source.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` counts seconds upwards."""
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether the line is worth its place."""
        if record.levelno < logging.WARNING:
            return True
        place = (record.pathname, record.lineno)
        now = self._clock()
        with self._lock:
            last = self._last.get(place)
            if last is not None and now - last < QUIET:
                return False
            self._last[place] = now
            return True


@contextmanager
def listening(hear: Callable[[str], None]) -> Iterator[None]:
    """Pass on what the rabbit driver complains of in this thread, whether or not it is logged."""
    me = threading.get_ident()

    def note(record: logging.LogRecord) -> bool:
        if record.thread == me and record.levelno >= logging.WARNING:
            hear(record.getMessage())
        return True

    logger = logging.getLogger(DRIVER)
    logger.filters.insert(0, note)  # before the one that passes a line a minute
    try:
        yield
    finally:
        logger.removeFilter(note)


def install() -> None:
    """Have the rabbit driver of this process say things once a minute. Twice is fine."""
    logger = logging.getLogger(DRIVER)
    if not any(isinstance(known, OnceAMinute) for known in logger.filters):
        logger.addFilter(OnceAMinute())

# SPDX-License-Identifier: Apache-2.0
"""Log of repeated failures that stays short during an outage."""

import time
from collections.abc import Callable
from typing import Any

from cyborg.core.log import FieldLogger, get_logger

LOG = get_logger(__name__)

LOG_INTERVAL = 60.0  # seconds between two warnings of one RateLimitedLogger


class RateLimitedLogger:
    """Logger of a repeated failure: at most once a minute, and once at its end."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, logger: FieldLogger = LOG
    ) -> None:
        """``clock`` returns monotonic seconds."""
        self._clock = clock
        self._logger = logger
        self._last: float | None = None

    def warn(self, failure: str, *args: object, **fields: Any) -> bool:
        """Log a failure unless one was logged in the last minute; return whether it was logged."""
        now = self._clock()
        if self._last is not None and now - self._last < LOG_INTERVAL:
            return False
        self._last = now
        self._logger.warning(failure, *args, **fields)
        return True

    def recovered(self, subject: str) -> None:
        """Log the recovery of ``subject`` if a failure was logged."""
        if self.reset():
            self._logger.info("%s recovered", subject)

    def reset(self) -> bool:
        """Forget the current failure without a log line; return whether it had been logged."""
        logged, self._last = self._last is not None, None
        return logged

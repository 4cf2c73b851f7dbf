# SPDX-License-Identifier: Apache-2.0
"""Repeated failures: the delays of retries, and a log that stays short during an outage."""

import random
import time
from collections.abc import Callable
from typing import Any

from cyborg.core.log import FieldLogger, get_logger

LOG = get_logger(__name__)

# Generator of all random delays.
#
# It has no state, which the forked workers of a service would share, and which threads would change
# for other users of the generator of the module ``random``.
JITTER = random.SystemRandom()

MAX_DOUBLINGS = 30  # 2.0 to the power of a larger number would only be cut off, or overflow


def compute_delay(failures: int, max_delay: float, jitter: float) -> float:
    """Return the seconds until the next try: about 1, doubled with each failure.

    ``failures`` is the number of earlier failures. The delay is 0.5 to 1.5 times min(max_delay, 2
    ** failures); ``jitter``, from 0 to 1, chooses the point between the two.
    """
    # Without jitter, clients that failed together would retry together.
    middle = min(max_delay, 2.0 ** min(failures, MAX_DOUBLINGS))
    return middle * (0.5 + jitter)


class Backoff:
    """Delays between the tries of one client: ``initial`` seconds, doubled up to ``maximum``."""

    def __init__(self, initial: float, maximum: float, *, jitter: bool = False) -> None:
        """With ``jitter`` each delay is shortened by a random part, at most by one half."""
        self._initial = initial
        self.maximum = maximum
        """The longest delay in seconds; it may be changed."""
        self._jitter = jitter
        self.delay = initial
        """Seconds until the next try, without jitter."""

    def next_delay(self) -> float:
        """Return the seconds until the next try, after a failure."""
        delay, self.delay = self.delay, min(2 * self.delay, self.maximum)
        # Shortened only, so that the maximum holds.
        return delay * JITTER.uniform(0.5, 1.0) if self._jitter else delay

    def reset(self) -> None:
        """Start again with ``initial``, after a success."""
        self.delay = self._initial


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
        # By the time and not by the text, which has counts and addresses that differ.
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

# SPDX-License-Identifier: Apache-2.0
"""Retry delays: exponential backoff, with jitter where many clients retry the same service."""

import random

JITTER = random.SystemRandom()
"""Generator of all random delays.

It has no state, which the forked workers of a service would share, and which threads would change
for other users of the generator of the module ``random``.
"""

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
        self._maximum = maximum
        self._jitter = jitter
        self.delay = initial
        """Seconds until the next try, without jitter."""

    def next_delay(self) -> float:
        """Return the seconds until the next try, after a failure."""
        delay, self.delay = self.delay, min(2 * self.delay, self._maximum)
        return delay * JITTER.uniform(0.5, 1.0) if self._jitter else delay

    def set_maximum(self, maximum: float) -> None:
        """Set the longest delay."""
        self._maximum = maximum

    def reset(self) -> None:
        """Start again with ``initial``, after a success."""
        self.delay = self._initial

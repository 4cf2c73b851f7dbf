# SPDX-License-Identifier: Apache-2.0
"""Limits of the number of requests of one kind that a process serves at the same time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from webob import exc


@contextmanager
def take_slot(
    slots: threading.Semaphore, timeout: float, reason: str, retry_after: int
) -> Iterator[None]:
    """Take one of the slots until the end of the block; wait for it for ``timeout`` seconds.

    Raise HTTPTooManyRequests with the reason if there is none in time. ``retry_after`` is the
    number of seconds after which the client is to send the request again.
    """
    if not slots.acquire(timeout=timeout):
        raise too_many(reason, retry_after)
    try:
        yield
    finally:
        slots.release()


def too_many(reason: str, seconds: int) -> exc.HTTPTooManyRequests:
    """Return the error for a client that must wait for a number of seconds."""
    return exc.HTTPTooManyRequests(
        f"{reason}, retry in {seconds} s", headers={"Retry-After": str(seconds)}
    )


class Turns:
    """Admits one request at a time, in a process whose threads all serve requests.

    Few others wait for their turn, for a short time: each one that waits keeps a thread from other
    requests.
    """

    def __init__(self, reason: str, max_waiting: int, seconds: float) -> None:
        self._reason = reason
        self._seconds = seconds
        self._queue = threading.BoundedSemaphore(1 + max_waiting)
        self._turn = threading.BoundedSemaphore(1)

    @contextmanager
    def take(self) -> Iterator[None]:
        """Take the turn until the end of the block. Raise HTTPTooManyRequests."""
        with (
            take_slot(self._queue, 0, self._reason, 1),
            take_slot(self._turn, self._seconds, self._reason, 1),
        ):
            yield

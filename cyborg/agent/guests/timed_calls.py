# SPDX-License-Identifier: Apache-2.0
"""Calls with a timeout to a library that may hang, one call at a time."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from cyborg.core.errors import TimedOut, Unavailable

T = TypeVar("T")


class TimedCalls:
    """Calls one at a time, each in a thread of its own. Thread-safe.

    A thread cannot be ended. While a call that exceeded its timeout has not returned, all further
    calls fail at once. Otherwise the order in which the calls take effect would be unknown.
    """

    def __init__(self, subject: str, timeout: float) -> None:
        """``subject`` is what is called, for errors; ``timeout`` is in seconds."""
        self._subject = subject
        self._timeout = timeout
        self._lock = threading.Lock()  # one call at a time
        self._hanging: threading.Thread | None = None
        self._hanging_since = 0.0

    def run(self, function: Callable[[], T]) -> T:
        """Return the result of a function, or raise its exception.

        Raise TimedOut if it exceeds the timeout, Unavailable if an earlier call has not returned.
        """
        if not self._lock.acquire(timeout=self._timeout):
            raise Unavailable(f"{self._subject} has not completed earlier calls, retry later")
        try:
            return self._run(function)
        finally:
            self._lock.release()

    def _run(self, function: Callable[[], T]) -> T:
        if self._hanging is not None and self._hanging.is_alive():
            seconds = time.monotonic() - self._hanging_since
            raise Unavailable(f"{self._subject} has not answered for {seconds:.0f} s")
        results: list[T] = []
        errors: list[Exception] = []

        def call() -> None:
            try:
                results.append(function())
            except Exception as exc:  # noqa: BLE001  raised again in the caller's thread
                errors.append(exc)

        thread = threading.Thread(target=call, name=self._subject, daemon=True)
        begin = time.monotonic()
        thread.start()
        thread.join(self._timeout)
        if thread.is_alive():
            self._hanging, self._hanging_since = thread, begin
            raise TimedOut(f"{self._subject} did not answer in {self._timeout:g} s")
        if errors:
            raise errors[0]
        return results[0]

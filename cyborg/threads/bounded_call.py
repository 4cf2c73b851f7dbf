# SPDX-License-Identifier: Apache-2.0
"""Calls of a library that may not return, with a deadline for the caller."""

import contextvars
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from cyborg.core.errors import TimedOut, Unavailable

T = TypeVar("T")


class BoundedCalls:
    """Calls in daemon threads, of which a limited number run at a time.

    The timeout of a library applies to each packet, so a server that sends a byte a second can
    delay a call for hours. A call cannot be interrupted: after its deadline it keeps its thread
    until it returns.
    """

    def __init__(self, name: str, max_calls: int) -> None:
        """``name`` is the name of the threads."""
        self._name = name
        self._max_calls = max_calls
        self._free = threading.BoundedSemaphore(max_calls)

    def call(self, func: Callable[[], T], seconds: float) -> T:
        """Return the result of ``func``, or raise its exception.

        Raise TimedOut if it does not return in time, and Unavailable if too many other calls are in
        progress.
        """
        end = time.monotonic() + seconds
        if not self._free.acquire(timeout=max(0.0, seconds)):
            raise Unavailable(f"{self._max_calls} other calls are in progress")
        result: list[T] = []
        errors: list[BaseException] = []
        done = threading.Event()
        context = contextvars.copy_context()  # with the fields of log lines

        def run() -> None:
            try:
                result.append(context.run(func))
            except BaseException as exc:  # noqa: BLE001 - raised in the thread of the caller
                errors.append(exc)
            finally:
                self._free.release()
                done.set()

        try:
            threading.Thread(target=run, name=self._name, daemon=True).start()
        except RuntimeError as exc:
            self._free.release()
            raise Unavailable(f"no thread can start: {exc}") from exc
        if not done.wait(max(0.0, end - time.monotonic())):
            raise TimedOut(f"no answer in {seconds:.3g} s")
        if errors:
            raise errors[0]
        return result[0]

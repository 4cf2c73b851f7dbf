# SPDX-License-Identifier: Apache-2.0
"""Calls in threads: with a deadline, several at a time, or many in the background."""

import contextvars
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from cyborg.core.errors import TimedOut, Unavailable

T = TypeVar("T")


def start_call(name: str, func: Callable[[], T]) -> Future[T]:
    """Call a function in a daemon thread of its own. Raise RuntimeError if no thread can start.

    The function has the caller's context, such as the fields of log lines.
    """
    # No ThreadPoolExecutor: it joins its threads at the end of the process, and a call that hangs
    # must not keep the process.
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(func))
        except BaseException as exc:  # noqa: BLE001 - raised in the thread that reads the result
            future.set_exception(exc)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class BoundedCalls:
    """Calls in daemon threads, of which a limited number run at a time."""

    # The timeout of a library applies to each packet, so a server that sends a byte a second can
    # delay a call for hours. A call cannot be interrupted: after its deadline it keeps its thread
    # until it returns.

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

        def run() -> T:
            try:
                return func()
            finally:
                self._free.release()  # before the caller has the result, and may call again

        try:
            future = start_call(self._name, run)
        except RuntimeError as exc:
            self._free.release()
            raise Unavailable(f"no thread can start: {exc}") from exc
        # Not result(timeout): its TimeoutError could also be that of the function.
        if not wait([future], max(0.0, end - time.monotonic())).done:
            raise TimedOut(f"no answer in {seconds:.3g} s")
        return future.result()


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
        self._hanging: Future[Any] | None = None
        self._hanging_since = 0.0

    def run(self, function: Callable[[], T]) -> T:
        """Return the result of a function, or raise its exception.

        Raise TimedOut if it exceeds the timeout, Unavailable if an earlier call has not returned.
        """
        if not self._lock.acquire(timeout=self._timeout):
            raise Unavailable(f"{self._subject} has not completed earlier calls, retry later")
        try:
            begin = time.monotonic()
            if self._hanging is not None and not self._hanging.done():
                seconds = begin - self._hanging_since
                raise Unavailable(f"{self._subject} has not answered for {seconds:.0f} s")
            future = start_call(self._subject, function)
            if not wait([future], self._timeout).done:
                self._hanging, self._hanging_since = future, begin
                raise TimedOut(f"{self._subject} did not answer in {self._timeout:g} s")
            return future.result()
        finally:
            self._lock.release()


R = TypeVar("R")


def map_parallel(
    name: str, func: Callable[[T], R], items: Sequence[T], max_threads: int
) -> list[R]:
    """Return the result of ``func`` for each item, in order, with at most ``max_threads`` calls.

    ``name`` is the name of the threads. If a call raises, no further call starts, and the exception
    is raised after the running calls have ended.
    """
    results: list[Any] = [None] * len(items)
    errors: list[BaseException] = []
    positions = iter(range(len(items)))
    lock = threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                position = next(positions, None)
            if position is None:
                return
            try:
                results[position] = func(items[position])
            except BaseException as exc:  # noqa: BLE001  raised by the caller's thread
                errors.append(exc)

    # The caller's thread is one of them, so that a single call needs no thread. The others are
    # daemons, so that a call that hangs does not keep the process.
    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(work,), name=name, daemon=True
        )
        for _ in range(min(max_threads, len(items)) - 1)
    ]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def map_ahead(
    name: str,
    func: Callable[[T], R],
    items: Iterable[T],
    *,
    max_threads: int,
    max_ahead: int,
    on_wait: Callable[[], object] = lambda: None,
    stopped: threading.Event | None = None,
) -> Generator[R, None, None]:
    """Yield the result of ``func`` for each item, in order, with at most ``max_threads`` calls.

    A slow call does not delay those of later items: up to ``max_ahead`` items are read before their
    results are taken. ``items`` is read in the caller's thread. ``name`` is the name of the
    threads. While a result is awaited, ``on_wait`` is called each second; it may raise. If a call
    raises, the exception is raised in the place of its result. After an exception, and after the
    generator is closed, ``stopped`` is set, no further call starts, and the running ones are
    awaited.
    """
    stopped = stopped or threading.Event()
    queue = SimpleQueue[tuple[Future[R], T] | None]()

    def work() -> None:
        while (entry := queue.get()) is not None:
            future, item = entry
            if stopped.is_set():
                continue
            try:
                future.set_result(func(item))
            except BaseException as exc:  # noqa: BLE001  raised where the result is taken
                future.set_exception(exc)

    threads: list[threading.Thread] = []
    pending = deque[Future[R]]()
    iterator = iter(items)
    try:
        while True:
            for item in itertools.islice(iterator, max_ahead - len(pending)):
                future = Future[R]()
                pending.append(future)
                queue.put((future, item))
                if len(threads) < max_threads:
                    # A daemon, so that a call that hangs does not keep the process.
                    context = contextvars.copy_context()
                    thread = threading.Thread(
                        target=context.run, args=(work,), name=name, daemon=True
                    )
                    thread.start()
                    threads.append(thread)
            if not pending:
                return
            while not wait([pending[0]], 1.0).done:
                on_wait()
            yield pending.popleft().result()
    finally:
        stopped.set()
        for _ in threads:
            queue.put(None)
        for thread in threads:
            thread.join()


# Threads of one ``FanOut``. An unresponsive agent occupies a thread for ``[rpc] timeout``.
MAX_THREADS = 8


class FanOut:
    """Pool of at most MAX_THREADS daemon threads that calls functions for lists of items."""

    def __init__(self, name: str) -> None:
        """``name`` is the name of the threads."""
        self._name = name
        self._lock = threading.Lock()
        self._batches: deque[deque[Callable[[], None]]] = deque()
        self._threads = 0
        self._stopped = False

    def submit(self, func: Callable[[T], None], items: Iterable[T]) -> None:
        """Call ``func`` for each item in the background; do not wait.

        ``func`` must not raise. Batches take turns, call by call, so that a small batch does not
        wait for a large one. After ``stop`` nothing is submitted.
        """
        batch: deque[Callable[[], None]] = deque(functools.partial(func, item) for item in items)
        with self._lock:
            if self._stopped or not batch:
                return
            self._batches.append(batch)
            # Threads end when nothing is left, so that an idle daemon has none.
            new_threads = min(MAX_THREADS - self._threads, len(batch))
            self._threads += new_threads
        for started in range(new_threads):
            # No ThreadPoolExecutor: its threads are not daemons, and a call to a dead agent must
            # not delay the end of the process.
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads can start: the running ones, if any, do the work
                with self._lock:
                    self._threads -= new_threads - started
                    has_no_thread = self._threads == 0
                if has_no_thread:
                    raise
                return

    def stop(self) -> None:
        """Discard the calls that have not started."""
        with self._lock:
            self._stopped = True
            self._batches.clear()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            call()

    def _next(self) -> Callable[[], None] | None:
        """Return the next call, or None to end the thread."""
        with self._lock:
            if not self._batches:
                self._threads -= 1
                return None
            batch = self._batches.popleft()
            call = batch.popleft()
            if batch:
                self._batches.append(batch)
            return call

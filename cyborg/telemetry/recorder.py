# SPDX-License-Identifier: Apache-2.0
"""Count events and durations of one process, in values that ``worker_files`` may share.

It needs the standard library only, because agents use the same RPC clients.
"""

import threading
import time
from bisect import bisect_left
from types import TracebackType
from typing import Protocol

from cyborg.core.errors import CyborgError
from cyborg.core.log import get_logger
from cyborg.telemetry.families import Family

LOG = get_logger(__name__)

MAX_VALUES = 16384
"""Values of one process, three times those of each operation and RPC method with its results."""

RETRY_INTERVAL = 10.0
"""Seconds after which a series that could not be stored is tried again."""

Key = tuple[str, ...]
"""The name of a metric and the values of its labels."""


class ValueStore(Protocol):
    """Interface of a store of up to MAX_VALUES floating-point numbers."""

    @property
    def values(self) -> "memoryview[float]":
        """Return the numbers."""

    def add_key(self, key: Key, width: int) -> None:
        """Record that the next ``width`` values are those of a key. Raise OSError."""


class MetricRecorder:
    """Recorder of the metrics of one process; thread-safe. It does nothing until it is opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._store: ValueStore | None = None
        self._indexes: dict[Key, int] = {}
        self._used = 0
        self._retry_at = 0.0  # monotonic seconds
        self._is_full = False

    def open(self, store: ValueStore) -> None:
        """Begin to record in an empty store."""
        with self._lock:
            self._indexes, self._used = {}, 0
            self._retry_at, self._is_full = 0.0, False
            self._store = store

    def close(self) -> None:
        """Record no more; then the store can be closed."""
        with self._lock:
            self._store = None

    def count(self, family: Family, *labels: str, amount: float = 1.0) -> None:
        """Add to a counter. With ``amount`` 0 the counter is shown before the first event."""
        if self._store is None:
            return
        with self._lock:
            if (index := self._find((family.name, *labels), family)) >= 0:
                self._store.values[index] += amount

    def set(self, family: Family, value: float, *labels: str) -> None:
        """Set a gauge, or the value of a counter that is counted elsewhere in this process."""
        if self._store is None:
            return
        with self._lock:
            if (index := self._find((family.name, *labels), family)) >= 0:
                self._store.values[index] = value

    def observe(self, family: Family, seconds: float, *labels: str) -> None:
        """Add a duration to a histogram."""
        if self._store is None:
            return
        # The clocks of two servers may differ, and a sum must not decrease.
        seconds = max(0.0, seconds)
        with self._lock:
            if (index := self._find((family.name, *labels), family)) >= 0:
                self._store.values[index + bisect_left(family.buckets, seconds)] += 1.0
                self._store.values[index + len(family.buckets) + 1] += seconds

    def measure(self, calls: Family, seconds: Family, method: str) -> "Measurement":
        """Return a context manager that counts a call and observes its duration."""
        return Measurement(self, calls, seconds, method)

    def _find(self, key: Key, family: Family) -> int:
        """Return the index of the first value of a key, -1 if it cannot be stored."""
        store = self._store
        if store is None:  # closed since the caller has looked
            return -1
        index = self._indexes.get(key)
        if index is not None:
            return index
        width = family.width
        if self._used + width > MAX_VALUES:
            if not self._is_full:
                self._is_full = True
                LOG.warning("Too many metrics: series such as %s are not recorded", " ".join(key))
            return -1
        if time.monotonic() < self._retry_at:
            return -1
        # No request may fail because its metric cannot be stored.
        error: OSError | None = None
        try:
            store.add_key(key, width)
        except OSError as exc:
            error = exc
        if error is not None:
            self._retry_at = time.monotonic() + RETRY_INTERVAL
            LOG.warning(
                "Cannot store metrics, new series are not recorded for %.0f s: %s",
                RETRY_INTERVAL,
                error,
            )
            return -1
        index = self._used
        self._indexes[key] = index
        self._used += width
        return index


class Measurement:
    """Measurement of a call: its result is ok, or the code of the error that it raises."""

    __slots__ = ("_calls", "_method", "_recorder", "_seconds", "_started")

    def __init__(
        self, recorder: MetricRecorder, calls: Family, seconds: Family, method: str
    ) -> None:
        self._recorder, self._calls, self._seconds = recorder, calls, seconds
        self._method = method
        self._started = 0.0

    def __enter__(self) -> None:
        """Begin the measurement."""
        self._started = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        """Record the call."""
        # An error of a library may have a code too, of any value.
        error = exc.code if isinstance(exc, CyborgError) else CyborgError.code
        self._recorder.count(self._calls, self._method, "ok" if exc is None else error)
        self._recorder.observe(self._seconds, time.monotonic() - self._started, self._method)

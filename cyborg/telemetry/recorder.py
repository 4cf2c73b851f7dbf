# SPDX-License-Identifier: Apache-2.0
"""Count events and durations of one process, in values that ``WorkerFiles`` may share.

The metrics with their names, labels and buckets are here. The values of a label are from a fixed
set, such as the routes of the API: no client can add series.
"""

# Only the standard library: agents use the same RPC clients, and serve no metrics.
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from cyborg.core import errors, log

LOG = log.get_logger(__name__)

# Up to 30 s, the default timeout of an RPC call.
_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_STAGES = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
_DELIVERY = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 300.0, 1800.0)


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: a histogram if it has buckets, a counter if its name ends with ``_total``.

    Otherwise it is a gauge, of which the greatest value of all workers is shown. ``buckets`` are
    upper limits in seconds.
    """

    name: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def is_gauge(self) -> bool:
        """Return whether the metric is a gauge."""
        return not self.buckets and not self.name.endswith("_total")

    @property
    def width(self) -> int:
        """Return the number of stored values: the buckets, the last one and the sum; else 1."""
        return len(self.buckets) + 2 if self.buckets else 1


# All metrics by name.
FAMILIES: dict[str, Family] = {}


def _define(
    name: str, text: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = ()
) -> Family:
    return FAMILIES.setdefault(name, Family(name, text, labels, buckets))


API_REQUESTS = _define(
    "cyborg_api_requests_total",
    "Requests to the REST API; the route - is an unknown path.",
    ("method", "route", "status"),
)
API_SECONDS = _define(
    "cyborg_api_request_seconds",
    "Duration of requests to the REST API in seconds.",
    ("method", "route"),
    _QUICK,
)
RPC_CLIENT_CALLS = _define(
    "cyborg_rpc_client_calls_total",
    "RPC calls of this service, by called method and result: ok or the code of the error.",
    ("method", "result"),
)
RPC_CLIENT_SECONDS = _define(
    "cyborg_rpc_client_seconds",
    "Duration of RPC calls of this service in seconds, until the answer.",
    ("method",),
    _QUICK,
)
RPC_SERVER_CALLS = _define(
    "cyborg_rpc_server_calls_total",
    "RPC calls that this service has answered, by result: ok or the code of the error.",
    ("method", "result"),
)
RPC_SERVER_SECONDS = _define(
    "cyborg_rpc_server_seconds",
    "Duration of the work for an RPC call in seconds, without the time in queues.",
    ("method",),
    _QUICK,
)
BINDS = _define(
    "cyborg_binds_total",
    "Ended binds: bound, prepare_failed if the host failed, else the code of the error.",
    ("outcome",),
)
BIND_SECONDS = _define(
    "cyborg_bind_stage_seconds",
    "Duration of the stages of binds in seconds: owner, claim, wait (for cleanings), prepare.",
    ("stage",),
    _STAGES,
)
GUEST_DEVICES = _define(
    "cyborg_guest_devices_total",
    "Devices that agents attached to running guests, or could not: attached, failed.",
    ("outcome",),
)
DELIVERY_SECONDS = _define(
    "cyborg_outbox_delivery_seconds",
    "Seconds from the commit of an outbox message to its delivery.",
    ("kind",),
    _DELIVERY,
)
LOOP_OVERDUE = _define(
    "process_loop_overdue_seconds",
    "Seconds since the last round of a blocked loop of a worker began, 0 if it is not blocked.",
    ("loop",),
)
NOTIFICATIONS = _define(
    "process_nova_notifications_total",
    "Notifications of Nova that the conductors of this host have received.",
    ("result",),
)


# Values of one process, three times those of each operation and RPC method with its results.
MAX_VALUES = 16384

# Seconds after which a series that could not be stored is tried again.
RETRY_INTERVAL = 10.0

# The name of a metric and the values of its labels.
Key = tuple[str, ...]


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
        # Before the lock, so that agents, which have no store, never wait for it.
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

    @contextmanager
    def measure(self, calls: Family, seconds: Family, method: str) -> Iterator[None]:
        """Count a call by its result and observe its duration.

        The result is ok, or the code of the error that the block raises.
        """
        started, result = time.monotonic(), "ok"
        try:
            yield
        except BaseException as exc:
            # An error of a library may have a code too, of any value.
            kind = errors.CyborgError
            result = exc.code if isinstance(exc, kind) else kind.code
            raise
        finally:
            self.count(calls, method, result)
            self.observe(seconds, time.monotonic() - started, method)

    def _find(self, key: Key, family: Family) -> int:
        """Return the index of the first value of a key, -1 if it cannot be stored."""
        store = self._store
        if store is None:  # closed since the caller has looked
            return -1
        index = self._indexes.get(key)
        if index is not None:
            return index
        width = family.width
        # The file has a fixed size: it is mapped, and cannot grow under its readers.
        if self._used + width > MAX_VALUES:
            if not self._is_full:
                self._is_full = True
                LOG.warning("Too many metrics: series such as %s are not recorded", " ".join(key))
            return -1
        if time.monotonic() < self._retry_at:
            return -1
        # No request may fail because its metric cannot be stored.
        try:
            store.add_key(key, width)
        except OSError as exc:
            # A full disk stays full for a while, and each call would try again under the lock.
            self._retry_at = time.monotonic() + RETRY_INTERVAL
            LOG.warning(
                "Cannot store metrics, new series are not recorded for %.0f s: %s",
                RETRY_INTERVAL,
                exc,
            )
            return -1
        index = self._used
        self._indexes[key] = index
        self._used += width
        return index

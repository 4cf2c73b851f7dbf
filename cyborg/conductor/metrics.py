# SPDX-License-Identifier: Apache-2.0
"""Metrics for Prometheus, read from the database at each scrape.

So every conductor returns the values of the whole service, and a restart resets no value. Only the
metrics named ``process_*`` belong to the process that answers. Numbers of objects may be some time
old: see ``conductor.common.count_cache``.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from wsgiref.simple_server import WSGIServer

from oslo_config import cfg
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cyborg.conductor.common.count_cache import CountCache
from cyborg.core.arq.context_states import ContextState
from cyborg.core.arq.states import ArqState
from cyborg.core.attachments.attachment import AttachmentState
from cyborg.core.errors import Unavailable
from cyborg.core.hosts.liveness import Liveness
from cyborg.core.inventory.device import Health
from cyborg.core.inventory.maintenance import SuccessorState
from cyborg.core.log import get_logger
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db.read import totals
from cyborg.db.read.totals import Counts, Totals
from cyborg.db.reader import Reader
from cyborg.threads.rate_limited_log import RateLimitedLogger

LOG = get_logger(__name__)

CACHE_SECONDS = 5.0  # seconds for which collected metrics are cached
RETRY_INTERVAL = 10.0  # seconds between two attempts to bind the port

LOOPS = "process_loop_overdue_seconds"
LOOPS_TEXT = (
    "Seconds since the last round of a blocked loop of this process began, 0 if it is not blocked."
)

NOTIFICATIONS = "process_nova_notifications"
NOTIFICATIONS_TEXT = "Notifications of Nova that this process has received."

METRICS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "cyborg_database_up": ("1 if the database answered; if 0, there are no other metrics.", ()),
    "cyborg_count_age_seconds": (
        "Seconds since the requests, device contexts, attachments, successors, handles, devices "
        "and providers were counted.",
        (),
    ),
    "cyborg_arqs": ("Accelerator requests.", ("state",)),
    "cyborg_bind_oldest_seconds": ("Seconds since the oldest request entered BindStarted.", ()),
    "cyborg_arqs_orphan_suspected": ("Bound requests whose instance has no allocation.", ()),
    "cyborg_arqs_owner_unverified": (
        "Bound requests whose instance's project is not verified yet.",
        (),
    ),
    "cyborg_device_contexts": ("Device contexts.", ("state",)),
    "cyborg_attachments": ("Attachments.", ("state",)),
    "cyborg_maintenance_windows": ("Devices with a maintenance window.", ()),
    "cyborg_device_successors": (
        "Successors of device contexts whose device is under maintenance.",
        ("state",),
    ),
    "cyborg_handles": ("Attach handles: free, owned, dirty or draining.", ("state",)),
    "cyborg_devices": ("Devices.", ("status", "health")),
    "cyborg_device_unhealthy_seconds": (
        "Seconds for which a device has been unhealthy; only unhealthy devices.",
        ("host", "address"),
    ),
    "cyborg_services": ("Daemons by liveness, from their last heartbeat.", ("binary", "state")),
    "cyborg_hosts_cordoned": ("Hosts that are cordoned because their agent is down.", ()),
    "cyborg_outbox_messages": (
        "Outbox messages: pending or dead letters (dead).",
        ("kind", "state"),
    ),
    "cyborg_outbox_oldest_seconds": ("Age of the oldest pending message in seconds.", ("kind",)),
    "cyborg_jobs_open": ("Open jobs.", ("kind",)),
    "cyborg_jobs_overdue": ("Open jobs past their deadline.", ("kind",)),
    "cyborg_jobs_oldest_seconds": ("Age of the oldest open job in seconds.", ("kind",)),
    "cyborg_providers": ("Resource providers that Cyborg publishes to Placement.", ()),
    "cyborg_providers_stale": ("Resource providers that wait for publishing.", ()),
    "cyborg_providers_failing": ("Resource providers whose last publishing failed.", ()),
    "cyborg_placement_sync_lag_seconds": (
        "Seconds for which the oldest stale provider has waited for publishing.",
        (),
    ),
    "cyborg_placement_verification_age_seconds": (
        "Seconds since the provider was verified whose verification is the oldest.",
        (),
    ),
    "cyborg_self_heal_actions_total": ("Self-healing actions of the conductors.", ("kind",)),
    "cyborg_self_heal_last_timestamp_seconds": (
        "Unix time of the last self-healing action of a kind.",
        ("kind",),
    ),
}
"""Every metric of this service: its help text and its labels."""


class DatabaseCollector(Collector):
    """Collector of the metrics from the database; thread-safe."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        reader: Reader,
        *,
        now: Callable[[], datetime] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``now`` returns naive UTC, ``clock`` monotonic seconds."""
        self._conf = conf
        self._reader = reader
        self._now = now or reader.clock
        self._clock = clock
        self._lock = threading.Lock()
        self._counts = CountCache(reader, clock)
        self._read_at = float("-inf")
        self._metrics: list[Metric] = []

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without samples, since the database may be down at the start."""
        return _empty().values()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, cached for CACHE_SECONDS."""
        with self._lock:
            if self._clock() - self._read_at >= CACHE_SECONDS:
                self._metrics = self._collect_metrics()
                self._read_at = self._clock()
            return self._metrics

    def _collect_metrics(self) -> list[Metric]:
        families = _empty()
        error: str | None = None
        try:
            self._reader.clock.refresh()
            counts, counts_age = self._counts.read()
            found, now = read_totals(self._conf, self._reader, self._now), self._now()
        except Unavailable as exc:
            error = exc.message
        if error is not None:
            LOG.warning("Cannot collect metrics, only cyborg_database_up is shown: %s", error)
            families["cyborg_database_up"].add_metric([], 0)
            return [families["cyborg_database_up"]]
        families["cyborg_database_up"].add_metric([], 1)
        families["cyborg_count_age_seconds"].add_metric([], counts_age)
        _fill_counts(families, counts)
        _fill(families, found, now)
        return list(families.values())

    def stop(self) -> None:
        """End counting in the background."""
        self._counts.stop()


class LoopCollector(Collector):
    """Collector of the metric of overdue loops of this process; it needs no database."""

    def __init__(self, overdue: Callable[[], Mapping[str, float]]) -> None:
        self._overdue = overdue

    def describe(self) -> Iterable[Metric]:
        """Return the metric without samples."""
        return [self._family()]

    def collect(self) -> Iterable[Metric]:
        """Return the metric with a sample for each loop."""
        family = self._family()
        for loop, seconds in sorted(self._overdue().items()):
            family.add_metric([loop], seconds)
        return [family]

    @staticmethod
    def _family() -> GaugeMetricFamily:
        return GaugeMetricFamily(LOOPS, LOOPS_TEXT, labels=("loop",))


class NotificationCollector(Collector):
    """Collector of the metric of Nova's notifications to this process; it needs no database."""

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """``counts`` returns the number of notifications by result."""
        self._counts = counts

    def describe(self) -> Iterable[Metric]:
        """Return the metric without samples."""
        return [self._family()]

    def collect(self) -> Iterable[Metric]:
        """Return the metric with a sample for each result; no samples without notifications."""
        family = self._family()
        for result, count in sorted(self._counts().items()):
            family.add_metric([result], count)
        return [family]

    @staticmethod
    def _family() -> CounterMetricFamily:
        return CounterMetricFamily(NOTIFICATIONS, NOTIFICATIONS_TEXT, labels=("result",))


class MetricsServer:
    """HTTP server for Prometheus on one port, which only one worker of a host can bind."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        reader: Reader,
        overdue: Callable[[], Mapping[str, float]] = dict,
        notifications: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """``overdue`` returns for each loop of this process the seconds that it is overdue.

        ``notifications`` returns the number of notifications of Nova by result.
        """
        self._conf = conf
        self._registry = CollectorRegistry()
        self._collector = DatabaseCollector(conf, reader)
        self._registry.register(self._collector)
        self._registry.register(LoopCollector(overdue))
        self._registry.register(NotificationCollector(notifications))
        ProcessCollector(registry=self._registry)
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self._rate_limited_log = RateLimitedLogger(logger=LOG)
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def port(self) -> int | None:
        """Return the port on which metrics are served, None while they are not served."""
        return None if self._server is None else int(self._server.server_port)

    def ensure(self) -> bool:
        """Bind the port and serve metrics if not done yet; return whether they are served."""
        options = self._conf.conductor
        with self._lock:
            if self._stopped or self._server is not None:
                return not self._stopped
            failure: OSError | None = None
            try:
                self._server, self._thread = start_http_server(
                    options.metrics_port, options.metrics_listen, self._registry
                )
            except OSError as exc:
                failure = exc
        if failure is not None:
            # If the port is in use, then most likely by another worker of this service.
            if failure.errno != errno.EADDRINUSE:
                self._rate_limited_log.warn(f"Cannot serve metrics: {failure}; retrying")
            return False
        LOG.info("Serving metrics on %s port %s", options.metrics_listen, self.port)
        return True

    def stop(self) -> None:
        """Close the server and its port. Idempotent."""
        with self._lock:
            self._stopped = True
            server, thread, self._server = self._server, self._thread, None
        if server is not None and thread is not None:
            server.shutdown()
            server.server_close()
            thread.join()
        self._collector.stop()


def read_totals(conf: cfg.ConfigOpts, reader: Reader, now: Callable[[], datetime]) -> Totals:
    """Read pending and failing work from the database. Raise Unavailable."""
    current = now()
    with reader.connect() as connection:
        return totals.read(connection, now=current)


def _empty() -> dict[str, Any]:
    return {
        name: (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(
            name, text, labels=labels
        )
        for name, (text, labels) in METRICS.items()
    }


def _fill_counts(families: Mapping[str, Any], counts: Counts) -> None:
    """Add the samples of numbers of objects. A count without rows gives the sample 0."""

    def put(name: str, value: float, *labels: str) -> None:
        families[f"cyborg_{name}"].add_metric(labels, value)

    for name, state, count in _list_states(counts):
        put(name, count, state)
    put("arqs_orphan_suspected", counts.orphans_suspected)
    put("arqs_owner_unverified", counts.owners_unverified)
    for use in ("free", "owned", "dirty", "draining"):
        put("handles", counts.handles.get(use, 0), use)
    for status in ("enabled", "maintaining"):
        for health in Health:
            put("devices", counts.devices.get((status, health), 0), status, health)
    put("providers", counts.providers)


def _fill(families: Mapping[str, Any], found: Totals, now: datetime) -> None:
    """Add the samples of pending and failing work. A count without rows gives the sample 0."""

    def put(name: str, value: float, *labels: str) -> None:
        families[f"cyborg_{name}"].add_metric(labels, value)

    def age(since: datetime | None) -> float:
        return 0.0 if since is None else max(0.0, (now - since).total_seconds())

    put("maintenance_windows", found.maintenance_windows)
    put("bind_oldest_seconds", age(found.oldest_bind_started))
    for device in found.unhealthy:
        put(
            "device_unhealthy_seconds",
            age(device["health_since"]),
            device["host"],
            device["address"],
        )
    for binary in sorted({binary for binary, _ in found.services}):
        for liveness in Liveness:
            put("services", found.services.get((binary, liveness), 0), binary, liveness)
    put("hosts_cordoned", found.hosts_cordoned)
    for messages in found.outbox:
        put("outbox_messages", messages["count"], messages["kind"], messages["state"])
        if messages["state"] == "pending":
            put("outbox_oldest_seconds", age(messages["oldest"]), messages["kind"])
    for jobs in found.jobs:
        put("jobs_open", jobs["count"], jobs["kind"])
        put("jobs_overdue", jobs["overdue"], jobs["kind"])
        put("jobs_oldest_seconds", age(jobs["oldest"]), jobs["kind"])
    put("providers_stale", found.providers_stale)
    put("providers_failing", found.providers_failing)
    put("placement_sync_lag_seconds", age(found.oldest_stale))
    put("placement_verification_age_seconds", age(found.oldest_verified))
    done = {row["kind"]: row for row in found.self_heal_actions}
    for kind in sorted(set(CorrectiveAction) | set(done)):
        put("self_heal_actions_total", done[kind]["count"] if kind in done else 0, kind)
        if kind in done:
            timestamp = done[kind]["last_at"].replace(tzinfo=UTC).timestamp()
            put("self_heal_last_timestamp_seconds", timestamp, kind)


def _list_states(found: Counts) -> Iterator[tuple[str, str, int]]:
    """Yield the name of each metric of objects by state, with each state and its number."""
    states: tuple[tuple[str, Mapping[str, int], Iterable[str]], ...] = (
        ("arqs", found.arqs, ArqState),
        ("device_contexts", found.device_contexts, ContextState),
        ("attachments", found.attachments, AttachmentState),
        ("device_successors", found.successors, SuccessorState),
    )
    for name, counts, all_states in states:
        for state in all_states:
            yield name, state, counts.get(state, 0)

# SPDX-License-Identifier: Apache-2.0
"""What Prometheus is told: counted in the database when it asks, whichever process did the work.

So the answer of any conductor is right, and nothing is lost when one restarts. Only the metrics
named ``process_*`` are of the process that answers.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from wsgiref.simple_server import WSGIServer

from oslo_config import cfg
from oslo_log import log
from oslo_utils import timeutils
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cyborg.conductor.periodic import Complaints
from cyborg.core.deed import Deed
from cyborg.core.device import Health
from cyborg.core.errors import Unavailable
from cyborg.core.liveness import Liveness
from cyborg.core.states import RequestState
from cyborg.db.read import totals
from cyborg.db.read.totals import Totals
from cyborg.db.reader import Reader

LOG = log.getLogger(__name__)

FRESH = 5.0  # seconds for which an answer is given again
RETRY = 10.0  # seconds between two tries to take the port

METRICS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "cyborg_database_up": ("Whether the database answered; without it there is nothing else.", ()),
    "cyborg_requests": ("Accelerator requests.", ("state",)),
    "cyborg_bind_oldest_seconds": ("How long the oldest request is in BindStarted.", ()),
    "cyborg_orphans_suspected": ("Bound requests whose instance has no allocation.", ()),
    "cyborg_owners_unknown": ("Bound requests whose instance's project is not known yet.", ()),
    "cyborg_handles": ("Attach handles: free, owned, dirty or draining.", ("use",)),
    "cyborg_devices": ("Devices.", ("status", "health")),
    "cyborg_device_unhealthy": (
        "How long a device has been unhealthy, in seconds; only those that are.",
        ("host", "address"),
    ),
    "cyborg_services": ("Daemons by what their last hello says.", ("binary", "state")),
    "cyborg_hosts_closed": ("Hosts that are closed because their agent is down.", ()),
    "cyborg_outbox_messages": ("Messages that wait (pending) or failed (dead).", ("kind", "state")),
    "cyborg_outbox_oldest_seconds": ("How long the oldest message waits.", ("kind",)),
    "cyborg_jobs_open": ("Host work that has not ended.", ("kind",)),
    "cyborg_jobs_overdue": ("Host work that is past its deadline.", ("kind",)),
    "cyborg_jobs_oldest_seconds": ("How long the oldest open work has been promised.", ("kind",)),
    "cyborg_providers": ("Resource providers that Placement must have.", ()),
    "cyborg_providers_stale": ("Resource providers that Placement must still be told of.", ()),
    "cyborg_providers_failing": ("Resource providers that Placement refused.", ()),
    "cyborg_providers_oldest_seconds": (
        "How long the provider that has waited longest does so.",
        (),
    ),
    "cyborg_deeds_total": ("What the conductors put right by themselves.", ("kind",)),
    "cyborg_deeds_last_timestamp_seconds": ("When the conductors did that last.", ("kind",)),
}
"""Every metric of this service: what it says, and its labels."""


class FromDatabase(Collector):
    """Makes the metrics of one scrape; many threads may ask at once."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        reader: Reader,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``now`` is naive UTC; ``clock`` counts seconds upwards."""
        self._conf = conf
        self._reader = reader
        self._now = now
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._made: list[Metric] = []

    def describe(self) -> Iterable[Metric]:
        """Name the metrics without asking the database, which may be away at the start."""
        return _empty().values()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, those of the last answer while it is fresh."""
        with self._lock:
            if self._clock() - self._read_at >= FRESH:
                self._made = self._make()
                self._read_at = self._clock()
            return self._made

    def _make(self) -> list[Metric]:
        families = _empty()
        try:
            found, now = look(self._conf, self._reader, self._now), self._now()
        except Unavailable as bad:
            LOG.warning("No metrics: %s", bad.message)
            families["cyborg_database_up"].add_metric([], 0)
            return [families["cyborg_database_up"]]
        families["cyborg_database_up"].add_metric([], 1)
        _fill(families, found, now)
        return list(families.values())


class MetricsServer:
    """Answers Prometheus on one port, if it can have it; another worker may be there already."""

    def __init__(self, conf: cfg.ConfigOpts, reader: Reader) -> None:
        self._conf = conf
        self._registry = CollectorRegistry()
        self._registry.register(FromDatabase(conf, reader))
        ProcessCollector(registry=self._registry)
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self._complaints = Complaints()
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def port(self) -> int | None:
        """Return the port that is served, None while none is."""
        return None if self._server is None else int(self._server.server_port)

    def ensure(self) -> bool:
        """Take the port unless it is ours; tell whether it is now."""
        ours = self._conf.conductor
        with self._lock:
            if self._stopped or self._server is not None:
                return not self._stopped
            try:
                self._server, self._thread = start_http_server(
                    ours.metrics_port, ours.metrics_listen, self._registry
                )
            except OSError as bad:
                # A port that is taken is most often another worker's of this very service.
                if bad.errno != errno.EADDRINUSE:
                    self._complaints.wrong(f"Metrics cannot be served: {bad}")
                return False
        LOG.info("Metrics are served on %s port %s", ours.metrics_listen, self.port)
        return True

    def stop(self) -> None:
        """Give the port back. Twice is fine."""
        with self._lock:
            self._stopped = True
            server, thread, self._server = self._server, self._thread, None
        if server is not None and thread is not None:
            server.shutdown()
            server.server_close()
            thread.join()


def look(conf: cfg.ConfigOpts, reader: Reader, now: Callable[[], datetime]) -> Totals:
    """Count everything once. Raises Unavailable."""
    ours, at = conf.conductor, now()
    interval = timedelta(seconds=ours.hello_interval)
    with reader.connect() as connection:
        return totals.read(
            connection,
            now=at,
            late_before=at - interval * (ours.late_after + 1),
            down_before=at - interval * (ours.down_after + 1),
        )


def _empty() -> dict[str, Any]:
    return {
        name: (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(
            name, text, labels=labels
        )
        for name, (text, labels) in METRICS.items()
    }


def _fill(families: Mapping[str, Any], found: Totals, now: datetime) -> None:
    """Give each family its samples. What is counted and is not there is 0, not absent."""

    def put(name: str, value: float, *labels: str) -> None:
        families[f"cyborg_{name}"].add_metric(labels, value)

    def age(since: datetime | None) -> float:
        return 0.0 if since is None else max(0.0, (now - since).total_seconds())

    for state in RequestState:
        put("requests", found.requests.get(state, 0), state)
    put("bind_oldest_seconds", age(found.oldest_bind_started))
    put("orphans_suspected", found.orphans_suspected)
    put("owners_unknown", found.owners_unknown)
    for use in ("free", "owned", "dirty", "draining"):
        put("handles", found.handles.get(use, 0), use)
    for status in ("enabled", "maintaining"):
        for health in Health:
            put("devices", found.devices.get((status, health), 0), status, health)
    for row in found.unhealthy:
        put("device_unhealthy", age(row["health_since"]), row["host"], row["address"])
    for binary in sorted({binary for binary, _ in found.services}):
        for liveness in Liveness:
            put("services", found.services.get((binary, liveness), 0), binary, liveness)
    put("hosts_closed", found.hosts_closed)
    for row in found.outbox:
        put("outbox_messages", row["count"], row["kind"], row["state"])
        if row["state"] == "pending":
            put("outbox_oldest_seconds", age(row["oldest"]), row["kind"])
    for row in found.jobs:
        put("jobs_open", row["count"], row["kind"])
        put("jobs_overdue", row["overdue"], row["kind"])
        put("jobs_oldest_seconds", age(row["oldest"]), row["kind"])
    put("providers", found.providers)
    put("providers_stale", found.providers_stale)
    put("providers_failing", found.providers_failing)
    put("providers_oldest_seconds", age(found.oldest_stale))
    done = {row["kind"]: row for row in found.deeds}
    for kind in sorted(set(Deed) | set(done)):
        put("deeds_total", done[kind]["count"] if kind in done else 0, kind)
        if kind in done:
            at = done[kind]["last_at"].replace(tzinfo=UTC).timestamp()
            put("deeds_last_timestamp_seconds", at, kind)

# SPDX-License-Identifier: Apache-2.0
"""Metrics for Prometheus, read from the database at each scrape.

So every conductor returns the values of the whole service, and a restart resets no value. Numbers
of objects may be some time old: see ``db.totals.cache``. The metrics that the workers
of this host count themselves are in ``cyborg.telemetry``.
"""

import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from itertools import chain
from typing import Any

from oslo_config import cfg
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cyborg.conductor.attachments.deliveries import ATTACHED, FAILED
from cyborg.conductor.notifications.notifications import NOTIFICATION, NOVA_EVENT
from cyborg.core.attachments.attachment import AttachmentState
from cyborg.core.binding.states import ArqState
from cyborg.core.contexts.states import ContextState
from cyborg.core.errors import Unavailable
from cyborg.core.hosts import Liveness
from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_set import OfferState
from cyborg.core.jobs.job import JobKind
from cyborg.core.log import get_logger
from cyborg.core.maintenance import SuccessorState
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db.engine import Reader
from cyborg.db.totals import read as totals_read
from cyborg.db.totals.cache import CountCache
from cyborg.db.totals.read import Counts, HandleUse, SetKey, Totals
from cyborg.telemetry.recorder import (
    BINDS,
    GUEST_DEVICES,
    LOOP_OVERDUE,
    NOTIFICATIONS,
    MetricRecorder,
)
from cyborg.telemetry.server import MetricsServer
from cyborg.threads.locks import CachedValue

LOG = get_logger(__name__)

# Seconds for which collected metrics are cached.
CACHE_SECONDS = 5.0
# Maximum number of resource classes in metrics.
MAX_CLASSES = 200

# Outcomes of binds that are shown before the first one, so that its increase is seen.
EXPECTED_OUTCOMES = ("bound", "no_handle", "prepare_failed")

# Every metric from the database: its help text and its labels.
_TABLE = resources.files(__package__).joinpath("metrics.toml").read_text("utf-8")
METRICS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    name: (metric["help"], tuple(metric.get("labels", ())))
    for name, metric in tomllib.loads(_TABLE).items()
}


@dataclass(eq=False)
class DatabaseCollector(Collector):
    """Collector of the metrics from the database; thread-safe.

    ``clock`` returns monotonic seconds.
    """

    reader: Reader
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        # Counts of all objects grow with the cloud: they are read less often than pending work.
        self._counts = CountCache(self.reader, self.clock)
        self._metrics = CachedValue(self._collect_metrics, CACHE_SECONDS, self.clock)

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without samples, since the database may be down at the start."""
        # The client library calls this at the registration, to find duplicate names.
        return _empty().values()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, cached for CACHE_SECONDS.

        If the database cannot be read, or does not answer another scrape in time, it is down.
        """
        try:
            return self._metrics.get()
        except Unavailable as exc:
            return _report_down(exc.message)

    def _collect_metrics(self) -> list[Metric]:
        families = _empty()
        try:
            self.reader.clock.refresh()
            counts, counts_age = self._counts.read()
            now = self.reader.clock()
            totals = read_totals(self.reader, now)
        except Unavailable as exc:
            return _report_down(exc.message)
        families["cyborg_database_up"].add_metric([], 1)
        families["cyborg_count_age_seconds"].add_metric([], counts_age)
        _fill_counts(families, counts)
        _fill(families, totals, now)
        return list(families.values())

    def stop(self) -> None:
        """End counting in the background."""
        self._counts.stop()


def make_server(
    conf: cfg.ConfigOpts,
    reader: Reader,
    recorder: MetricRecorder,
    overdue: Callable[[], Mapping[str, float]] = dict,
    notifications: Callable[[], Mapping[str, int]] = dict,
) -> MetricsServer:
    """Return the server of the metrics of a conductor.

    ``overdue`` returns for each loop of this process the seconds that it is overdue,
    ``notifications`` the number of notifications of Nova by result.
    """

    def refresh() -> None:
        for loop, seconds in overdue().items():
            recorder.set(LOOP_OVERDUE, seconds, loop)
        for result, count in notifications().items():
            recorder.set(NOTIFICATIONS, count, result)
        for outcome in EXPECTED_OUTCOMES:
            recorder.count(BINDS, outcome, amount=0)
        for outcome in (ATTACHED, FAILED):
            recorder.count(GUEST_DEVICES, outcome, amount=0)

    options, collector = conf.conductor, DatabaseCollector(reader)
    return MetricsServer(
        options.metrics_listen,
        options.metrics_port,
        recorder,
        options.metrics_directory,
        collectors=[collector],
        refresh=refresh,
        on_stop=collector.stop,
    )


def read_totals(reader: Reader, now: datetime) -> Totals:
    """Read pending and failing work from the database. Raise Unavailable."""
    with reader.connect() as connection:
        return totals_read.read(connection, now=now)


def _report_down(error: str) -> list[Metric]:
    """Log that the database does not answer, and return the only metric that is then known."""
    LOG.warning("Cannot collect metrics, only cyborg_database_up is shown: %s", error)
    family = _empty()["cyborg_database_up"]
    family.add_metric([], 0)
    return [family]


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
    # Each label value is a time series that the metrics server keeps.
    classes = sorted({key.resource_class for key in counts.handles})[:MAX_CLASSES]
    for use in ("free", "owned", "dirty", "draining", "cordoned"):
        put("handles", counts.count_handles(use), use)
        for name in classes:
            put("class_handles", counts.handles.get(HandleUse(name, use), 0), name, use)
    for status in ("enabled", "maintaining"):
        for health in Health:
            put("devices", counts.devices.get((status, health), 0), status, health)
    for kind, size in sorted({(key.kind, key.size) for key in counts.device_sets}):
        for offer in OfferState:
            put(
                "device_sets",
                counts.device_sets.get(SetKey(kind, size, offer), 0),
                kind,
                str(size),
                offer,
            )
    put("providers", counts.providers)


# The name of a metric without its prefix, the value, and the labels.
_Sample = tuple[str, float, *tuple[str, ...]]


def _fill(families: Mapping[str, Any], totals: Totals, now: datetime) -> None:
    """Add the samples of pending and failing work. A count without rows gives the sample 0."""
    for name, value, *labels in chain(
        _list_devices(totals, now),
        _list_services(totals),
        _list_messages(totals, now),
        _list_jobs(totals, now),
        _list_providers(totals, now),
        _list_actions(totals),
    ):
        families[f"cyborg_{name}"].add_metric(labels, value)


def _age(since: datetime | None, now: datetime) -> float:
    return 0.0 if since is None else max(0.0, (now - since).total_seconds())


def _list_devices(totals: Totals, now: datetime) -> Iterator[_Sample]:
    yield "maintenance_windows", totals.maintenance_windows
    yield "devices_failing", totals.devices_failing
    yield "guest_devices_missing", totals.guest_devices_missing
    if totals.audit_findings is not None:
        yield "audit_findings", totals.audit_findings
    yield "bind_oldest_seconds", _age(totals.oldest_bind_started, now)
    for device in totals.unhealthy:
        seconds = _age(device["health_since"], now)
        yield "device_unhealthy_seconds", seconds, device["host"], device["address"]


def _list_services(totals: Totals) -> Iterator[_Sample]:
    for binary in sorted({binary for binary, _ in totals.services}):
        for liveness in Liveness:
            yield "services", totals.services.get((binary, liveness), 0), binary, liveness
    yield "hosts_cordoned", totals.hosts_cordoned


def _list_messages(totals: Totals, now: datetime) -> Iterator[_Sample]:
    messages = {(row["kind"], row["state"]): row for row in totals.outbox}
    # Kinds without rows too: an alert cannot compare a sample that does not exist.
    for kind in sorted({NOVA_EVENT, NOTIFICATION} | {kind for kind, _ in messages}):
        for state in ("pending", "dead"):
            row = messages.get((kind, state))
            yield "outbox_messages", row["count"] if row else 0, kind, state
        pending = messages.get((kind, "pending"))
        yield "outbox_oldest_seconds", _age(pending["oldest"] if pending else None, now), kind


def _list_jobs(totals: Totals, now: datetime) -> Iterator[_Sample]:
    open_jobs = {row["kind"]: row for row in totals.jobs}
    for kind in sorted({str(kind) for kind in JobKind} | set(open_jobs)):
        job = open_jobs.get(kind)
        yield "jobs_open", job["count"] if job else 0, kind
        yield "jobs_overdue", job["overdue"] if job else 0, kind
        yield "jobs_oldest_seconds", _age(job["oldest"] if job else None, now), kind


def _list_providers(totals: Totals, now: datetime) -> Iterator[_Sample]:
    yield "providers_stale", totals.providers_stale
    yield "providers_failing", totals.providers_failing
    yield "placement_sync_lag_seconds", _age(totals.oldest_stale, now)
    yield "placement_verification_age_seconds", _age(totals.oldest_verified, now)


def _list_actions(totals: Totals) -> Iterator[_Sample]:
    done = {row["kind"]: row for row in totals.self_heal_actions}
    for kind in sorted(set(CorrectiveAction) | set(done)):
        yield "self_heal_actions_total", done[kind]["count"] if kind in done else 0, kind
        if kind in done:
            timestamp = done[kind]["last_at"].replace(tzinfo=UTC).timestamp()
            yield "self_heal_last_timestamp_seconds", timestamp, kind


def _list_states(counts: Counts) -> Iterator[tuple[str, str, int]]:
    """Yield the name of each metric of objects by state, with each state and its number."""
    states: tuple[tuple[str, Mapping[str, int], Iterable[str]], ...] = (
        ("arqs", counts.arqs, ArqState),
        ("device_contexts", counts.device_contexts, ContextState),
        ("attachments", counts.attachments, AttachmentState),
        ("device_successors", counts.successors, SuccessorState),
    )
    for name, by_state, all_states in states:
        for state in all_states:
            yield name, state, by_state.get(state, 0)

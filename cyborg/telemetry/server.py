# SPDX-License-Identifier: Apache-2.0
"""Serve the metrics of all workers of a service to Prometheus, on one port of the host."""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, core, start_http_server
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cyborg.core.log import get_logger
from cyborg.telemetry.recorder import FAMILIES, Family, MetricRecorder
from cyborg.telemetry.worker_files import MemoryValues, Samples, Snapshot, WorkerFiles
from cyborg.threads.failures import RateLimitedLogger

LOG = get_logger(__name__)

RETRY_INTERVAL = 3.0
"""Seconds between two attempts to bind the port, so until another worker takes it over."""


class WorkerCollector(Collector):
    """Collector of the values that all workers have recorded, and of their processes."""

    def __init__(self, read: Callable[[], Snapshot | None]) -> None:
        """``read`` returns the values, None if they cannot be read now."""
        self._read = read

    def describe(self) -> Iterable[core.Metric]:
        """Return the metrics without samples."""
        return [_make_family(family) for family in FAMILIES.values()]

    def collect(self) -> Iterable[core.Metric]:
        """Return the metrics that have samples."""
        snapshot = self._read()
        if snapshot is None:
            return []
        return [*_make_metrics(snapshot.samples), *_describe_processes(sorted(set(snapshot.pids)))]


class MetricsServer:
    """HTTP server for Prometheus on one port, which only one worker of a host can bind.

    ``recorder`` records the metrics of this worker from the first ``ensure`` on.
    """

    def __init__(
        self,
        address: str,
        port: int,
        recorder: MetricRecorder,
        directory: Path | str,
        *,
        collectors: Sequence[Collector] = (),
        refresh: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """``directory`` has the files of the workers; empty if the service has one process.

        ``refresh`` sets the values of the recorder that this worker does not record at once.
        ``on_stop`` is called after the last scrape.
        """
        self._address = address
        self._number = port
        self._recorder = recorder
        self._directory = Path(directory) if directory else None
        self._refresh = refresh
        self._on_stop = on_stop
        self._registry = CollectorRegistry()
        # A registry of our own: the global one also has the process of prometheus_client itself.
        for collector in (*collectors, WorkerCollector(self._read)):
            self._registry.register(collector)
        self._store: MemoryValues | WorkerFiles | None = None
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
        """Record metrics, and bind the port if no worker has; return whether this one serves it."""
        with self._lock:
            if self._stopped:
                return False
            try:
                store = self._open()
                self._refresh()
                if self._server is not None:
                    return True
                if not store.lock_serving():
                    return False
                self._server, self._thread = start_http_server(
                    self._number, self._address, self._registry
                )
            except OSError as exc:
                reason = str(exc)
                if exc.errno == errno.EADDRINUSE:
                    reason = f"another program uses port {self._number} of {self._address}"
                self._rate_limited_log.warn(f"Cannot serve metrics: {reason}; retrying")
                return False
        LOG.info("Serving metrics on %s port %s", self._address, self.port)
        return True

    def stop(self) -> None:
        """Close the server and its port. Idempotent."""
        with self._lock:
            self._stopped = True
            server, thread, self._server = self._server, self._thread, None
            store, self._store = self._store, None
        if server is not None and thread is not None:
            server.shutdown()
            server.server_close()
            # Before the recorder and its store are closed: a scrape may still read them.
            thread.join()
        self._on_stop()
        self._recorder.close()
        if store is not None:
            store.close()

    def _open(self) -> MemoryValues | WorkerFiles:
        """Begin to record if not done yet; return the store. Raise OSError."""
        if self._store is None:
            directory = self._directory
            self._store = MemoryValues() if directory is None else WorkerFiles(directory)
            self._recorder.open(self._store)
        return self._store

    def _read(self) -> Snapshot | None:
        try:
            self._refresh()
            if (store := self._store) is not None:  # until the server stops
                return store.read()
        except OSError as exc:
            self._rate_limited_log.warn(f"Cannot read the metrics of the workers: {exc}")
        return None


def _make_family(family: Family) -> Any:
    if family.buckets:
        return core.HistogramMetricFamily(family.name, family.text, labels=family.labels)
    kind = core.GaugeMetricFamily if family.is_gauge else core.CounterMetricFamily
    return kind(family.name, family.text, labels=family.labels)


def _make_metrics(samples: Samples) -> list[core.Metric]:
    found: dict[str, Any] = {}
    for (name, *labels), values in sorted(samples.items()):
        family = FAMILIES[name]
        metric = found.setdefault(name, _make_family(family))
        if family.buckets:
            limits = [*map(floatToGoString, family.buckets), "+Inf"]
            counts = zip(limits, accumulate(values[:-1]), strict=True)
            metric.add_metric(labels, list(counts), values[-1])
        else:
            metric.add_metric(labels, values[0])
    return list(found.values())


def _describe_processes(pids: Iterable[int]) -> list[core.Metric]:
    """Return CPU time, memory and files of each worker, which has the label ``pid``."""
    # The process collector of prometheus_client needs /proc/stat, which systemd hides.
    metrics: list[Any] = [
        core.CounterMetricFamily("process_cpu_seconds", "CPU time in seconds.", labels=["pid"]),
        core.GaugeMetricFamily("process_virtual_memory_bytes", "Virtual memory.", labels=["pid"]),
        core.GaugeMetricFamily("process_resident_memory_bytes", "Resident memory.", labels=["pid"]),
        core.GaugeMetricFamily(
            "process_start_time_seconds", "Unix time of the start.", labels=["pid"]
        ),
        core.GaugeMetricFamily("process_open_fds", "Open file descriptors.", labels=["pid"]),
    ]
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for metric, value in zip(metrics, _read_process(pid), strict=True):
                metric.add_metric([str(pid)], value)
    return metrics


def _read_process(pid: int) -> tuple[float, ...]:
    """Return CPU seconds, virtual and resident bytes, start and open files. Raise OSError."""
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    folder = Path("/proc", str(pid))
    # The fields after the name, which may have spaces: state is field 3 of proc(5).
    fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    stat = [0.0, 0.0, 0.0, *map(_number, fields.split())]
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    files = len(os.listdir(folder / "fd"))
    return (
        (stat[14] + stat[15]) / ticks,
        stat[23],
        stat[24] * page,
        booted + stat[22] / ticks,
        files,
    )


def _number(text: str) -> float:
    return float(text) if text.lstrip("-").isdecimal() else 0.0

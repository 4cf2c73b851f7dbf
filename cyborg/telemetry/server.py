# SPDX-License-Identifier: Apache-2.0
"""Serve the metrics of all workers of a service to Prometheus, on one port of the host.

The workers keep their metrics in files, so that each can serve them all.

::

    lock                     held while files are created, read or merged
    serving                  locked by the worker that serves the port
    <pid>-<random>.values    the values of a worker, which maps the file and holds a lock on it
    <pid>-<random>.keys      which metric has which values: a line for each key
    ended.json               the sums of the workers that have ended

Files without a lock are those of workers that have ended: the next worker that starts, or the next
scrape, adds them to ``ended.json`` and deletes them.
"""

import contextlib
import errno
import fcntl
import json
import mmap
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, core, start_http_server
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cyborg.core.log import get_logger
from cyborg.telemetry.recorder import FAMILIES, MAX_VALUES, Family, Key, MetricRecorder
from cyborg.threads.failures import RateLimitedLogger

LOG = get_logger(__name__)


SIZE = MAX_VALUES * 8  # bytes of a file of values

Samples = dict[Key, list[float]]


class MemoryValues:
    """Values of a service that has one process."""

    def __init__(self) -> None:
        self.values = memoryview(bytearray(SIZE)).cast("d")
        self._keys: list[tuple[Key, int]] = []

    def add_key(self, key: Key, width: int) -> None:
        """Record that the next ``width`` values are those of a key."""
        self._keys.append((key, width))

    def lock_serving(self) -> bool:
        """Return True: there is no other worker."""
        return True

    def read(self) -> "Snapshot":
        """Return the values."""
        return Snapshot(_split(list(self._keys), self.values.tolist()), (os.getpid(),))

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Values of all workers, and the processes of those that run."""

    samples: Samples
    pids: tuple[int, ...]


# Not the multiprocess mode of prometheus_client: an environment variable selects it before the
# first import, it keeps the files of each worker for ever, and a full disk kills the worker,
# because its files are sparse.
class WorkerFiles:
    """The files of this worker in a directory, and access to those of the others."""

    def __init__(self, directory: Path) -> None:
        """Create the files of this worker. Raise OSError."""
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        with self._locked(), contextlib.ExitStack() as undo:
            self._merge_ended()
            # Without all of its files, this worker must leave none of them.
            self._values_file = _create(directory / f"{name}.values")
            undo.callback((directory / f"{name}.values").unlink)
            undo.callback(os.close, self._values_file)
            # Without blocks on the disk, a write to the mapped file could kill the process.
            os.posix_fallocate(self._values_file, 0, SIZE)
            # The lock shows that this worker runs. Before ``_locked`` ends: another worker would
            # merge and delete a file without a lock.
            fcntl.flock(self._values_file, fcntl.LOCK_EX)
            self._keys_file = _create(directory / f"{name}.keys")
            undo.callback((directory / f"{name}.keys").unlink)
            undo.callback(os.close, self._keys_file)
            # Mapped, so that a worker that is killed loses nothing: the kernel has its values.
            self._map = mmap.mmap(self._values_file, SIZE)
            self.values = memoryview(self._map).cast("d")
            undo.pop_all()
        self._keys_size = 0
        self._serving_lock: int | None = None  # descriptor, held by the worker that serves the port

    def add_key(self, key: Key, width: int) -> None:
        """Record that the next ``width`` values are those of a key. Raise OSError."""
        line = json.dumps([key, width]).encode() + b"\n"
        # A key that a full disk has cut off must not stand before the next one.
        os.ftruncate(self._keys_file, self._keys_size)
        # A full disk may write a part, without an error.
        if os.write(self._keys_file, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._keys_size += len(line)

    def lock_serving(self) -> bool:
        """Return whether this worker may serve the port, because no other one does."""
        if self._serving_lock is None:
            descriptor = os.open(self._directory / "serving", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                os.close(descriptor)
                if isinstance(exc, BlockingIOError):
                    return False
                raise
            self._serving_lock = descriptor
        return True

    def read(self) -> Snapshot:
        """Return the values of all workers, including those that have ended. Raise OSError."""
        with self._locked():
            running = self._merge_ended()
            samples = _load_ended(self._directory)[0]
            for name in running:
                found, _ = _read_worker(self._directory, name)
                _add(samples, found, with_gauges=True)
        return Snapshot(samples, tuple(int(name.partition("-")[0]) for name in running))

    def close(self) -> None:
        """Close the files; their values count as those of a worker that has ended."""
        self.values.release()
        self._map.close()
        os.close(self._values_file)
        os.close(self._keys_file)
        if self._serving_lock is not None:
            os.close(self._serving_lock)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the directory, without which no file is created or deleted."""
        descriptor = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _merge_ended(self) -> list[str]:
        """Add the values of ended workers to the sums; return the names of the running ones."""
        # By the files of values: those of keys are created after them, and deleted before them.
        names = sorted(path.stem for path in self._directory.glob("*-*.values"))
        running = [name for name in names if _is_locked(self._directory / f"{name}.values")]
        ended = sorted(set(names) - set(running))
        if not ended:
            return running
        samples, merged = _load_ended(self._directory)
        for name in set(ended) - merged:
            found, error = _read_worker(self._directory, name)
            if error is not None:
                LOG.warning("Metrics of the ended worker %s are lost: %s", name, error)
            _add(samples, found, with_gauges=False)
        # The names are in the same file as the sums: a worker that is killed before it has
        # deleted the files does not cause them to be added twice.
        document = {"merged": ended, "samples": list(samples.items())}
        file = self._directory / "ended.json.new"
        file.write_text(json.dumps(document), encoding="utf-8")
        file.replace(self._directory / "ended.json")
        for name in ended:
            (self._directory / f"{name}.keys").unlink(missing_ok=True)
            (self._directory / f"{name}.values").unlink(missing_ok=True)
        return running


def _create(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)


def _is_locked(path: Path) -> bool:
    """Return whether the worker of a file runs."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # A lock, not the pid in the name, which another process may have by now.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _read_worker(directory: Path, name: str) -> tuple[Samples, str | None]:
    """Return the values of a worker; without values, why its files cannot be read.

    The keys are read before the values, so that each key has its values.
    """
    try:
        lines = (directory / f"{name}.keys").read_bytes().split(b"\n")[:-1]
        keys = [(_check_key(key), int(width)) for key, width in map(json.loads, lines)]
        content = (directory / f"{name}.values").read_bytes()[:SIZE]
        values = struct.unpack(f"{len(content) // 8}d", content)
    except (OSError, ValueError, TypeError, RecursionError, struct.error) as exc:
        # Such as after a crash of the host: metrics must not fail a worker.
        return {}, f"{type(exc).__name__}: {exc}"
    return _split(keys, values), None


def _check_key(key: Any) -> Key:
    """Return a key of a file. Raise TypeError."""
    if not isinstance(key, list) or not all(isinstance(text, str) for text in key) or not key:
        raise TypeError(f"not a key: {str(key)[:60]}")
    return tuple(key)


def _split(keys: list[tuple[Key, int]], values: Any) -> Samples:
    samples, index = {}, 0
    for key, width in keys:
        samples[key] = list(values[index : index + width])
        index += width
    return samples


def _add(samples: Samples, added: Mapping[Key, list[float]], *, with_gauges: bool) -> None:
    """Add the values of a worker; of a gauge, keep the greatest value.

    Leave out values that another release has stored in another form. ``with_gauges`` is False for
    workers that have ended, whose gauges say nothing any more.
    """
    for key, values in added.items():
        name, *labels = key
        family = FAMILIES.get(name)
        if family is None or len(values) != family.width or len(labels) != len(family.labels):
            continue
        if not family.is_gauge:
            old = samples.get(key, [0.0] * len(values))
            samples[key] = [a + b for a, b in zip(old, values, strict=True)]
        elif with_gauges:
            samples[key] = [max(values[0], samples.get(key, values)[0])]


def _load_ended(directory: Path) -> tuple[Samples, set[str]]:
    """Return the sums of the ended workers, and the names of those whose files may remain.

    The sums start again from 0, as after a loss of the directory, if the file is missing or
    malformed. Raise OSError if it cannot be read.
    """
    samples: Samples = {}
    try:
        document = json.loads((directory / "ended.json").read_text(encoding="utf-8"))
        stored = {
            _check_key(key): [float(value) for value in values]
            for key, values in document["samples"]
        }
        merged = {str(name) for name in document["merged"]}
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return samples, set()
    _add(samples, stored, with_gauges=False)
    return samples, merged


# Seconds between two attempts to bind the port, so until another worker takes it over.
RETRY_INTERVAL = 3.0


class WorkerCollector(Collector):
    """Collector of the values that all workers have recorded, and of their processes."""

    def __init__(self, read: Callable[[], Snapshot | None]) -> None:
        """``read`` returns the values, None if they cannot be read now."""
        self._read = read

    def describe(self) -> Iterable[core.Metric]:
        """Return the metrics without samples."""
        # prometheus_client would otherwise read the files to learn the names.
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
        self._requested_port = port
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
                # Not logged: of the workers of a host all but one find the port served.
                if not store.lock_serving():
                    return False
                self._server, self._thread = start_http_server(
                    self._requested_port, self._address, self._registry
                )
            except OSError as exc:
                reason = str(exc)
                if exc.errno == errno.EADDRINUSE:
                    reason = f"another program uses port {self._requested_port} of {self._address}"
                self._rate_limited_log.warn(f"Cannot serve metrics: {reason}; retrying")
                return False
        LOG.info("Serving metrics on %s port %s", self._address, self.port)
        return True

    def stop(self) -> None:
        """Close the server and its port. Idempotent."""
        with self._lock:
            self._stopped = True
            server = self._server
            thread = self._thread
            store = self._store
            self._server = None
            self._store = None
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
    """Return the samples as metrics of prometheus_client, of which each has all its series."""
    metrics: dict[str, Any] = {}
    for (name, *labels), values in sorted(samples.items()):
        family = FAMILIES[name]
        metric = metrics.setdefault(name, _make_family(family))
        # A histogram of Prometheus has for each limit the number of all values up to it.
        if family.buckets:
            *bucket_counts, total_seconds = values
            limits = [*map(floatToGoString, family.buckets), "+Inf"]
            counts = zip(limits, accumulate(bucket_counts), strict=True)
            metric.add_metric(labels, list(counts), total_seconds)
        else:
            metric.add_metric(labels, values[0])
    return list(metrics.values())


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
        # The metrics are in the order of the values of ``_read_process``.
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for metric, value in zip(metrics, _read_process(pid), strict=True):
                metric.add_metric([str(pid)], value)
    return metrics


def _read_process(pid: int) -> tuple[float, ...]:
    """Return CPU seconds, virtual and resident bytes, start and open files. Raise OSError."""
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    folder = Path("/proc", str(pid))
    # The fields after the name, which may have spaces: state is field 3 of proc(5). The list gets
    # items in front, so that an index is the number of a field.
    fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    stat = [0.0, 0.0, 0.0, *map(_number, fields.split())]
    user_ticks, system_ticks, start_ticks = stat[14], stat[15], stat[22]
    virtual_bytes, resident_pages = stat[23], stat[24]
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    files = len(os.listdir(folder / "fd"))
    return (
        (user_ticks + system_ticks) / ticks,
        virtual_bytes,
        resident_pages * page,
        booted + start_ticks / ticks,
        files,
    )


def _number(text: str) -> float:
    return float(text) if text.lstrip("-").isdecimal() else 0.0

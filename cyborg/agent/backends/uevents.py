# SPDX-License-Identifier: Apache-2.0
"""Rediscovery of devices when the kernel reports a change: uevents read with libudev."""

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cyborg.agent.backends.backend import Backend
from cyborg.core import log
from cyborg.core.clock import EventBatch, affects, mark_overflow
from cyborg.core.clock import add as add_event
from cyborg.threads import failures, periodic

LOG = log.get_logger(__name__)

# Receive buffer in bytes; adding or removing 256 virtual functions needs about half a MiB.
BUFFER_SIZE = 16 * 1024 * 1024

MAX_EVENTS_PER_READ = 1024  # so that an event storm cannot prevent a stop


class EventsDropped(Exception):
    """The receive buffer overflowed and the kernel dropped events."""


class EventSource(Protocol):
    """Source of uevents."""

    def read(self, seconds: float | None) -> list[str]:
        """Return the subsystems of the events since the last call, one for each event.

        Wait up to ``seconds`` for the first event; None waits without limit. Return an empty list
        after the timeout, or after ``wake``. Raise EventsDropped if the kernel dropped events, and
        OSError if the source is broken.
        """

    def wake(self) -> None:
        """Make ``read`` return soon. Thread-safe."""

    def close(self) -> None:
        """Close the source. Do not call it while ``read`` runs."""


class NetlinkSource:
    """Source of the kernel's events of some subsystems; it receives events from its creation on."""

    def __init__(self, subsystems: Iterable[str], buffer: int = BUFFER_SIZE) -> None:
        """Open a socket with a buffer of ``buffer`` bytes.

        Raise OSError, or ImportError without libudev.
        """
        import pyudev  # here, because it loads libudev, which other agents do not need

        self._monitor: Any = pyudev.Monitor.from_netlink(pyudev.Context(), source="kernel")
        for subsystem in sorted(subsystems):
            self._monitor.filter_by(subsystem)
        try:
            self._monitor.set_receive_buffer_size(buffer)
        except OSError as exc:
            # This needs CAP_NET_ADMIN. Without it more events are dropped, which is handled.
            # The text and not the exception: a log record with the exception would keep the socket.
            reason = str(exc)
            LOG.info("Cannot enlarge the uevent buffer, using the kernel's default: %s", reason)
        # After the filters: before them, events of all subsystems would be queued.
        self._monitor.start()
        self._wakeup_fd, self._wakeup_write_fd = os.pipe()
        # A full pipe must not block the thread that wakes this one.
        os.set_blocking(self._wakeup_fd, False)
        os.set_blocking(self._wakeup_write_fd, False)
        self._poll = select.poll()
        self._poll.register(self._monitor.fileno(), select.POLLIN)
        self._poll.register(self._wakeup_fd, select.POLLIN)

    def read(self, seconds: float | None) -> list[str]:
        """Return the subsystems of new events."""
        # Rounded up: a timeout that is rounded down to 0 would make a busy loop.
        self._poll.poll(None if seconds is None else max(0, int(seconds * 1000) + 1))
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup_fd, 64)  # what ``wake`` has written, if anything
        subsystems: list[str] = []
        try:
            # poll() returns None for a filtered event and at the end. If events are left, the
            # next wait ends at once.
            while (
                len(subsystems) < MAX_EVENTS_PER_READ
                and (event := self._monitor.poll(0)) is not None
            ):
                subsystems.append(str(event.subsystem))
        except OSError as exc:
            # pyudev reports that a descriptor has an error, but not which one.
            if (exc.errno or self._read_socket_error()) != errno.ENOBUFS:
                raise
            raise EventsDropped from exc
        return subsystems

    def wake(self) -> None:
        """Make ``read`` return soon."""
        # A full pipe already has a wake-up that ``read`` has not consumed.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wakeup_write_fd, b"w")

    def close(self) -> None:
        """Close the descriptors."""
        self._poll = select.poll()
        self._monitor = None  # libudev closes its own with the last reference
        os.close(self._wakeup_fd)
        os.close(self._wakeup_write_fd)

    def _read_socket_error(self) -> int:
        """Return and clear the pending error of the socket."""
        with socket.socket(fileno=os.dup(self._monitor.fileno())) as duplicate:
            return duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


INITIAL_PAUSE = 1.0  # seconds before the source is reopened
MAX_PAUSE = 60.0


@dataclass(eq=False)
class UeventWatcher(periodic.LoopThread):
    """Thread that reads uevents and makes the affected backends rediscover.

    ``open_source`` opens a source for subsystems; ``clock`` is monotonic, in seconds.
    """

    backends: Sequence[Backend]
    open_source: Callable[[frozenset[str]], EventSource] = NetlinkSource
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        super().__init__("uevents")
        self._subsystems: frozenset[str] = frozenset()  # of the open source
        self._source: EventSource | None = None
        self._lock = threading.Lock()  # of the source: a stop may wake it while it is replaced
        self._batch: EventBatch | None = None
        self._started = False  # opening a source was tried
        self._reopen_needed = False  # the source lacks subsystems of new backends
        self._backoff = failures.Backoff(INITIAL_PAUSE, MAX_PAUSE)
        self._warned = False
        self._opened_at = 0.0
        self._event_count = self._rediscoveries = 0  # since the start, for the log

    def start(self) -> None:
        """Open the source and start the thread, if any backend subscribes to uevents.

        If the source was opened, no change after this call is missed.
        """
        if self._subsystems_needed():
            self.open()
            super().start()

    def refresh(self) -> None:
        """Subscribe to the uevents of the current backends. Call this after a backend was added.

        If these need further subsystems, make all backends rediscover, to find changes between
        their last discovery and this call. Do not call it concurrently with ``start`` or itself.
        """
        if self._subsystems_needed() <= self._subsystems or self._stopped.is_set():
            return
        if not self._started:
            # As if events were dropped, so that all backends rediscover.
            self._batch = mark_overflow(None, self.clock())
            self.start()
            return
        self._reopen_needed = True
        with self._lock:
            if self._source is not None:
                self._source.wake()

    def stop(self) -> None:
        """Stop the thread."""
        super().stop()
        with self._lock:
            if self._source is not None:
                self._source.wake()

    def run_once(self) -> float:
        """Read events once and rediscover if due; return the seconds before the next call."""
        if self._reopen_needed:
            self._close()
        if self._source is None:
            if not self.open():
                return self._back_off()
            # Changes without an open source were missed.
            self._batch = mark_overflow(self._batch, self.clock())
        if not self._read():
            return self._back_off()
        if self._batch is not None and self.clock() >= self._batch.due:
            self._trigger(self._batch)
        return 0.0

    def on_end(self) -> None:
        """Close the source."""
        self._close()

    def _read(self) -> bool:
        """Read new events and add them to the batch; return whether the source works."""
        source, due = self._source, self._batch.due if self._batch else None
        if source is None:
            return False  # for the types: ``run_once`` has opened it
        try:
            subsystems = source.read(None if due is None else max(0.0, due - self.clock()))
        except EventsDropped:
            # Which devices the lost events were about is unknown, so that all backends must look.
            LOG.info("The kernel dropped uevents (buffer overflow), rediscovering all backends")
            self._batch = mark_overflow(self._batch, self.clock())
            return True
        except Exception as exc:
            LOG.debug("Reading the uevent socket failed", exc_info=True)
            self._close()
            # The source has worked for a while: this is another failure, which is logged again.
            if self.clock() - self._opened_at >= MAX_PAUSE:
                self._warned = False
                self._backoff.reset()
            self._log_failure(exc)
            return False
        now = self.clock()
        for subsystem in subsystems:
            self._batch = add_event(self._batch, now, subsystem)
        return True

    def _back_off(self) -> float:
        """Rediscover after a failure; return the seconds before the source is reopened."""
        if self._batch is not None:
            self._trigger(self._batch)
        return self._backoff.next_delay()

    def _trigger(self, batch: EventBatch) -> None:
        """Rediscover the backends that the collected uevents concern."""
        self._batch = None
        affected = [b for b in self.backends if affects(batch, b.driver.UEVENT_SUBSYSTEMS)]
        self._event_count += batch.events
        self._rediscoveries += bool(affected)
        LOG.debug(
            "Received %d uevents of subsystems %s in %.2f s%s, rediscovering backends: %s "
            "(since start: %d uevents, %d rediscoveries)",
            batch.events,
            ", ".join(sorted(batch.subsystems)) or "nothing",
            batch.last - batch.first,
            ", some dropped" if batch.overflow else "",
            ", ".join(b.name for b in affected) or "none",
            self._event_count,
            self._rediscoveries,
        )
        for backend in affected:
            backend.rediscover()

    def open(self) -> bool:
        """Open a source; return whether it is open."""
        # Clear the flag first: a backend that is added meanwhile sets it again.
        self._started, self._reopen_needed = True, False
        self._subsystems = self._subsystems_needed()
        try:
            source = self.open_source(self._subsystems)
        except Exception as exc:
            LOG.debug("Cannot open uevent socket", exc_info=True)
            self._log_failure(exc)
            return False
        with self._lock:
            self._source = source
        self._opened_at = self.clock()
        # A stop since the begin of this function has found no source to wake.
        if self._stopped.is_set():
            source.wake()
        LOG.info("Watching uevents of %s", ", ".join(sorted(self._subsystems)))
        return True

    def _subsystems_needed(self) -> frozenset[str]:
        """Return the subsystems that the current backends subscribe to."""
        return frozenset[str]().union(*(b.driver.UEVENT_SUBSYSTEMS for b in self.backends))

    def _close(self) -> None:
        with self._lock:
            source, self._source = self._source, None
        if source is not None:
            source.close()

    def _log_failure(self, exc: Exception) -> None:
        """Log a failure: the first at WARNING, others at DEBUG until a source works again."""
        LOG.log(
            logging.DEBUG if self._warned else logging.WARNING,
            "Cannot read uevents, retrying; until then device changes are found only "
            "every [agent] discovery_interval: %s: %s",
            type(exc).__name__,
            exc,
        )
        self._warned = True

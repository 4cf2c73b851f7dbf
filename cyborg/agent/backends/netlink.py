# SPDX-License-Identifier: Apache-2.0
"""Reading of the kernel's uevents with libudev.

The events come from the kernel, not from udevd. So udevd does not have to run, and no event waits
for the rules of udevd, which may take seconds for a card with many PCI functions. Only the
subsystem of an event is used; sysfs is the source of truth.
"""

import contextlib
import errno
import os
import select
import socket
from collections.abc import Iterable
from typing import Any, Protocol

from cyborg.core.log import get_logger

LOG = get_logger(__name__)

BUFFER_SIZE = 16 * 1024 * 1024
"""Receive buffer in bytes; adding or removing 256 virtual functions needs about half a MiB."""

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
            # It needs CAP_NET_ADMIN. Without it more events are dropped, which is handled.
            # Its text: a log record that keeps the exception keeps the frames that have the socket.
            reason = str(exc)
            LOG.info("Cannot enlarge the uevent buffer, using the kernel's default: %s", reason)
        self._monitor.start()
        self._wakeup_fd, self._wakeup_write_fd = os.pipe()
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
            os.read(self._wakeup_fd, 64)
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

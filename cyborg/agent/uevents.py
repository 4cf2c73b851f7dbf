# SPDX-License-Identifier: Apache-2.0
"""Hearing the kernel's uevents, by libudev.

The kernel itself is heard, not udevd: that need not run, and what it adds is not used here. The
events say which subsystem changed and no more is taken from them; sysfs is the truth. On udev's own
word one would wait for its rules, which may take seconds for a card with many functions.
"""

import contextlib
import errno
import os
import select
import socket
from collections.abc import Iterable
from typing import Any, Protocol

from oslo_log import log

LOG = log.getLogger(__name__)

BUFFER = 16 * 1024 * 1024
"""Bytes of events that may wait; 256 virtual functions that come or go are about half of one."""

MAX_AT_ONCE = 1024  # events that are taken in one turn, so that a storm keeps nobody from stopping


class Lost(Exception):
    """The kernel had more events than could wait, and threw some away."""


class Ear(Protocol):
    """Something that hears events."""

    def hear(self, seconds: float | None) -> list[str]:
        """Return the subsystems of the events since the last call, one for each event.

        Waits so long for the first, None is for ever; comes back empty-handed then, and when
        woken. Raises Lost; OSError when it hears nothing any more.
        """

    def wake(self) -> None:
        """Have ``hear`` return soon. Any thread may."""

    def close(self) -> None:
        """Hear nothing any more. Not beside ``hear``."""


class KernelEar:
    """The kernel's events of some subsystems, from the moment it is made."""

    def __init__(self, subsystems: Iterable[str], buffer: int = BUFFER) -> None:
        """``buffer`` is in bytes. Raises OSError, ImportError where there is no libudev."""
        import pyudev  # loads libudev: late, for agents that watch nothing

        self._monitor: Any = pyudev.Monitor.from_netlink(pyudev.Context(), source="kernel")
        for subsystem in sorted(subsystems):
            self._monitor.filter_by(subsystem)
        try:
            self._monitor.set_receive_buffer_size(buffer)
        except OSError as bad:
            # It needs CAP_NET_ADMIN. What is lost without it is noticed and made good.
            LOG.info("The buffer for uevents stays as the kernel made it: %s", bad)
        self._monitor.start()
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self._poll = select.poll()
        self._poll.register(self._monitor.fileno(), select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)

    def hear(self, seconds: float | None) -> list[str]:
        """Return the subsystems of new events."""
        # Rounded up: a wait that is cut to nothing would be made again and again.
        self._poll.poll(None if seconds is None else max(0, int(seconds * 1000) + 1))
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 64)
        told: list[str] = []
        try:
            # An event that nobody asked for reads as None, as does the end; what is left then
            # ends the next wait at once.
            while len(told) < MAX_AT_ONCE and (event := self._monitor.poll(0)) is not None:
                told.append(str(event.subsystem))
        except OSError as bad:
            # pyudev says of a descriptor in error that it is, and not in which.
            if (bad.errno or self._error()) != errno.ENOBUFS:
                raise
            raise Lost from bad
        return told

    def wake(self) -> None:
        """End the wait of ``hear``."""
        # A full pipe is full of wakes that were not heard yet.
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b"w")

    def close(self) -> None:
        """Give the descriptors back."""
        self._poll = select.poll()
        self._monitor = None  # libudev closes its own with the last reference
        os.close(self._woken)
        os.close(self._waker)

    def _error(self) -> int:
        """Return what is wrong with the socket, which forgets it."""
        with socket.socket(fileno=os.dup(self._monitor.fileno())) as same:
            return same.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

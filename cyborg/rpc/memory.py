# SPDX-License-Identifier: Apache-2.0
"""The broker of ``kombu+memory:////``: queues of this process that wake those who wait for them.

kombu's own is polled: oslo.messaging polls it without any pause, so that each idle listener burns a
core; and two threads that meet a new queue at once may each make one, and lose a message.
"""

import threading
from collections.abc import Callable
from queue import Empty, Queue
from time import monotonic
from typing import Any

import kombu.transport
from kombu.transport import memory, virtual

# Told of every message, whatever its queue: there are few listeners, and one lock is enough.
_arrived = threading.Condition()
_count = 0


def install() -> None:
    """Make this the broker behind ``memory://`` in this process. Twice is fine."""
    kombu.transport.TRANSPORT_ALIASES["memory"] = f"{__name__}:Transport"


class Channel(memory.Channel):  # type: ignore[misc]  # kombu has no types
    """One user's view of the queues."""

    queues: dict[str, "Queue[Any]"] = {}

    def _new_queue(self, queue: str, **_: Any) -> None:
        self._queue_for(queue)

    def _queue_for(self, queue: str) -> "Queue[Any]":
        return self.queues.setdefault(queue, Queue())

    def _put(self, queue: str, message: Any, **more: Any) -> None:
        super()._put(queue, message, **more)
        _tell()

    def _put_fanout(self, exchange: str, message: Any, routing_key: Any = None, **_: Any) -> None:
        super()._put_fanout(exchange, message, routing_key)
        _tell()


class Transport(memory.Transport):  # type: ignore[misc]
    """Waits for messages instead of asking for them again and again."""

    Channel = Channel
    global_state = virtual.BrokerState()

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one message. Raises TimeoutError when none comes in ``timeout`` seconds."""
        end = None if timeout is None else monotonic() + timeout
        while True:
            seen = _count
            if self._deliver_one(timeout):
                return
            left = None if end is None else end - monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            with _arrived:
                _arrived.wait_for(lambda before=seen: _count != before, left)  # type: ignore[misc]

    def _deliver_one(self, timeout: float | None) -> bool:
        get: Callable[..., Any] = self.cycle.get
        try:
            get(self._deliver, timeout=timeout)
        except Empty:
            return False
        return True


def _tell() -> None:
    global _count  # noqa: PLW0603  one broker in one process
    with _arrived:
        _count += 1
        _arrived.notify_all()

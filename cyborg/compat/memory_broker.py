# SPDX-License-Identifier: Apache-2.0
"""In-process broker for ``kombu+memory:////``, whose queues wake their listeners.

kombu's own broker is polled. oslo.messaging polls it without a pause, so each idle listener uses a
whole core. Besides, two threads that are the first to use a queue may both create it, which loses a
message.
"""

import threading
from collections.abc import Callable
from queue import Empty, Queue
from time import monotonic
from typing import Any

import kombu.transport
from kombu.transport import memory, virtual

# Notified of the messages of all queues: there are few listeners, so one condition is enough.
_arrived = threading.Condition()
_count = 0


def install() -> None:
    """Make kombu use ``Transport`` for ``memory://`` in this process. Idempotent."""
    kombu.transport.TRANSPORT_ALIASES["memory"] = f"{__name__}:Transport"


class Channel(memory.Channel):  # type: ignore[misc]  # kombu has no types
    """Channel to the queues of the process."""

    queues: dict[str, "Queue[Any]"] = {}

    def _new_queue(self, queue: str, **_: Any) -> None:
        self._queue_for(queue)

    def _queue_for(self, queue: str) -> "Queue[Any]":
        return self.queues.setdefault(queue, Queue())

    def _put(self, queue: str, message: Any, **kwargs: Any) -> None:
        super()._put(queue, message, **kwargs)
        _notify_arrival()

    def _put_fanout(self, exchange: str, message: Any, routing_key: Any = None, **_: Any) -> None:
        super()._put_fanout(exchange, message, routing_key)
        _notify_arrival()


class Transport(memory.Transport):  # type: ignore[misc]
    """Transport that waits for messages instead of polling."""

    Channel = Channel
    global_state = virtual.BrokerState()

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one message. Raise TimeoutError if none arrives in ``timeout`` seconds."""
        end = None if timeout is None else monotonic() + timeout
        while True:
            count = _count
            if self._deliver_one(timeout):
                return
            remaining = None if end is None else end - monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError
            with _arrived:
                _arrived.wait_for(
                    lambda count=count: _count != count,  # type: ignore[misc]
                    remaining,
                )

    def _deliver_one(self, timeout: float | None) -> bool:
        get: Callable[..., Any] = self.cycle.get
        try:
            get(self._deliver, timeout=timeout)
        except Empty:
            return False
        return True


def _notify_arrival() -> None:
    global _count  # noqa: PLW0603  one broker in one process
    with _arrived:
        _count += 1
        _arrived.notify_all()

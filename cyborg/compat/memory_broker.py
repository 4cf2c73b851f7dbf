# SPDX-License-Identifier: Apache-2.0
"""In-process broker for ``kombu+memory:////``, whose queues wake their consumers."""

import threading
import weakref
from collections.abc import Callable
from queue import Empty, Queue
from time import monotonic
from typing import Any

import kombu.transport
from kombu.transport import memory, virtual

# The transports that consume each queue, with the number of their consumers. A message wakes only
# these: a process with the agents of many hosts has a transport for each of them. The references
# are weak, because a connection may be dropped without being closed.
_consumers: dict[str, weakref.WeakKeyDictionary["Transport", int]] = {}
_consumers_lock = threading.Lock()


def install() -> None:
    """Make kombu use ``Transport`` for ``memory://`` in this process. Idempotent."""
    # Not TRANSPORT_ALIASES, which has no effect after the first connection.
    kombu.transport._transport_cache["memory"] = Transport


def install_for(url: str) -> None:
    """Install ``Transport`` if the URL of a broker, as oslo.messaging has it, is of this one."""
    if url.startswith("kombu+memory:"):
        install()


class Channel(memory.Channel):  # type: ignore[misc]  # kombu has no types
    """Channel to the queues of the process."""

    queues: dict[str, "Queue[Any]"] = {}
    connection: "Transport"

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> None:
        """Consume a queue; its messages wake the transport of this channel."""
        # The queue of the consumer whose tag this one takes over, if any.
        former = self._tag_to_queue.get(consumer_tag)
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        # A consumer that starts again on its queue is counted already.
        if former != queue:
            if former is not None:
                self._remove_consumer(former)
            with _consumers_lock:
                transports = _consumers.setdefault(queue, weakref.WeakKeyDictionary())
                transports[self.connection] = transports.get(self.connection, 0) + 1
        # Another thread may wait for events of this transport while the queue has messages already.
        self.connection.wake()

    def basic_cancel(self, consumer_tag: str) -> None:
        """End a consumer. kombu calls this also for each consumer of a channel that is closed."""
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is not None:
            self._remove_consumer(queue)

    def _remove_consumer(self, queue: str) -> None:
        with _consumers_lock:
            transports = _consumers.get(queue)
            if transports is not None:
                count = transports.pop(self.connection, 0)
                if count > 1:
                    transports[self.connection] = count - 1
                if not transports:
                    del _consumers[queue]

    def _new_queue(self, queue: str, **_: Any) -> None:
        self._queue_for(queue)

    def _queue_for(self, queue: str) -> "Queue[Any]":
        # setdefault: two threads that are the first to use a queue must not both create it, which
        # would lose a message.
        found = self.queues.get(queue)
        return self.queues.setdefault(queue, Queue()) if found is None else found

    def _put(self, queue: str, message: Any, **kwargs: Any) -> None:
        super()._put(queue, message, **kwargs)
        with _consumers_lock:
            # A copy: woken threads cancel and add consumers while this loop runs.
            transports = list(_consumers.get(queue, ()))
            if not transports:
                _consumers.pop(queue, None)  # its connections were dropped
        for transport in transports:
            transport.wake()

    def _put_fanout(self, exchange: str, message: Any, routing_key: Any = None, **_: Any) -> None:
        for queue in self._lookup(exchange, routing_key):
            self._put(queue, message)


# kombu's own is polled: oslo.messaging polls it without a pause, so that each idle listener uses a
# whole core.
class Transport(memory.Transport):  # type: ignore[misc]
    """Transport that waits for messages instead of polling."""

    Channel = Channel
    global_state = virtual.BrokerState()

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self._arrived = threading.Condition()
        self._count = 0  # of calls of wake

    def wake(self) -> None:
        """Report a message in a queue that a channel of this transport consumes."""
        with self._arrived:
            self._count += 1
            self._arrived.notify_all()

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one message. Raise TimeoutError if none arrives in ``timeout`` seconds."""
        end = None if timeout is None else monotonic() + timeout
        while True:
            # Read before the queues: a message that arrives after they were found empty changes the
            # count, and ends the wait at once.
            count = self._count
            if self._deliver_one(timeout):
                return
            remaining = None if end is None else end - monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError
            with self._arrived:
                self._arrived.wait_for(
                    lambda count=count: self._count != count,  # type: ignore[misc]
                    remaining,
                )

    def _deliver_one(self, timeout: float | None) -> bool:
        get: Callable[..., Any] = self.cycle.get
        # It does not wait: kombu's channels ignore the timeout for queues in memory.
        try:
            get(self._deliver, timeout=timeout)
        except Empty:
            return False
        return True

# SPDX-License-Identifier: Apache-2.0
import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import kombu
import pytest

from cyborg.compat import memory_broker


@pytest.fixture
def connection() -> Iterator[Any]:
    memory_broker.install()
    with kombu.Connection("memory://") as queues:
        queues.connect()
        queues.transport.polling_interval = 0.0
        yield queues


def consume(connection: Any, name: str) -> tuple[list[str], Any]:
    received: list[str] = []
    queue = kombu.Queue(name, kombu.Exchange(name), routing_key=name)
    consumer = kombu.Consumer(
        connection, [queue], on_message=lambda m: received.append(m.payload), no_ack=True
    )
    consumer.consume()
    return received, queue


def test_drain_events_is_woken_by_a_message(connection: Any) -> None:
    name = uuid4().hex
    received, queue = consume(connection, name)

    def publish() -> None:
        with kombu.Connection("memory://") as other:
            other.Producer().publish("hello", exchange=queue.exchange, routing_key=name)

    sender = threading.Timer(0.05, publish)
    sender.start()
    started = time.monotonic()
    connection.drain_events(timeout=10)
    sender.join()
    assert received == ["hello"]
    assert time.monotonic() - started < 5


def test_drain_events_without_messages_uses_no_cpu(connection: Any) -> None:
    consume(connection, uuid4().hex)
    started = time.thread_time()
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.2)
    assert time.thread_time() - started < 0.05


def test_concurrent_first_use_creates_one_queue() -> None:
    name, queues = uuid4().hex, []
    with kombu.Connection("memory://") as connection:
        channel = connection.channel()
        together = threading.Barrier(8)

        def meet() -> None:
            together.wait()
            queues.append(channel._queue_for(name))

        threads = [threading.Thread(target=meet) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({id(queue) for queue in queues}) == 1

# SPDX-License-Identifier: Apache-2.0
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import kombu
import pytest

from cyborg.compat import memory_broker
from cyborg.tests.fixtures.machine.processes import ends_within


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
    with ends_within(15):  # a thread that nothing wakes waits for all of the timeout
        connection.drain_events(timeout=90)
    sender.join()
    assert received == ["hello"]


def publish(queue: Any) -> None:
    with kombu.Connection("memory://") as other:
        other.Producer().publish("hello", exchange=queue.exchange, routing_key=queue.name)


def test_new_consumer_of_a_queue_with_messages_wakes_a_waiting_thread(connection: Any) -> None:
    name = uuid4().hex
    consume(connection, uuid4().hex)
    queue = kombu.Queue(name, kombu.Exchange(name), routing_key=name)
    queue(connection.channel()).declare()
    publish(queue)
    received: list[list[str]] = []
    consumer = threading.Timer(0.1, lambda: received.append(consume(connection, name)[0]))
    consumer.start()
    with ends_within(15):
        connection.drain_events(timeout=90)
    consumer.join()
    assert received == [["hello"]]


def test_tag_that_is_consumed_twice_is_one_consumer(connection: Any) -> None:
    first, second = uuid4().hex, uuid4().hex
    channel = connection.channel()
    for name in (first, first, second):
        kombu.Queue(name, kombu.Exchange(name), routing_key=name)(channel).declare()
        channel.basic_consume(name, True, lambda message: None, "tag")
    assert first not in memory_broker._consumers
    assert list(memory_broker._consumers[second].values()) == [1]
    channel.basic_cancel("tag")
    assert second not in memory_broker._consumers


def test_install_after_a_connection_of_kombu() -> None:
    kombu.transport._transport_cache.pop("memory", None)
    with kombu.Connection("memory://") as former:
        assert not isinstance(former.transport, memory_broker.Transport)
    memory_broker.install()
    with kombu.Connection("memory://") as connection:
        assert isinstance(connection.transport, memory_broker.Transport)


@pytest.mark.slow
def test_connection_dropped_without_close_is_forgotten() -> None:
    memory_broker.install()
    name = uuid4().hex
    dropped = kombu.Connection("memory://")
    _, queue = consume(dropped, name)
    transport = weakref.ref(dropped.transport)
    del dropped
    gc.collect()
    assert transport() is None
    publish(queue)
    assert name not in memory_broker._consumers


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


def test_message_wakes_only_the_transports_that_consume_its_queue(connection: Any) -> None:
    name = uuid4().hex
    _, queue = consume(connection, name)
    with kombu.Connection("memory://") as other, kombu.Connection("memory://") as sender:
        consume(other, uuid4().hex)
        counts = connection.transport._count, other.transport._count
        sender.Producer().publish("hello", exchange=queue.exchange, routing_key=name)
        assert connection.transport._count == counts[0] + 1
        assert other.transport._count == counts[1]
    connection.drain_events(timeout=0.1)


def test_closed_channel_is_not_woken() -> None:
    memory_broker.install()
    name = uuid4().hex
    with kombu.Connection("memory://") as closed:
        _, queue = consume(closed, name)
        consume(closed, name)
        transport = closed.transport
    count = transport._count
    assert name not in memory_broker._consumers
    with kombu.Connection("memory://") as sender:
        sender.Producer().publish("hello", exchange=queue.exchange, routing_key=name)
    assert transport._count == count

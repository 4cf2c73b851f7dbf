# SPDX-License-Identifier: Apache-2.0
import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import kombu
import pytest

from cyborg.rpc import memory


@pytest.fixture
def connection() -> Iterator[Any]:
    memory.install()
    with kombu.Connection("memory://") as made:
        made.connect()
        made.transport.polling_interval = 0.0
        yield made


def consume(connection: Any, name: str) -> tuple[list[str], Any]:
    got: list[str] = []
    queue = kombu.Queue(name, kombu.Exchange(name), routing_key=name)
    consumer = kombu.Consumer(
        connection, [queue], on_message=lambda m: got.append(m.payload), no_ack=True
    )
    consumer.consume()
    return got, queue


def test_a_waiting_listener_is_woken(connection: Any) -> None:
    name = uuid4().hex
    got, queue = consume(connection, name)

    def publish() -> None:
        with kombu.Connection("memory://") as other:
            other.Producer().publish("hello", exchange=queue.exchange, routing_key=name)

    sender = threading.Timer(0.05, publish)
    sender.start()
    begin = time.monotonic()
    connection.drain_events(timeout=10)
    sender.join()
    assert got == ["hello"]
    assert time.monotonic() - begin < 5


def test_waiting_in_vain_costs_no_cpu(connection: Any) -> None:
    consume(connection, uuid4().hex)
    begin = time.thread_time()
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.2)
    assert time.thread_time() - begin < 0.05


def test_a_queue_that_two_meet_first_is_one() -> None:
    name, made = uuid4().hex, []
    with kombu.Connection("memory://") as connection:
        channel = connection.channel()
        together = threading.Barrier(8)

        def meet() -> None:
            together.wait()
            made.append(channel._queue_for(name))

        threads = [threading.Thread(target=meet) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({id(queue) for queue in made}) == 1

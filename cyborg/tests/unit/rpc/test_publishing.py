# SPDX-License-Identifier: Apache-2.0
"""Calls that no queue takes, and later calls on the same connection, against RabbitMQ."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import oslo_messaging
import pytest
from amqp.exceptions import NotFound

from cyborg.compat import rabbit
from cyborg.rpc.publishing import SentCounter
from cyborg.tests.fixtures.bus.broker import open_bus

pytestmark = pytest.mark.services


@pytest.fixture
def connection(rabbit_url: str) -> Iterator[Any]:
    """Yield a connection of the rabbit driver that is open."""
    with open_bus(rabbit_url) as bus:
        with rabbit.exclusive_connection(bus.transport.oslo) as opened:
            pass
        yield opened  # the driver locks it to send


@pytest.fixture
def name() -> str:
    """Return a new name, for an exchange and its queue."""
    return f"test-{uuid4().hex[:12]}"


def _bind(connection: Any, name: str) -> None:
    """Declare a queue of an exchange; both end with the last queue."""
    channel = connection.channel
    channel.exchange_declare(name, "topic", durable=False, auto_delete=True)
    channel.queue_declare(name, exclusive=True)
    channel.queue_bind(name, name, name)


def _send(connection: Any, name: str, routing_key: str) -> None:
    options = oslo_messaging.TransportOptions(at_least_once=True)
    connection.topic_send(name, routing_key, {}, timeout=20.0, transport_options=options)


def test_publish_after_a_returned_message_gets_its_own_confirmation(
    connection: Any, name: str
) -> None:
    _bind(connection, name)
    confirmed: list[int] = []
    connection.channel.events["basic_ack"].add(lambda tag, multiple: confirmed.append(tag))
    for number in (1, 3):
        with pytest.raises(oslo_messaging.MessageUndeliverable):
            _send(connection, name, "no-queue")
        assert confirmed == list(range(1, number + 1))
        _send(connection, name, name)
        assert confirmed == list(range(1, number + 2))
    assert connection.channel.queue_delete(name) == 2


def test_publish_to_a_deleted_exchange_is_undeliverable(connection: Any, name: str) -> None:
    _bind(connection, name)
    _send(connection, name, name)
    connection.channel.queue_delete(name)
    sent = SentCounter()
    with pytest.raises(oslo_messaging.MessageUndeliverable) as raised:
        _send(connection, name, name)
    assert isinstance(raised.value.exception, NotFound)
    # The driver may have sent a copy of it before, over a connection that failed.
    assert sent.count == 1
    with pytest.raises(oslo_messaging.MessageUndeliverable) as raised:
        _send(connection, name, name)
    assert raised.value.exception.reply_code == 312, "NO_ROUTE: the exchange was declared again"
    _bind(connection, name)
    _send(connection, name, name)
    assert connection.channel.queue_delete(name) == 1

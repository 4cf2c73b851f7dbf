# SPDX-License-Identifier: Apache-2.0
"""Half-open broker connections and queues without a consumer: time limits and errors."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import kombu
import oslo_messaging
import pytest

from cyborg.compat import rabbit
from cyborg.core.errors import TimedOut, Unavailable
from cyborg.rpc import client as client_module
from cyborg.rpc import publishing
from cyborg.rpc.publishing import count_consumers
from cyborg.rpc.transport import HEARTBEAT
from cyborg.tests.fixtures.bus.broker import Bus, open_bus
from cyborg.tests.fixtures.bus.proxy import Fault, Proxy, proxy
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import ends_within
from cyborg.tests.fixtures.machine.tiers import sample

pytestmark = pytest.mark.services

SLACK = 20.0  # additional seconds for a busy machine


class Echo:
    """Endpoint that returns the arguments of each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        def answer(ctxt: Any, **arguments: Any) -> Any:
            self.calls += 1
            return arguments

        return answer


@pytest.fixture
def env(rabbit_url: str) -> Iterator[tuple[Bus, Bus, Proxy]]:
    """Return the buses of a client and of a server, and the proxy between client and broker.

    The server has a direct connection: to stop, it must get the confirmation of its answers.
    """
    parsed = oslo_messaging.TransportURL.parse(make_conf(), rabbit_url)
    options = {"topic": f"test-{uuid4().hex[:12]}", "timeout": 20.0}
    with (
        proxy(parsed.hosts[0].port or 5672) as broker_proxy,
        open_bus(rabbit_url, rpc=options) as direct,
    ):
        parsed.hosts[0].hostname, parsed.hosts[0].port = "127.0.0.1", broker_proxy.port
        with open_bus(str(parsed), rpc=options) as bus:
            yield bus, direct, broker_proxy


def _queue(bus: Bus, url: str) -> kombu.Queue:
    topic = f"{bus.conf.rpc.topic}.conductor"
    exchange = kombu.Exchange(bus.conf.rpc.topic, type="topic", durable=False, auto_delete=True)
    connection = kombu.Connection(url.replace("rabbit://", "amqp://", 1))
    return kombu.Queue(topic, exchange, topic, durable=False, auto_delete=True)(connection)


def test_call_without_a_server_is_unavailable_within_seconds(
    env: tuple[Bus, Bus, Proxy], rabbit_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, _, _ = env
    monkeypatch.setattr(client_module, "RESTART_WAIT", 1.0)
    queue = _queue(bus, rabbit_url)
    queue.declare()
    try:
        started = time.monotonic()
        with (
            ends_within(1.0 + SLACK),
            pytest.raises(Unavailable, match="no cyborg-conductor listens") as raised,
        ):
            bus.conductor().discovery_create("h")
        assert time.monotonic() - started >= 1.0
        assert not isinstance(raised.value, TimedOut), "the call was certainly not carried out"
        assert queue.get() is None, "no message is left for a later conductor"
    finally:
        queue.delete()
        queue.channel.connection.client.release()


# Without an agent, the exchange is deleted too.
@pytest.mark.parametrize("agent", sample([True, False], True))
@pytest.mark.parametrize("fresh", [0.0, 60.0])
def test_call_waits_for_a_restarting_conductor(
    env: tuple[Bus, Bus, Proxy], monkeypatch: pytest.MonkeyPatch, fresh: float, agent: bool
) -> None:
    bus, direct, _ = env
    waiting, echo = threading.Event(), Echo()
    # With 60, the queue counts as served, but the broker has deleted it with its last consumer.
    monkeypatch.setattr("cyborg.rpc.transport.ANSWER_FRESH", fresh)
    monkeypatch.setattr(client_module, "RESTART_WAIT", 15.0)
    monkeypatch.setattr(client_module, "_pause", lambda seconds: waiting.set())
    client = bus.conductor()
    agents = direct.serving("agent", Echo()) if agent else contextlib.nullcontext()
    with agents, ThreadPoolExecutor(1) as pool:
        with direct.serving("conductor", Echo()):
            assert client.discovery_create("a")["host"] == "a"
        pending = pool.submit(client.discovery_create, "b")
        assert waiting.wait(120)
        with direct.serving("conductor", echo):
            assert pending.result(120)["host"] == "b"
    assert echo.calls == 1


@pytest.mark.matrix
def test_call_to_a_deleted_queue_is_unavailable_within_seconds(
    env: tuple[Bus, Bus, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, direct, _ = env
    monkeypatch.setattr("cyborg.rpc.transport.ANSWER_FRESH", 60.0)
    monkeypatch.setattr(client_module, "RESTART_WAIT", 1.0)
    client = bus.conductor()
    # An agent keeps the exchange.
    with direct.serving("agent", Echo()):
        with direct.serving("conductor", Echo()):
            client.discovery_create("a")
        started = time.monotonic()
        with (
            ends_within(1.0 + SLACK),
            pytest.raises(Unavailable, match="no cyborg-conductor listens") as raised,
        ):
            client.discovery_create("b")
        took = time.monotonic() - started
    assert not isinstance(raised.value, TimedOut), "the call was certainly not carried out"
    assert took >= 1.0, "it waits for another conductor"


def test_call_on_a_half_open_connection_is_not_sent(
    env: tuple[Bus, Bus, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, direct, broker_proxy = env
    client, echo = bus.conductor(), Echo()
    with direct.serving("conductor", echo):
        client.discovery_create("a")
        monkeypatch.setattr("cyborg.rpc.transport.ANSWER_FRESH", 0.0)
        monkeypatch.setattr(publishing, "QUERY_TIMEOUT", 0.5)
        broker_proxy.begin(Fault.HALF_OPEN)
        started = time.monotonic()
        with ends_within(0.5 + SLACK), pytest.raises(Unavailable) as raised:
            client.discovery_create("b")
        assert time.monotonic() - started >= 0.5
        assert not isinstance(raised.value, TimedOut)
        assert echo.calls == 1
        broker_proxy.close()


@pytest.mark.matrix
def test_connection_that_receives_nothing_is_replaced(env: tuple[Bus, Bus, Proxy]) -> None:
    bus, direct, broker_proxy = env
    client = bus.conductor()
    with direct.serving("conductor", Echo()):
        client.discovery_create("a")
        with rabbit.exclusive_connection(bus.transport.oslo) as connection:
            old = connection.connection.connection
            broker_proxy.begin(Fault.HALF_OPEN)
            broker_proxy.end()
            # As the thread of the driver does that misses the heartbeats of the broker.
            connection.ensure_connection()
            assert connection.connection.connection is not old
            assert count_consumers(connection, f"{bus.conf.rpc.topic}.conductor") == 1
        broker_proxy.close()


@pytest.mark.matrix
def test_query_on_a_connection_without_a_channel_opens_another_one(
    env: tuple[Bus, Bus, Proxy],
) -> None:
    bus, direct, broker_proxy = env
    client = bus.conductor()
    with direct.serving("conductor", Echo()):
        client.discovery_create("a")
        with rabbit.exclusive_connection(bus.transport.oslo) as connection:
            connection.discard_channel()
            broker_proxy.begin(Fault.HALF_OPEN)
            broker_proxy.end()
            assert count_consumers(connection, f"{bus.conf.rpc.topic}.conductor") == 1
        broker_proxy.close()


def test_call_without_confirmation_times_out(
    env: tuple[Bus, Bus, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, direct, broker_proxy = env
    client = bus.conductor()
    with direct.serving("conductor", Echo()):
        client.discovery_create("a")
        monkeypatch.setattr("cyborg.rpc.transport.ANSWER_FRESH", 60.0)
        monkeypatch.setattr(publishing, "CONFIRM_TIMEOUT", 1.0)
        broker_proxy.begin(Fault.HALF_OPEN)
        started = time.monotonic()
        with ends_within(1.0 + SLACK), pytest.raises(TimedOut, match="may have been carried out"):
            client.discovery_create("b")
        assert time.monotonic() - started >= 1.0
        broker_proxy.close()


def test_limits_of_a_call_are_seconds() -> None:
    # The tests above shorten these limits; a caller waits for at most their sum.
    assert 0 < publishing.QUERY_TIMEOUT <= 3
    assert 0 < publishing.CONFIRM_TIMEOUT <= 5
    assert 0 < client_module.SERVER_WAIT <= 4
    assert 0 < client_module.RESTART_WAIT <= 20


def test_heartbeat_default_is_short_and_configurable(rabbit_url: str) -> None:
    with open_bus(rabbit_url) as bus:
        options = bus.conf.oslo_messaging_rabbit
        assert options.heartbeat_timeout_threshold == HEARTBEAT <= 20
        bus.conf.set_override("heartbeat_timeout_threshold", 9, group="oslo_messaging_rabbit")
        assert options.heartbeat_timeout_threshold == 9

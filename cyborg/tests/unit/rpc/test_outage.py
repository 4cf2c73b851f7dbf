# SPDX-License-Identifier: Apache-2.0
"""Calls before, during and after outages of the broker."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import oslo_messaging
import pytest

from cyborg.core.errors import Unavailable
from cyborg.tests.fixtures.bus.broker import open_bus
from cyborg.tests.fixtures.bus.tcp_relay import relay
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import ends_within, wait_until

LONG = 120.0

pytestmark = pytest.mark.services


class EchoEndpoint:
    """Endpoint that returns the arguments of each call."""

    def __getattr__(self, name: str) -> Any:
        return lambda ctxt, **arguments: arguments


def retry(work: Callable[[], Any]) -> Any:
    """Call a function until it succeeds."""
    results: list[Any] = []

    def succeeds() -> bool:
        with contextlib.suppress(Unavailable):
            results.append(work())
        return bool(results)

    wait_until("the call succeeds", succeeds, LONG)
    return results[0]


# amqp closes the socket of a connection whose handshake fails with OSError, not with other errors
# (``Connection.connect``): an outage can leave one to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_calls_recover_after_outages_of_the_broker(rabbit_url: str) -> None:
    # An earlier test may have left a thread that connects to a broker which does not exist.
    earlier = set(threading.enumerate())
    parsed = oslo_messaging.TransportURL.parse(make_conf(), rabbit_url)
    with relay(parsed.hosts[0].port or 5672) as wire:
        parsed.hosts[0].hostname, parsed.hosts[0].port = "127.0.0.1", wire.port
        with open_bus(str(parsed), rpc={"timeout": 1.0}) as bus:
            client = bus.conductor()

            def call() -> Any:
                return client.discovery_create("h")

            with pytest.raises(Unavailable, match="does not answer"):
                call()
            wire.restore()
            retry(bus.transport.ensure_open)
            with bus.serving("conductor", EchoEndpoint()):
                assert retry(call) == {"host": "h", "driver": None}
                wire.cut()
                # More calls than connections in the pool, so that some open a new connection. A
                # call is bounded while the broker is away.
                with ends_within(60), ThreadPoolExecutor(8) as pool:
                    futures = [pool.submit(call) for _ in range(8)]
                assert {type(future.exception()) for future in futures} == {Unavailable}
                wire.restore()
                assert retry(call) == {"host": "h", "driver": None}
        left = set(threading.enumerate()) - earlier
        assert not [thread for thread in left if thread.name == "bus"]

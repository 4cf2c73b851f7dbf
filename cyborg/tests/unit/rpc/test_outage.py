# SPDX-License-Identifier: Apache-2.0
"""A broker that is not there yet, comes, goes and comes back."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import oslo_messaging
import pytest

from cyborg.core.errors import Unavailable
from cyborg.fixtures.broker import open_bus
from cyborg.fixtures.options import make_conf
from cyborg.fixtures.relay import relay

LONG = 40.0

pytestmark = pytest.mark.services


class Everything:
    """Answers every method."""

    def __getattr__(self, name: str) -> Any:
        return lambda ctxt, **said: said


def in_the_end(work: Callable[[], Any]) -> Any:
    """Do something until it succeeds; each try that fails takes its own time."""
    end = time.monotonic() + LONG
    while True:
        try:
            return work()
        except Unavailable:
            assert time.monotonic() < end


def test_it_comes_goes_and_comes_back(rabbit_url: str) -> None:
    parsed = oslo_messaging.TransportURL.parse(make_conf(), rabbit_url)
    with relay(parsed.hosts[0].port or 5672) as wire:
        parsed.hosts[0].hostname, parsed.hosts[0].port = "127.0.0.1", wire.port
        with open_bus(str(parsed), rpc={"timeout": 1.0}) as bus:
            client = bus.conductor()

            def call() -> Any:
                return client.discovery_create("h")

            with pytest.raises(Unavailable, match="does not answer"):
                call()
            wire.mend()
            in_the_end(bus.transport.ensure_open)
            with bus.serving("conductor", Everything()):
                assert in_the_end(call) == {"host": "h", "driver": None}
                wire.cut()
                began = time.monotonic()
                # More at once than there are connections in the pool: some open one of their own.
                with ThreadPoolExecutor(8) as pool:
                    asked = [pool.submit(call) for _ in range(8)]
                assert {type(one.exception()) for one in asked} == {Unavailable}
                assert time.monotonic() - began < 10, "a call is bounded while the broker is away"
                wire.mend()
                assert in_the_end(call) == {"host": "h", "driver": None}
        assert not [t for t in threading.enumerate() if t.name == "bus"]

# SPDX-License-Identifier: Apache-2.0
"""Duplicated messages: RabbitMQ, two conductors, each kind of database."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.conductor.common.calls import IdempotentEndpoint
from cyborg.conductor.manager import make_handlers
from cyborg.conductor.wiring import build_conductor
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc import filters as message_filter
from cyborg.rpc.client import make_conductor_client
from cyborg.rpc.contract import ConductorAPI
from cyborg.rpc.transport import Transport
from cyborg.tests.fixtures.bus.broker import Bus, open_bus
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.machine.options import make_conf

pytestmark = pytest.mark.services

CALLS = 50


class Twice(message_filter.Connection):
    """A connection that publishes each call twice.

    The messaging driver does so if its connection fails before the broker has confirmed a message.
    """

    def make_sender(self, channel: Any, producer: Any) -> Callable[..., Any]:
        publish = super().make_sender(channel, producer)

        def publish_twice(*args: Any, **more: Any) -> Any:
            publish(*args, **more)
            return publish(*args, **more)

        return publish_twice


class Counted:
    """A conductor on the bus that counts its calls."""

    def __init__(self, name: str, engine: sa.Engine, calls: "Counter[str]") -> None:
        unused: Any = None
        self._name, self._calls, self._lock = name, calls, threading.Lock()
        conf, uow = make_conf(nova={"send_events": False}), UnitOfWork(engine)
        conductor = build_conductor(conf, uow, unused, unused, unused)
        self._endpoint = IdempotentEndpoint(make_handlers(conductor), uow)

    def __getattr__(self, method: str) -> Any:
        work = getattr(self._endpoint, method)

        def answer(ctxt: Any, **arguments: Any) -> Any:
            with self._lock:
                self._calls[self._name] += 1
            return work(ctxt, **arguments)

        return answer


def client_that_publishes_twice(bus: Bus) -> tuple[ConductorAPI, Transport]:
    transport = Transport(bus.conf)
    pool = transport.oslo._driver._connection_pool
    connection_class = pool.connection_cls
    pool.connection_cls = lambda *args, **more: Twice(
        *args, **{**connection_class.keywords, **more}
    )
    return make_conductor_client(transport, bus.conf), transport


def test_duplicated_calls_to_two_conductors_run_once(engine: sa.Engine, rabbit_url: str) -> None:
    rows.insert_profile(engine, "fpga")
    calls: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        bus = stack.enter_context(open_bus(rabbit_url, rpc={"timeout": 60.0}))
        for name in ("one", "two"):
            topic = {"topic": bus.conf.rpc.topic, "timeout": 60.0}
            own = stack.enter_context(open_bus(rabbit_url, rpc=topic))
            stack.enter_context(own.serving("conductor", Counted(name, engine, calls), name))
        client, transport = client_that_publishes_twice(bus)
        stack.callback(transport.cleanup)
        created = [client.arq_create("fpga", "p")["arqs"][0]["uuid"] for _ in range(CALLS)]
    # The servers have stopped, so the last copy has been answered too.
    stored = [row["uuid"] for row in rows.read(engine, schema.arqs)]
    assert sorted(stored) == sorted(created)
    assert len(set(created)) == CALLS
    # Both must have received calls: a single conductor drops its own duplicates.
    assert calls["one"] + calls["two"] > CALLS
    assert min(calls.values()) > 0

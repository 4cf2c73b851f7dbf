# SPDX-License-Identifier: Apache-2.0
"""An agent stops: a notification is sent, the metric counts it, and down_since is listed.

test_liveness checks with real processes that the host is cordoned in Placement.
"""

import queue
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from oslo_config import cfg
from prometheus_client import CollectorRegistry

from cyborg.conductor.metrics import DatabaseCollector
from cyborg.conductor.service import ConductorService
from cyborg.core.text import to_iso
from cyborg.db.backends import read as backends
from cyborg.db.engine import Reader
from cyborg.db.services import read as services
from cyborg.rpc.notifications import GROUP, is_enabled
from cyborg.rpc.transport import make_transport, register_options
from cyborg.tests.fixtures.bus.notification_listeners import run_listener
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.hosts.hosts import Host, card
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import wait_until

__all__ = ["node", "placement_adapter"]

pytestmark = pytest.mark.services

LONG = 120.0
Heard = queue.Queue[tuple[str, str, dict[str, Any]]]


def options(rabbit: str, topic: str) -> cfg.ConfigOpts:
    conf = make_conf(
        rpc={"topic": topic, "timeout": 10.0},
        nova={"send_events": False},
        conductor={
            "hello_interval": 0.1,
            "publish_interval": 0.1,
            "outbox_interval": 0.1,
            "broker_reconnect_grace": 0.2,
        },
    )
    register_options(conf)
    is_enabled(conf)
    conf.set_override("transport_url", "kombu+memory:////")
    conf.set_override("control_exchange", topic)
    driver_options = {"driver": ["messagingv2"], "topics": [topic], "transport_url": rabbit}
    for name, value in driver_options.items():
        conf.set_override(name, value, group=GROUP)
    return conf


@pytest.fixture
def topic() -> str:
    return f"test-{uuid4().hex[:12]}"


@pytest.fixture
def notifications(rabbit_url: str, topic: str) -> Iterator[Heard]:
    """Collect the notifications of a listener, with their priority."""
    received: Heard = queue.Queue()

    class Endpoint:
        def info(self, ctxt: Any, publisher: str, event: str, payload: Any, more: Any) -> None:
            received.put(("info", event, payload))

        def error(self, ctxt: Any, publisher: str, event: str, payload: Any, more: Any) -> None:
            received.put(("error", event, payload))

    with run_listener(options(rabbit_url, topic), topic, Endpoint()):
        yield received


def test_agent_killed_raises_an_alarm(
    rabbit_url: str, topic: str, notifications: Heard, sqlite_engine: sa.Engine, node: Node
) -> None:
    conf = options(rabbit_url, topic)
    transport = make_transport(conf)
    conf.set_override("amqp_auto_delete", True, group="oslo_messaging_rabbit")
    conductor = ConductorService(conf, transport, engine=sqlite_engine, placement=node.client)
    metrics = CollectorRegistry()
    metrics.register(DatabaseCollector(Reader(sqlite_engine)))
    host = Host(node.name, devices=[card()])

    def closed() -> float | None:
        return metrics.get_sample_value("cyborg_hosts_cordoned")

    def down() -> float | None:
        labels = {"binary": "cyborg-agent", "state": "down"}
        return metrics.get_sample_value("cyborg_services", labels)

    def listing() -> tuple[Any, list[Any]]:
        with sqlite_engine.connect() as connection:
            (agent,) = services.find(connection, binary="cyborg-agent")
            (backend,) = backends.find(connection)
        assert agent["down_since"] == backend["down_since"]
        return agent["down_since"], backend["functions"]

    conductor.start()
    try:
        assert conductor.wait_ready(20)
        assert conductor.conductor is not None
        hosts = conductor.conductor.hosts
        host.send(hosts, card())
        # The agent sends no more heartbeats.
        priority, event, payload = notifications.get(timeout=LONG)
        since, functions = listing()
        assert (priority, event) == ("error", "service.down.error")
        data = payload["data"]
        assert (data["hostname"], data["binary"]) == (node.name, "cyborg-agent")
        assert data["down_since"] == to_iso(since)
        wait_until("the metrics tell", lambda: (closed(), down()) == (1, 1), LONG)
        assert functions == [{"function": "fake", "total": 2, "used": 0, "free": 0}]

        def well_again() -> bool:
            host.hello(hosts)
            return listing()[0] is None and (closed(), down()) == (0, 0)

        wait_until("the metrics forget", well_again, LONG)
        priority, event, payload = notifications.get(timeout=LONG)
        assert (priority, event) == ("info", "service.up.end")
        assert payload["data"]["uuid"] == data["uuid"]
    finally:
        conductor.stop()
        transport.cleanup()

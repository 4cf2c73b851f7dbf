# SPDX-License-Identifier: Apache-2.0
"""An agent goes away: listeners hear it over RabbitMQ, the metric counts it, the listing says when.

That its host closes in Placement is told in test_liveness, with real processes.
"""

import queue
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import oslo_messaging
import pytest
import sqlalchemy as sa
from oslo_config import cfg
from prometheus_client import CollectorRegistry

from cyborg.conductor.metrics import FromDatabase
from cyborg.conductor.service import ConductorService
from cyborg.db.read import backends, services
from cyborg.db.reader import Reader
from cyborg.fixtures.embedded import Node, node, placement_adapter
from cyborg.fixtures.hosts import Host, card
from cyborg.fixtures.options import make_conf
from cyborg.fixtures.processes import until
from cyborg.rpc.notifier import GROUP, is_wanted
from cyborg.rpc.transport import make_transport, register_options

__all__ = ["node", "placement_adapter"]

pytestmark = pytest.mark.services

LONG = 30.0
Heard = queue.Queue[tuple[str, str, dict[str, Any]]]


def options(rabbit: str, topic: str) -> cfg.ConfigOpts:
    conf = make_conf(
        rpc={"topic": topic, "timeout": 10.0},
        nova={"notify": False},
        conductor={
            "hello_interval": 0.1,
            "publish_interval": 0.1,
            "outbox_interval": 0.1,
            "reconnect_grace": 0.2,
        },
    )
    register_options(conf)
    is_wanted(conf)
    conf.set_override("transport_url", "kombu+memory:////")
    conf.set_override("control_exchange", topic)
    ours = {"driver": ["messagingv2"], "topics": [topic], "transport_url": rabbit}
    for name, value in ours.items():
        conf.set_override(name, value, group=GROUP)
    return conf


@pytest.fixture
def topic() -> str:
    return f"test-{uuid4().hex[:12]}"


@pytest.fixture
def heard(rabbit_url: str, topic: str) -> Iterator[Heard]:
    """What a listener hears, with the priority."""
    found: Heard = queue.Queue()

    class Endpoint:
        def info(self, ctxt: Any, who: str, event: str, payload: Any, more: Any) -> None:
            found.put(("info", event, payload))

        def error(self, ctxt: Any, who: str, event: str, payload: Any, more: Any) -> None:
            found.put(("error", event, payload))

    conf = options(rabbit_url, topic)
    transport = oslo_messaging.get_notification_transport(conf)
    conf.set_override("amqp_auto_delete", True, group="oslo_messaging_rabbit")
    target = oslo_messaging.Target(topic=topic)
    listener = oslo_messaging.get_notification_listener(
        transport, [target], [Endpoint()], executor="threading"
    )
    listener.start()
    yield found
    listener.stop()
    listener.wait()
    transport.cleanup()


def test_an_agent_that_goes_away_raises_an_alarm(
    rabbit_url: str, topic: str, heard: Heard, sqlite_engine: sa.Engine, node: Node
) -> None:
    conf = options(rabbit_url, topic)
    transport = make_transport(conf)
    conf.set_override("amqp_auto_delete", True, group="oslo_messaging_rabbit")
    conductor = ConductorService(conf, transport, engine=sqlite_engine, placement=node.client)
    metrics = CollectorRegistry()
    metrics.register(FromDatabase(conf, Reader(sqlite_engine)))
    host = Host(node.name, devices=[card()])

    def closed() -> float | None:
        return metrics.get_sample_value("cyborg_hosts_closed")

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
        host.tell(hosts, card())
        # It says nothing more.
        priority, event, payload = heard.get(timeout=LONG)
        since, functions = listing()
        assert (priority, event) == ("error", "service.down.error")
        told = payload["data"]
        assert (told["hostname"], told["binary"]) == (node.name, "cyborg-agent")
        assert told["down_since"] == f"{since.isoformat()}+00:00"
        until("the metrics tell", lambda: (closed(), down()) == (1, 1), LONG)
        assert functions == [{"function": "fake", "total": 2, "used": 0, "free": 0}]

        def well_again() -> bool:
            host.hello(hosts)
            return listing()[0] is None and (closed(), down()) == (0, 0)

        until("the metrics forget", well_again, LONG)
        priority, event, payload = heard.get(timeout=LONG)
        assert (priority, event) == ("info", "service.up.end")
        assert payload["data"]["uuid"] == told["uuid"]
    finally:
        conductor.stop()
        transport.cleanup()

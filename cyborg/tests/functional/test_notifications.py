# SPDX-License-Identifier: Apache-2.0
"""Notifications of a complete conductor on RabbitMQ, also while the broker is unreachable."""

import queue
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import oslo_messaging
import pytest
import sqlalchemy as sa
from oslo_config import cfg
from oslo_utils import timeutils

from cyborg.conductor.notifications.notifications import (
    NOTIFICATION,
    NOVA_EVENT,
    NotificationBuilder,
)
from cyborg.conductor.service import ConductorService
from cyborg.core.notification import Event
from cyborg.db import schema
from cyborg.db.binding import write as request_store
from cyborg.db.outbox import write as outbox
from cyborg.rpc.client import make_conductor_client
from cyborg.rpc.notifications import GROUP, is_enabled
from cyborg.rpc.transport import make_transport, register_options
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.bus.notification_listeners import run_listener
from cyborg.tests.fixtures.bus.tcp_relay import Relay, relay
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import wait_until

__all__ = ["node", "placement_adapter"]

pytestmark = pytest.mark.services

LONG = 120.0


class Endpoint:
    """An endpoint that keeps the notifications."""

    def __init__(self, heard: "queue.Queue[tuple[Any, ...]]") -> None:
        self._heard = heard

    def info(self, ctxt: Any, publisher: str, event: str, payload: Any, more: Any) -> None:
        """Keep a notification."""
        self._heard.put((publisher, event, payload))


class Env:
    """A conductor whose notifications use a relay that can be cut, and what a listener hears."""

    def __init__(self, url: str, wire: Relay, engine: sa.Engine, node: Node, nova: FakeNova):
        self.wire, self.engine, self.nova = wire, engine, nova
        parsed = oslo_messaging.TransportURL.parse(make_conf(), url)
        parsed.hosts[0].hostname, parsed.hosts[0].port = "127.0.0.1", wire.port
        self.topic = f"test-{uuid4().hex[:12]}"
        self.conf = self.options(url, str(parsed))
        self.transport = make_transport(self.conf)
        self.conf.set_override("amqp_auto_delete", True, group="oslo_messaging_rabbit")
        self.service = ConductorService(
            self.conf, self.transport, engine=engine, placement=node.client
        )
        self.client = make_conductor_client(self.transport, self.conf)
        self.heard: queue.Queue[tuple[Any, ...]] = queue.Queue()

    def options(self, url: str, notifications: str) -> cfg.ConfigOpts:
        """Return the options of one side."""
        conf = make_conf(
            rpc={"topic": self.topic, "timeout": 10.0},
            nova={"auth_type": "none", "endpoint_override": self.nova.url},
            conductor={"hello_interval": 0.2, "outbox_interval": 0.2, "orphan_scan_interval": 0.0},
        )
        register_options(conf)
        is_enabled(conf)
        conf.set_override("host", "controller-1")
        conf.set_override("transport_url", url)
        conf.set_override("control_exchange", self.topic)
        for name, value in (
            ("driver", ["messagingv2"]),
            ("topics", [self.topic]),
            ("transport_url", notifications),
        ):
            conf.set_override(name, value, group=GROUP)
        return conf

    def close(self) -> None:
        """Stop everything."""
        self.service.stop()
        self.transport.cleanup()

    def add_messages(self, uuid: str) -> None:
        """Write the messages of a bind: Nova's event and the notification."""
        builder = NotificationBuilder(self.conf, now=timeutils.utcnow)
        with self.engine.begin() as tx:
            (row,) = request_store.lock(tx, [uuid])
            event = {"server_uuid": row["instance_uuid"], "tag": uuid, "name": "n"}
            messages = builder.build_messages(Event.BOUND, [row])
            nova = outbox.Message(NOVA_EVENT, str(row["instance_uuid"]), event)
            outbox.add_all(tx, [nova, *messages])


@pytest.fixture
def env(
    rabbit_url: str, sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> Iterator[Env]:
    port = oslo_messaging.TransportURL.parse(make_conf(), rabbit_url).hosts[0].port or 5672
    with relay(port) as wire:
        new_env = Env(rabbit_url, wire, sqlite_engine, node, fake_nova)
        listener_conf = new_env.options(rabbit_url, rabbit_url)
        with run_listener(listener_conf, new_env.topic, Endpoint(new_env.heard)):
            new_env.service.start()
            try:
                assert new_env.service.wait_ready(20)
                yield new_env
            finally:
                new_env.close()


def test_unreachable_broker_delays_only_notifications(env: Env) -> None:
    instance, provider = str(uuid4()), str(uuid4())
    uuid = rows.insert_arq(
        env.engine,
        rows.insert_profile(env.engine),
        state="Bound",
        hostname="compute-1",
        device_rp_uuid=provider,
        instance_uuid=instance,
    )
    card = rows.insert_card(env.engine)
    (device,) = rows.read(env.engine, schema.devices, id=card.device_id)
    env.add_messages(uuid)
    env.client.device_set_status(device["uuid"], "maintaining")
    wait_until("Nova has its event", lambda: env.nova.tags == [uuid])
    wait_until("the broker was tried", lambda: all(row["attempts"] for row in waiting(env)))
    assert [row["kind"] for row in waiting(env)] == [NOTIFICATION] * 2
    assert env.heard.empty()
    env.client.device_set_status(device["uuid"], "enabled")
    env.wire.restore()
    received = [env.heard.get(timeout=LONG) for _ in range(3)]
    wait_until("nothing waits", lambda: waiting(env) == [])
    assert {publisher for publisher, _, _ in received} == {"cyborg-conductor:controller-1"}
    assert [event for _, event, payload in received if payload["schema"] == "device"] == [
        "device.disable.end",
        "device.enable.end",
    ]
    ((event, payload),) = [
        (event, payload)
        for _, event, payload in received
        if payload["schema"] == "accelerator_request"
    ]
    assert event == "accelerator_request.bind.end"
    assert payload["version"] == "1.0"
    assert payload["data"] == {
        "uuid": uuid,
        "state": "Bound",
        "device_profile_name": "fpga",
        "device_profile_group_id": 0,
        "resource_class": "FPGA",
        "project_id": "project-1",
        "hostname": "compute-1",
        "device_rp_uuid": provider,
        "instance_uuid": instance,
        "error": None,
    }
    of_device = [p for _, event, p in received if event.startswith("device.")]
    assert all(p["request_id"].startswith("req-") for p in of_device)


def waiting(env: Env) -> list[dict[str, Any]]:
    return rows.read(env.engine, schema.outbox)

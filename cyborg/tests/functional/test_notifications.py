# SPDX-License-Identifier: Apache-2.0
"""Notifications of a whole conductor on RabbitMQ, also while their broker is away."""

import queue
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import oslo_messaging
import pytest
import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.events import EVENT
from cyborg.conductor.notices import NOTIFICATION, Notices
from cyborg.conductor.service import ConductorService
from cyborg.core.notification import Event
from cyborg.db import schema
from cyborg.db.store import outbox
from cyborg.db.store import requests as request_store
from cyborg.fixtures import rows
from cyborg.fixtures.embedded import Node, node, placement_adapter
from cyborg.fixtures.nova import FakeNova
from cyborg.fixtures.options import make_conf
from cyborg.fixtures.processes import until
from cyborg.fixtures.relay import Relay, relay
from cyborg.rpc.conductor import ConductorClient
from cyborg.rpc.notifier import GROUP, is_wanted
from cyborg.rpc.transport import make_transport, register_options

__all__ = ["node", "placement_adapter"]

pytestmark = pytest.mark.services

LONG = 30.0


class Bed:
    """A conductor whose notifications take a wire that can be cut, and a listener behind it."""

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
        self.client = ConductorClient(self.transport, self.conf)
        self.heard: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self._listener = self._listen(url)

    def options(self, url: str, notifications: str) -> cfg.ConfigOpts:
        """Return the options of one side."""
        conf = make_conf(
            rpc={"topic": self.topic, "timeout": 10.0},
            nova={"auth_type": "none", "endpoint_override": self.nova.url},
            conductor={"hello_interval": 0.2, "outbox_interval": 0.2, "reconcile_interval": 0.0},
        )
        register_options(conf)
        is_wanted(conf)
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

    def _listen(self, url: str) -> Any:
        heard = self.heard

        class Endpoint:
            def info(self, ctxt: Any, who: str, event: str, payload: Any, more: Any) -> None:
                heard.put((who, event, payload))

        conf = self.options(url, url)
        transport = oslo_messaging.get_notification_transport(conf)
        conf.set_override("amqp_auto_delete", True, group="oslo_messaging_rabbit")
        target = oslo_messaging.Target(topic=self.topic)
        listener = oslo_messaging.get_notification_listener(
            transport, [target], [Endpoint()], executor="threading"
        )
        listener.start()
        return listener

    def close(self) -> None:
        """Stop everything."""
        self.service.stop()
        self._listener.stop()
        self._listener.wait()
        self._listener.transport.cleanup()
        self.transport.cleanup()

    def promise(self, uuid: str) -> None:
        """Write what a bind writes: Nova's event and the notification, in one statement."""
        told = Notices(self.conf)
        with self.engine.begin() as tx:
            (row,) = request_store.lock(tx, [uuid])
            event = {"server_uuid": row["instance_uuid"], "tag": uuid, "name": "n"}
            mine = told.rows(Event.BOUND, [row])
            outbox.add_all(tx, [(EVENT, str(row["instance_uuid"]), event), *mine])


@pytest.fixture
def bed(
    rabbit_url: str, sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> Iterator[Bed]:
    port = oslo_messaging.TransportURL.parse(make_conf(), rabbit_url).hosts[0].port or 5672
    with relay(port) as wire:
        it = Bed(rabbit_url, wire, sqlite_engine, node, fake_nova)
        it.service.start()
        try:
            assert it.service.wait_ready(20)
            yield it
        finally:
            it.close()


def test_a_broker_that_is_away_holds_up_its_own_messages_alone(bed: Bed) -> None:
    instance, provider = str(uuid4()), str(uuid4())
    uuid = rows.request(
        bed.engine,
        rows.profile(bed.engine),
        state="Bound",
        hostname="compute-1",
        device_rp_uuid=provider,
        instance_uuid=instance,
    )
    card = rows.card(bed.engine)
    (device,) = rows.read(bed.engine, schema.devices, id=card.device_id)
    bed.promise(uuid)
    bed.client.device_set_status(device["uuid"], "maintaining")
    until("Nova has its event", lambda: bed.nova.tags == [uuid])
    until("the broker was tried", lambda: all(row["attempts"] for row in waiting(bed)))
    assert [row["kind"] for row in waiting(bed)] == [NOTIFICATION] * 2
    assert bed.heard.empty()
    bed.client.device_set_status(device["uuid"], "enabled")
    bed.wire.mend()
    found = [bed.heard.get(timeout=LONG) for _ in range(3)]
    until("nothing waits", lambda: waiting(bed) == [])
    assert {who for who, _, _ in found} == {"cyborg-conductor:controller-1"}
    assert [event for _, event, payload in found if payload["schema"] == "device"] == [
        "device.disable.end",
        "device.enable.end",
    ]
    ((event, payload),) = [
        (event, payload)
        for _, event, payload in found
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
    of_device = [p for _, event, p in found if event.startswith("device.")]
    assert all(p["request_id"].startswith("req-") for p in of_device)


def waiting(bed: Bed) -> list[dict[str, Any]]:
    return rows.read(bed.engine, schema.outbox)

# SPDX-License-Identifier: Apache-2.0
"""Nova's notifications on RabbitMQ release what a deleted server has left, within seconds.

The conductor is complete except for agents, Placement is real, Nova is a double over HTTP, and the
interval of the orphan collector is an hour.
"""

import contextlib
import itertools
import queue
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import oslo_messaging
import pytest
import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.notifications.notifications import ArqEventRecorder, NotificationBuilder
from cyborg.conductor.orphans.release import OrphanReleaser
from cyborg.conductor.orphans.watcher import InstanceWatcher
from cyborg.conductor.service import ConductorService
from cyborg.core.errors import Unavailable
from cyborg.core.orphans import hints
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.notifications import make_listener, queue_name
from cyborg.rpc.transport import make_transport, register_options
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.bus.nova_notifications import NovaBus, make_payload
from cyborg.tests.fixtures.bus.tcp_relay import Relay, relay
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import Env as AttachmentEnv
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.publisher_setup import PublishedCard
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.machine.tiers import sample

__all__ = ["node", "placement_adapter"]

pytestmark = pytest.mark.services

SECONDS = 50.0


@pytest.fixture(autouse=True)
def release_new_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Release the ARQs of servers that were built a moment ago, without a wait of a minute."""
    monkeypatch.setattr(hints, "MIN_BIND_AGE", timedelta(0))


class Cloud(PublishedCard):
    """One host with a card, servers on it, and a conductor that receives Nova's notifications."""

    def __init__(
        self, url: str, wire: Relay, engine: sa.Engine, node: Node, nova: FakeNova
    ) -> None:
        super().__init__(engine, node, 4)
        self.nova, self.wire, self.bus = nova, wire, NovaBus(url)
        parsed = oslo_messaging.TransportURL.parse(make_conf(), url)
        parsed.hosts[0].hostname, parsed.hosts[0].port = "127.0.0.1", wire.port
        conf = make_conf(
            rpc={"topic": f"test-{uuid4().hex[:12]}", "timeout": 10.0},
            nova={
                "auth_type": "none",
                "endpoint_override": nova.url,
                "notifications": True,
                "notification_url": str(parsed),
                "notification_exchange": self.bus.exchange,
                "notification_topic": self.bus.topic,
            },
            conductor={"orphan_scan_interval": 3600.0, "hello_interval": 60.0},
        )
        register_options(conf)
        conf.set_override("transport_url", url)
        self.transport = make_transport(conf)
        conf.set_override("amqp_auto_delete", True, group="oslo_messaging_rabbit")
        self.queue = queue_name(conf)
        self.service = ConductorService(conf, self.transport, engine=engine, placement=node.client)

    def start(self) -> None:
        """Start the conductor and wait until it listens."""
        self.wire.restore()
        self.service.start()
        assert self.service.wait_ready(SECONDS)
        wait_until("the listener runs", self.listens, SECONDS)

    def listens(self) -> bool:
        """Return whether the queue of the notifications has a consumer."""
        return self.bus.count(self.queue)[0] > 0

    def close(self) -> None:
        """Stop everything."""
        self.service.stop()
        self.bus.close()
        self.transport.cleanup()

    def boot(self) -> str:
        """Boot a server with one unit of the card; return its uuid."""
        instance = str(uuid4())
        self.nova.add_server(instance, self.node.name)
        self.allocate(instance)
        assert self.service.conductor is not None
        arqs = self.service.conductor.arqs
        (arq,) = arqs.create("fpga", "project-1")["arqs"]
        arqs.bind([self.make_bind(arq["uuid"], instance)], None)
        return instance

    def delete(self, instance: str) -> None:
        """Delete a server and its allocation, and leave its ARQs."""
        self.nova.servers.pop(instance, None)
        self.node.deallocate(instance)

    def holders(self) -> set[str]:
        """Return the instances whose ARQs own handles."""
        return set(self.list_bound().values())

    def results(self) -> dict[str, int]:
        """Return the counts of notifications by result."""
        assert self.service.conductor is not None
        watcher = self.service.conductor.instance_watcher
        assert watcher is not None
        return watcher.counts()

    def wait_received(self, count: int) -> None:
        """Wait until so many notifications are counted."""
        wait_until(f"{count} notifications", lambda: sum(self.results().values()) >= count, SECONDS)


@pytest.fixture
def cloud(
    rabbit_url: str, sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> Iterator[Cloud]:
    port = oslo_messaging.TransportURL.parse(make_conf(), rabbit_url).hosts[0].port or 5672
    with relay(port) as wire:
        new_cloud = Cloud(rabbit_url, wire, sqlite_engine, node, fake_nova)
        try:
            new_cloud.start()
            yield new_cloud
        finally:
            new_cloud.close()


def test_deleted_server_frees_its_device_within_seconds(cloud: Cloud) -> None:
    stays, deleted = cloud.boot(), cloud.boot()
    cloud.delete(deleted)
    cloud.bus.emit_instance("instance.delete.end", deleted)
    wait_until("the device is free", lambda: cloud.holders() == {stays}, SECONDS)
    # The ARQ is deleted: no other service would delete it.
    assert [row["instance_uuid"] for row in rows.read(cloud.engine, schema.arqs)] == [stays]


def test_offloaded_server_frees_its_device(cloud: Cloud) -> None:
    shelved = cloud.boot()
    cloud.nova.add_server(shelved, None, "SHELVED_OFFLOADED")
    cloud.node.deallocate(shelved)
    cloud.bus.emit_instance("instance.shelve_offload.end", shelved)
    wait_until("the device is free", lambda: cloud.holders() == set(), SECONDS)
    # The server exists: the ARQ is kept, as by the orphan collector.
    (row,) = rows.read(cloud.engine, schema.arqs)
    assert (row["state"], row["instance_uuid"]) == ("Unbound", None)


def test_forged_late_and_malformed_notifications_release_nothing(cloud: Cloud) -> None:
    running = cloud.boot()
    events = ["delete.end", "shelve_offload.end", "delete.end", "delete.start", "evacuate"]
    for event in events:
        cloud.bus.emit_instance(f"instance.{event}", running)
    cloud.bus.emit_instance("instance.soft_delete.end", running)
    malformed: list[Any] = [
        None,
        [],
        make_payload(17),
        make_payload("x" * 100_000),
        make_payload(running, **{"nova_object.version": "2.0"}),
        make_payload(running, **{"nova_object.data": [running]}),
        make_payload(running, **{"nova_object.namespace": "other"}),
    ]
    for payload in malformed:
        cloud.bus.emit("instance.delete.end", payload)
    cloud.bus.emit(["instance.delete.end"], make_payload(running))
    raw = [b"", b"\xff\x00", b"{", b"[]", b'{"oslo.version": "2.0", "oslo.message": "7"}']
    cloud.bus.publish_raw(cloud.queue, *raw, content_type="application/json")
    cloud.bus.publish_raw(cloud.queue, b"x" * 2_000_000)
    headers = {"compression": "application/x-gzip"}
    cloud.bus.publish_raw(cloud.queue, b"x", application_headers=headers)
    refused = len(malformed) + 1 + len(raw) + 2
    cloud.wait_received(len(events) + 1 + refused)
    results = cloud.results()
    assert (results["ignored"], results["malformed"]) == (1, refused)
    assert results["queued"] + results["coalesced"] == len(events)
    # The server is checked, and the listener still receives.
    deleted = cloud.boot()
    cloud.delete(deleted)
    cloud.bus.emit_instance("instance.delete.end", deleted)
    wait_until("the device is free", lambda: cloud.holders() == {running}, SECONDS)
    (row,) = rows.read(cloud.engine, schema.arqs)
    assert (row["state"], row["orphan_since"]) == ("Bound", None)
    assert cloud.bus.count(cloud.queue) == (1, 0)


@pytest.mark.parametrize("away", sample(["nova", "placement", "not admin"], "nova"))
def test_nothing_is_released_while_a_neighbour_is_away(
    cloud: Cloud, away: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted, other = cloud.boot(), cloud.boot()
    cloud.delete(deleted)
    checks: list[str] = []
    conductor = cloud.service.conductor
    assert conductor is not None
    watcher: Any = conductor.instance_watcher
    read = watcher._placement.allocations

    def allocations(provider: str) -> Any:
        checks.append(provider)
        if away == "placement" and len(checks) < 3:
            raise Unavailable("Placement is away")
        return read(provider)

    monkeypatch.setattr(watcher._placement, "allocations", allocations)
    monkeypatch.setattr(hints, "_FIRST_PAUSE", 0.5)
    if away == "nova":
        cloud.nova.status = 503
    elif away == "not admin":
        cloud.nova.is_admin = False
    cloud.bus.emit_instance("instance.delete.end", deleted)
    wait_until("two checks", lambda: len(checks) >= 2, SECONDS)
    assert cloud.holders() == {deleted, other}
    cloud.nova.status, cloud.nova.is_admin = 200, True
    wait_until("the device is free", lambda: cloud.holders() == {other}, SECONDS)


@pytest.mark.matrix
def test_burst_of_foreign_instances_is_checked_in_batches(cloud: Cloud) -> None:
    stays, deleted = cloud.boot(), cloud.boot()
    cloud.delete(deleted)
    batches: list[int] = []
    paths = len(cloud.nova.requested_paths)

    def count_statements(*args: Any) -> None:
        if "instance_uuid IN" in args[2]:
            batches.append(1)

    sa.event.listen(cloud.engine, "before_cursor_execute", count_statements)
    foreign = [str(uuid4()) for _ in range(1000)]
    for instance in foreign:
        cloud.bus.emit_instance("instance.delete.end", instance)
        cloud.bus.emit_instance("instance.delete.end", stays)
    cloud.bus.emit_instance("instance.delete.end", deleted)
    cloud.wait_received(2001)
    wait_until("the device is free", lambda: cloud.holders() == {stays}, SECONDS)
    sa.event.remove(cloud.engine, "before_cursor_execute", count_statements)
    # Two statements for a batch, and one request to Nova for each server without an allocation.
    assert len(batches) < 100
    assert len(cloud.nova.requested_paths) - paths < 10
    assert cloud.results()["queued"] <= 1000 + len(batches) + 2


@pytest.mark.matrix
def test_pool_takes_no_messages_from_other_consumers(cloud: Cloud) -> None:
    received: queue.Queue[str] = queue.Queue()

    class Endpoint:
        def info(self, ctxt: Any, publisher: str, event: str, payload: Any, more: Any) -> None:
            received.put(payload["nova_object.data"]["uuid"])

    instances = [str(uuid4()) for _ in range(20)]
    with cloud.bus.listening(Endpoint()), cloud.bus.listening(Endpoint(), pool="other-pool"):
        for instance in instances:
            cloud.bus.emit_instance("instance.delete.end", instance)
        # Each of the two others gets every message, and so does the conductor.
        found = [received.get(timeout=SECONDS) for _ in range(40)]
        cloud.wait_received(20)
    assert sorted(found) == sorted(2 * instances)


def listener_options(bus: NovaBus, **nova: Any) -> cfg.ConfigOpts:
    conf = make_conf(
        rpc={"topic": bus.exchange},
        nova={
            "notifications": True,
            "notification_exchange": bus.exchange,
            "notification_topic": bus.topic,
            **nova,
        },
    )
    register_options(conf)
    conf.set_override("transport_url", bus.url)
    return conf


@contextlib.contextmanager
def listening(conf: cfg.ConfigOpts, receive: Callable[[Any], Any]) -> Iterator[None]:
    listener = make_listener(conf)
    assert listener is not None
    conf.set_override("amqp_auto_delete", True, group="oslo_messaging_rabbit")
    try:
        listener.start(receive, receive)
        yield
    finally:
        listener.stop()
        listener.cleanup()


@pytest.fixture
def nova_bus(rabbit_url: str) -> Iterator[NovaBus]:
    bus = NovaBus(rabbit_url)
    yield bus
    bus.close()


@pytest.mark.matrix
def test_empty_pool_consumes_the_queue_of_the_topic(nova_bus: NovaBus) -> None:
    received: queue.Queue[Any] = queue.Queue()
    conf = listener_options(nova_bus, notification_pool="")
    name = f"{nova_bus.topic}.info"
    with listening(conf, received.put):
        wait_until("the listener runs", lambda: nova_bus.count(name)[0] > 0, SECONDS)
        nova_bus.emit_instance("instance.delete.end", "x")
        assert received.get(timeout=SECONDS)["event_type"] == "instance.delete.end"
        wait_until("nothing waits", lambda: nova_bus.count(name) == (1, 0), SECONDS)


@pytest.mark.matrix
def test_conductors_share_the_notifications(nova_bus: NovaBus) -> None:
    received: queue.Queue[Any] = queue.Queue()
    confs = [listener_options(nova_bus) for _ in range(2)]
    name = queue_name(confs[0])
    with listening(confs[0], received.put), listening(confs[1], received.put):
        wait_until("both listen", lambda: nova_bus.count(name)[0] == 2, SECONDS)
        instances = [str(uuid4()) for _ in range(50)]
        for instance in instances:
            nova_bus.emit_instance("instance.delete.end", instance)
        messages = [received.get(timeout=SECONDS) for _ in instances]
        wait_until("nothing waits", lambda: nova_bus.count(name) == (2, 0), SECONDS)
    found = [message["payload"]["nova_object.data"]["uuid"] for message in messages]
    assert (sorted(found), received.empty()) == (sorted(instances), True)


@pytest.mark.matrix
def test_broker_outage_is_survived(cloud: Cloud) -> None:
    stays, deleted = cloud.boot(), cloud.boot()
    cloud.wire.cut()
    wait_until("the broker has lost the consumer", lambda: not cloud.listens(), SECONDS)
    cloud.delete(deleted)
    cloud.wire.restore()
    wait_until("the listener is back", cloud.listens, SECONDS)
    cloud.bus.emit_instance("instance.delete.end", deleted)
    wait_until("the device is free", lambda: cloud.holders() == {stays}, SECONDS)


def test_attachment_ends_with_its_server(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    """A server without accel:device_profile: Nova deletes none of its ARQs."""
    env = AttachmentEnv(sqlite_engine, node, fake_nova)
    env.attach()
    env.settle()
    assert env.check() == "attached"
    conf, uow = env.conf, UnitOfWork(sqlite_engine)
    recorder = ArqEventRecorder(conf, NotificationBuilder(conf, now=uow.clock))
    seconds = itertools.count(0, 2)
    watcher = InstanceWatcher(
        uow,
        node.placement,
        env.nova_client,
        OrphanReleaser(uow, recorder, lambda: None, uow.clock),
        env.runner.end_lost,
        clock=lambda: float(next(seconds)),
    )
    del fake_nova.servers[env.instance]
    node.deallocate(env.instance)
    message = {"event_type": "instance.delete.end", "payload": make_payload(env.instance)}
    watcher.receive(message)
    assert watcher.run_once() == 2
    env.settle()
    assert env.rows() == []
    assert env.owned() == 0

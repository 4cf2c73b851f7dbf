# SPDX-License-Identifier: Apache-2.0
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.service import ConductorService
from cyborg.core import naming
from cyborg.core.errors import Misconfigured, NotFound, Stale
from cyborg.db import schema
from cyborg.rpc.client import make_conductor_client
from cyborg.rpc.contract import ConductorAPI
from cyborg.rpc.transport import make_transport, register_options
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.hosts.hosts import Host, card
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import ends_within, wait_until

__all__ = ["node", "placement_adapter"]


def options(**groups: Any) -> Any:
    plain: dict[str, dict[str, Any]] = {
        "rpc": {"topic": f"t{uuid4().hex}", "timeout": 10},
        "nova": {"send_events": False},
        "conductor": {"publish_interval": 0.1, "hello_interval": 0.1},
    }
    conf = make_conf(**plain | groups)
    register_options(conf)
    conf.set_override("transport_url", "kombu+memory:////")
    return conf


@pytest.fixture
def bus(sqlite_engine: sa.Engine, node: Node) -> Iterator[ConductorAPI]:
    """A client of a complete conductor on the in-process bus."""
    conf = options()
    transport = make_transport(conf)
    service = ConductorService(conf, transport, engine=sqlite_engine, placement=node.client)
    service.start()
    try:
        assert service.wait_ready(20)
        yield make_conductor_client(transport, conf)
    finally:
        service.stop()
        transport.cleanup()
    service.wait()
    assert not [t for t in threading.enumerate() if t.name in ("publisher", "outbox", "hello")]


def test_report_over_the_bus_creates_providers(
    bus: ConductorAPI, sqlite_engine: sa.Engine, node: Node
) -> None:
    host = Host(node.name, devices=[card()])
    with pytest.raises(Stale):
        bus.report(host.message())
    drivers = [{"name": "fake", "driver": "fake", "status": "READY", "error": None}]
    hello: dict[str, Any] = {
        "host": host.name,
        "epoch": host.epoch,
        "endpoint": None,
        "status": "READY",
        "drivers": drivers,
        "digest": host.digest,
        "versions": {},
    }
    assert bus.hello(**hello) == {"interval": 0.1, "report": True, "desired_generation": 0}
    host.generation = 1
    bus.report(host.message())
    assert bus.hello(**hello)["report"] is False
    wait_until("the device is published", node.children)
    (device,) = rows.read(sqlite_engine, schema.devices)
    bus.device_set_status(device["uuid"], "maintaining")
    with pytest.raises(NotFound):
        bus.device_set_status(str(uuid4()), "enabled")
    profile = bus.device_profile_create({"name": "p", "groups": [{"resources:CUSTOM_FAKE": "1"}]})
    assert profile["name"] == "p"
    (arq,) = bus.arq_create("p", "project")["arqs"]
    bus.arq_delete([arq["uuid"]], None, None, False)
    bus.device_profile_delete(["p"])
    with pytest.raises(NotFound):
        bus.discovery_create("no-such-host", None)
    daemons = {row["binary"] for row in rows.read(sqlite_engine, schema.services)}
    assert daemons == {"cyborg-agent", "cyborg-conductor"}


def test_unreachable_agent_is_cordoned_in_placement_until_its_next_heartbeat(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    """Test own heartbeats over the bus, marking down, and reserved inventory in Placement."""
    conf = options(
        conductor={"publish_interval": 0.1, "hello_interval": 0.1, "broker_reconnect_grace": 0.2}
    )
    transport = make_transport(conf)
    service = ConductorService(conf, transport, engine=sqlite_engine, placement=node.client)
    service.start()
    try:
        assert service.wait_ready(20)
        assert service.conductor is not None
        host = Host(node.name)
        host.send(service.conductor.hosts, card())
        uuid = naming.provider_uuid(node.name, card().address)

        def reserved() -> int | None:
            inventory = node.inventory(uuid)
            return inventory["CUSTOM_FAKE"]["reserved"] if inventory else None

        wait_until("the devices are reserved", lambda: reserved() == 2)
        (row,) = rows.read(sqlite_engine, schema.services, binary="cyborg-agent")
        assert row["down_since"] - row["last_seen_at"] >= timedelta(seconds=0.7)
        host.hello(service.conductor.hosts)
        wait_until("they are offered again", lambda: reserved() == 0)
    finally:
        service.stop()
        transport.cleanup()


def test_stop_does_not_wait_for_an_unanswered_heartbeat(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    conf = options(conductor={"publish_interval": 0.1, "hello_interval": 0.1})
    transport = make_transport(conf)
    service = ConductorService(conf, transport, engine=sqlite_engine, placement=node.client)
    service.start()
    assert service.wait_ready(20)
    assert service._server is not None
    # From here on no server takes messages, as during an outage of the broker.
    service._server.stop()
    service._server.wait()
    with ends_within(5):
        service.stop()
    transport.cleanup()


def test_stop_while_waiting_for_the_database_succeeds(tmp_path: Any, node: Node) -> None:
    conf = options(database={"connection": f"sqlite:///{tmp_path}/no-tables.db"})
    service = ConductorService(conf, placement=node.client)
    service.start()
    assert not service.wait_ready(0.1)
    for _ in range(2):
        service.stop()
    service.wait()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"placement": {"auth_type": "nonsense"}}, "placement"),
        ({"nova": {"auth_type": "nonsense"}}, "nova"),
        ({"placement": {"endpoint_override": "http://127.0.0.1:1"}}, "connection"),
        ({"conductor": {"custody_key_file": "/none"}}, "custody_key_file.* /none"),
    ],
    ids=str,
)
def test_start_with_invalid_configuration_is_refused(groups: dict[str, Any], message: str) -> None:
    if "placement" not in groups:
        groups = groups | {"placement": {"endpoint_override": "http://127.0.0.1:1"}}
    with pytest.raises(Misconfigured, match=message):
        ConductorService(options(**groups)).start()


@pytest.mark.parametrize(("seconds", "warned"), [(150.0, False), (130.0, False), (129.0, True)])
def test_start_with_a_short_driver_timeout_logs_a_warning(
    sqlite_engine: sa.Engine,
    node: Node,
    caplog: pytest.LogCaptureFixture,
    seconds: float,
    warned: bool,
) -> None:
    conf = options(conductor={"driver_timeout": seconds})
    transport = make_transport(conf)
    service = ConductorService(conf, transport, engine=sqlite_engine, placement=node.client)
    service.start()
    service.stop()
    transport.cleanup()
    assert ("an agent may need 130 s" in caplog.text) is warned

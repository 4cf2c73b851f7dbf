# SPDX-License-Identifier: Apache-2.0
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.service import ConductorService
from cyborg.core import names
from cyborg.core.errors import Misconfigured, NotFound, Stale
from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.embedded import Node, node, placement_adapter
from cyborg.fixtures.hosts import Host, card
from cyborg.fixtures.options import make_conf
from cyborg.rpc.conductor import ConductorClient
from cyborg.rpc.transport import make_transport, register_options

__all__ = ["node", "placement_adapter"]


def options(**groups: Any) -> Any:
    plain = {
        "rpc": {"topic": f"t{uuid4().hex}", "timeout": 10},
        "nova": {"notify": False},
        "conductor": {"publish_interval": 0.1, "hello_interval": 0.1},
    }
    conf = make_conf(**plain | groups)
    register_options(conf)
    conf.set_override("transport_url", "kombu+memory:////")
    return conf


@pytest.fixture
def bus(sqlite_engine: sa.Engine, node: Node) -> Iterator[ConductorClient]:
    """A client of a whole conductor on the bus within this process."""
    conf = options()
    transport = make_transport(conf)
    service = ConductorService(conf, transport, engine=sqlite_engine, placement=node.client)
    service.start()
    try:
        assert service.wait_ready(20)
        yield ConductorClient(transport, conf)
    finally:
        service.stop()
        transport.cleanup()
    service.wait()
    assert not [t for t in threading.enumerate() if t.name in ("publisher", "outbox", "hello")]


def test_an_agents_words_become_providers(
    bus: ConductorClient, sqlite_engine: sa.Engine, node: Node
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
    assert bus.hello(**hello) == {"interval": 0.1, "report": True, "wanted": 0}
    host.generation = 1
    bus.report(host.message())
    assert bus.hello(**hello)["report"] is False
    published = threading.Event()
    for _ in range(200):
        if node.children():
            published.set()
            break
        published.wait(0.05)
    assert published.is_set()
    (device,) = rows.read(sqlite_engine, schema.devices)
    bus.device_set_status(device["uuid"], "maintaining")
    with pytest.raises(NotFound):
        bus.device_set_status(str(uuid4()), "enabled")
    made = bus.device_profile_create({"name": "p", "groups": [{"resources:CUSTOM_FAKE": "1"}]})
    assert made["name"] == "p"
    (arq,) = bus.arq_create("p", "project")["arqs"]
    bus.arq_delete([arq["uuid"]], None, None, False)
    bus.device_profile_delete(["p"])
    with pytest.raises(NotFound):
        bus.discovery_create("no-such-host", None)
    daemons = {row["binary"] for row in rows.read(sqlite_engine, schema.services)}
    assert daemons == {"cyborg-agent", "cyborg-conductor"}


def test_a_silent_agent_closes_its_host_and_a_hello_opens_it(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    """The whole way: the conductor hears itself by the bus, judges, and Placement follows."""
    conf = options(
        conductor={"publish_interval": 0.1, "hello_interval": 0.1, "reconnect_grace": 0.2}
    )
    transport = make_transport(conf)
    service = ConductorService(conf, transport, engine=sqlite_engine, placement=node.client)
    service.start()
    try:
        assert service.wait_ready(20)
        assert service.conductor is not None
        host = Host(node.name)
        host.tell(service.conductor.hosts, card())
        uuid = names.provider_uuid(node.name, card().address)

        def reserved() -> int | None:
            inventory = node.inventory(uuid)
            return inventory["CUSTOM_FAKE"]["reserved"] if inventory else None

        wait_for(lambda: reserved() == 2)
        (row,) = rows.read(sqlite_engine, schema.services, binary="cyborg-agent")
        assert row["down_since"] - row["last_seen_at"] >= timedelta(seconds=0.7)
        host.hello(service.conductor.hosts)
        wait_for(lambda: reserved() == 0)
    finally:
        service.stop()
        transport.cleanup()


def test_a_hello_of_its_own_that_gets_no_answer_holds_up_no_stop(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    conf = options(conductor={"publish_interval": 0.1, "hello_interval": 0.1})
    transport = make_transport(conf)
    service = ConductorService(conf, transport, engine=sqlite_engine, placement=node.client)
    service.start()
    assert service.wait_ready(20)
    assert service._server is not None
    # From here on nobody takes messages, as when the broker is away.
    service._server.stop()
    service._server.wait()
    began = time.monotonic()
    service.stop()
    assert time.monotonic() - began < 5
    transport.cleanup()


def wait_for(done: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(400):
        if done():
            return
        pause.wait(0.05)
    raise AssertionError("waited in vain")


def test_it_stops_while_it_waits_for_its_database(tmp_path: Any, node: Node) -> None:
    conf = options(database={"connection": f"sqlite:///{tmp_path}/no-tables.db"})
    service = ConductorService(conf, placement=node.client)
    service.start()
    assert not service.wait_ready(0.1)
    for _ in range(2):
        service.stop()
    service.wait()


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ({"placement": {"auth_type": "nonsense"}}, "placement"),
        ({"nova": {"auth_type": "nonsense"}}, "nova"),
        ({"placement": {"endpoint_override": "http://127.0.0.1:1"}}, "connection"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_at_the_start(groups: dict[str, Any], found: str) -> None:
    if "placement" not in groups:
        groups = groups | {"placement": {"endpoint_override": "http://127.0.0.1:1"}}
    with pytest.raises(Misconfigured, match=found):
        ConductorService(options(**groups)).start()


@pytest.mark.parametrize(("seconds", "warned"), [(150.0, False), (130.0, False), (129.0, True)])
def test_agents_that_would_be_given_up_too_early(
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

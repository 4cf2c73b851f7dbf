# SPDX-License-Identifier: Apache-2.0
import logging
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.clients.placement import Known, Placement
from cyborg.conductor.devices import Devices
from cyborg.conductor.publisher import Publisher
from cyborg.core import names
from cyborg.core.device import Device, Health
from cyborg.core.errors import Unavailable
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.embedded import Node, node, placement_adapter
from cyborg.fixtures.hosts import Host, card, rooms
from cyborg.fixtures.options import make_conf

__all__ = ["node", "placement_adapter"]

FAKE = "CUSTOM_FAKE"


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = timeutils.utcnow()

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def publisher(engine: sa.Engine, placement: Placement, clock: Clock | None = None) -> Publisher:
    return Publisher(make_conf(), UnitOfWork(engine), placement, now=clock or timeutils.utcnow)


def tell(engine: sa.Engine, node: Node, *devices: Device, host: Host | None = None) -> Host:
    host = host or Host(node.name)
    host.tell(rooms(engine), *devices)
    return host


def uuid(node: Node, n: int = 0) -> str:
    return names.provider_uuid(node.name, f"0000:{n:02x}:00.0")


def provider(engine: sa.Engine) -> dict[str, Any]:
    (row,) = rows.read(engine, schema.providers)
    return row


def test_a_report_becomes_nested_providers(engine: sa.Engine, node: Node) -> None:
    tell(engine, node, card(0, 16), card(1, 1))
    assert publisher(engine, node.placement).run_once() == 2
    children = node.children()
    assert set(children) == {f"{node.name}_0000:00:00.0", f"{node.name}_0000:01:00.0"}
    first = children[f"{node.name}_0000:00:00.0"]
    assert (first["uuid"], first["parent_provider_uuid"]) == (uuid(node), node.uuid)
    inventory = node.inventory(uuid(node))[FAKE]
    assert (inventory["total"], inventory["reserved"], inventory["max_unit"]) == (16, 0, 16)
    assert node.traits(uuid(node)) == {"OWNER_CYBORG", "CUSTOM_FAKE_DEVICE"}
    for row in rows.read(engine, schema.providers):
        assert (row["published"], row["stale_since"], row["owner"]) == (1, None, None)
    assert publisher(engine, node.placement).run_once() == 0


def test_what_has_not_changed_is_not_written(sqlite_engine: sa.Engine, node: Node) -> None:
    host = tell(sqlite_engine, node, card(0), card(1))
    assert publisher(sqlite_engine, node.placement).run_once() == 2
    before = {name: child["generation"] for name, child in node.children().items()}
    tell(sqlite_engine, node, card(0, serial="other"), card(1), host=host)
    assert publisher(sqlite_engine, node.placement).run_once() == 1
    assert {name: child["generation"] for name, child in node.children().items()} == before


@pytest.mark.parametrize(
    "facts",
    [{"health": Health.UNHEALTHY}, {"setup_required": True}, {"reboot_required": True}],
    ids=str,
)
def test_what_cannot_be_used_is_closed(
    sqlite_engine: sa.Engine, node: Node, facts: dict[str, Any]
) -> None:
    host = tell(sqlite_engine, node, card(0, 4, **facts))
    publisher(sqlite_engine, node.placement).run_once()
    inventory = node.inventory(uuid(node))[FAKE]
    assert (inventory["total"], inventory["reserved"]) == (4, 4)
    tell(sqlite_engine, node, card(0, 4), host=host)
    publisher(sqlite_engine, node.placement).run_once()
    assert node.inventory(uuid(node))[FAKE]["reserved"] == 0


def test_a_disabled_device_is_closed_and_opened(sqlite_engine: sa.Engine, node: Node) -> None:
    tell(sqlite_engine, node, card())
    (device,) = rows.read(sqlite_engine, schema.devices)
    devices = Devices(UnitOfWork(sqlite_engine))
    for status, reserved in (("maintaining", 2), ("enabled", 0)):
        devices.set_status(device["uuid"], status)
        assert publisher(sqlite_engine, node.placement).run_once() == 1
        assert node.inventory(uuid(node))[FAKE]["reserved"] == reserved


def test_what_is_gone_is_deleted(sqlite_engine: sa.Engine, node: Node) -> None:
    host = tell(sqlite_engine, node, card())
    publisher(sqlite_engine, node.placement).run_once()
    tell(sqlite_engine, node, host=host)
    assert publisher(sqlite_engine, node.placement).run_once() == 1
    assert not node.children()
    assert not rows.read(sqlite_engine, schema.providers)
    tell(sqlite_engine, node, card(), host=host)
    assert publisher(sqlite_engine, node.placement).run_once() == 1
    assert len(node.children()) == 1


def test_what_is_gone_but_allocated_is_closed_and_kept(
    sqlite_engine: sa.Engine, node: Node, clock: Clock
) -> None:
    host = tell(sqlite_engine, node, card(0, 4))
    publish = publisher(sqlite_engine, node.placement, clock)
    publish.run_once()
    consumer = node.allocate(uuid(node), FAKE)
    tell(sqlite_engine, node, host=host)
    assert publish.run_once() == 0
    assert node.inventory(uuid(node))[FAKE]["reserved"] == 4
    assert "allocations" in provider(sqlite_engine)["error"]
    assert publish.run_once() == 0
    node.client.delete(f"/allocations/{consumer}")
    clock.now += timedelta(minutes=2)
    assert publish.run_once() == 1
    assert not node.children()


def test_a_vanished_bound_device_is_reserved_in_full(sqlite_engine: sa.Engine, node: Node) -> None:
    host = tell(sqlite_engine, node, card(0, 4))
    publisher(sqlite_engine, node.placement).run_once()
    node.allocate(uuid(node), FAKE)
    rows.request(sqlite_engine, rows.profile(sqlite_engine))
    handle = rows.read(sqlite_engine, schema.attach_handles)[0]
    (request,) = rows.read(sqlite_engine, schema.requests)
    rows.change(sqlite_engine, schema.attach_handles, handle["id"], request_id=request["id"])
    tell(sqlite_engine, node, host=host)
    assert publisher(sqlite_engine, node.placement).run_once() == 1
    inventory = node.inventory(uuid(node))[FAKE]
    assert (inventory["total"], inventory["reserved"]) == (1, 1)


def test_parts_within_parts_nest_and_go_in_order(sqlite_engine: sa.Engine, node: Node) -> None:
    part = card().deployables[0]
    inner = replace(part, address="a-inner", parent="b-outer")
    outer = replace(part, address="b-outer")
    host = tell(sqlite_engine, node, card(deployables=(inner, outer)))
    publish = publisher(sqlite_engine, node.placement)
    assert publish.run_once() == 2
    children = node.children()
    above = children[f"{node.name}_b-outer"]
    assert children[f"{node.name}_a-inner"]["parent_provider_uuid"] == above["uuid"]
    tell(sqlite_engine, node, host=host)
    assert publish.run_once() == 2
    assert not node.children()


def test_a_compute_node_that_is_not_there_yet_is_waited_for(
    sqlite_engine: sa.Engine, placement_adapter: Any, clock: Clock
) -> None:
    late = Node(placement_adapter, made=False)
    tell(sqlite_engine, late, card())
    publish = publisher(sqlite_engine, late.placement, clock)
    assert publish.run_once() == 0
    row = provider(sqlite_engine)
    assert "nova-compute" in row["error"]
    assert (row["attempts"], row["owner"]) == (1, None)
    late.make()
    assert publish.run_once() == 0
    clock.now += timedelta(seconds=2)
    assert publish.run_once() == 1
    assert provider(sqlite_engine)["error"] is None


def test_drift_is_repaired(sqlite_engine: sa.Engine, node: Node) -> None:
    host = tell(sqlite_engine, node, card())
    publisher(sqlite_engine, node.placement).run_once()
    (child,) = node.children().values()
    node.client.delete(f"/resource_providers/{uuid(node)}/traits")
    node.client.put(
        f"/resource_providers/{uuid(node)}",
        json={"name": f"{node.name}-other", "parent_provider_uuid": None},
    )
    tell(sqlite_engine, node, card(serial="touched"), host=host)
    assert publisher(sqlite_engine, node.placement).run_once() == 1
    assert {c["uuid"] for c in node.children().values()} == {child["uuid"]}
    assert set(node.children()) == {child["name"]}
    assert "OWNER_CYBORG" in node.traits(uuid(node))


def test_a_deleted_tree_is_made_again(sqlite_engine: sa.Engine, node: Node) -> None:
    host = tell(sqlite_engine, node, card())
    publisher(sqlite_engine, node.placement).run_once()
    for each in (uuid(node), node.uuid):
        assert node.client.delete(f"/resource_providers/{each}").status_code == 204
    node.make()
    tell(sqlite_engine, node, card(serial="touched"), host=host)
    assert publisher(sqlite_engine, node.placement).run_once() == 1
    assert len(node.children()) == 1


class Meddler(Placement):
    """Somebody writes to a provider whenever we have read it, so many times."""

    times = 0

    def _meddle(self, uuid: str) -> None:
        if self.times:
            self.times -= 1
            known = Placement.get(self, uuid)
            assert known is not None
            # Never the same twice: equal traits would not be a change.
            traits = {"CUSTOM_FAKE_DEVICE"} if self.times % 2 else set()
            self.set_traits(uuid, known.generation, traits)

    def traits(self, uuid: str) -> frozenset[str]:
        found = super().traits(uuid)
        self._meddle(uuid)
        return found


@pytest.mark.parametrize(("times", "done"), [(2, 1), (100, 0)])
def test_a_conflict_is_read_again_and_retried(
    sqlite_engine: sa.Engine, node: Node, times: int, done: int
) -> None:
    host = tell(sqlite_engine, node, card())
    publisher(sqlite_engine, node.placement).run_once()
    meddler = Meddler(node.client)
    meddler.times = times
    tell(sqlite_engine, node, card(0, 5), host=host)
    assert publisher(sqlite_engine, meddler).run_once() == done
    if done:
        assert node.inventory(uuid(node))[FAKE]["total"] == 5
        assert "OWNER_CYBORG" in node.traits(uuid(node))
    else:
        assert "gave up" in provider(sqlite_engine)["error"]


def test_one_bad_provider_stops_no_other(
    sqlite_engine: sa.Engine, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    part = card(0).deployables[0]
    bad = replace(part, traits=frozenset({"NO_SUCH_STANDARD_TRAIT"}))
    tell(sqlite_engine, node, card(0, deployables=(bad,)), card(1))
    assert publisher(sqlite_engine, node.placement).run_once() == 1
    failed, good = rows.read(sqlite_engine, schema.providers)
    assert "NO_SUCH_STANDARD_TRAIT" in failed["error"]
    assert (good["error"], good["stale_since"]) == (None, None)
    assert failed["name"] in caplog.text


class Away(Placement):
    """Placement cannot be reached."""

    def find(self, name: str) -> Known | None:
        raise Unavailable("Placement cannot be reached: connection refused")


def test_placement_away_is_said_once_and_waited_for(
    sqlite_engine: sa.Engine, node: Node, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    tell(sqlite_engine, node, card(0), card(1))
    publish = publisher(sqlite_engine, Away(node.client), clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert publish.run_once() == 0
            clock.now += timedelta(seconds=5)
    assert caplog.text.count("cannot be reached") == 1
    for row in rows.read(sqlite_engine, schema.providers):
        assert (row["attempts"], row["owner"]) == (3, None)
    assert publisher(sqlite_engine, node.placement, clock).run_once() == 2


class Watched(Placement):
    """Something happens in the middle of a publication."""

    def find(self, name: str) -> Known | None:
        self.meanwhile()
        return super().find(name)

    def meanwhile(self) -> None:
        raise NotImplementedError


def test_a_change_in_the_meantime_stays_stale(engine: sa.Engine, node: Node) -> None:
    host = tell(engine, node, card(0, 2))
    watched = Watched(node.client)
    pending = [3]

    def change() -> None:
        if pending:
            tell(engine, node, card(0, pending.pop()), host=host)

    watched.meanwhile = change  # type: ignore[method-assign]
    assert publisher(engine, watched).run_once() == 2
    row = provider(engine)
    assert (row["revision"], row["published"], row["stale_since"]) == (2, 2, None)
    assert node.inventory(uuid(node))[FAKE]["total"] == 3


def test_what_another_leases_is_left_alone(engine: sa.Engine, node: Node, clock: Clock) -> None:
    tell(engine, node, card())
    other = publisher(engine, node.placement, clock)
    watched = Watched(node.client)
    counts: list[int] = []
    watched.meanwhile = lambda: counts.append(other.run_once())  # type: ignore[method-assign]
    assert publisher(engine, watched, clock).run_once() == 1
    assert counts == [0]
    # A conductor that died keeps its lease no longer than that.
    (row,) = rows.read(engine, schema.providers)
    until = clock.now + timedelta(seconds=60)
    rows.change(
        engine, schema.providers, row["id"], owner="d", lease_until=until, stale_since=clock.now
    )
    assert other.run_once() == 0
    clock.now += timedelta(seconds=61)
    assert other.run_once() == 1

# SPDX-License-Identifier: Apache-2.0
"""Deletion of the allocations of a removed host, together with its resource providers."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.placement.publisher import Publisher
from cyborg.conductor.placement.reconciler import ProviderReconciler
from cyborg.core.errors import Stale
from cyborg.db.providers import write as store
from cyborg.tests.fixtures.databases.placement import Node, make_allocation, node, placement_adapter
from cyborg.tests.fixtures.databases.publisher_setup import (
    Clock,
    make_publisher,
    provider_row,
    provider_uuid,
    report_devices,
)
from cyborg.tests.fixtures.hosts.hosts import Host, card

__all__ = ["node", "placement_adapter"]

FAKE = "CUSTOM_FAKE"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def remove_host(engine: sa.Engine, node: Node, host: Host, clock: Clock) -> None:
    report_devices(engine, node, host=host)
    with engine.begin() as tx:
        assert store.mark_removed(tx, node.name, clock(), evict=True) == 1


@pytest.fixture
def publish(sqlite_engine: sa.Engine, node: Node, clock: Clock) -> Publisher:
    return make_publisher(sqlite_engine, node.placement, clock)


def set_cpus(node: Node, *, min_unit: int) -> None:
    path = f"/resource_providers/{node.uuid}"
    body = {
        "resource_provider_generation": node.client.get(path).json()["generation"],
        "inventories": {"VCPU": {"total": 2, "min_unit": min_unit}},
    }
    assert node.client.put(f"{path}/inventories", json=body).status_code == 200


def allocate_both(node: Node) -> str:
    """Allocate a processor of the node and a unit of its card to a new consumer; return it."""
    consumer = str(uuid4())
    body = make_allocation(provider_uuid(node), FAKE, 1, "p")
    body["allocations"][node.uuid] = {"resources": {"VCPU": 1}}
    assert node.client.put(f"/allocations/{consumer}", json=body).status_code == 204
    return consumer


def allocations(node: Node, consumer: str) -> set[str]:
    return set(node.client.get(f"/allocations/{consumer}").json()["allocations"])


def test_consumer_that_cannot_be_changed_does_not_keep_the_others(
    sqlite_engine: sa.Engine, node: Node, clock: Clock, publish: Publisher
) -> None:
    host = report_devices(sqlite_engine, node, card(0, 4))
    publish.run_once()
    set_cpus(node, min_unit=1)
    refused = allocate_both(node)
    others = [node.allocate(provider_uuid(node), FAKE) for _ in range(2)]
    # The consumer has less than the node's smallest unit now, so that Placement accepts no write.
    set_cpus(node, min_unit=2)
    remove_host(sqlite_engine, node, host, clock)
    assert publish.run_once() == 0
    assert [allocations(node, consumer) for consumer in others] == [set(), set()]
    assert allocations(node, refused) == {node.uuid, provider_uuid(node)}
    assert node.inventory(provider_uuid(node))[FAKE]["reserved"] == 4
    error = provider_row(sqlite_engine)["error"]
    assert f"{refused} (" in error
    assert "VCPU" in error
    set_cpus(node, min_unit=1)
    clock.now += timedelta(minutes=2)
    assert publish.run_once() == 1
    assert allocations(node, refused) == {node.uuid}
    assert not node.children()


def test_allocations_are_kept_if_the_host_returns_meanwhile(
    sqlite_engine: sa.Engine,
    node: Node,
    clock: Clock,
    publish: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = report_devices(sqlite_engine, node, card(0, 4))
    publish.run_once()
    consumers = [node.allocate(provider_uuid(node), FAKE) for _ in range(2)]
    remove_host(sqlite_engine, node, host, clock)
    real = node.placement.set_consumer

    def return_after_first(*arguments: Any) -> None:
        real(*arguments)
        report_devices(sqlite_engine, node, card(0, 4), host=host)

    monkeypatch.setattr(node.placement, "set_consumer", return_after_first)
    publish.run_once()
    kept = [consumer for consumer in consumers if allocations(node, consumer)]
    assert len(kept) == 1
    clock.now += timedelta(minutes=2)
    assert publish.run_once() == 1
    assert node.inventory(provider_uuid(node))[FAKE]["reserved"] == 0
    assert [consumer for consumer in consumers if allocations(node, consumer)] == kept


def test_no_allocation_is_deleted_after_the_end_of_the_lease(
    sqlite_engine: sa.Engine, node: Node, publish: Publisher
) -> None:
    report_devices(sqlite_engine, node, card(0, 4))
    publish.run_once()
    consumers = [node.allocate(provider_uuid(node), FAKE) for _ in range(2)]
    checks = iter([False, False, True])  # at the begin, and before each allocation
    with pytest.raises(Stale):
        ProviderReconciler(node.placement).reconcile(
            provider_uuid(node), None, None, may_evict=lambda: True, lease_expired=checks.__next__
        )
    assert [bool(allocations(node, consumer)) for consumer in sorted(consumers)] == [False, True]
    assert node.inventory(provider_uuid(node))[FAKE]["reserved"] == 4

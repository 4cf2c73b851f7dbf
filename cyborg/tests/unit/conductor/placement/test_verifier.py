# SPDX-License-Identifier: Apache-2.0
"""The verification of published providers in a real Placement: its calls, and what it finds."""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core import placement
from cyborg.core.errors import Unavailable
from cyborg.db import schema
from cyborg.db.providers import write as store
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.placement import Node, placement_adapter
from cyborg.tests.fixtures.databases.publisher_setup import (
    Clock,
    RecordingPlacement,
    make_publisher,
    make_verifier,
    provider_uuid,
    report_devices,
)
from cyborg.tests.fixtures.hosts.hosts import card
from cyborg.tests.fixtures.machine import tiers

__all__ = ["placement_adapter"]

FAKE = "CUSTOM_FAKE"
INTERVAL = timedelta(minutes=10)
CARDS = 3


class Cloud:
    """Hosts whose providers are published, and one conductor."""

    def __init__(self, engine: sa.Engine, client: Any, hosts: int) -> None:
        self.engine = engine
        self.clock = Clock()
        self.recording = RecordingPlacement(client)
        assert hosts > 0, "a cloud without hosts proves nothing"
        self.nodes = [Node(client) for _ in range(hosts)]
        for node in self.nodes:
            report_devices(engine, node, *(card(n, 4) for n in range(CARDS)))
        self.publisher = make_publisher(engine, self.recording, self.clock)
        assert self.publisher.run_once() == hosts * CARDS
        self.verifier = make_verifier(engine, self.recording, self.clock)
        self.recording.take()

    def pass_interval(self) -> list[str]:
        """Let an interval pass, verify and publish; return the requests."""
        self.clock.now += INTERVAL
        self.verifier.run_once()
        self.publisher.run_once()
        return self.recording.take()

    def run_rounds(self, intervals: int) -> list[str]:
        """Run the rounds of some intervals; return the requests."""
        period = placement.round_period(INTERVAL.total_seconds())
        for _ in range(int(intervals * INTERVAL.total_seconds() / period)):
            self.clock.now += timedelta(seconds=period)
            self.verifier.run_once()
        return self.recording.take()

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of all providers."""
        return rows.read(self.engine, schema.providers)


@pytest.fixture
def cloud(sqlite_engine: sa.Engine, placement_adapter: Any) -> Cloud:
    return Cloud(sqlite_engine, placement_adapter, max(2, tiers.scale(6)))


@pytest.fixture
def small_cloud(engine: sa.Engine, placement_adapter: Any) -> Cloud:
    return Cloud(engine, placement_adapter, 2)


def test_unchanged_cloud_costs_one_call_per_host_and_interval(cloud: Cloud) -> None:
    for _ in range(2):
        calls = cloud.pass_interval()
        expected = {f"GET /resource_providers?in_tree={node.uuid}": 1 for node in cloud.nodes}
        assert Counter(calls) == expected
    assert not [row for row in cloud.rows() if row["stale_since"] or row["owner"]]


def test_rounds_of_unchanged_cloud_verify_each_host_in_each_interval(cloud: Cloud) -> None:
    calls = Counter(cloud.run_rounds(6))
    assert calls.keys() == {f"GET /resource_providers?in_tree={n.uuid}" for n in cloud.nodes}
    # Once in EARLIEST intervals at most.
    assert set(calls.values()) <= {6, 7, 8}


def change_inventory(node: Node, uuid: str) -> None:
    summary = node.placement.get(uuid)
    assert summary is not None
    inventories = {FAKE: {**node.inventory(uuid)[FAKE], "reserved": 1}}
    node.placement.set_inventories(uuid, summary.generation, inventories)


def delete_inventory(node: Node, uuid: str) -> None:
    assert node.client.delete(f"/resource_providers/{uuid}/inventories").status_code == 204


def change_traits(node: Node, uuid: str) -> None:
    summary = node.placement.get(uuid)
    assert summary is not None
    node.placement.set_traits(uuid, summary.generation, ["HW_CPU_X86_SSE"])


def delete_traits(node: Node, uuid: str) -> None:
    assert node.client.delete(f"/resource_providers/{uuid}/traits").status_code == 204


def rename(node: Node, uuid: str) -> None:
    node.placement.rename(uuid, f"{uuid}-other", node.uuid)


def delete(node: Node, uuid: str) -> None:
    node.placement.delete(uuid)


CHANGES: list[Callable[[Node, str], None]] = [
    change_inventory,
    delete_inventory,
    change_traits,
    delete_traits,
    rename,
    delete,
]


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_any_provider_is_repaired_within_one_interval(
    cloud: Cloud, change: Callable[[Node, str], None]
) -> None:
    cloud.pass_interval()
    before = {}
    for number, node in enumerate(cloud.nodes):
        uuid = provider_uuid(node, number % CARDS)
        before[uuid] = node.inventory(uuid), node.traits(uuid)
        change(node, uuid)
    cloud.pass_interval()
    for number, node in enumerate(cloud.nodes):
        uuid = provider_uuid(node, number % CARDS)
        assert (node.inventory(uuid), node.traits(uuid)) == before[uuid]
        assert len(node.children()) == CARDS
    # The generation after the repair is known: the next interval costs one call a host again.
    assert len(cloud.pass_interval()) == len(cloud.nodes)


def test_recreated_compute_node_gets_its_providers_again(small_cloud: Cloud) -> None:
    node = small_cloud.nodes[0]
    for n in range(CARDS):
        node.placement.delete(provider_uuid(node, n))
    node.placement.delete(node.uuid)
    other = Node(node.client, created=False)
    other.name = node.name
    other.create()
    small_cloud.pass_interval()
    assert len(other.children()) == CARDS
    assert len(small_cloud.pass_interval()) == len(small_cloud.nodes)


def test_allocation_costs_two_calls_once(small_cloud: Cloud) -> None:
    node = small_cloud.nodes[0]
    uuid = provider_uuid(node, 1)
    node.allocate(uuid, FAKE)
    calls = small_cloud.pass_interval()
    assert len(calls) == len(small_cloud.nodes) + 2
    assert {call for call in calls if uuid in call} == {
        f"GET /resource_providers/{uuid}/inventories",
        f"GET /resource_providers/{uuid}/traits",
    }
    assert len(small_cloud.pass_interval()) == len(small_cloud.nodes)


def test_contents_are_read_once_a_day_without_a_new_generation(small_cloud: Cloud) -> None:
    small_cloud.clock.now += placement.FULL_INTERVAL
    calls = small_cloud.pass_interval()
    providers = len(small_cloud.nodes) * CARDS
    assert len(calls) == len(small_cloud.nodes) + 2 * providers
    assert len(small_cloud.pass_interval()) == len(small_cloud.nodes)


def test_two_conductors_verify_each_host_once(small_cloud: Cloud) -> None:
    now = small_cloud.clock.now + INTERVAL

    def lease(owner: str) -> list[int]:
        with small_cloud.engine.begin() as tx:
            rows = store.lease_for_verification(
                tx, owner=owner, before=now, now=now, until=now + INTERVAL, limit=1
            )
        return [row["id"] for row in rows]

    leases = [lease("a"), lease("b"), lease("c")]
    assert [len(ids) for ids in leases] == [CARDS, CARDS, 0]
    assert len({*leases[0], *leases[1]}) == 2 * CARDS
    # The leases of conductors that have stopped end.
    small_cloud.clock.now = now + INTERVAL
    assert small_cloud.verifier.run_once() == 0
    small_cloud.clock.now += timedelta(seconds=60)
    assert len(small_cloud.pass_interval()) == len(small_cloud.nodes)


def test_change_of_desired_state_ends_the_lease_of_a_verifier(small_cloud: Cloud) -> None:
    node, now = small_cloud.nodes[0], small_cloud.clock.now + INTERVAL
    with small_cloud.engine.begin() as tx:
        leased = store.lease_for_verification(
            tx, owner="a", before=now, now=now, until=now + INTERVAL, limit=100
        )
        assert len(leased) == CARDS * len(small_cloud.nodes)
    with small_cloud.engine.begin() as tx:
        store.mark_stale_of_hosts(tx, [node.name], now)
    with small_cloud.engine.begin() as tx:
        store.record_unchanged(tx, "a", [row["id"] for row in leased], now)
    stale = [row for row in small_cloud.rows() if row["host"] == node.name]
    assert {(row["owner"], row["verified_at"]) for row in stale} == {(None, None)}
    assert small_cloud.publisher.run_once() == CARDS


def test_unavailable_placement_delays_the_verification(small_cloud: Cloud) -> None:
    small_cloud.clock.now += INTERVAL
    small_cloud.recording.unreachable = True
    with pytest.raises(Unavailable):
        small_cloud.verifier.run_once()
    assert not [row for row in small_cloud.rows() if row["stale_since"]]
    small_cloud.recording.unreachable = False
    small_cloud.clock.now += timedelta(minutes=2)
    assert small_cloud.verifier.run_once() == CARDS * len(small_cloud.nodes)


def test_host_without_answer_does_not_delay_others(small_cloud: Cloud) -> None:
    failing, node = small_cloud.nodes
    small_cloud.recording.refused = {failing.uuid}
    delete_inventory(node, provider_uuid(node, 0))
    small_cloud.clock.now += 0.9 * INTERVAL
    for _ in range(2):  # in the first round, the failing host may be the only one of the batch
        with contextlib.suppress(Unavailable):
            small_cloud.verifier.run_once()
    small_cloud.publisher.run_once()
    assert FAKE in node.inventory(provider_uuid(node, 0))
    small_cloud.recording.refused = set()
    small_cloud.clock.now += timedelta(minutes=2)
    delete_inventory(failing, provider_uuid(failing, 0))
    small_cloud.pass_interval()
    assert FAKE in failing.inventory(provider_uuid(failing, 0))


def test_interval_that_is_not_held_is_logged_once(
    small_cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    for late in (False, True):
        small_cloud.clock.now += 2 * INTERVAL if late else INTERVAL
        with caplog.at_level(logging.WARNING):
            small_cloud.verifier.run_once()
            small_cloud.verifier.run_once()
        assert caplog.text.count("placement_verify_interval is 600 s") == int(late)


def test_verification_needs_few_statements(cloud: Cloud) -> None:
    cloud.clock.now += INTERVAL
    with count_statements(cloud.engine) as statements:
        assert cloud.verifier.run_once() == CARDS * len(cloud.nodes)
    # Count; lease by three, and identities; record by one. Then a search without a result.
    assert len(statements) <= 8, statements.statements

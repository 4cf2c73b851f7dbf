# SPDX-License-Identifier: Apache-2.0
"""The number of calls to a real Placement that publishing needs."""

from datetime import timedelta

import pytest
import sqlalchemy as sa

from cyborg.clients import placement
from cyborg.conductor.placement import publisher
from cyborg.core.inventory.device import Health
from cyborg.db import schema
from cyborg.db.providers import write as store
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.publisher_setup import (
    Clock,
    RecordingPlacement,
    make_publisher,
    provider_uuid,
    report_devices,
)
from cyborg.tests.fixtures.hosts.hosts import card
from cyborg.tests.fixtures.machine import tiers

__all__ = ["node", "placement_adapter"]


@pytest.fixture
def recording(node: Node) -> RecordingPlacement:
    """Return a client whose classes and traits are cached, as after a first call."""
    client = RecordingPlacement(node.client)
    client.ensure_classes(["CUSTOM_FAKE"])
    client.ensure_traits(["CUSTOM_FAKE_DEVICE"])
    client.take()
    return client


def test_first_report_costs_three_calls_per_provider(
    sqlite_engine: sa.Engine, node: Node, recording: RecordingPlacement
) -> None:
    count = tiers.scale(64)
    report_devices(sqlite_engine, node, *(card(n, 1) for n in range(count)))
    assert make_publisher(sqlite_engine, recording).run_once() == count
    calls = recording.take()
    assert len(node.children()) == count
    assert len(calls) <= 3 * count + 1, calls[:5]


def test_change_of_one_device_costs_four_calls(
    sqlite_engine: sa.Engine, node: Node, recording: RecordingPlacement
) -> None:
    cards = [card(n, 1) for n in range(max(8, tiers.scale(64)))]
    publish = make_publisher(sqlite_engine, recording)
    host = report_devices(sqlite_engine, node, *cards)
    publish.run_once()
    for change in ({"health": Health.UNHEALTHY}, {}, {"reboot_required": True}):
        recording.take()
        cards[7] = card(7, 1, **change)
        report_devices(sqlite_engine, node, *cards, host=host)
        with count_statements(sqlite_engine) as statements:
            assert publish.run_once() == 1
        reserved = node.inventory(provider_uuid(node, 7))["CUSTOM_FAKE"]["reserved"]
        assert reserved == (1 if change else 0)
        calls = recording.take()
        assert len(calls) == 4, calls
        assert len(statements) <= 6, statements.statements


def test_new_device_costs_three_calls_and_removal_two(
    sqlite_engine: sa.Engine, node: Node, recording: RecordingPlacement
) -> None:
    publish = make_publisher(sqlite_engine, recording)
    host = report_devices(sqlite_engine, node, card(0), card(1))
    publish.run_once()
    recording.take()
    report_devices(sqlite_engine, node, card(0), card(1), card(2), host=host)
    publish.run_once()
    assert len(recording.take()) == 3
    report_devices(sqlite_engine, node, card(0), card(2), host=host)
    publish.run_once()
    assert [call.split()[0] for call in recording.take()] == ["GET", "DELETE"]


def test_unchanged_report_costs_no_calls(
    sqlite_engine: sa.Engine, node: Node, recording: RecordingPlacement
) -> None:
    publish = make_publisher(sqlite_engine, recording)
    host = report_devices(sqlite_engine, node, card(0), card(1))
    publish.run_once()
    recording.take()
    report_devices(sqlite_engine, node, card(0), card(1), host=host)
    with count_statements(sqlite_engine) as statements:
        assert publish.run_once() == 0
    assert recording.take() == []
    assert len(statements) == 1


def test_verification_without_drift_only_reads(
    sqlite_engine: sa.Engine, node: Node, recording: RecordingPlacement
) -> None:
    publish = make_publisher(sqlite_engine, recording, clock := Clock())
    report_devices(sqlite_engine, node, *(card(n) for n in range(4)))
    publish.run_once()
    recording.take()
    with sqlite_engine.begin() as tx:
        store.schedule_verification_of_hosts(tx, [node.name], clock.now)
    assert publish.run_once() == 4
    calls = recording.take()
    # The compute node by name, the tree, and the inventories and traits of each provider.
    assert len(calls) == 2 + 2 * 4
    assert {call.split()[0] for call in calls} == {"GET"}


@pytest.mark.parametrize("cards", tiers.sample([1, 3], 3))
def test_run_after_long_placement_outage_publishes_all(
    sqlite_engine: sa.Engine, node: Node, recording: RecordingPlacement, cards: int
) -> None:
    clock = Clock()
    publish = make_publisher(sqlite_engine, recording, clock)
    host = report_devices(sqlite_engine, node, *(card(n, 1) for n in range(cards)))
    publish.run_once()
    recording.unreachable = True
    report_devices(sqlite_engine, node, *(card(n, 2) for n in range(cards)), host=host)
    recording.take()
    runs = tiers.scale(720)
    for _ in range(runs):
        assert publish.run_once() == 0
        clock.now += timedelta(seconds=5)
    assert len(recording.take()) <= 2 * runs
    for row in rows.read(sqlite_engine, schema.providers):
        assert "cannot be reached" in row["error"]
        assert (row["attempts"], row["owner"], row["lease_until"]) == (0, None, None)
    recording.unreachable = False
    assert publish.run_once() == cards
    for n in range(cards):
        assert node.inventory(provider_uuid(node, n))["CUSTOM_FAKE"]["total"] == 2
    assert {row["error"] for row in rows.read(sqlite_engine, schema.providers)} == {None}


def test_failing_providers_do_not_delay_others(
    sqlite_engine: sa.Engine,
    node: Node,
    recording: RecordingPlacement,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "BATCH", 8)
    cards = [card(n, 1) for n in range(14)]
    publish = make_publisher(sqlite_engine, recording)
    host = report_devices(sqlite_engine, node, *cards)
    publish.run_once()
    recording.refused = {provider_uuid(node, n) for n in (3, 4, 5)}
    report_devices(sqlite_engine, node, *(card(n, 2) for n in range(14)), host=host)
    count = publish.run_once()
    while publish.unfinished:  # on a slow machine
        count += publish.run_once()
    assert count == 11
    unpublished = {r["uuid"] for r in rows.read(sqlite_engine, schema.providers) if r["error"]}
    assert unpublished == recording.refused
    recording.refused = set()
    assert publish.run_once() == 3


def test_classes_and_traits_are_never_deleted() -> None:
    """The only DELETE call of the client is for providers."""
    with open(placement.__file__, encoding="utf-8") as file:
        deletes = [line.strip() for line in file if '"DELETE"' in line]
    assert deletes == ['self._call("DELETE", f"/resource_providers/{uuid}", 404)']

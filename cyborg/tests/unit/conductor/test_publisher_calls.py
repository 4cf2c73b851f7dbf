# SPDX-License-Identifier: Apache-2.0
"""What publishing costs: the calls that a real Placement gets."""

from datetime import timedelta

import pytest
import sqlalchemy as sa

from cyborg.clients import placement
from cyborg.core.device import Health
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.store import providers as store
from cyborg.fixtures import rows
from cyborg.fixtures.embedded import Node, node, placement_adapter
from cyborg.fixtures.hosts import card
from cyborg.fixtures.publishing import Clock, Counted, publisher, tell, uuid

__all__ = ["node", "placement_adapter"]


@pytest.fixture
def counted(node: Node) -> Counted:
    """Return a client that knows its Placement already, as one does after its first call."""
    client = Counted(node.client)
    client.ensure_classes(["CUSTOM_FAKE"])
    client.ensure_traits(["CUSTOM_FAKE_DEVICE"])
    client.take()
    return client


def test_a_first_report_costs_three_calls_a_provider(
    sqlite_engine: sa.Engine, node: Node, counted: Counted
) -> None:
    tell(sqlite_engine, node, *(card(n, 1) for n in range(64)))
    assert publisher(sqlite_engine, counted).run_once() == 64
    sent = counted.take()
    assert len(node.children()) == 64
    assert len(sent) <= 3 * 64 + 1, sent[:5]


def test_one_device_of_many_costs_four(
    sqlite_engine: sa.Engine, node: Node, counted: Counted
) -> None:
    cards = [card(n, 1) for n in range(64)]
    publish = publisher(sqlite_engine, counted)
    host = tell(sqlite_engine, node, *cards)
    publish.run_once()
    for change in ({"health": Health.UNHEALTHY}, {}, {"reboot_required": True}):
        counted.take()
        cards[7] = card(7, 1, **change)
        tell(sqlite_engine, node, *cards, host=host)
        with counting(sqlite_engine) as statements:
            assert publish.run_once() == 1
        reserved = node.inventory(uuid(node, 7))["CUSTOM_FAKE"]["reserved"]
        assert reserved == (1 if change else 0)
        sent = counted.take()
        assert len(sent) == 4, sent
        assert len(statements) <= 5, statements.statements


def test_one_new_device_costs_three_and_one_that_went_two(
    sqlite_engine: sa.Engine, node: Node, counted: Counted
) -> None:
    publish = publisher(sqlite_engine, counted)
    host = tell(sqlite_engine, node, card(0), card(1))
    publish.run_once()
    counted.take()
    tell(sqlite_engine, node, card(0), card(1), card(2), host=host)
    publish.run_once()
    assert len(counted.take()) == 3
    tell(sqlite_engine, node, card(0), card(2), host=host)
    publish.run_once()
    assert [call.split()[0] for call in counted.take()] == ["GET", "DELETE"]


def test_what_nobody_touched_costs_nothing(
    sqlite_engine: sa.Engine, node: Node, counted: Counted
) -> None:
    publish = publisher(sqlite_engine, counted)
    host = tell(sqlite_engine, node, card(0), card(1))
    publish.run_once()
    counted.take()
    tell(sqlite_engine, node, card(0), card(1), host=host)
    with counting(sqlite_engine) as statements:
        assert publish.run_once() == 0
    assert counted.take() == []
    assert len(statements) == 1


def test_an_audit_reads_and_writes_nothing(
    sqlite_engine: sa.Engine, node: Node, counted: Counted
) -> None:
    publish = publisher(sqlite_engine, counted, clock := Clock())
    tell(sqlite_engine, node, *(card(n) for n in range(4)))
    publish.run_once()
    counted.take()
    with sqlite_engine.begin() as tx:
        store.audit_host(tx, node.name, clock.now)
    assert publish.run_once() == 4
    sent = counted.take()
    # The compute node by its name, the tree, and inventories and traits of each.
    assert len(sent) == 2 + 2 * 4
    assert {call.split()[0] for call in sent} == {"GET"}


@pytest.mark.parametrize("cards", [1, 3])
def test_after_an_hour_away_all_is_in_sync_in_one_round(
    sqlite_engine: sa.Engine, node: Node, counted: Counted, cards: int
) -> None:
    clock = Clock()
    publish = publisher(sqlite_engine, counted, clock)
    host = tell(sqlite_engine, node, *(card(n, 1) for n in range(cards)))
    publish.run_once()
    counted.away = True
    tell(sqlite_engine, node, *(card(n, 2) for n in range(cards)), host=host)
    counted.take()
    for _ in range(720):
        assert publish.run_once() == 0
        clock.now += timedelta(seconds=5)
    assert len(counted.take()) <= 2 * 720
    for row in rows.read(sqlite_engine, schema.providers):
        assert "cannot be reached" in row["error"]
        assert (row["attempts"], row["owner"], row["lease_until"]) == (0, None, None)
    counted.away = False
    assert publish.run_once() == cards
    for n in range(cards):
        assert node.inventory(uuid(node, n))["CUSTOM_FAKE"]["total"] == 2
    assert {row["error"] for row in rows.read(sqlite_engine, schema.providers)} == {None}


def test_providers_that_placement_fails_at_keep_no_other_waiting(
    sqlite_engine: sa.Engine, node: Node, counted: Counted
) -> None:
    cards = [card(n, 1) for n in range(70)]
    publish = publisher(sqlite_engine, counted)
    host = tell(sqlite_engine, node, *cards)
    publish.run_once()
    counted.refused = {uuid(node, n) for n in (3, 4, 5)}
    tell(sqlite_engine, node, *(card(n, 2) for n in range(70)), host=host)
    assert publish.run_once() == 67
    left = {r["uuid"] for r in rows.read(sqlite_engine, schema.providers) if r["error"]}
    assert left == counted.refused
    counted.refused = set()
    assert publish.run_once() == 3


def test_classes_and_traits_are_never_deleted() -> None:
    """The client has no call for it: what it deletes is one provider."""
    with open(placement.__file__, encoding="utf-8") as file:
        deletes = [line.strip() for line in file if '"DELETE"' in line]
    assert deletes == ['self._call("DELETE", f"/resource_providers/{uuid}", 404)']

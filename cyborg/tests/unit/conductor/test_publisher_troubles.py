# SPDX-License-Identifier: Apache-2.0
import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.clients.placement import Known, Placement
from cyborg.core.errors import Unavailable
from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.embedded import Node, node, placement_adapter
from cyborg.fixtures.hosts import card
from cyborg.fixtures.publishing import Clock, provider, publisher, tell, uuid

__all__ = ["node", "placement_adapter"]

FAKE = "CUSTOM_FAKE"


@pytest.fixture
def clock() -> Clock:
    return Clock()


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
    engine: sa.Engine, node: Node, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    tell(engine, node, card(0), card(1))
    publish = publisher(engine, Away(node.client), clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert publish.run_once() == 0
            clock.now += timedelta(seconds=5)
    assert caplog.text.count("cannot be reached") == 1
    for row in rows.read(engine, schema.providers):
        assert (row["attempts"], row["owner"], row["next_try_at"]) == (0, None, None)
        assert "cannot be reached" in row["error"]
    assert publisher(engine, node.placement, clock).run_once() == 2


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

# SPDX-License-Identifier: Apache-2.0
import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.clients.placement import Placement, ProviderSummary
from cyborg.conductor.placement import publisher
from cyborg.core.errors import Unavailable
from cyborg.core.inventory.device import Health
from cyborg.db import schema
from cyborg.db.providers.write import schedule_verification_of_hosts
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.publisher_setup import (
    Clock,
    make_publisher,
    provider_row,
    provider_uuid,
    report_devices,
)
from cyborg.tests.fixtures.device_sets.points import Points, PointsPlacement
from cyborg.tests.fixtures.hosts.hosts import card
from cyborg.tests.fixtures.machine.log_lines import warnings_of

__all__ = ["node", "placement_adapter"]

FAKE = "CUSTOM_FAKE"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_missing_compute_node_is_retried(
    sqlite_engine: sa.Engine, placement_adapter: Any, clock: Clock
) -> None:
    late = Node(placement_adapter, created=False)
    report_devices(sqlite_engine, late, card())
    publish = make_publisher(sqlite_engine, late.placement, clock)
    assert publish.run_once() == 0
    row = provider_row(sqlite_engine)
    assert "nova-compute" in row["error"]
    assert (row["attempts"], row["owner"]) == (1, None)
    late.create()
    assert publish.run_once() == 0
    clock.now += timedelta(seconds=2)
    assert publish.run_once() == 1
    assert provider_row(sqlite_engine)["error"] is None


def test_change_during_a_failed_attempt_is_not_delayed(
    engine: sa.Engine, placement_adapter: Any, clock: Clock
) -> None:
    late = Node(placement_adapter, created=False)
    host = report_devices(engine, late, card())
    placement = PointsPlacement(placement_adapter, requests := Points())
    publish = make_publisher(engine, placement, clock)
    publish.run_once()
    assert provider_row(engine)["next_try_at"] > clock.now
    clock.now += timedelta(seconds=2)

    changed = card(health=Health.UNHEALTHY)
    requests.start({0: lambda: report_devices(engine, late, changed, host=host)})
    assert publish.run_once() == 0
    row = provider_row(engine)
    assert "nova-compute" in row["error"]
    assert row["next_try_at"] is None
    late.create()
    assert publish.run_once() == 1


def test_verification_scheduled_during_a_failed_attempt_is_not_delayed(
    engine: sa.Engine, placement_adapter: Any, clock: Clock
) -> None:
    """As when the compute node appears: the watch of the nodes schedules it."""
    late = Node(placement_adapter, created=False)
    report_devices(engine, late, card())
    placement = PointsPlacement(placement_adapter, requests := Points())
    publish = make_publisher(engine, placement, clock)
    publish.run_once()
    clock.now += timedelta(seconds=2)

    def schedule() -> None:
        with engine.begin() as tx:
            assert schedule_verification_of_hosts(tx, [late.name], clock.now) == 1

    requests.start({0: schedule})
    assert publish.run_once() == 0
    row = provider_row(engine)
    assert "nova-compute" in row["error"]
    assert (row["next_try_at"], row["attempts"]) == (None, 1)


class ConcurrentWriter(Placement):
    """Placement with a client that writes after each of the first ``times`` reads."""

    times = 0

    def _write_concurrently(self, uuid: str) -> None:
        if self.times:
            self.times -= 1
            summary = Placement.get(self, uuid)
            assert summary is not None
            # The traits alternate, because equal traits would not be a change.
            traits = {"CUSTOM_FAKE_DEVICE"} if self.times % 2 else set()
            self.set_traits(uuid, summary.generation, traits)

    def traits(self, uuid: str) -> frozenset[str]:
        actual = super().traits(uuid)
        self._write_concurrently(uuid)
        return actual


@pytest.mark.parametrize(("times", "done"), [(2, 1), (100, 0)])
def test_conflict_is_reread_and_retried(
    sqlite_engine: sa.Engine, node: Node, times: int, done: int
) -> None:
    host = report_devices(sqlite_engine, node, card())
    make_publisher(sqlite_engine, node.placement).run_once()
    writer = ConcurrentWriter(node.client)
    writer.times = times
    report_devices(sqlite_engine, node, card(0, 5), host=host)
    assert make_publisher(sqlite_engine, writer).run_once() == done
    if done:
        assert node.inventory(provider_uuid(node))[FAKE]["total"] == 5
        assert "OWNER_CYBORG" in node.traits(provider_uuid(node))
    else:
        assert "other clients keep changing" in provider_row(sqlite_engine)["error"]


def test_rejected_provider_does_not_affect_others(
    sqlite_engine: sa.Engine, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    deployable = card(0).deployables[0]
    rejected = replace(deployable, traits=frozenset({"NO_SUCH_STANDARD_TRAIT"}))
    report_devices(sqlite_engine, node, card(0, deployables=(rejected,)), card(1))
    assert make_publisher(sqlite_engine, node.placement).run_once() == 1
    failed, published = rows.read(sqlite_engine, schema.providers)
    assert "NO_SUCH_STANDARD_TRAIT" in failed["error"]
    assert (published["error"], published["stale_since"]) == (None, None)
    assert failed["name"] in caplog.text


class UnreachablePlacement(Placement):
    """Placement that cannot be reached."""

    def find(self, name: str) -> ProviderSummary | None:
        raise Unavailable("Placement cannot be reached: connection refused")


def test_placement_outage_is_logged_once_and_retried(
    engine: sa.Engine, node: Node, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    report_devices(engine, node, card(0), card(1))
    publish = make_publisher(engine, UnreachablePlacement(node.client), clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert publish.run_once() == 0
            clock.now += timedelta(seconds=5)
    assert caplog.text.count("cannot be reached") == 1
    for row in rows.read(engine, schema.providers):
        assert (row["attempts"], row["owner"], row["next_try_at"]) == (0, None, None)
        assert "cannot be reached" in row["error"]
    assert make_publisher(engine, node.placement, clock).run_once() == 2


class HookedPlacement(Placement):
    """Placement that calls ``on_find`` during publishing."""

    def find(self, name: str) -> ProviderSummary | None:
        self.on_find()
        return super().find(name)

    def on_find(self) -> None:
        raise NotImplementedError


def test_change_during_publishing_is_published_later(engine: sa.Engine, node: Node) -> None:
    host = report_devices(engine, node, card(0, 2))
    hooked = HookedPlacement(node.client)
    pending = [3]

    def change() -> None:
        if pending:
            report_devices(engine, node, card(0, pending.pop()), host=host)

    hooked.on_find = change  # type: ignore[method-assign]
    assert make_publisher(engine, hooked).run_once() == 2
    row = provider_row(engine)
    assert (row["revision"], row["published_revision"], row["stale_since"]) == (2, 2, None)
    assert node.inventory(provider_uuid(node))[FAKE]["total"] == 3


def test_provider_changed_during_publishing_is_stale_since_then(
    engine: sa.Engine, node: Node, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its earlier time it would be published before all others, again and again."""
    monkeypatch.setattr(publisher, "MAX_RUN", 0.0)
    host = report_devices(engine, node, card(0, 2))
    hooked = HookedPlacement(node.client)
    clock.now += timedelta(seconds=30)

    def change() -> None:
        report_devices(engine, node, card(0, 3), host=host)

    hooked.on_find = change  # type: ignore[method-assign]
    assert make_publisher(engine, hooked, clock).run_once() == 1
    row = provider_row(engine)
    assert (row["revision"], row["published_revision"], row["stale_since"]) == (2, 1, clock.now)


def test_provider_leased_by_another_conductor_is_skipped(
    engine: sa.Engine, node: Node, clock: Clock
) -> None:
    report_devices(engine, node, card())
    other = make_publisher(engine, node.placement, clock)
    hooked = HookedPlacement(node.client)
    counts: list[int] = []
    hooked.on_find = lambda: counts.append(other.run_once())  # type: ignore[method-assign]
    assert make_publisher(engine, hooked, clock).run_once() == 1
    assert counts == [0]
    # The lease of a dead conductor expires.
    (row,) = rows.read(engine, schema.providers)
    until = clock.now + timedelta(seconds=60)
    rows.update(
        engine, schema.providers, row["id"], owner="d", lease_until=until, stale_since=clock.now
    )
    assert other.run_once() == 0
    clock.now += timedelta(seconds=61)
    assert other.run_once() == 1


@pytest.mark.parametrize(("timeout", "seconds"), [(4.0, 60), (30.0, 90)])
def test_lease_is_longer_than_three_requests(
    sqlite_engine: sa.Engine, node: Node, clock: Clock, timeout: float, seconds: int
) -> None:
    report_devices(sqlite_engine, node, card())
    hooked = HookedPlacement(node.client)
    hooked.timeout = timeout
    ends: list[Any] = []
    hooked.on_find = lambda: ends.append(provider_row(sqlite_engine)["lease_until"])  # type: ignore[method-assign]
    assert make_publisher(sqlite_engine, hooked, clock).run_once() == 1
    assert ends == [clock.now + timedelta(seconds=seconds)]


def test_only_a_changed_publish_error_is_logged(
    sqlite_engine: sa.Engine, node: Node, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def card_with_trait(trait: str) -> Any:
        deployable = replace(card(0).deployables[0], traits=frozenset({trait}))
        return card(0, deployables=(deployable,))

    def lines() -> list[str]:
        messages = [r.getMessage() for r in caplog.records if "is not published" in r.getMessage()]
        caplog.clear()
        return messages

    host = report_devices(sqlite_engine, node, card_with_trait("NO_SUCH_TRAIT_ONE"))
    publish = make_publisher(sqlite_engine, node.placement, clock)
    publish.run_once()
    (first,) = lines()
    assert "NO_SUCH_TRAIT_ONE" in first
    for _ in range(3):
        clock.now += timedelta(minutes=5)
        publish.run_once()
    assert lines() == []
    # A different error without a change of the host does not reset the count of attempts.
    with sqlite_engine.begin() as tx:
        tx.execute(sa.update(schema.deployables).values(traits=["NO_SUCH_TRAIT_TWO"]))
    clock.now += timedelta(minutes=5)
    publish.run_once()
    (second,) = lines()
    assert "NO_SUCH_TRAIT_TWO" in second
    assert provider_row(sqlite_engine)["attempts"] > 1
    report_devices(sqlite_engine, node, card_with_trait("NO_SUCH_TRAIT_TWO"), host=host)
    publish.run_once()
    assert lines() == [], "the same error after a report is not logged"


def test_missing_compute_node_is_logged_once_per_host(
    sqlite_engine: sa.Engine,
    placement_adapter: Any,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    late = Node(placement_adapter, created=False)
    report_devices(sqlite_engine, late, *[card(n) for n in range(5)])
    publish = make_publisher(sqlite_engine, late.placement, clock)
    for _ in range(4):
        publish.run_once()
        clock.now += timedelta(minutes=2)
    assert len(warnings_of(caplog.records)) == 1
    assert caplog.text.count("nova-compute") == 1
    late.create()
    assert publish.run_once() == 5
    assert caplog.text.count("Found compute node resource provider") == 1

# SPDX-License-Identifier: Apache-2.0
"""Unschedulable devices are reserved and newer changes are kept despite other faults."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.clients.placement import Placement, ProviderSummary
from cyborg.conductor.placement.publisher import Publisher
from cyborg.core.errors import Invalid
from cyborg.core.hosts import Identity
from cyborg.core.inventory.device import Health
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.publisher_setup import (
    Clock,
    RecordingPlacement,
    make_publisher,
    provider_row,
    provider_uuid,
    report_devices,
)
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.hosts import Host, card
from cyborg.tests.fixtures.machine.options import make_conf

__all__ = ["node", "placement_adapter"]

FAKE = "CUSTOM_FAKE"


def reserved(node: Node) -> int:
    """Return the reserved units of the node's card."""
    return int(node.inventory(provider_uuid(node))[FAKE]["reserved"])


def test_rejected_trait_does_not_prevent_cordon(sqlite_engine: sa.Engine, node: Node) -> None:
    publish = make_publisher(sqlite_engine, node.placement, clock := Clock())
    host = report_devices(sqlite_engine, node, card(0, 4))
    publish.run_once()
    deployable = replace(card(0, 4).deployables[0], traits=frozenset({"NO_SUCH_STANDARD_TRAIT"}))
    unhealthy = card(0, 4, deployables=(deployable,), health=Health.UNHEALTHY)
    report_devices(sqlite_engine, node, unhealthy, host=host)
    assert publish.run_once() == 0
    assert "NO_SUCH_STANDARD_TRAIT" in provider_row(sqlite_engine)["error"]
    assert reserved(node) == 4
    # It stays reserved until its traits are accepted.
    report_devices(sqlite_engine, node, replace(unhealthy, health=Health.OK), host=host)
    clock.now += timedelta(seconds=60)
    assert publish.run_once() == 0
    assert reserved(node) == 4


def test_provider_without_compute_node_is_cordoned_in_place(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    publish = make_publisher(sqlite_engine, node.placement, clock := Clock())
    host = report_devices(sqlite_engine, node, card(0, 4))
    publish.run_once()
    host.identity = Identity(provider="nowhere")
    report_devices(sqlite_engine, node, card(0, 4), host=host)
    assert publish.run_once() == 0
    assert reserved(node) == 0
    report_devices(sqlite_engine, node, card(0, 4, health=Health.UNHEALTHY), host=host)
    assert publish.run_once() == 0
    assert "nowhere" in provider_row(sqlite_engine)["error"]
    assert reserved(node) == 4
    assert [child["uuid"] for child in node.children().values()] == [provider_uuid(node)]
    host.identity = Identity()
    report_devices(sqlite_engine, node, card(0, 4), host=host)
    clock.now += timedelta(seconds=60)
    assert publish.run_once() == 1
    assert reserved(node) == 0


def test_providers_without_compute_node_are_read_in_one_tree(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    publish = make_publisher(sqlite_engine, recording := RecordingPlacement(node.client))
    host = report_devices(sqlite_engine, node, *(card(n, 4) for n in range(8)))
    publish.run_once()
    host.identity = Identity(provider="nowhere")
    report_devices(sqlite_engine, node, *(card(n, 4) for n in range(8)), host=host)
    recording.take()
    assert publish.run_once() == 0
    # The configured provider, the list of root providers for similar names, and the tree.
    assert len(recording.take()) == 3


class FailingPlacement(Placement):
    """Placement that raises ``problem`` for the host named ``broken``."""

    problem: Exception = Invalid("404")

    def find(self, name: str) -> ProviderSummary | None:
        if name == "broken":
            raise self.problem
        return super().find(name)


@pytest.mark.parametrize("problem", [Invalid("Placement answered 404"), ValueError("no JSON")])
def test_host_with_unexpected_error_does_not_affect_others(
    sqlite_engine: sa.Engine, node: Node, problem: Exception
) -> None:
    report_devices(sqlite_engine, node, card(0), host=Host("broken"))
    report_devices(sqlite_engine, node, card(0))
    failing = FailingPlacement(node.client)
    failing.problem = problem
    assert make_publisher(sqlite_engine, failing).run_once() == 1
    failed, published = rows.read(sqlite_engine, schema.providers)
    assert (published["host"], published["stale_since"]) == (node.name, None)
    message = problem.message if isinstance(problem, Invalid) else "internal error"
    assert message in failed["error"]
    assert (failed["owner"], failed["attempts"]) == (None, 1)


def test_unreadable_identity_does_not_affect_other_hosts(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    report_devices(sqlite_engine, node, card(0), host=Host("broken"))
    report_devices(sqlite_engine, node, card(0))
    (agent,) = (row for row in rows.read(sqlite_engine, schema.services) if row["host"] == "broken")
    names = [f"n{n}" for n in range(99)]
    rows.update(sqlite_engine, schema.services, agent["id"], identity={"names": names})
    assert make_publisher(sqlite_engine, node.placement).run_once() == 1
    failed, published = rows.read(sqlite_engine, schema.providers)
    assert (published["host"], published["stale_since"]) == (node.name, None)
    assert "names" in failed["error"]


class InterruptedPlacement(Placement):
    """Placement that calls ``after_read`` once, after a provider has been read."""

    after_read: Callable[[], None] | None = None

    def inventories(self, uuid: str) -> dict[str, dict[str, Any]]:
        actual = super().inventories(uuid)
        event, self.after_read = self.after_read, None
        if event is not None:
            event()
        return actual


def test_conductor_with_expired_lease_overwrites_nothing(engine: sa.Engine, node: Node) -> None:
    clock, seconds = Clock(), [0.0]
    other = make_publisher(engine, node.placement, clock)
    host = report_devices(engine, node, card(0, 4))
    other.run_once()
    interrupted = InterruptedPlacement(node.client)
    publish = build(
        Publisher, make_conf(), UnitOfWork(engine), interrupted, now=clock, clock=lambda: seconds[0]
    )
    report_devices(engine, node, card(0, 5), host=host)

    def after_read() -> None:
        seconds[0] += 1000
        clock.now += timedelta(seconds=1000)
        report_devices(engine, node, card(0, 5, health=Health.UNHEALTHY), host=host)
        assert other.run_once() == 1

    interrupted.after_read = after_read
    assert publish.run_once() == 0
    assert reserved(node) == 5
    row = provider_row(engine)
    assert (row["stale_since"], row["error"], row["owner"]) == (None, None, None)

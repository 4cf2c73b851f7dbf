# SPDX-License-Identifier: Apache-2.0
"""What must be closed is closed, and what is newer stays, whatever else goes wrong."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.clients.placement import Known, Placement
from cyborg.conductor.publisher import Publisher
from cyborg.core.device import Health
from cyborg.core.errors import Invalid
from cyborg.core.identity import Identity
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.embedded import Node, node, placement_adapter
from cyborg.fixtures.hosts import Host, card
from cyborg.fixtures.options import make_conf
from cyborg.fixtures.publishing import Clock, Counted, provider, publisher, tell, uuid

__all__ = ["node", "placement_adapter"]

FAKE = "CUSTOM_FAKE"


def reserved(node: Node) -> int:
    """Return how much of the node's card is reserved."""
    return int(node.inventory(uuid(node))[FAKE]["reserved"])


def test_a_trait_that_placement_refuses_keeps_nothing_open(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    publish = publisher(sqlite_engine, node.placement, clock := Clock())
    host = tell(sqlite_engine, node, card(0, 4))
    publish.run_once()
    part = replace(card(0, 4).deployables[0], traits=frozenset({"NO_SUCH_STANDARD_TRAIT"}))
    sick = card(0, 4, deployables=(part,), health=Health.UNHEALTHY)
    tell(sqlite_engine, node, sick, host=host)
    assert publish.run_once() == 0
    assert "NO_SUCH_STANDARD_TRAIT" in provider(sqlite_engine)["error"]
    assert reserved(node) == 4
    # And it does not open before its traits are right.
    tell(sqlite_engine, node, replace(sick, health=Health.OK), host=host)
    clock.now += timedelta(seconds=60)
    assert publish.run_once() == 0
    assert reserved(node) == 4


def test_what_has_lost_its_compute_node_is_closed_where_it_is(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    publish = publisher(sqlite_engine, node.placement, clock := Clock())
    host = tell(sqlite_engine, node, card(0, 4))
    publish.run_once()
    host.identity = Identity(provider="nowhere")
    tell(sqlite_engine, node, card(0, 4), host=host)
    assert publish.run_once() == 0
    assert reserved(node) == 0
    tell(sqlite_engine, node, card(0, 4, health=Health.UNHEALTHY), host=host)
    assert publish.run_once() == 0
    assert "nowhere" in provider(sqlite_engine)["error"]
    assert reserved(node) == 4
    assert [child["uuid"] for child in node.children().values()] == [uuid(node)]
    host.identity = Identity()
    tell(sqlite_engine, node, card(0, 4), host=host)
    clock.now += timedelta(seconds=60)
    assert publish.run_once() == 1
    assert reserved(node) == 0


def test_many_without_a_compute_node_are_read_at_once(sqlite_engine: sa.Engine, node: Node) -> None:
    publish = publisher(sqlite_engine, counted := Counted(node.client))
    host = tell(sqlite_engine, node, *(card(n, 4) for n in range(8)))
    publish.run_once()
    host.identity = Identity(provider="nowhere")
    tell(sqlite_engine, node, *(card(n, 4) for n in range(8)), host=host)
    counted.take()
    assert publish.run_once() == 0
    # What was configured, the nearest names, and the tree.
    assert len(counted.take()) == 3


class Refusing(Placement):
    """Placement answers otherwise than we expect for the host called ``broken``."""

    problem: Exception = Invalid("404")

    def find(self, name: str) -> Known | None:
        if name == "broken":
            raise self.problem
        return super().find(name)


@pytest.mark.parametrize("problem", [Invalid("Placement answered 404"), ValueError("no JSON")])
def test_a_host_that_cannot_be_read_stops_no_other(
    sqlite_engine: sa.Engine, node: Node, problem: Exception
) -> None:
    tell(sqlite_engine, node, card(0), host=Host("broken"))
    tell(sqlite_engine, node, card(0))
    refusing = Refusing(node.client)
    refusing.problem = problem
    assert publisher(sqlite_engine, refusing).run_once() == 1
    broken, good = rows.read(sqlite_engine, schema.providers)
    assert (good["host"], good["stale_since"]) == (node.name, None)
    told = problem.message if isinstance(problem, Invalid) else "internal error"
    assert told in broken["error"]
    assert (broken["owner"], broken["attempts"]) == (None, 1)


def test_what_a_newer_release_told_of_a_host_stops_no_other(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    tell(sqlite_engine, node, card(0), host=Host("broken"))
    tell(sqlite_engine, node, card(0))
    (agent,) = (row for row in rows.read(sqlite_engine, schema.services) if row["host"] == "broken")
    names = [f"n{n}" for n in range(99)]
    rows.change(sqlite_engine, schema.services, agent["id"], identity={"names": names})
    assert publisher(sqlite_engine, node.placement).run_once() == 1
    broken, good = rows.read(sqlite_engine, schema.providers)
    assert (good["host"], good["stale_since"]) == (node.name, None)
    assert "names" in broken["error"]


class Asleep(Placement):
    """Something happens, once, after a provider has been read."""

    meanwhile: Callable[[], None] | None = None

    def inventories(self, uuid: str) -> dict[str, dict[str, Any]]:
        found = super().inventories(uuid)
        event, self.meanwhile = self.meanwhile, None
        if event is not None:
            event()
        return found


def test_a_conductor_that_slept_past_its_lease_undoes_nothing(
    engine: sa.Engine, node: Node
) -> None:
    clock, seconds = Clock(), [0.0]
    other = publisher(engine, node.placement, clock)
    host = tell(engine, node, card(0, 4))
    other.run_once()
    asleep = Asleep(node.client)
    publish = Publisher(
        make_conf(), UnitOfWork(engine), asleep, now=clock, clock=lambda: seconds[0]
    )
    tell(engine, node, card(0, 5), host=host)

    def meanwhile() -> None:
        seconds[0] += 1000
        clock.now += timedelta(seconds=1000)
        tell(engine, node, card(0, 5, health=Health.UNHEALTHY), host=host)
        assert other.run_once() == 1

    asleep.meanwhile = meanwhile
    assert publish.run_once() == 0
    assert reserved(node) == 5
    row = provider(engine)
    assert (row["stale_since"], row["error"], row["owner"]) == (None, None, None)

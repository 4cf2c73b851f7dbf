# SPDX-License-Identifier: Apache-2.0
"""Statements of one host with 15 device sets, in a cloud of 250 such hosts.

Neither the number of the statements nor the rows that each reads grow with the hosts: a statement
that reads a table reads at least 2000 rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.conductor.placement.offers import GroupPlanner
from cyborg.core.errors import NoHandle
from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_set import SetKind
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.device_sets.host import SetHost, make_gpu
from cyborg.tests.fixtures.hosts.hosts import make_hosts
from cyborg.tests.fixtures.machine import tiers
from cyborg.tests.fixtures.scale import costs
from cyborg.tests.fixtures.scale.fill import Size, fill
from cyborg.tests.fixtures.scale.sets import fill_sets

__all__ = ["node", "placement_adapter"]

SIZE = Size(hosts=250, handles=1)
# Rows of one statement. A host has 23 deployables, 8 handles and 32 memberships.
MAX_ROWS = 600
# Tables that a plan of PostgreSQL must not read. Updates of given rows, a function scan, are left
# out: the planner expects 100 rows, and reads a table of this size once for them.
TABLES = ("deployables", "attach_handles", "set_members", "services")


@pytest.fixture(scope="module", params=tiers.sample(["mysql", "postgresql"], "mysql"))
def cloud(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sa.Engine]:
    """Yield an engine of a database with a large cloud at rest."""
    folder: Path = tmp_path_factory.mktemp("cloud")
    with fresh_database(request.param, folder) as url, engine_of(url) as engine:
        schema.metadata.create_all(engine)
        fill(engine, SIZE)
        assert fill_sets(engine) == 15 * SIZE.hosts
        yield engine


@dataclass
class Measured:
    """A host of the cloud whose statements are recorded."""

    host: SetHost
    statements: dict[str, int] = field(default_factory=dict)
    expensive: list[str] = field(default_factory=list)

    def run(self, name: str, step: Callable[[], Any]) -> Any:
        """Run a step, and record its statements."""
        engine = self.host.engine
        with costs.record(engine) as recorded:
            result = step()
        self.statements[name] = len(recorded.found)
        if engine.dialect.name == "mysql":
            found = recorded.above(MAX_ROWS)
        else:
            scans = tuple(f"Seq Scan {table}" for table in TABLES)
            found = [
                cost
                for cost in recorded.found
                if any(scan in cost.plan for scan in scans) and "Function Scan" not in cost.plan
            ]
        self.expensive += [
            f"{name}: {each.rows_read} rows read, {each.rows_sorted} sorted: {each.statement}\n"
            f"{each.plan}"
            for each in found
        ]
        return result

    def report(self, **facts: Any) -> None:
        """Report one GPU with these facts, and do not publish."""
        self.host.gpus["04"] = make_gpu("04", **facts)
        self.host.host.send(
            make_hosts(self.host.engine), *self.host.gpus.values(), self.host.source
        )


def refuse_bind(host: SetHost) -> None:
    with pytest.raises(NoHandle, match="handle is taken"):
        host.bind("3")


@pytest.mark.parametrize("group", tiers.sample(["", "measured"], "measured"))
def test_host_with_sets_costs_as_much_as_in_a_small_cloud(
    cloud: sa.Engine, node: Node, group: str
) -> None:
    host = SetHost(cloud, node, wanted={"2": 4}, kind=SetKind.PCIE, group=group)
    measured = Measured(host)
    sick = {"health": Health.UNHEALTHY, "health_reason": "Xid 79"}
    measured.run("unhealthy", lambda: measured.report(**sick))
    measured.run("publish unhealthy", host.publish)
    measured.run("healthy", measured.report)
    measured.run("publish healthy", host.publish)
    instance = measured.run("bind", lambda: host.bind("3"))
    measured.run("publish bound", host.publish)
    measured.run("refused bind", lambda: refuse_bind(host))
    measured.run("release", lambda: host.delete(instance))
    measured.run("publish released", host.publish)
    planner = GroupPlanner(UnitOfWork(cloud), lambda: None)
    assert measured.run("plan groups", planner.sweep) == (1 if group else 0)
    measured.run("sweep", make_hosts(cloud).sweep)
    assert not measured.expensive, "\n\n".join(measured.expensive)
    limits = {
        **{"unhealthy": 18, "healthy": 18, "bind": 14, "release": 12, "sweep": 5},
        "refused bind": 36,
        **{"publish bound": 18, "publish released": 18, "plan groups": 12 if group else 2},
        # Three batches: the withdrawal, what is offered after it, and an empty one.
        **{"publish unhealthy": 58, "publish healthy": 58},
    }
    above = {n: count for n, count in measured.statements.items() if count > limits[n]}
    assert not above, measured.statements

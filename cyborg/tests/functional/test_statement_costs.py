# SPDX-License-Identifier: Apache-2.0
"""Rows that statements read in a cloud with 128 000 handles and 100 000 ARQs.

A statement of a periodic task, or of a page of a list, must not read more rows if the cloud has
more. Each exception is listed with its reason.
"""

import logging
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor.wiring import Conductor, build_conductor
from cyborg.db import schema
from cyborg.db.read import totals
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.db.write import orphans, services
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.databases.placement import placement_adapter
from cyborg.tests.fixtures.machine import tiers
from cyborg.tests.fixtures.machine.log_lines import texts_of
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.scale import costs
from cyborg.tests.fixtures.scale.fill import Size, fill
from cyborg.tests.fixtures.scale.lists import EMPTY, LISTS, find_middle, list_requests, read_page

__all__ = ["placement_adapter"]

SIZE = Size(hosts=1000, arqs=100_000)
LIMITS = {"mysql": 3000, "postgresql": 15_000}
"""Rows of one statement; PostgreSQL reads a table of 8 000 rows once rather than looks up 100."""

PAGE = 100
FEW = 20
"""Rows of a page of what counts the handles of its devices: 128 of each host."""
TASKS = (
    *(
        "publisher",
        "verification",
        "outbox",
        "jobs",
        "sweep",
        "audits",
        "rollouts",
        "attachments",
        "custody",
    ),
    "compute nodes",
)
SCANS: Mapping[str, frozenset[str]] = {
    # A cloud has sixteen times fewer devices than handles. Reports change these columns, and an
    # index on each of them would cost every report more than a seldom used order is worth.
    "devices": frozenset(
        {"hostname", "model", "address", "health", "status", "created_at", "updated_at"}
        | {"deliverable", "type", "vendor"}
    ),
    "deployables": frozenset(
        {"hostname", "resource_class", "num_accelerators", "created_at", "updated_at"}
    ),
    # A driver is found by the backends of the hosts; a page ends the scan of the deployables.
    "accelerators": frozenset({"driver"}),
    # A cloud has 128 times fewer services than handles, and four backends on a host. A capability
    # is in no column.
    "backends": frozenset(
        {"binary", "host", "last_seen_at", "name", "driver", "status", "created_at", "function"}
    ),
    "services": frozenset({"function"}),
    "hardware": frozenset({"driver", "uuid", "host", "address", "numa_node", "health", "serial"}),
    # MariaDB sorts the entries of the index for a state that most jobs have. Ended jobs expire.
    "jobs": frozenset({"state"}),
}
"""Filters and sort keys that scan a table other than those of handles and ARQs, by list."""


@pytest.fixture(scope="module", params=tiers.sample(["mysql", "postgresql"], "mysql"))
def cloud(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sa.Engine]:
    """Yield an engine of a database with a large cloud at rest."""
    folder: Path = tmp_path_factory.mktemp("cloud")
    with fresh_database(request.param, folder) as url, engine_of(url) as engine:
        schema.metadata.create_all(engine)
        fill(engine, SIZE)
        yield engine


def make_conductor(engine: sa.Engine, nova: FakeNova, placement: Any) -> Conductor:
    # The orphan scan calls Placement for each provider: its statements have a test of their own.
    conf = make_conf(conductor={"orphan_scan_interval": 0})
    agents: Any = None
    client = Nova(nova.adapter(), 5.0)
    return build_conductor(conf, UnitOfWork(engine), agents, Placement(placement), client)


def describe(found: list[costs.Cost]) -> str:
    """Return statements with their costs, and with their plans on PostgreSQL."""
    return "\n\n".join(
        f"{cost.rows_read} rows read, {cost.rows_sorted} sorted: {cost.statement}\n{cost.plan}"
        for cost in found
    )


def check(engine: sa.Engine, recorded: costs.Costs) -> None:
    expensive = recorded.above(LIMITS[engine.dialect.name])
    assert not expensive, describe(expensive)


@pytest.mark.parametrize("name", TASKS)
def test_periodic_task_reads_only_what_is_due(
    cloud: sa.Engine,
    name: str,
    fake_nova: FakeNova,
    placement_adapter: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    conductor = make_conductor(cloud, fake_nova, placement_adapter)
    (task,) = [task for task in conductor.tasks if task.name == name]
    with caplog.at_level(logging.WARNING):
        task.run_once()
        with costs.record(cloud) as recorded:
            task.run_once()
    assert texts_of(caplog.records, logging.WARNING) == []
    check(cloud, recorded)


def test_tasks_are_complete(cloud: sa.Engine, fake_nova: FakeNova, placement_adapter: Any) -> None:
    conductor = make_conductor(cloud, fake_nova, placement_adapter)
    assert {task.name for task in conductor.tasks} == {*TASKS, "clock"}


def test_searches_of_the_failure_detector_and_the_orphan_scan(cloud: sa.Engine) -> None:
    now = timeutils.utcnow()
    old = now - timedelta(days=1)
    with costs.record(cloud) as recorded, cloud.begin() as tx:
        assert services.mark_down(tx, now, timedelta(minutes=1), 64) == []
        assert orphans.delete_expired(tx, old, 1000) == 0
        assert orphans.failed_binds(tx, old, 1000) == []
        (last,) = orphans.next_bound(tx, "8", 0, 1)
        assert len(orphans.next_bound(tx, last["device_rp_uuid"], last["id"], 500)) == 500
    assert len(recorded.found) == 5
    check(cloud, recorded)


def test_scrape_reads_pending_work(cloud: sa.Engine) -> None:
    with costs.record(cloud) as recorded, cloud.connect() as connection:
        found = totals.read(connection, now=timeutils.utcnow())
    assert sum(found.services.values()) == SIZE.hosts
    check(cloud, recorded)
    assert len(recorded.found) == 8


@pytest.mark.parametrize("name", LISTS)
def test_page_reads_only_its_rows(cloud: sa.Engine, name: str) -> None:
    with cloud.connect() as connection:
        middle = find_middle(connection, name)
    limit = FEW if name in ("backends", "services") else PAGE
    scans = SCANS.get(name, frozenset())
    failures = []
    for request in list_requests(name, limit, middle):
        key = request[0]
        with costs.record(cloud) as recorded, cloud.connect() as connection:
            found = read_page(connection, name, request)
            connection.rollback()
        assert found or key in EMPTY, request
        if key not in scans and (expensive := recorded.above(LIMITS[cloud.dialect.name])):
            failures.append(f"{name} {request}: {describe(expensive)}")
    assert not failures, "\n\n".join(failures)

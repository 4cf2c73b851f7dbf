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

from cyborg.api.v2 import explanations
from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor.wiring import Conductor, build_conductor
from cyborg.core import naming
from cyborg.core.binding.accelerator import AcceleratorState
from cyborg.core.explain.explanation import GroupDemand
from cyborg.db import schema
from cyborg.db.attachments import handles as guest_devices
from cyborg.db.attachments import write as write_attachments
from cyborg.db.backends import read as backends
from cyborg.db.binding import accelerators
from cyborg.db.explain import provider_counts, provider_states
from cyborg.db.orphans import write as orphans
from cyborg.db.paging import Page
from cyborg.db.services import read as services
from cyborg.db.services import write as write_services
from cyborg.db.totals import read as totals
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.databases.placement import placement_adapter
from cyborg.tests.fixtures.databases.rows import GROUPS, TRAIT
from cyborg.tests.fixtures.machine import tiers
from cyborg.tests.fixtures.machine.log_lines import texts_of
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.scale import costs
from cyborg.tests.fixtures.scale.fill import CLASSES, DRIVERS, Size, fill
from cyborg.tests.fixtures.scale.lists import LISTS, find_middle, list_requests, read_page

__all__ = ["placement_adapter"]

# test_device_set_costs.py has a case of the default tier.
pytestmark = pytest.mark.matrix

SIZE = Size(hosts=1000, arqs=100_000)
# Rows of one statement; PostgreSQL reads a table of 8 000 rows once rather than looks up 100.
LIMITS = {"mysql": 3000, "postgresql": 15_000}

PAGE = 100
LONG_PAGE = 1000
# Rows of a page of what counts the handles of its devices: 128 of each host.
FEW = 16
HANDLES = schema.attach_handles

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
        "instances",
        "deletion scan",
    ),
    "compute nodes",
)
# Filters and sort keys that scan a table other than those of handles and ARQs, by list.
SCANS: Mapping[str, frozenset[str]] = {
    # A cloud has sixteen times fewer devices than handles. Reports change these columns, and an
    # index on each of them would cost every report more than a seldom used order is worth.
    "devices": frozenset(
        {"hostname", "model", "address", "health", "status", "created_at", "updated_at"}
        | {"deliverable", "type", "vendor"}
    ),
    "deployables": frozenset({"resource_class", "num_accelerators", "created_at", "updated_at"}),
    # A driver is found by the backends of the hosts; a page ends the scan of the deployables.
    "accelerators": frozenset({"driver"}),
    # A cloud has 128 times fewer services than handles, and four backends on a host.
    "services?kind=backend": frozenset(
        {"binary", "host", "last_seen_at", "name", "driver", "status", "created_at"}
    ),
    "hardware": frozenset({"driver", "uuid", "host", "address", "numa_node", "health", "serial"}),
    # MariaDB sorts the entries of the index for a state that most jobs have. Ended jobs expire.
    "jobs": frozenset({"state"}),
    # The status of an entry follows from three tables, of which PostgreSQL reads many blocks.
    "drivers/{key}": frozenset({"status"}),
}
# Lists that show numbers of what they do not show, with the entries of an index that one statement
# may read for them, for each host.
COUNTED: Mapping[str, int] = {
    "discoveries/{uuid}": len(DRIVERS) * 3,
    "drivers": len(DRIVERS) * 8,
    "drivers/{key}": len(DRIVERS) * 8,
}


@pytest.fixture(
    scope="module", params=tiers.sample(["mysql", "postgresql"], "mysql", mark=pytest.mark.long)
)
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
    # Counting reads all rows, but only as often as ``db.totals.cache`` allows.
    assert {task.name for task in conductor.tasks} == {*TASKS, "clock", "counts"}


def test_searches_of_the_failure_detector_and_the_orphan_scan(cloud: sa.Engine) -> None:
    now = timeutils.utcnow()
    old = now - timedelta(days=1)
    with costs.record(cloud) as recorded, cloud.begin() as tx:
        assert write_services.mark_down(tx, now, timedelta(minutes=1), 64) == []
        assert orphans.delete_expired(tx, old, 1000) == 0
        assert orphans.failed_binds(tx, old, 1000) == []
        (last,) = orphans.next_bound(tx, "8", 0, 1)
        assert len(orphans.next_bound(tx, last["device_rp_uuid"], last["id"], 500)) == 500
    assert len(recorded.found) == 5
    check(cloud, recorded)


@pytest.mark.parametrize(("host", "found"), [(None, 10), ("compute-00042", 1)])
def test_handles_of_an_address_are_joined_for_other_columns_only(
    cloud: sa.Engine, host: str | None, found: int
) -> None:
    page, address = Page(limit=10), "0000:03:00.1"
    with costs.record(cloud) as recorded, cloud.connect() as connection:
        rows = accelerators.find(connection, page=page, address=address, hostname=host)
    assert len(rows) == found
    ids, _ = recorded.found
    assert ("JOIN" in ids.statement) == (host is not None)


def test_search_for_lost_attachments_reads_only_their_arqs(cloud: sa.Engine) -> None:
    few = 50
    with costs.record(cloud) as recorded, cloud.begin() as tx:
        ids = write_attachments.ids_after(tx, 0, few)
        recorded.found.clear()
        assert write_attachments.find_lost(tx, ids) == []
    (cost,) = recorded.found
    assert len(ids) == few
    assert cost.rows_read <= 10 * few, describe([cost])


def test_devices_that_an_agent_attaches_read_only_its_host(cloud: sa.Engine) -> None:
    with costs.record(cloud) as recorded, cloud.begin() as tx:
        host = tx.scalar(sa.select(sa.func.min(schema.devices.c.host)))
        cards = sa.select(schema.deployables.c.id).where(schema.deployables.c.host == host)
        of_host = schema.attach_handles.c.deployable_id.in_(tx.scalars(cards).all())
        tx.execute(sa.update(schema.attach_handles).where(of_host).values(type="VFIO"))
        recorded.found.clear()
        found = guest_devices.of_host(tx, str(host))
        tx.rollback()
    assert len(found) > SIZE.devices
    assert len(recorded.found) == 1
    check(cloud, recorded)


def test_scrape_reads_pending_work(cloud: sa.Engine) -> None:
    with costs.record(cloud) as recorded, cloud.connect() as connection:
        found = totals.read(connection, now=timeutils.utcnow())
    assert sum(found.services.values()) == SIZE.hosts
    check(cloud, recorded)
    assert len(recorded.found) == 8


def test_handles_are_counted_by_an_index_alone(cloud: sa.Engine) -> None:
    executed: dict[str, Any] = {}

    def record(_: Any, __: Any, statement: str, values: Any, *___: Any) -> None:
        executed[statement] = values

    with cloud.connect() as connection:
        sa.event.listen(connection, "before_cursor_execute", record)
        found = totals.count(connection)
        sa.event.remove(connection, "before_cursor_execute", record)
        (statement,) = [each for each in executed if "attach_handles" in each]
        explain = connection.exec_driver_sql(f"EXPLAIN {statement}", executed[statement])
        plan = explain.mappings().all()
    assert sum(found.handles.values()) == SIZE.hosts * SIZE.devices * SIZE.handles
    if cloud.dialect.name == "mysql":
        (step,) = [step for step in plan if step["table"] == "attach_handles"]
        # It neither reads rows of the table nor sorts, and is not repeated for each deployable.
        assert (step["select_type"], step["Extra"]) == ("DERIVED", "Using index")
    else:
        lines = [line for step in plan for line in step.values() if "on attach_handles" in line]
        assert ["Index Only Scan" in line for line in lines] == [True]


@pytest.mark.parametrize("name", LISTS)
def test_page_reads_only_its_rows(cloud: sa.Engine, name: str) -> None:
    with cloud.connect() as connection:
        middle = find_middle(connection, name)
    limit = FEW if name.startswith(("hosts", "services")) else PAGE
    scans = SCANS.get(name, frozenset())
    max_rows = max(LIMITS[cloud.dialect.name], COUNTED.get(name, 0) * SIZE.hosts)
    failures = []
    for request in list_requests(name, limit, middle):
        key = request[0]
        with costs.record(cloud) as recorded, cloud.connect() as connection:
            found = read_page(connection, name, request)
            connection.rollback()
        assert found or key in LISTS[name].empty, request
        if key not in scans and (expensive := recorded.above(max_rows)):
            failures.append(f"{name} {request}: {describe(expensive)}")
    assert not failures, "\n\n".join(failures)


@pytest.mark.parametrize("name", ["discoveries", "services?kind=daemon"])
def test_long_page_reads_at_most_ten_rows_for_each_that_it_shows(
    cloud: sa.Engine, name: str
) -> None:
    with costs.record(cloud) as recorded, cloud.connect() as connection:
        found = read_page(connection, name, ("", Page(LONG_PAGE), {}))
        connection.rollback()
    assert found
    rows_read = sum(cost.rows_read for cost in recorded.found)
    assert rows_read <= 10 * len(found), describe(recorded.found)


@pytest.mark.parametrize("state", AcceleratorState)
@pytest.mark.parametrize("key", [None, "uuid", "created_at"])
def test_page_of_accelerators_in_a_state_does_not_scan_all_handles(
    cloud: sa.Engine, state: AcceleratorState, key: str | None
) -> None:
    full = state in (AcceleratorState.BOUND, AcceleratorState.FREE)
    with costs.record(cloud) as recorded, cloud.connect() as connection:
        found = accelerators.find(connection, page=Page(LONG_PAGE, sort_key=key), states=[state])
        connection.rollback()
    assert len(found) == (LONG_PAGE if full else 0)
    # Free handles are anywhere in the order of the uuids: their share decides how many are read.
    # Here they are the last ones.
    is_scan = (state, key) == (AcceleratorState.FREE, "uuid")
    if cloud.dialect.name == "mysql":
        cordoned = state is AcceleratorState.CORDONED
        # Those of devices that are not schedulable are found by a scan of the devices.
        limit = 10 * LONG_PAGE if cordoned else 8 * LONG_PAGE if full else 10
        expensive = [] if is_scan else recorded.above(limit)
    else:
        # PostgreSQL counts more for a page whose rows it looks up than for a scan of this cloud.
        scans = ("Seq Scan attach_handles", "Seq Scan arqs")
        expensive = [
            cost
            for cost in recorded.found
            if cost.rows_sorted > LONG_PAGE or any(scan in cost.plan for scan in scans)
        ]
    assert not expensive, describe(expensive)


@pytest.mark.parametrize("direction", ["asc", "desc"])
def test_draining_accelerators_are_found_in_each_order(cloud: sa.Engine, direction: str) -> None:
    shown: list[list[str]] = []
    with cloud.connect() as connection:
        # One device, the deployable of another one, and a handle of a third one.
        for table, id_ in ((schema.devices, 7), (schema.deployables, 90), (HANDLES, 10_000)):
            connection.execute(sa.update(table).where(table.c.id == id_).values(draining=True))
        for key in ("uuid", "created_at"):
            with costs.record(cloud) as recorded:
                page = Page(LONG_PAGE, sort_key=key, sort_dir=direction)
                found = accelerators.find(connection, page=page, states=["draining"])
            shown.append([row["uuid"] for row in found])
            # The handles of three deployables, and of these 33 each with its device.
            assert not (expensive := recorded.above(1000)), describe(expensive)
        connection.rollback()
    by_uuid, by_creation = shown
    assert len(by_uuid) == 2 * SIZE.handles + 1
    assert by_uuid == sorted(by_uuid, reverse=direction == "desc")
    assert by_creation == by_uuid  # the uuids of this cloud are in the order of the ids


@pytest.mark.parametrize("states", [["free"], ["free", "cordoned"]])
@pytest.mark.parametrize(("direction", "opposite"), [("asc", "desc"), ("desc", "asc")])
def test_last_page_of_free_accelerators_does_not_read_the_pages_before(
    cloud: sa.Engine, states: list[str], direction: str, opposite: str
) -> None:
    with cloud.connect() as connection:
        page = Page(LONG_PAGE, sort_dir=opposite)
        uuids = [row["uuid"] for row in accelerators.find(connection, page=page, states=states)]
        page = Page(LONG_PAGE, marker=uuids[FEW], sort_dir=direction)
        with costs.record(cloud) as recorded:
            found = accelerators.find(connection, page=page, states=states)
        connection.rollback()
    assert [row["uuid"] for row in found] == uuids[FEW - 1 :: -1]
    assert not (expensive := recorded.above(LIMITS[cloud.dialect.name])), describe(expensive)


def test_evaluation_of_the_cloud_reads_the_handles_of_its_class_once(cloud: sa.Engine) -> None:
    demands = [GroupDemand(0, {"FPGA": 1}, frozenset({TRAIT}))]
    with costs.record(cloud) as recorded, cloud.connect() as connection:
        counts = provider_counts.find(connection, demands)
    cards = SIZE.hosts * SIZE.devices
    of_class = cards // len(CLASSES)
    # Few kinds: what a worker evaluates does not grow with the cloud.
    assert len(counts.kinds) < 10
    assert len(set(counts.hosts.values())) < 10
    *batches, layouts = recorded.found
    assert len(batches) == -(-of_class // provider_counts.MAX_PROVIDERS)
    # The entries of an index for each handle of the class, and some rows for each provider.
    # PostgreSQL counts 50 for each block that it looks into. Neither depends on the other classes.
    limit = of_class * {"mysql": SIZE.handles + 8, "postgresql": 200}[cloud.dialect.name]
    for cost in batches:
        assert cost.rows_read < limit, describe([cost])
        assert cost.rows_sorted <= provider_counts.MAX_PROVIDERS, describe([cost])
    if cloud.dialect.name == "postgresql":
        assert "Index Only Scan attach_handles" in batches[0].plan
        assert "Seq Scan attach_handles" not in batches[0].plan
    # Devices with layouts are searched for.
    assert max(layouts.rows_read, layouts.rows_sorted) <= 1.1 * cards, describe([layouts])
    with costs.record(cloud) as recorded, cloud.connect() as connection:
        counts = provider_counts.add_others(connection, counts)
    assert counts.others == cards - of_class
    assert counts.other_handles == counts.others * SIZE.handles
    # All handles are counted by an index.
    limit = (SIZE.handles + 2) * cards
    assert not (expensive := recorded.above(limit)), describe(expensive)


def test_rejections_of_candidates_read_only_hosts_of_the_nearest_providers(
    cloud: sa.Engine,
) -> None:
    context: Any = {"groups": GROUPS, "config_data": {}}
    with costs.record(cloud) as recorded, cloud.connect() as connection:
        found = explanations.explain_absent_providers(connection, context, [], None)
    assert len(found) == explanations.MAX_REJECTED
    # The statements that count the kinds come first: the test above has their limit.
    of_hosts = recorded.found[-6:]
    limit = explanations.MAX_REJECTED * {"mysql": 64, "postgresql": 3000}[cloud.dialect.name]
    for cost in of_hosts:
        assert max(cost.rows_read, cost.rows_sorted) < limit, describe([cost])


@pytest.mark.parametrize("middle", [False, True])
def test_page_of_explained_providers_reads_only_their_rows(
    cloud: sa.Engine, *, middle: bool
) -> None:
    marker = naming.provider_uuid("compute-00500", "0000:04:00.0") if middle else None
    with costs.record(cloud) as recorded, cloud.connect() as connection:
        page = Page(FEW, marker=marker)
        uuids = [row["uuid"] for row in provider_states.find_uuids(connection, page)]
        states = provider_states.find(connection, uuids=uuids)
        owners = provider_states.find_holders(connection, uuids)
    assert [state.uuid for state in states] == uuids
    assert {state.uuid for state in states if state.handles.taken} == owners.keys()
    assert len(uuids) == FEW
    check(cloud, recorded)


@pytest.mark.parametrize("function", ["fpga", "qat", "nothing"])
def test_page_of_a_function_reads_only_the_devices_of_its_backends(
    cloud: sa.Engine, function: str
) -> None:
    for module, options in ((backends, {}), (services, {"functions": True})):
        with costs.record(cloud) as recorded, cloud.connect() as connection:
            page = Page(FEW)
            found = module.find(connection, page=page, function=function, **options)
            connection.rollback()
        assert len(found) == (0 if function == "nothing" else FEW)
        assert not (expensive := recorded.above(LIMITS[cloud.dialect.name])), describe(expensive)


def test_page_of_agents_with_functions_reads_each_of_their_handles_once(cloud: sa.Engine) -> None:
    with costs.record(cloud) as recorded, cloud.connect() as connection:
        found = services.find(connection, page=Page(SIZE.hosts), functions=True)
        connection.rollback()
    counts = [item for row in found for backend in row["backends"] for item in backend["functions"]]
    handles = SIZE.hosts * SIZE.devices * SIZE.handles
    assert sum(item["total"] for item in counts) == handles
    assert len(recorded.found) == 3
    # PostgreSQL also counts blocks of the index.
    limit = handles * {"mysql": 1.3, "postgresql": 12}[cloud.dialect.name]
    assert not (expensive := recorded.above(int(limit))), describe(expensive)

# SPDX-License-Identifier: Apache-2.0
"""Hosts and backends that are removed while members of device sets are not clean yet."""

from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.hosts.services import HostRemoval
from cyborg.conductor.inventory.report_handler import ReportHandler
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.drivers.rollout import StepKey
from cyborg.core.inventory.report import BackendStatus
from cyborg.db import schema
from cyborg.db.drivers import rollouts
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.device_sets.host import SetHost
from cyborg.tests.fixtures.device_sets.saved import make_set_host
from cyborg.tests.fixtures.hosts.hosts import make_hosts
from cyborg.tests.fixtures.machine.options import make_conf

__all__ = ["node", "placement_adapter"]


@pytest.fixture
def host(engine: sa.Engine, node: Node) -> SetHost:
    """Return a host with a released set whose partition is not deactivated yet."""
    found = make_set_host(engine, node)
    found.delete(found.bind("3"))
    return found


def remove_backend(host: SetHost, backend: str) -> Any:
    conf, now = make_conf(), timeutils.utcnow()
    handler = ReportHandler(conf, NotificationBuilder(conf, now=timeutils.utcnow))
    uow = UnitOfWork(host.engine)
    return uow.run(lambda tx: handler.remove_backend(tx, host.node.name, backend, now))


def members(host: SetHost) -> list[dict[str, Any]]:
    """Return the handles that need cleaning."""
    return list(rows.read(host.engine, schema.attach_handles, needs_cleaning=True))


def test_removal_of_a_host_removes_sets_that_are_not_clean(host: SetHost) -> None:
    (agent,) = rows.read(host.engine, schema.services)
    rows.update(host.engine, schema.services, agent["id"], down_since=timeutils.utcnow())
    removal = build(HostRemoval, make_conf(), UnitOfWork(host.engine), host.arqs)
    removal.forget(host.node.name, force=True)
    for table in (schema.devices, schema.deployables, schema.set_members, schema.attach_handles):
        assert rows.read(host.engine, table) == []


def test_removal_of_the_source_leaves_the_cleaning_to_the_members(host: SetHost) -> None:
    assert {row["set_id"] is None for row in members(host)} == {False}
    result = remove_backend(host, "hgx")
    assert result.abandoned == 2
    assert rows.read(host.engine, schema.devices, address="hgx") == []
    assert {row["set_id"] for row in members(host)} == {None}
    assert len(members(host)) == 2
    found = rows.read(host.engine, schema.custody_records, event="cleaning_abandoned")
    assert {row["details"]["deployable_address"] for row in found} == {"hgx:3"}


def test_removal_of_the_members_removes_their_sets_from_placement(host: SetHost) -> None:
    assert remove_backend(host, "gpu").abandoned == 2
    host.publish()
    assert host.offered() == {}
    assert rows.read(host.engine, schema.attach_handles) == []


def test_removal_of_the_source_keeps_a_set_with_an_owner(engine: sa.Engine, node: Node) -> None:
    host = make_set_host(engine, node)
    host.bind("3")
    assert remove_backend(host, "hgx").abandoned == 0
    (row,) = rows.read(engine, schema.deployables, address="hgx:3")
    assert row["draining"]
    assert {member["set_id"] for member in members(host)} == {row["id"]}


def test_sweep_waits_for_a_source_that_fails(engine: sa.Engine, node: Node) -> None:
    """Its agent may have been restarted, so that no report would remove the drained set."""
    make_set_host(engine, node)
    (drained,) = rows.read(engine, schema.deployables, address="hgx:3")
    rows.update(engine, schema.deployables, drained["id"], draining=True)
    (source,) = rows.read(engine, schema.backends, name="hgx")
    rows.update(engine, schema.backends, source["id"], status=str(BackendStatus.ERROR))
    hosts = make_hosts(engine)
    assert hosts.sweep() == 0
    rows.update(engine, schema.backends, source["id"], status=str(BackendStatus.READY))
    assert hosts.sweep() == 1


def test_handles_in_use_of_a_source_are_those_of_its_sets(engine: sa.Engine, node: Node) -> None:
    host = make_set_host(engine, node)
    host.bind("3")
    backends = [StepKey(node.name, name) for name in ("gpu", "hgx")]
    with engine.begin() as tx:
        found = rollouts.count_handles_in_use(tx, backends)
    assert found == dict.fromkeys(backends, 2)


def test_report_locks_the_handles_that_it_removes_in_one_order(
    engine: sa.Engine, node: Node
) -> None:
    """The members of removed sets, and removed devices."""
    host = make_set_host(engine, node)
    instance = host.bind("3")
    locked: list[str] = []

    def record(*event: Any) -> None:
        text = " ".join(str(event[2]).split())
        if "FROM attach_handles" in text and "needs_cleaning FROM" in text:
            locked.append(text)

    sa.event.listen(engine, "before_cursor_execute", record)
    left = [gpu for unit, gpu in host.gpus.items() if unit not in {"02", "04"}]
    host.host.send(make_hosts(engine), *left)
    assert len(locked) == 1
    assert "ORDER BY attach_handles.id" in locked[0]
    assert set(host.owners().values()) == {instance}
    found = {row["address"] for row in rows.read(engine, schema.deployables)}
    assert found == {"hgx:3", *(gpu.address for gpu in left)}

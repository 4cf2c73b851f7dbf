# SPDX-License-Identifier: Apache-2.0
"""Host work of the members of device sets: restored together, released set by set."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.release import release
from cyborg.conductor.jobs.reboot import enqueue_restores
from cyborg.db import schema
from cyborg.db.binding import write as arqs
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.device_sets.host import SetHost, gpu_address
from cyborg.tests.fixtures.device_sets.saved import make_set_host

__all__ = ["node", "placement_adapter"]

ONE, OTHER = "3", "4"  # modules 1 and 3; 2 and 4


@pytest.fixture
def host(engine: sa.Engine, node: Node) -> SetHost:
    """A host whose GPUs and sets are prepared."""
    host = make_set_host(engine, node, wanted={"2": 4})
    abilities = host.source.abilities
    host.gpus = {unit: replace(gpu, abilities=abilities) for unit, gpu in host.gpus.items()}
    host.report()
    return host


def bind(host: SetHost, name: str) -> str:
    """Bind a set whose host work is done; return the instance."""
    instance = host.bind(name)
    for row in rows.read(host.engine, schema.arqs, state="BindStarted"):
        rows.update(host.engine, schema.arqs, row["id"], state="Bound", job_id=None)
    for row in rows.read(host.engine, schema.jobs, state="pending"):
        rows.update(host.engine, schema.jobs, row["id"], state="done")
    return instance


def subjects(job: dict[str, Any]) -> list[str]:
    """Return the handles and device sets of a job, in their order."""
    return [item["handle"] or item["deployable"] for item in job["arguments"]["items"]]


def members(host: SetHost, name: str) -> Sequence[str]:
    return sorted(gpu_address(unit) for unit in host.family[name])


def test_released_sets_have_a_job_each(host: SetHost) -> None:
    """While a guest keeps one of them, the devices of the others are cleaned."""
    instance = bind(host, ONE)
    bind(host, OTHER)
    for row in rows.read(host.engine, schema.arqs):
        rows.update(
            host.engine, schema.arqs, row["id"], instance_uuid=instance, instance_slot=9 + row["id"]
        )
    host.delete(instance)
    found = [subjects(job) for job in host.jobs("release")]
    assert [[names[0], *sorted(names[1:])] for names in found] == [
        [f"hgx:{name}", *members(host, name)] for name in (ONE, OTHER)
    ]


def test_restored_set_is_activated_after_all_its_members(host: SetHost) -> None:
    uow = UnitOfWork(host.engine)
    for name in (ONE, OTHER):
        bind(host, name)
    assert uow.run(lambda tx: enqueue_restores(tx, host.node.name, uow.clock())) == 2
    for name, job in zip((ONE, OTHER), host.jobs("restore"), strict=True):
        *handles, last = subjects(job)
        assert (sorted(handles), last) == (members(host, name), f"hgx:{name}")
        waiting = rows.read(host.engine, schema.arqs, job_id=job["id"])
        assert len(waiting) == 2, "no guest gets a device before the partition is active"


def test_part_of_a_set_that_is_released_leaves_the_restore_of_the_others(host: SetHost) -> None:
    """As the collector of orphans may release it."""
    uow = UnitOfWork(host.engine)
    bind(host, ONE)
    uow.run(lambda tx: enqueue_restores(tx, host.node.name, uow.clock()))
    first, other = rows.read(host.engine, schema.arqs)
    owned = {row["arq_id"]: row["address"] for row in rows.read(host.engine, schema.attach_handles)}

    def release_first(tx: sa.Connection) -> None:
        found = arqs.lock(tx, [first["uuid"]])
        assert not release(tx, found, keep=False, now=uow.clock(), timeout=60.0).failed_arqs

    uow.run(release_first)
    old, new = host.jobs("restore")
    assert (old["state"], new["state"]) == ("cancelled", "pending")
    assert subjects(new) == [owned[other["id"]]]
    (left,) = rows.read(host.engine, schema.arqs)
    assert (left["state"], left["job_id"]) == ("Bound", new["id"])
    assert new["next_try_at"] <= uow.clock() + timedelta(seconds=1)


def test_part_of_a_set_whose_devices_need_no_work_is_not_restored(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    """Only the work of the set was left, and it needs all members."""
    host, uow = make_set_host(sqlite_engine, node, wanted={"2": 4}), UnitOfWork(sqlite_engine)
    bind(host, ONE)
    uow.run(lambda tx: enqueue_restores(tx, host.node.name, uow.clock()))
    (job,) = host.jobs("restore")
    assert subjects(job) == [f"hgx:{ONE}"]
    first, other = rows.read(host.engine, schema.arqs)
    uow.run(
        lambda tx: release(
            tx, arqs.lock(tx, [first["uuid"]]), keep=False, now=uow.clock(), timeout=60.0
        )
    )
    assert [row["state"] for row in host.jobs("restore")] == ["cancelled"]
    (left,) = rows.read(host.engine, schema.arqs)
    assert (left["id"], left["state"], left["job_id"]) == (other["id"], "Bound", None)

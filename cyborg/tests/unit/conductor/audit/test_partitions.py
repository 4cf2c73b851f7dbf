# SPDX-License-Identifier: Apache-2.0
"""Partitions of a fabric whose activation does not agree with the database, and their repair."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.audit.repair import RepairExecutor
from cyborg.core.audit.compare import compare_hardware
from cyborg.core.audit.sources import Finding, HostSnapshot, Kind, Repair
from cyborg.core.inventory.device_set import Activation
from cyborg.core.inventory.report import dump_answer, load_answer
from cyborg.core.jobs.job import load_job_spec
from cyborg.db import schema
from cyborg.db.audits.read import read_snapshot
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.interleave import Race
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.device_sets.host import (
    SOURCE,
    gpu_address,
    make_source,
)
from cyborg.tests.fixtures.device_sets.saved import make_set_host
from cyborg.tests.fixtures.hosts.hosts import make_hosts
from cyborg.tests.fixtures.machine.tiers import sample

__all__ = ["node", "placement_adapter"]

INACTIVE, OWN, FOREIGN = Activation.INACTIVE, Activation.OWN, Activation.FOREIGN
PAIR, FOUR = "3", "1"  # modules 1 and 3; 1 to 4
SET_ITEM = {"backend": SOURCE, "device": SOURCE, "deployable": f"{SOURCE}:{PAIR}", "handle": ""}


class Env:
    """A host with sets of a fabric, and the part of an audit about its hardware."""

    def __init__(self, engine: sa.Engine, node: Node) -> None:
        self.engine, self.uow = engine, UnitOfWork(engine)
        self.host = make_set_host(engine, node, wanted={"2": 4})
        self.name = node.name
        self.woken: list[str] = []

    def bind(self, name: str, *, age: timedelta = timedelta(hours=1)) -> str:
        """Bind a set; its partition was activated some time ago."""
        instance = self.host.bind(name)
        updated = {"state": "Bound", "job_id": None, "updated_at": self.uow.clock() - age}
        for row in rows.read(self.engine, schema.arqs):
            rows.update(self.engine, schema.arqs, row["id"], **updated)
        for row in rows.read(self.engine, schema.jobs):
            rows.update(self.engine, schema.jobs, row["id"], state="done")
        return instance

    def find(self, **active: Activation) -> Sequence[Finding]:
        """Return the findings about partitions, of which these are active."""
        host = self.host
        states = {f"{SOURCE}:{name}": INACTIVE for name in host.family}
        states |= {f"{SOURCE}:{name.strip('p')}": found for name, found in active.items()}
        answer = dump_answer([*host.gpus.values(), host.source], [], states)
        database = self.uow.run(lambda tx: read_snapshot(tx, self.name))
        snapshot = HostSnapshot(self.name, self.uow.clock(), load_answer(answer), database=database)
        return list(compare_hardware(snapshot))

    def reboot(self) -> None:
        """Send the first heartbeat of the agent after a reboot of the host."""
        agent, hosts = self.host.host, make_hosts(self.engine)
        agent.boot_id = agent.boot_id or "boot-0"
        agent.hello(hosts)
        agent.epoch, agent.boot_id = str(uuid4()), f"{agent.boot_id}+1"
        agent.hello(hosts)

    def repair(self, findings: Sequence[Finding]) -> list[str | None]:
        """Run the repairs; return their errors."""
        wake = [lambda: self.woken.append("publisher"), lambda: self.woken.append("jobs")]
        repairs = RepairExecutor(self.uow, self.host.node.placement, wake[0], wake[1], 600.0)
        return [found["error"] for found in repairs.apply(self.name, findings)]


@pytest.fixture
def env(engine: sa.Engine, node: Node) -> Env:
    return Env(engine, node)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine, node: Node) -> Env:
    return Env(sqlite_engine, node)


def test_active_partition_of_a_bound_set_is_no_finding(sqlite_env: Env) -> None:
    assert sqlite_env.find() == []
    sqlite_env.bind(PAIR)
    assert sqlite_env.find(p3=OWN) == sqlite_env.find(p3=FOREIGN) == []


def test_partition_that_is_prepared_or_released_is_no_finding(sqlite_env: Env) -> None:
    instance = sqlite_env.bind(PAIR, age=timedelta(seconds=5))
    assert sqlite_env.find() == sqlite_env.find(p3=OWN) == []
    sqlite_env.host.delete(instance)
    assert sqlite_env.find() == sqlite_env.find(p3=OWN) == []


def test_unused_partition_of_the_agent_is_deactivated_by_repair(env: Env) -> None:
    (finding,) = env.find(p3=OWN)
    assert (finding.kind, finding.object) == (Kind.PARTITION_UNUSED, f"partition {SOURCE}:{PAIR}")
    assert env.repair([finding]) == [None]
    (job,) = env.host.jobs("release")
    items = job["arguments"]["items"]
    assert {key: items[0][key] for key in SET_ITEM} == SET_ITEM
    assert {item["handle"] for item in items[1:]} == {gpu_address("01"), gpu_address("03")}
    assert env.woken == ["publisher", "jobs"]
    # Nobody gets the devices until the partition is inactive.
    env.host.publish()
    assert PAIR not in env.host.offered()
    assert env.find(p3=OWN) == []


def test_unused_partition_of_another_program_is_not_repaired(sqlite_env: Env) -> None:
    (finding,) = sqlite_env.find(p3=FOREIGN)
    assert (finding.kind, finding.repair) == (Kind.PARTITION_UNUSED, None)
    assert "another program" in finding.explanation


def test_unused_partition_under_a_server_is_not_repaired(sqlite_env: Env) -> None:
    sqlite_env.bind(FOUR)
    found = {finding.kind: finding for finding in sqlite_env.find(p3=OWN)}
    assert found.keys() == {Kind.PARTITION_UNUSED, Kind.PARTITION_INACTIVE}
    assert found[Kind.PARTITION_UNUSED].repair is None


def test_partition_bound_before_its_repair_is_not_deactivated(env: Env) -> None:
    (finding,) = env.find(p3=OWN)
    env.bind(PAIR)
    (error,) = env.repair([finding])
    assert "in use" in str(error)
    assert env.host.jobs("release") == []
    assert len(env.host.owners()) == 2


def test_inactive_partition_of_a_server_is_activated_by_repair(env: Env) -> None:
    env.bind(PAIR)
    (finding,) = env.find()
    assert (finding.kind, finding.repair) == (Kind.PARTITION_INACTIVE, Repair.ACTIVATE)
    assert env.repair([finding, replace(finding, object="again")]) == [None, None]
    (job,) = env.host.jobs("restore")
    # Not the GPUs, which the server uses.
    (item,) = job["arguments"]["items"]
    assert {key: item[key] for key in SET_ITEM} == SET_ITEM
    waiting = [r for r in rows.read(env.engine, schema.arqs) if r["job_id"] == job["id"]]
    assert [row["state"] for row in waiting] == ["Bound"]


@pytest.mark.parametrize("name", sample([PAIR, "7"], PAIR))
@pytest.mark.parametrize("prepared", [True, False])
def test_reboot_during_a_repair_restores_the_whole_set(env: Env, name: str, prepared: bool) -> None:
    """The job of the repair has the partition alone; the reboot also undid the devices."""
    host = env.host
    if name != PAIR:
        wanted = {"1": 8}
        host.source = make_source(wanted=wanted)
        host.report()
    if prepared:
        gpus = host.gpus.items()
        host.gpus = {unit: replace(gpu, abilities=host.source.abilities) for unit, gpu in gpus}
        host.report()
    env.bind(name)
    assert env.repair(env.find()) == [None]
    env.reboot()
    old, new = host.jobs("restore")
    assert (old["state"], new["state"]) == ("cancelled", "pending")
    # Another conductor may be delivering it.
    assert load_job_spec(new["uuid"], "restore", new["arguments"], 60.0).cancels == (old["uuid"],)
    *devices, last = new["arguments"]["items"]
    units = sorted(map(gpu_address, host.family[name])) if prepared else []
    assert sorted(item["handle"] for item in devices) == units
    assert (last["deployable"], last["handle"]) == (f"{SOURCE}:{name}", "")
    # No guest gets a device before the partition is active.
    waiting = rows.read(env.engine, schema.arqs)
    assert {(row["state"], row["job_id"]) for row in waiting} == {("Bound", new["id"])}
    assert len(waiting) == len(host.family[name])
    # An audit of that time adds nothing to the job.
    assert env.repair(env.find()) in ([], [None])
    assert len(host.jobs("restore")) == 2


@pytest.mark.parametrize("at", ["device_contexts", "INSERT INTO jobs"])
def test_repair_during_a_reboot_adds_no_job(env: Env, at: str) -> None:
    """The reboot has found no job of a repair, and restores all devices with their partition.

    It stands before it reads the ARQs without a job, or before it enqueues their job.
    """
    if env.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer")
    host = env.host
    gpus = host.gpus.items()
    host.gpus = {unit: replace(gpu, abilities=host.source.abilities) for unit, gpu in gpus}
    host.report()
    env.bind(PAIR)
    findings = env.find()
    agent, hosts = host.host, make_hosts(env.engine)
    agent.boot_id = "boot-0"
    agent.hello(hosts)
    agent.epoch, agent.boot_id = str(uuid4()), "boot-1"
    race = Race(env.engine, lambda: agent.hello(hosts), at, lambda: env.repair(findings))
    assert (race.reached, race.waited) == (True, True)
    assert (race.first, race.second) == (None, None)
    (job,) = host.jobs("restore")
    assert len(job["arguments"]["items"]) == 3
    waiting = rows.read(env.engine, schema.arqs)
    assert [row["job_id"] for row in waiting] == [job["id"]] * 2


def test_reboot_during_a_failing_repair_opens_the_set(env: Env) -> None:
    env.bind(PAIR)
    env.host.publish()
    env.repair(env.find())
    (job,) = env.host.jobs("restore")
    rows.update(env.engine, schema.jobs, job["id"], error="the fabric manager is away")
    env.reboot()
    (provider,) = rows.read(env.engine, schema.providers, uuid=env.host.provider(PAIR))
    assert provider["stale_since"] is not None
    assert not provider["verify_only"], "it was cordoned after the failure"


def test_second_reboot_leaves_one_restore_of_each_set(env: Env) -> None:
    gpus = env.host.gpus.items()
    env.host.gpus = {unit: replace(gpu, abilities=env.host.source.abilities) for unit, gpu in gpus}
    env.host.report()
    env.bind(PAIR)
    env.reboot()
    env.reboot()
    (job,) = env.host.jobs("restore")
    assert len(job["arguments"]["items"]) == 3

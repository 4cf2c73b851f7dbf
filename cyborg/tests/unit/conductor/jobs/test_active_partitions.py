# SPDX-License-Identifier: Apache-2.0
"""Active partitions that an agent reports, and those that nothing uses."""

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.common.calls import IdempotentEndpoint
from cyborg.conductor.jobs.active_partitions import (
    MAX_PARTITIONS,
    ActivePartitions,
    enqueue_deactivation,
)
from cyborg.core.errors import InUse, Invalid, Stale
from cyborg.core.inventory.device_set import SetKind
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.device_sets.host import SOURCE, gpu_address
from cyborg.tests.fixtures.device_sets.saved import make_set_host

__all__ = ["node", "placement_adapter"]

PAIR, FOUR, FAR = "3", "1", "5"  # modules 1 and 3; 1 to 4; 5 and 7


class Env:
    """A host with sets of a fabric, and the conductor's answers to its agent."""

    def __init__(self, engine: sa.Engine, node: Node, kind: SetKind = SetKind.FABRIC) -> None:
        self.engine = engine
        self.host = make_set_host(engine, node, wanted={"2": 4}, kind=kind)
        self.woken: list[str] = []
        self.partitions = ActivePartitions(
            UnitOfWork(engine),
            lambda: self.woken.append("publisher"),
            lambda: self.woken.append("jobs"),
            600.0,
        )

    def check(self, *names: str, epoch: str | None = None) -> list[str | None]:
        """Report active partitions as the agent does; return their uses."""
        agent = self.host.host
        addresses = [f"{SOURCE}:{name}" for name in names]
        answer = self.partitions.find_uses(self.host.node.name, epoch or agent.epoch, addresses)
        return list(answer["uses"])

    def deactivate(self, *names: str, epoch: str | None = None) -> list[str]:
        """Request the deactivation as the agent does; return the names that are accepted."""
        agent = self.host.host
        addresses = [f"{SOURCE}:{name}" for name in names]
        answer = self.partitions.deactivate(self.host.node.name, epoch or agent.epoch, addresses)
        return [address.removeprefix(f"{SOURCE}:") for address in answer["deactivated"]]

    def database(self) -> list[Any]:
        """Return the rows that a deactivation changes."""
        return [rows.read(self.engine, t) for t in (schema.attach_handles, schema.jobs)]


@pytest.fixture
def env(engine: sa.Engine, node: Node) -> Env:
    return Env(engine, node)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine, node: Node) -> Env:
    return Env(sqlite_engine, node)


def test_unused_partition_is_deactivated_and_its_sets_are_reserved(env: Env) -> None:
    env.host.bind(FAR)
    before = env.database()
    assert env.check(PAIR, FAR) == ["unused", "used"]
    assert env.database() == before, "the report alone changes nothing"
    assert env.woken == []
    assert env.deactivate(PAIR, FAR) == [PAIR]
    assert env.woken == ["publisher", "jobs"]
    (job,) = env.host.jobs("release")
    partition, *devices = job["arguments"]["items"]
    assert (partition["deployable"], partition["handle"]) == (f"{SOURCE}:{PAIR}", "")
    assert {item["handle"] for item in devices} == {gpu_address("01"), gpu_address("03")}
    env.host.publish()
    assert {name for name in env.host.offered() if env.host.family[name] & {"01", "03"}} == set()
    # The next report finds that it is being cleaned.
    assert env.check(PAIR) == ["used"]
    assert env.deactivate(PAIR) == []
    assert len(env.host.jobs("release")) == 1


def test_resent_deactivation_does_not_clean_a_second_time(sqlite_env: Env) -> None:
    """A copy of the call may arrive after the job has ended."""
    arguments = {
        "host": sqlite_env.host.node.name,
        "epoch": sqlite_env.host.host.epoch,
        "partitions": [f"{SOURCE}:{PAIR}"],
    }
    handlers = {"deactivate_partitions": sqlite_env.partitions.deactivate}
    endpoint = IdempotentEndpoint(handlers, UnitOfWork(sqlite_env.engine))
    call = SimpleNamespace(call_id=str(uuid4()), request_id=None)
    expected = {"deactivated": arguments["partitions"]}
    assert endpoint.deactivate_partitions(call, **arguments) == expected
    for handle in rows.read(sqlite_env.engine, schema.attach_handles):
        clean = {"needs_cleaning": False, "set_id": None, "job_id": None}
        rows.update(sqlite_env.engine, schema.attach_handles, handle["id"], **clean)
    before = sqlite_env.database()
    assert endpoint.deactivate_partitions(call, **arguments) == expected
    assert sqlite_env.database() == before


def test_partition_with_a_device_of_another_set_is_not_deactivated(sqlite_env: Env) -> None:
    sqlite_env.host.bind(FOUR)
    assert sqlite_env.check(PAIR, FOUR) == ["overlapped", "used"]
    assert sqlite_env.deactivate(PAIR, FOUR) == []
    assert sqlite_env.host.jobs("release") == []
    assert sqlite_env.woken == []


def test_partition_with_a_missing_device_is_not_deactivated(sqlite_env: Env) -> None:
    sqlite_env.host.report(without=["01"])
    before = sqlite_env.database()
    assert sqlite_env.check(PAIR) == ["missing"]
    assert sqlite_env.deactivate(PAIR) == []
    provider = sqlite_env.host.provider(PAIR)
    now = timeutils.utcnow()
    # The repair of an audit.
    with pytest.raises(InUse, match=r"does not report 1 of 2 devices.*fmpm -d"):
        UnitOfWork(sqlite_env.engine).run(
            lambda tx: enqueue_deactivation(tx, [provider], now, 600.0)
        )
    assert sqlite_env.database() == before


def test_partition_with_a_device_that_a_job_changes_is_not_deactivated(sqlite_env: Env) -> None:
    job = rows.insert(
        sqlite_env.engine,
        schema.jobs,
        kind="partition",
        host=sqlite_env.host.node.name,
        subject=gpu_address("01"),
        arguments={},
        state="open",
        **dict.fromkeys(("created_at", "updated_at", "next_try_at"), timeutils.utcnow()),
    )
    (gpu,) = rows.read(sqlite_env.engine, schema.deployables, address=gpu_address("01"))
    rows.update(sqlite_env.engine, schema.deployables, gpu["id"], job_id=job)
    assert sqlite_env.check(PAIR, FAR) == ["overlapped", "unused"]
    assert sqlite_env.deactivate(PAIR, FAR) == [FAR]


def test_set_that_is_no_partition_is_unknown(sqlite_engine: sa.Engine, node: Node) -> None:
    env = Env(sqlite_engine, node, kind=SetKind.NUMA)
    assert env.check(PAIR) == [None]
    assert env.deactivate(PAIR) == []
    assert env.host.jobs("release") == []


def test_partition_of_no_reported_set_is_unknown(sqlite_env: Env) -> None:
    assert sqlite_env.check("99") == [None]
    assert sqlite_env.check() == []


def test_used_partitions_take_a_constant_number_of_statements(sqlite_env: Env) -> None:
    sqlite_env.host.bind(PAIR)
    sqlite_env.host.bind(FAR)
    with count_statements(sqlite_env.engine) as one:
        sqlite_env.check(PAIR)
    with count_statements(sqlite_env.engine) as two:
        sqlite_env.check(PAIR, FAR)
    assert len(one) == len(two)


def test_report_of_an_unknown_agent_is_refused(sqlite_env: Env) -> None:
    with pytest.raises(Stale):
        sqlite_env.check(PAIR, epoch=str(uuid4()))
    with pytest.raises(Stale):
        sqlite_env.deactivate(PAIR, epoch=str(uuid4()))
    assert sqlite_env.host.jobs("release") == []


@pytest.mark.parametrize("partitions", [None, "hgx:3", {}, [1], [""], ["a"] * (MAX_PARTITIONS + 1)])
def test_malformed_report_is_refused(sqlite_env: Env, partitions: Any) -> None:
    agent = sqlite_env.host.host
    for handler in (sqlite_env.partitions.find_uses, sqlite_env.partitions.deactivate):
        with pytest.raises(Invalid, match="partitions"):
            handler(sqlite_env.host.node.name, agent.epoch, partitions)

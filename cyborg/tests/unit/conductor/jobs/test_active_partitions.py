# SPDX-License-Identifier: Apache-2.0
"""Active partitions that an agent reports, and those that nothing uses."""

from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.jobs.active_partitions import MAX_PARTITIONS, ActivePartitions
from cyborg.core.errors import Invalid, Stale
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

    def __init__(self, engine: sa.Engine, node: Node) -> None:
        self.engine = engine
        self.host = make_set_host(engine, node, wanted={"2": 4})
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
        answer = self.partitions.check(self.host.node.name, epoch or agent.epoch, addresses)
        return list(answer["uses"])


@pytest.fixture
def env(engine: sa.Engine, node: Node) -> Env:
    return Env(engine, node)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine, node: Node) -> Env:
    return Env(sqlite_engine, node)


def test_unused_partition_is_deactivated_and_its_sets_are_reserved(env: Env) -> None:
    env.host.bind(FAR)
    assert env.check(PAIR, FAR) == ["unused", "used"]
    assert env.woken == ["publisher", "jobs"]
    (job,) = env.host.jobs("release")
    partition, *devices = job["arguments"]["items"]
    assert (partition["deployable"], partition["handle"]) == (f"{SOURCE}:{PAIR}", "")
    assert {item["handle"] for item in devices} == {gpu_address("01"), gpu_address("03")}
    env.host.publish()
    assert {name for name in env.host.offered() if env.host.family[name] & {"01", "03"}} == set()
    # The next report finds that it is being cleaned.
    assert env.check(PAIR) == ["used"]
    assert len(env.host.jobs("release")) == 1


def test_partition_with_a_device_of_another_set_is_not_deactivated(sqlite_env: Env) -> None:
    sqlite_env.host.bind(FOUR)
    assert sqlite_env.check(PAIR, FOUR) == ["overlapped", "used"]
    assert sqlite_env.host.jobs("release") == []
    assert sqlite_env.woken == []


def test_partition_with_a_missing_device_is_not_deactivated(sqlite_env: Env) -> None:
    sqlite_env.host.report(without=["01"])
    assert sqlite_env.check(PAIR) == ["overlapped"]
    dirty = [r for r in rows.read(sqlite_env.engine, schema.attach_handles) if r["needs_cleaning"]]
    assert dirty == [], "the transaction was undone"


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
    assert sqlite_env.host.jobs("release") == []


@pytest.mark.parametrize("partitions", [None, "hgx:3", {}, [1], [""], ["a"] * (MAX_PARTITIONS + 1)])
def test_malformed_report_is_refused(sqlite_env: Env, partitions: Any) -> None:
    agent = sqlite_env.host.host
    with pytest.raises(Invalid, match="partitions"):
        sqlite_env.partitions.check(sqlite_env.host.node.name, agent.epoch, partitions)

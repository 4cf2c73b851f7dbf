# SPDX-License-Identifier: Apache-2.0
import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.hosts.heartbeats import Hosts
from cyborg.conductor.jobs.programming import Partitions
from cyborg.core.errors import CyborgError, InUse, Invalid, NoHandle, NotFound, WrongState
from cyborg.core.inventory.device import Ability, Layout
from cyborg.core.jobs.job import JobState
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.host_work import UNREACHABLE, JobsEnv
from cyborg.tests.fixtures.hosts.hosts import Host, card

ZERO: dict[str, Any] = {"name": "0", "offers": {}, "traits": []}
ONE, TWO = ({"name": str(n), "offers": {"FPGA": n}, "traits": []} for n in (1, 2))


class PartitionEnv(JobsEnv):
    """Jobs of a card with two layouts."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine)
        self.hosts = build(Hosts, self.conf, self.uow, now=self.now)
        self.card = self.add_card(abilities=["partitions", "sanitises"])
        self.wakes: list[str] = []
        self.partitions = build(
            Partitions,
            self.conf,
            self.uow,
            lambda: self.wakes.append("jobs"),
            lambda: self.wakes.append("publisher"),
            now=self.now,
        )
        id_ = int(self.device()["id"])
        rows.update(engine, schema.devices, id_, layout="1", layouts=[ONE, TWO])

    def device(self) -> dict[str, Any]:
        """Return the row of the card."""
        return dict(rows.read(self.engine, schema.devices)[0])

    def deployable(self) -> dict[str, Any]:
        """Return the row of the deployable of the card."""
        return dict(rows.read(self.engine, schema.deployables)[0])

    def report(self, handles: int) -> None:
        """Let the agent send a report of the card with this number of handles."""
        agent = Host(self.card.host)
        layouts = (ZERO, ONE, TWO)
        facts = {"layout": str(handles), "layouts": tuple(map(Layout.from_dict, layouts))}
        abilities = frozenset({Ability.PARTITIONS, Ability.SANITISES})
        device = card(1, handles, abilities=abilities, **facts)
        parts = tuple(replace(part, resource_class="FPGA") for part in device.deployables)
        agent.send(self.hosts, replace(device, deployables=parts if handles else ()))

    def start(self, layout: str = "2") -> str:
        """Start to apply a layout to the card; return the uuid of the job."""
        return self.partitions.start(self.device()["uuid"], layout)["uuid"]


@pytest.fixture
def env(engine: sa.Engine) -> PartitionEnv:
    return PartitionEnv(engine)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> PartitionEnv:
    return PartitionEnv(sqlite_engine)


def test_start_applies_a_layout_and_blocks_claims(env: PartitionEnv) -> None:
    job = env.start()
    assert env.wakes == ["jobs", "publisher"]
    assert env.start() == job, "a repeated request returns the same job"
    assert env.open_jobs() == ["partition"]
    with pytest.raises(WrongState, match="is being partitioned with layout 2"):
        env.start("1")
    with pytest.raises(NoHandle, match="being programmed"):
        env.bind(env.card)
    assert rows.read(env.engine, schema.providers)[0]["stale_since"] is not None
    env.jobs.run_once()
    (call,) = env.agents.calls
    assert (call["kind"], call["layout"], call["previous_layout"]) == ("partition", "2", "1")
    assert call["items"] == [
        {
            "backend": "fake",
            "device": env.device()["address"],
            "deployable": "",
            "handle": "",
            "accel": {},
        }
    ]
    assert rows.read(env.engine, schema.services)[0]["digest"] is None, "a report is requested"
    with pytest.raises(NoHandle, match="being programmed"):
        env.bind(env.card)  # the handles of the old layout may no longer exist
    env.report(2)
    assert (env.deployable()["job_id"], env.device()["layout"]) == (None, "2")
    assert env.handles() == {"free": 2}
    assert rows.read(env.engine, schema.providers)[0]["stale_since"] is not None
    env.bind(env.card)


def test_report_during_partitioning_changes_nothing(env: PartitionEnv) -> None:
    env.start()
    env.report(2)
    assert env.handles() == {"free": 16}
    assert env.deployable()["job_id"] is not None
    env.jobs.run_once()
    env.report(2)
    assert env.handles() == {"free": 2}


def test_partitioning_is_awaited_after_any_time(env: PartitionEnv) -> None:
    """The device must stay closed while its driver changes it."""
    env.start()
    for answer in ("running", UNREACHABLE):
        env.agents.answers["partition"] = answer
        env.jobs.run_once()
        env.advance(86400)
        env.jobs.run_once()
        env.jobs.sweep()
        assert env.open_jobs() == ["partition"]
    env.agents.answers = {}
    env.advance(86400)
    env.jobs.run_once()
    assert env.open_jobs() == []


def test_start_on_a_host_that_is_down_is_refused(sqlite_env: PartitionEnv) -> None:
    sqlite_env.mark_agents_down()
    with pytest.raises(WrongState, match="the agent of host compute-1 is down"):
        sqlite_env.start()


def test_failed_partitioning_opens_the_device_again(env: PartitionEnv) -> None:
    bitstream = str(uuid4())
    rows.update(env.engine, schema.deployables, env.deployable()["id"], bitstream_id=bitstream)
    job = env.start()
    env.agents.answers["partition"] = "failed"
    env.jobs.run_once()
    (row,) = rows.read(env.engine, schema.jobs, uuid=job)
    assert (row["state"], row["error"]) == (JobState.FAILED, "it broke")
    assert env.deployable()["bitstream_id"] == bitstream
    env.report(1)
    assert env.deployable()["job_id"] is None
    env.bind(env.card)


@pytest.mark.parametrize("reported", [True, False])
def test_failed_partitioning_can_be_repeated(env: PartitionEnv, reported: bool) -> None:
    """Also before the report that opens the device again."""
    failed = env.start()
    env.agents.answers["partition"] = "failed"
    env.jobs.run_once()
    if reported:
        env.report(1)
    env.agents.answers["partition"] = "done"
    job = env.start()
    assert job != failed
    env.jobs.run_once()
    (row,) = rows.read(env.engine, schema.jobs, uuid=job)
    assert (row["state"], row["error"]) == (JobState.DONE, None)


def test_start_on_a_device_in_use_is_refused(env: PartitionEnv) -> None:
    arq = env.add_arq()
    env.bind(env.card, arq)
    with pytest.raises(InUse, match=arq):
        env.start()
    env.arqs.delete([arq], None, None, allow_bound=True)
    with pytest.raises(WrongState, match=r"1 handle.* being cleaned"):
        env.start()
    env.jobs.run_once()
    env.start()


@pytest.mark.parametrize(
    ("layout", "values", "error"),
    [
        ("3", {}, Invalid("device .* has no layout '3': expected one of 1, 2")),
        ("", {}, Invalid("layout")),
        ("2", {"abilities": []}, WrongState("cannot be partitioned: its driver does not")),
    ],
)
def test_start_with_a_wrong_layout_is_refused(
    sqlite_env: PartitionEnv, layout: str, values: dict[str, Any], error: CyborgError
) -> None:
    if values:
        rows.update(sqlite_env.engine, schema.devices, sqlite_env.device()["id"], **values)
    with pytest.raises(type(error), match=error.message):
        sqlite_env.start(layout)
    assert sqlite_env.open_jobs() == []


def test_start_on_an_unknown_device_is_not_found(sqlite_env: PartitionEnv) -> None:
    uuid = str(uuid4())
    with pytest.raises(NotFound, match=uuid):
        sqlite_env.partitions.start(uuid, "2")


def empty(env: PartitionEnv) -> None:
    """Let the agent report the card without deployables: it offers nothing in this layout."""
    env.report(0)
    assert rows.read(env.engine, schema.deployables) == []
    assert env.device()["layout"] == "0"


def test_start_on_a_device_without_deployables_applies_the_layout(env: PartitionEnv) -> None:
    empty(env)
    job = env.start()
    assert env.start() == job, "a repeated request returns the same job"
    with pytest.raises(WrongState, match="is being partitioned with layout 2"):
        env.start("1")
    env.report(2)
    assert rows.read(env.engine, schema.deployables) == [], "a report changes nothing meanwhile"
    env.jobs.run_once()
    assert [(c["layout"], c["previous_layout"]) for c in env.agents.calls] == [("2", "0")]
    assert rows.read(env.engine, schema.services)[0]["digest"] is None, "a report is requested"
    env.report(2)
    assert (env.handles(), env.device()["layout"]) == ({"free": 2}, "2")
    assert rows.read(env.engine, schema.providers)[0]["stale_since"] is not None
    env.start("0")
    env.jobs.run_once()
    env.report(0)
    assert rows.read(env.engine, schema.deployables) == []
    assert env.open_jobs() == []
    env.start("1")


def test_failed_partitioning_of_a_device_without_deployables_can_be_repeated(
    env: PartitionEnv,
) -> None:
    empty(env)
    env.agents.answers["partition"] = "failed"
    first = env.start()
    env.jobs.run_once()
    (row,) = rows.read(env.engine, schema.jobs, uuid=first)
    assert row["state"] == JobState.FAILED
    env.report(0)
    env.agents.answers = {}
    assert env.start() != first
    env.jobs.run_once()
    env.report(2)
    assert env.handles() == {"free": 2}


def test_start_on_another_device_is_not_blocked_by_an_empty_one(sqlite_env: PartitionEnv) -> None:
    empty(sqlite_env)
    sqlite_env.start()
    other = sqlite_env.add_card(address="0000:02:00.0", abilities=["partitions"])
    (id_,) = (r["id"] for r in rows.read(sqlite_env.engine, schema.devices) if not r["layouts"])
    rows.update(sqlite_env.engine, schema.devices, id_, layout="1", layouts=[ONE, TWO])
    (uuid,) = (r["uuid"] for r in rows.read(sqlite_env.engine, schema.devices) if r["id"] == id_)
    assert other.host == sqlite_env.card.host
    sqlite_env.partitions.start(uuid, "2")
    assert sqlite_env.open_jobs() == ["partition", "partition"]


@pytest.mark.slow
def test_concurrent_changes_of_an_empty_device_exclude_each_other(env: PartitionEnv) -> None:
    for _ in range(3):
        empty(env)

        def one() -> None:
            env.start("1")

        assert len(race(env.start, one)) == 1
        env.jobs.run_once()
        env.report(0)


def race(*changes: Callable[[], Any]) -> list[str]:
    """Run changes at the same time; return the names of those that succeed."""
    succeeded = []

    def run(change: Callable[[], Any]) -> None:
        with contextlib.suppress(CyborgError):
            change()
            succeeded.append(change.__name__)

    threads = [threading.Thread(target=run, args=(change,)) for change in changes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return succeeded


@pytest.mark.slow
def test_concurrent_binds_and_layout_changes_exclude_each_other(env: PartitionEnv) -> None:
    for _ in range(5):
        arq = env.add_arq()

        def bind(arq: str = arq) -> None:
            env.bind(env.card, arq)

        assert len(race(bind, env.start)) == 1
        env.jobs.run_once()
        env.report(2)
        env.arqs.delete([arq], None, None, allow_bound=True)
        env.jobs.run_once()

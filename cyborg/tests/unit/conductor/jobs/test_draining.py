# SPDX-License-Identifier: Apache-2.0
"""Devices that are closed until nothing uses them, and then get another layout."""

import threading
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.conductor.drivers.rollout_controller import RolloutController
from cyborg.conductor.notifications.notifications import NOTIFICATION
from cyborg.core.errors import InUse, NoHandle, WrongState
from cyborg.core.jobs.job import JobState
from cyborg.db import schema
from cyborg.db.backends import desired as desired_backends
from cyborg.rpc.notifications import GROUP, is_enabled
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.unit.conductor.jobs.test_partitioning import ONE, PartitionEnv


class DrainEnv(PartitionEnv):
    """A card with two layouts that an ARQ uses."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine)
        is_enabled(self.conf)  # registers the options of notifications
        self.conf.set_override("driver", ["log"], group=GROUP)
        self.jobs = self.new_dispatcher()
        self.arq = self.add_arq()
        self.bind(self.card, self.arq)
        self.rollouts = build(RolloutController, self.conf, self.uow, self.agents, now=self.now)

    def drain(self) -> str:
        """Start to drain the card for its other layout; return the uuid of the job."""
        return self.partitions.start(self.device()["uuid"], "2", True)["uuid"]

    def job(self, uuid: str) -> dict[str, Any]:
        """Return the row of a job."""
        (row,) = rows.read(self.engine, schema.jobs, uuid=uuid)
        return dict(row)

    def release(self) -> None:
        """Delete the ARQ, and let the agent clean its handle."""
        self.arqs.delete([self.arq], None, None, allow_bound=True)
        self.run()

    def run(self) -> None:
        """Process the jobs that are due in a minute."""
        self.advance(30)
        times = {**rows.heartbeat(self.now()), "down_since": None}
        rows.update(self.engine, schema.services, 1, **times)
        self.jobs.run_once()

    def kinds(self) -> list[str]:
        """Return the kinds of the jobs that the agent got."""
        return self.agents.kinds()

    def stale(self) -> bool:
        """Return whether the provider of the card is to be published, and forget it."""
        (row,) = rows.read(self.engine, schema.providers)
        rows.update(self.engine, schema.providers, row["id"], stale_since=None)
        return row["stale_since"] is not None


@pytest.fixture
def env(engine: sa.Engine) -> DrainEnv:
    return DrainEnv(engine)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> DrainEnv:
    return DrainEnv(sqlite_engine)


def test_drain_waits_for_the_release_and_the_cleaning(env: DrainEnv) -> None:
    job = env.drain()
    assert env.stale()
    assert env.device()["cordoned"]
    assert env.drain() == env.start() == job, "a repeated request returns the same job"
    with pytest.raises(WrongState, match="is being partitioned with layout 2"):
        env.start("1")
    with pytest.raises(NoHandle, match="waits for another layout"):
        env.bind(env.card)
    env.run()
    assert env.kinds() == [], "the agent does nothing while the card is in use"
    assert env.arq in env.job(job)["error"]
    assert env.states()["Bound"] == 1
    env.agents.answers["release"] = "running"
    env.release()
    assert env.kinds() == ["release"]
    assert "being cleaned" in env.job(job)["error"]
    env.agents.answers = {}
    env.run()
    env.run()
    assert env.kinds()[-1] == "partition"
    assert env.agents.calls[-1]["layout"] == "2"
    assert "drains" not in env.agents.calls[-1]
    row = env.job(job)
    assert (row["state"], row["error"], row["attempts"]) == (JobState.DONE, None, 1)
    assert not env.device()["cordoned"]
    with pytest.raises(NoHandle, match="being programmed"):
        env.bind(env.card)  # closed without a gap until the agent has reported
    env.report(2)
    assert env.handles() == {"free": 2}
    env.bind(env.card)


def test_drain_of_an_unused_device_applies_the_layout_at_once(sqlite_env: DrainEnv) -> None:
    sqlite_env.release()
    job = sqlite_env.drain()
    assert sqlite_env.job(job)["deadline"] is None
    assert not sqlite_env.device()["cordoned"]
    sqlite_env.jobs.run_once()
    assert sqlite_env.kinds() == ["release", "partition"]


def test_drain_that_is_not_done_in_time_opens_the_device(env: DrainEnv) -> None:
    job = env.drain()
    assert env.stale()
    env.advance(env.conf.conductor.drain_timeout)
    env.jobs.sweep()
    assert env.job(job)["state"] == JobState.OPEN, "the dispatcher ends it, and opens the device"
    env.run()
    row = env.job(job)
    assert row["state"] == JobState.FAILED
    assert row["error"].startswith("not drained in time: device")
    assert env.arq in row["error"]
    assert env.stale()
    assert env.kinds() == []
    (notification,) = rows.read(env.engine, schema.outbox, kind=NOTIFICATION)
    assert notification["payload"]["event_type"] == "device.layout.error"
    assert notification["payload"]["payload"]["data"]["error"] == row["error"]
    env.bind(env.card)


def test_cancelled_drain_opens_the_device(env: DrainEnv) -> None:
    job = env.drain()
    assert env.stale()
    env.rollouts.cancel(job)
    assert env.job(job)["state"] == JobState.CANCELLED
    assert env.stale()
    env.release()
    env.run()
    assert env.kinds() == ["release"]
    env.bind(env.card)
    with pytest.raises(WrongState, match="cannot be cancelled"):
        env.rollouts.cancel(job)


def test_partitioning_that_has_begun_cannot_be_cancelled(sqlite_env: DrainEnv) -> None:
    sqlite_env.agents.answers["partition"] = "running"
    job = sqlite_env.drain()
    sqlite_env.release()
    sqlite_env.run()
    sqlite_env.run()
    assert sqlite_env.kinds()[-1] == "partition"
    with pytest.raises(WrongState, match="cannot be cancelled"):
        sqlite_env.rollouts.cancel(job)
    assert sqlite_env.open_jobs() == ["partition"]


def test_drain_is_continued_by_another_conductor(env: DrainEnv) -> None:
    job = env.drain()
    killed = env.new_dispatcher()
    assert len(killed._lease(5)) == 1, "killed while it has the job"
    env.arqs.delete([env.arq], None, None, allow_bound=True)
    env.jobs.run_once()
    assert env.kinds() == ["release"]
    env.advance(env.conf.conductor.lease_timeout)
    env.run()
    assert env.kinds() == ["release", "partition"]
    assert env.job(job)["state"] == JobState.DONE


def test_report_changes_a_device_that_drains(env: DrainEnv) -> None:
    """The job may wait for days: its health and its handles must be known."""
    job = env.drain()
    env.report(2)
    assert len(rows.read(env.engine, schema.attach_handles, draining=False)) == 2
    assert env.device()["cordoned"]
    env.uow.run(lambda tx: desired_backends.sync_cordon(tx, [env.card.host], env.now()))
    assert env.device()["cordoned"], "a change of a backend of the host does not open it"
    assert env.job(job)["state"] == JobState.OPEN


@pytest.mark.parametrize("values", [{"abilities": []}, {"layouts": [ONE]}])
def test_drain_for_a_layout_that_disappears_fails(
    sqlite_env: DrainEnv, values: dict[str, Any]
) -> None:
    env = sqlite_env
    job = env.drain()
    rows.update(env.engine, schema.devices, env.device()["id"], **values)
    env.run()
    assert env.job(job)["state"] == JobState.FAILED
    assert not env.device()["cordoned"]


def test_drain_waits_for_an_agent_that_is_down(sqlite_env: DrainEnv) -> None:
    env = sqlite_env
    env.release()
    env.mark_agents_down()
    job = env.drain()
    assert env.device()["cordoned"]
    env.jobs.run_once()
    assert "agent of host compute-1 is down" in env.job(job)["error"]
    env.run()
    env.run()
    assert env.kinds()[-1] == "partition"


def test_start_without_drain_names_the_way_out(sqlite_env: DrainEnv) -> None:
    with pytest.raises(InUse, match="or drain the device"):
        sqlite_env.start()


@pytest.mark.slow
def test_concurrent_cancel_and_begin_exclude_each_other(env: DrainEnv) -> None:
    for _ in range(3):
        job = env.drain()
        env.release()
        env.advance(30)
        errors: list[WrongState] = []

        def cancel(job: str = job, errors: list[WrongState] = errors) -> None:
            try:
                env.rollouts.cancel(job)
            except WrongState as exc:
                errors.append(exc)

        env.agents.calls.clear()
        threads = [threading.Thread(target=work) for work in (cancel, env.jobs.run_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        env.jobs.run_once()
        began = "partition" in env.kinds()
        assert began == bool(errors)
        assert env.job(job)["state"] == (JobState.DONE if began else JobState.CANCELLED)
        assert not env.device()["cordoned"]
        env.report(1)
        env.arq = env.add_arq()
        env.bind(env.card, env.arq)

# SPDX-License-Identifier: Apache-2.0
"""Driver jobs concurrent with each other, with reports, late outcomes and killed conductors."""

import threading
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Conflict
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.interleave import Race
from cyborg.tests.fixtures.hosts.hosts import card
from cyborg.tests.fixtures.hosts.rollouts import HOSTS, Cloud
from cyborg.tests.fixtures.machine.tiers import scale
from cyborg.tests.unit.conductor.drivers.test_rollout_controller import (
    bind,
    devices,
    install,
    uninstall,
    update,
)

pytestmark = pytest.mark.slow


def desired_statuses(cloud: Cloud, backend: str = "fake") -> list[tuple[str, str]]:
    backend_rows = rows.read(cloud.engine, schema.desired_backends, backend=backend)
    return [(row["driver"], row["status"]) for row in backend_rows]


def test_concurrent_installs_with_one_backend_name_fail_once(sqlite_env: Cloud) -> None:
    first = install(sqlite_env, backend="x", hosts=["c1"])
    second = install(sqlite_env, "other", backend="x", hosts=["c1"])
    sqlite_env.run()
    assert sqlite_env.job(first)[0] == "done"
    state, error, _ = sqlite_env.job(second)
    assert (state, "backend x now has another driver" in (error or "")) == ("failed", True)
    assert desired_statuses(sqlite_env, "x") == [("fake", "enabled")]
    assert sqlite_env.agents["c1"].running == {"x": ("fake", {})}


def test_install_during_the_uninstall_of_its_name_succeeds(sqlite_env: Cloud) -> None:
    sqlite_env.enable("c1", "x")
    uninstall_job = uninstall(sqlite_env)
    sqlite_env.rollouts().run_once()
    install_job = install(sqlite_env, "other", backend="x", hosts=["c1"])
    sqlite_env.run()
    assert (sqlite_env.job(uninstall_job)[0], sqlite_env.job(install_job)[0]) == ("done", "done")
    assert sqlite_env.agents["c1"].running == {"x": ("other", {})}


def test_force_concurrent_with_the_end_of_the_job(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    bind(cloud, "c1")
    job = uninstall(cloud, drain=True)
    cloud.run(rounds=2)
    race = Race(
        cloud.engine,
        lambda: uninstall(cloud, force=True),
        "FROM jobs WHERE jobs.",
        lambda: cloud.rollouts().cancel(job),
    )
    assert race.second is None
    cloud.run()
    job_arguments = [row["arguments"] for row in rows.read(cloud.engine, schema.jobs)]
    force_recorded = any(arguments["force"] or "forced" in arguments for arguments in job_arguments)
    # A caller without an error was recorded before the end of the job, or has a new job.
    assert isinstance(race.first, Conflict) != force_recorded


def test_unreadable_job_does_not_block_others(sqlite_env: Cloud) -> None:
    install(sqlite_env, hosts=["c1"])
    with sqlite_env.engine.begin() as tx:
        tx.execute(sa.update(schema.job_steps).values(previous={"status": 7}))
    readable_job = install(sqlite_env, "other", hosts=["c1"])
    sqlite_env.rollouts().run_once()
    sqlite_env.sync_agent("c1")
    sqlite_env.rollouts().run_once()
    assert sqlite_env.job(readable_job)[0] == "done"


def test_report_concurrent_with_uninstall_cordons_new_devices(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    host = cloud.agents["c1"].host
    host.devices = [card(0, backend="fake"), card(1, backend="fake")]
    host.hello(cloud.hosts)
    race = Race(cloud.engine, lambda: host.report(cloud.hosts), "COMMIT", lambda: uninstall(cloud))
    assert (race.reached, race.first, race.second) == (True, None, None)
    assert devices(cloud, "c1") == [("fake", True, False)] * 2


def test_report_concurrent_with_cancel_uncordons_new_devices(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    bind(cloud, "c1")
    job = uninstall(cloud, drain=True)
    cloud.run(rounds=2)
    host = cloud.agents["c1"].host
    host.devices = [card(0, backend="fake"), card(1, backend="fake")]
    host.hello(cloud.hosts)
    race = Race(
        cloud.engine,
        lambda: host.report(cloud.hosts),
        "COMMIT",
        lambda: cloud.rollouts().cancel(job),
    )
    assert (race.reached, race.first, race.second) == (True, None, None)
    assert devices(cloud, "c1") == [("fake", False, False)] * 2


def test_outcome_concurrent_with_the_deadline_is_rolled_back(cloud: Cloud) -> None:
    install(cloud, hosts=["c1"])
    cloud.rollouts().run_once()
    job = rows.read(cloud.engine, schema.jobs)[0]["uuid"]
    cloud.advance(200)
    race = Race(
        cloud.engine,
        lambda: cloud.rollouts().run_once(),
        "UPDATE job_steps",
        lambda: cloud.sync_agent("c1"),
    )
    assert (race.reached, race.first, race.second) == (True, None, None)
    cloud.run()
    assert cloud.job(job)[2] == {"c1": "failed"}
    cloud.sync_agent("c1")
    assert cloud.agents["c1"].running == {}, "the host has applied the rollback"


def test_concurrent_equal_installs_create_one_job(cloud: Cloud) -> None:
    uuids: list[str] = []
    race = Race(
        cloud.engine,
        lambda: uuids.append(install(cloud)),
        "INSERT INTO jobs",
        lambda: uuids.append(install(cloud)),
    )
    assert (race.reached, race.first, race.second) == (True, None, None)
    assert uuids[0] == uuids[1]


def test_update_concurrent_with_cancel_keeps_the_backend_enabled(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    bind(cloud, "c1")
    job = uninstall(cloud, drain=True)
    race = Race(
        cloud.engine,
        lambda: update(cloud, reload=True),
        "FROM jobs WHERE jobs.",
        lambda: cloud.rollouts().cancel(job),
    )
    assert (race.reached, race.second) == (True, None)
    assert race.first is None or isinstance(race.first, Conflict)
    cloud.run()
    assert devices(cloud, "c1") == [("fake", False, False)]


def test_concurrent_operators_agents_and_conductors_reach_the_desired_state(cloud: Cloud) -> None:
    for name in HOSTS:
        cloud.enable(name, "fake")
        cloud.enable(name, "two", "other")
    bind(cloud, "c2")
    stop, errors = threading.Event(), list[BaseException]()

    def loop(work: Any) -> None:
        while not stop.is_set():
            try:
                work()
            except Conflict:
                pass
            except BaseException as bad:  # noqa: BLE001  shown below
                errors.append(bad)
                return

    def agent(name: str) -> Any:
        return lambda: cloud.sync_agent(name)

    def operate() -> None:
        update(cloud, reload=True)

    def operate_other() -> None:
        cloud.drivers.update("other", None, None, {"level": "x"}, None, False)

    def withdraw() -> None:
        job = uninstall(cloud, drain=True, hosts=["c2"])
        cloud.rollouts().cancel(job)

    tasks = [agent(name) for name in HOSTS] + [
        lambda: cloud.rollouts().run_once(),
        lambda: cloud.rollouts().run_once(),
        operate,
        operate_other,
        withdraw,
    ]
    threads = [threading.Thread(target=loop, args=(work,)) for work in tasks]
    for thread in threads:
        thread.start()
    stop.wait(max(1, scale(4)))
    stop.set()
    for thread in threads:
        thread.join(60)
    assert errors == []
    cloud.advance(10)
    cloud.run(seconds=10)
    assert {row["state"] for row in rows.read(cloud.engine, schema.jobs)} <= {
        "done",
        "failed",
        "cancelled",
    }
    remaining = [
        (row["backend"], row["status"]) for row in rows.read(cloud.engine, schema.desired_backends)
    ]
    cordoned = [name for name in HOSTS for _, cordoned, _ in devices(cloud, name) if cordoned]
    assert (cordoned, {status for _, status in remaining}) == ([], {"enabled"}), remaining


class Cut(BaseException):
    """The conductor was killed here."""


def test_conductor_killed_between_any_statements_is_recovered(cloud: Cloud) -> None:
    remaining = [0]

    def kill_at(*event: Any) -> None:
        remaining[0] -= 1
        if remaining[0] == 0:
            raise Cut

    def run_once_killed(statements: int) -> bool:
        """Run a conductor and kill it before a statement; return whether it was killed."""
        remaining[0] = statements
        sa.event.listen(cloud.engine, "before_cursor_execute", kill_at)
        try:
            cloud.rollouts().run_once()
        except Cut:
            cloud.advance(60)  # the lease of the killed one
        finally:
            sa.event.remove(cloud.engine, "before_cursor_execute", kill_at)
        return remaining[0] <= 0

    cloud.conf.set_override("driver_timeout", 100000.0, "conductor")
    kill_count = 0
    for start in (install, lambda drivers: update(drivers, config={"count": 2}), uninstall):
        job = start(cloud)
        for statements in range(1, 200):
            kill_count += run_once_killed(statements)
            for name in HOSTS:
                cloud.sync_agent(name)
            cloud.advance(6)
            if cloud.job(job)[0] != "pending":
                break
        assert set(cloud.job(job)[2].values()) == {"done"}
    assert kill_count > 40
    assert [devices(cloud, name) for name in HOSTS] == [[]] * 4

# SPDX-License-Identifier: Apache-2.0
"""Driver jobs with hosts that are down: their rollback, and the outcome at their return."""

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import NotFound
from cyborg.db import old_rows, schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.interleave import Race
from cyborg.tests.fixtures.hosts.rollouts import HOSTS, Cloud
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.unit.conductor.drivers.test_rollout_controller import (
    devices,
    install,
    uninstall,
    update,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def down(cloud: Cloud) -> Cloud:
    """A cloud with the driver on all hosts, of which the first is down."""
    install(cloud)
    cloud.run()
    cloud.mark_down("c1")
    return cloud


def desired(cloud: Cloud, host: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the status and the options of the desired backends of a host."""
    (agent,) = rows.read(cloud.engine, schema.services, host=host)
    found = rows.read(cloud.engine, schema.desired_backends, service_id=agent["id"])
    return [(row["status"], row["config"]) for row in found]


def return_host(cloud: Cloud, failing: str = "") -> None:
    """Let the first host return, and apply the desired state until it does not change."""
    cloud.agents["c1"].failing = failing
    cloud.bring_back("c1")
    while cloud.sync_agent("c1"):
        pass


def test_failed_update_reverts_a_host_that_is_down(down: Cloud) -> None:
    down.agents["c2"].failing = "no such card"
    job = update(down, config={"count": 3}, status="disabled")
    down.run()
    assert down.job(job) == (
        "failed",
        "1 rolled_back, 3 skipped; c2 (fake): no such card",
        {"c1": "skipped", "c2": "rolled_back", "c3": "skipped", "c4": "skipped"},
    )
    assert desired(down, "c1") == [("enabled", {})]
    assert devices(down, "c1") == [("fake", False, False)]
    return_host(down)
    assert down.agents["c1"].running == {"fake": ("fake", {})}
    assert down.job(job)[2]["c1"] == "skipped"


def test_failure_at_the_return_rolls_back_and_fails_the_ended_job(down: Cloud) -> None:
    job = update(down, config={"count": 3}, status="disabled")
    down.run()
    assert down.job(job)[:2] == ("done", None)
    assert devices(down, "c1") == [("fake", True, False)]
    return_host(down, "no such card")
    steps = {"c1": "rolled_back", **dict.fromkeys(HOSTS[1:], "done")}
    assert down.job(job) == ("failed", "3 done, 1 rolled_back; c1 (fake): no such card", steps)
    (step,) = rows.read(down.engine, schema.job_steps, host="c1", state="rolled_back")
    assert step["error"] == "no such card"
    assert desired(down, "c1") == [("enabled", {})]
    assert down.agents["c1"].running == {"fake": ("fake", {})}
    assert devices(down, "c1") == [("fake", False, False)]
    assert update(down, reload=True) != job, "the next job can be created"


@pytest.mark.matrix
def test_failure_days_after_the_end_of_the_job_can_be_read(down: Cloud) -> None:
    job = update(down, config={"count": 3})
    down.run()
    down.advance(3 * 86400)
    return_host(down, "no such card")
    with down.engine.begin() as tx:
        assert old_rows.JOBS.purge(tx, down.now() - timedelta(days=1), 9) == 1
    assert down.job(job)[0] == "failed"


def test_success_at_the_return_completes_the_step(down: Cloud) -> None:
    job = update(down, config={"count": 3})
    down.run()
    return_host(down)
    assert down.job(job) == ("done", None, dict.fromkeys(HOSTS, "done"))
    assert down.agents["c1"].running == {"fake": ("fake", {"count": 3})}


def test_failure_at_the_return_stops_an_open_update(down: Cloud) -> None:
    job = update(down, config={"count": 3})
    down.rollouts().run_once()
    assert down.job(job)[2] == dict(
        zip(HOSTS, ["pending_agent", "in_progress", "waiting", "waiting"], strict=True)
    )
    return_host(down, "no such card")
    down.run()
    state, error, steps = down.job(job)
    assert (state, error) == (
        "failed",
        "1 done, 1 rolled_back, 2 skipped; c1 (fake): no such card",
    )
    assert steps == dict(zip(HOSTS, ["rolled_back", "done", "skipped", "skipped"], strict=True))


@pytest.mark.matrix
def test_failure_at_the_return_keeps_a_cancelled_job_cancelled(down: Cloud) -> None:
    job = update(down, config={"count": 3})
    down.rollouts().run_once()
    down.rollouts().cancel(job)
    down.run()
    assert down.job(job)[0] == "cancelled"
    return_host(down, "no such card")
    state, error, steps = down.job(job)
    assert (state, steps["c1"]) == ("cancelled", "rolled_back")
    assert "c1 (fake): no such card" in (error or "")
    assert desired(down, "c1") == [("enabled", {})]


def test_failed_install_at_the_return_leaves_the_configuration_file(cloud: Cloud) -> None:
    cloud.mark_down("c1")
    job = install(cloud)
    cloud.run()
    return_host(cloud, "no such card")
    state, error, steps = cloud.job(job)
    assert (state, steps["c1"]) == ("failed", "failed")
    assert error == "3 done, 1 failed; c1 (fake): no such card"
    assert (desired(cloud, "c1"), cloud.agents["c1"].running) == ([], {})


def test_later_job_replaces_the_change_of_a_host_that_is_down(down: Cloud) -> None:
    earlier = update(down, config={"count": 2})
    down.run()
    later = update(down, config={"count": 3})
    down.run()
    return_host(down)
    assert (down.job(earlier)[0], down.job(earlier)[2]["c1"]) == ("done", "skipped")
    assert (down.job(later)[0], down.job(later)[2]["c1"]) == ("done", "done")
    assert down.agents["c1"].running == {"fake": ("fake", {"count": 3})}


@pytest.mark.parametrize(
    ("failing", "result"),
    sample(
        [("", "done"), ("no such card", "rolled_back")],
        ("no such card", "rolled_back"),
        mark=pytest.mark.long,
    ),
)
def test_rollback_of_a_later_job_restores_the_earlier_change(
    down: Cloud, failing: str, result: str
) -> None:
    earlier = update(down, config={"count": 2})
    down.run()
    down.agents["c2"].failing = "no such card"
    later = update(down, config={"count": 3})
    down.run()
    assert down.job(later)[2]["c1"] == "skipped"
    assert desired(down, "c1") == [("enabled", {"count": 2})]
    assert down.job(earlier)[2]["c1"] == "pending_agent"
    return_host(down, failing)
    assert down.job(earlier)[2]["c1"] == result
    expected = {} if failing else {"count": 2}
    assert desired(down, "c1") == [("enabled", expected)]
    assert down.agents["c1"].running == {"fake": ("fake", expected)}


@pytest.mark.matrix
def test_failure_of_two_jobs_at_the_return_restores_the_state_before_both(down: Cloud) -> None:
    jobs = []
    for count in (2, 3):
        jobs.append(update(down, config={"count": count}))
        down.run()
    return_host(down, "no such card")
    assert [down.job(job)[2]["c1"] for job in jobs] == ["rolled_back"] * 2
    assert [down.job(job)[0] for job in jobs] == ["failed"] * 2
    assert desired(down, "c1") == [("enabled", {})]
    assert down.agents["c1"].running == {"fake": ("fake", {})}


@pytest.mark.parametrize("force", sample([True, False], True, mark=pytest.mark.long))
def test_uninstall_follows_a_host_that_is_marked_down_during_its_step(
    cloud: Cloud, force: bool
) -> None:
    install(cloud)
    cloud.run()
    cloud.agents["c1"].unreachable = True
    job = uninstall(cloud, force=force)
    cloud.run(rounds=3)
    assert cloud.job(job)[0] == "pending"
    assert cloud.job(job)[2]["c1"] == "in_progress"
    cloud.mark_down("c1")
    cloud.run(rounds=6)
    steps = {"c1": "pending_agent", **dict.fromkeys(HOSTS[1:], "done")}
    assert cloud.job(job) == ("done", None, steps), "it does not wait for its deadline"
    assert devices(cloud, "c1") == ([] if force else [("fake", True, False)])
    return_host(cloud)
    assert cloud.job(job) == ("done", None, dict.fromkeys(HOSTS, "done"))
    assert devices(cloud, "c1") == []


def test_update_of_a_host_that_stops_during_its_step_goes_no_further(sqlite_env: Cloud) -> None:
    install(sqlite_env)
    sqlite_env.run()
    sqlite_env.agents["c1"].unreachable = True
    job = update(sqlite_env, config={"count": 3})
    sqlite_env.run(rounds=3)
    sqlite_env.mark_down("c1")
    sqlite_env.run(seconds=10.0)
    steps = {"c1": "rolled_back", **dict.fromkeys(HOSTS[1:], "skipped")}
    assert sqlite_env.job(job)[::2] == ("failed", steps)


def test_failed_removal_at_the_return_restores_the_backend(down: Cloud) -> None:
    job = uninstall(down, force=True)
    down.run()
    assert (down.job(job)[0], devices(down, "c1")) == ("done", [])
    return_host(down, "busy")
    down.send_report("c1")
    assert (down.job(job)[0], down.job(job)[2]["c1"]) == ("failed", "rolled_back")
    assert desired(down, "c1") == [("enabled", {})]
    assert devices(down, "c1") == [("fake", False, False)]


def test_uninstall_omits_a_name_that_another_driver_has_on_a_down_host(down: Cloud) -> None:
    first = uninstall(down, force=True)
    down.run()
    install_job = install(down, "other", backend="fake", hosts=["c1"])
    down.run()
    assert (down.job(first)[0], down.job(install_job)[0]) == ("done", "done")
    with pytest.raises(NotFound, match="driver fake has no backend of c1"):
        uninstall(down, hosts=["c1"], force=True)
    return_host(down)
    assert down.agents["c1"].running == {"fake": ("other", {})}


def test_return_concurrent_with_the_failure_of_the_update(down: Cloud) -> None:
    down.agents["c2"].failing = "no such card"
    job = update(down, config={"count": 3})
    down.rollouts().run_once()
    down.sync_agent("c2")
    down.bring_back("c1")
    race = Race(
        down.engine,
        lambda: down.rollouts().run_once(),
        "UPDATE job_steps",
        lambda: down.sync_agent("c1"),
    )
    assert (race.reached, race.first, race.second) == (True, None, None)
    down.run()
    while down.sync_agent("c1"):
        pass
    state, _, steps = down.job(job)
    running = down.agents["c1"].running["fake"][1]
    assert state == "failed"
    # Either the outcome was recorded before the revert, or the host has applied the revert.
    assert (steps["c1"], running) in [("done", {"count": 3}), ("skipped", {})]
    assert desired(down, "c1") == [("enabled", running)]


@pytest.mark.matrix
def test_update_after_a_failed_return_changes_all_hosts(sqlite_engine: sa.Engine) -> None:
    cloud = Cloud(sqlite_engine, HOSTS)
    install(cloud)
    cloud.run()
    cloud.mark_down("c1")
    job = update(cloud, config={"count": 3})
    cloud.run()
    cloud.agents["c1"].failing = "no such card"
    cloud.bring_back("c1")
    cloud.sync_agent("c1")
    later = update(cloud, config={"count": 2})
    cloud.agents["c1"].failing = ""
    cloud.run()
    assert (cloud.job(job)[2]["c1"], cloud.job(later)[0]) == ("rolled_back", "done")
    assert cloud.agents["c1"].running == {"fake": ("fake", {"count": 2})}

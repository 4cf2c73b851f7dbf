# SPDX-License-Identifier: Apache-2.0
"""Number of statements of driver jobs on many hosts."""

from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.hosts.rollouts import Cloud
from cyborg.tests.unit.conductor.drivers.test_rollout_controller import install, uninstall, update

pytestmark = pytest.mark.slow


@pytest.fixture
def cloud(engine: sa.Engine) -> Cloud:
    return make_cloud(engine, 200)


def make_cloud(engine: sa.Engine, count: int) -> Cloud:
    names = [f"h{n:04}" for n in range(count)]
    cloud = Cloud(engine, names[:1])
    (pattern,) = rows.read(engine, schema.services, host=names[0])
    (drivers,) = [rows.read(engine, schema.drivers, service_id=pattern["id"])]
    base = {k: v for k, v in pattern.items() if k not in ("id", "uuid", "host")}
    with engine.begin() as tx:
        for name in names[1:]:
            new = {**base, "uuid": f"{name:0>36}", "host": name}
            key = tx.execute(sa.insert(schema.services).values(**new)).inserted_primary_key
            assert key is not None
            for driver in drivers:
                values = {k: v for k, v in driver.items() if k != "id"}
                tx.execute(sa.insert(schema.drivers).values(**{**values, "service_id": key[0]}))
    return cloud


def complete_steps(cloud: Cloud) -> None:
    """Set every step in progress to done."""
    with cloud.engine.begin() as tx:
        tx.execute(
            sa.update(schema.job_steps)
            .where(schema.job_steps.c.state == "in_progress")
            .values(state="done")
        )
        tx.execute(sa.update(schema.jobs).values(next_try_at=cloud.time))
        tx.execute(sa.update(schema.desired_backends).values(applied=True))


def test_rollout_on_many_hosts_runs_a_bounded_number_of_statements(cloud: Cloud) -> None:
    counts: dict[str, int] = {}

    def count(name: str, work: Any) -> Any:
        with count_statements(cloud.engine) as statements:
            result = work()
        counts[name] = len(statements)
        return result

    job = count("install", lambda: install(cloud))
    rounds = 0
    while cloud.job(job)[0] == "pending":
        count("round", lambda: cloud.rollouts().run_once())
        assert counts["round"] < 8 * 16, counts
        complete_steps(cloud)
        rounds += 1
    assert cloud.job(job)[0] == "done"
    assert rounds <= 200 // 16 + 2
    second = count("install again", lambda: install(cloud))
    cloud.rollouts().run_once()
    assert cloud.job(second)[0] == "done"
    job = count("update", lambda: update(cloud, reload=True))
    count("cancel update", lambda: cloud.rollouts().cancel(job))
    job = count("uninstall", lambda: uninstall(cloud))
    count("cancel uninstall", lambda: cloud.rollouts().cancel(job))
    assert max(counts[name] for name in counts if name != "round") <= 24, counts
    assert {row["status"] for row in rows.read(cloud.engine, schema.desired_backends)} == {
        "enabled"
    }


def test_install_on_many_down_hosts_ends_in_one_run(sqlite_engine: sa.Engine) -> None:
    cloud = make_cloud(sqlite_engine, 100)
    with cloud.engine.begin() as tx:
        tx.execute(sa.update(schema.services).values(down_since=cloud.time))
    job = install(cloud)
    max_statements = run_conductor(cloud)
    assert cloud.job(job)[0] == "done", "in one run, without waiting for the next round"
    assert max_statements < 8 * 16, "in several transactions"


def test_failed_update_reverts_many_down_hosts_in_one_run(sqlite_engine: sa.Engine) -> None:
    cloud = make_cloud(sqlite_engine, 100)
    install(cloud)
    while rows.read(cloud.engine, schema.jobs, state="pending"):
        cloud.rollouts().run_once()
        complete_steps(cloud)
    with cloud.engine.begin() as tx:
        up = schema.services.c.host == "h0099"
        tx.execute(sa.update(schema.services).where(~up).values(down_since=cloud.time))
    job = update(cloud, config={"count": 2})
    cloud.rollouts().run_once()
    cloud.advance(200)
    max_statements = run_conductor(cloud)
    state, _, steps = cloud.job(job)
    assert (state, set(list(steps.values())[:-1]), steps["h0099"]) == (
        "failed",
        {"skipped"},
        "rolled_back",
    )
    assert [row["config"] for row in rows.read(cloud.engine, schema.desired_backends)] == [{}] * 100
    assert max_statements < 10 * 16, "in several transactions"


def run_conductor(cloud: Cloud) -> int:
    """Run a conductor once; return the largest number of statements of a transaction."""
    max_statements = 0
    commits: list[int] = []

    def statement(*_: Any) -> None:
        nonlocal max_statements
        commits[-1:] = [commits[-1] + 1] if commits else [1]
        max_statements = max(max_statements, commits[-1])

    sa.event.listen(cloud.engine, "before_cursor_execute", statement)
    sa.event.listen(cloud.engine, "commit", lambda _: commits.append(0))
    cloud.rollouts().run_once()
    sa.event.remove(cloud.engine, "before_cursor_execute", statement)
    return max_statements

# SPDX-License-Identifier: Apache-2.0
"""What a change of a driver costs where there are many hosts."""

from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.fixtures import rows
from cyborg.fixtures.rollouts import Cloud
from cyborg.tests.unit.conductor.test_rollouts import (
    install,
    uninstall,
    update,
)


@pytest.fixture
def cloud(engine: sa.Engine) -> Cloud:
    return many(engine, 200)


def many(engine: sa.Engine, count: int) -> Cloud:
    names = [f"h{n:04}" for n in range(count)]
    cloud = Cloud(engine, names[:1])
    (pattern,) = rows.read(engine, schema.services, host=names[0])
    (drivers,) = [rows.read(engine, schema.drivers, service_id=pattern["id"])]
    base = {k: v for k, v in pattern.items() if k not in ("id", "uuid", "host")}
    with engine.begin() as tx:
        for name in names[1:]:
            new = {**base, "uuid": f"{name:0>36}", "host": name}
            id_ = tx.execute(sa.insert(schema.services).values(**new)).inserted_primary_key[0]
            for driver in drivers:
                its = {k: v for k, v in driver.items() if k != "id"}
                tx.execute(sa.insert(schema.drivers).values(**{**its, "service_id": id_}))
    return cloud


def ran(cloud: Cloud) -> None:
    """Have every step that was asked for be done."""
    with cloud.engine.begin() as tx:
        tx.execute(
            sa.update(schema.job_steps)
            .where(schema.job_steps.c.state == "rolling")
            .values(state="done")
        )
        tx.execute(sa.update(schema.jobs).values(next_try_at=cloud.time))
        tx.execute(sa.update(schema.wanted_backends).values(applied=True))


def test_what_many_hosts_cost(cloud: Cloud) -> None:
    told: dict[str, int] = {}

    def count(what: str, work: Any) -> Any:
        with counting(cloud.engine) as found:
            made = work()
        told[what] = len(found)
        return made

    job = count("install", lambda: install(cloud))
    looks = 0
    while cloud.job(job)[0] == "pending":
        count("look", lambda: cloud.rollouts().run_once())
        assert told["look"] < 8 * 16, told
        ran(cloud)
        looks += 1
    assert cloud.job(job)[0] == "done"
    assert looks <= 200 // 16 + 2
    again = count("install again", lambda: install(cloud))
    cloud.rollouts().run_once()
    assert cloud.job(again)[0] == "done"
    job = count("update", lambda: update(cloud, reload=True))
    count("cancel update", lambda: cloud.rollouts().cancel(job))
    job = count("uninstall", lambda: uninstall(cloud))
    count("cancel uninstall", lambda: cloud.rollouts().cancel(job))
    assert max(told[what] for what in told if what != "look") <= 24, told
    assert {row["wish"] for row in rows.read(cloud.engine, schema.wanted_backends)} == {"enabled"}


def test_many_dead_hosts(sqlite_engine: sa.Engine) -> None:
    cloud = many(sqlite_engine, 100)
    with cloud.engine.begin() as tx:
        tx.execute(sa.update(schema.services).values(down_since=cloud.time))
    job = install(cloud)
    longest = 0
    commits: list[int] = []

    def statement(*_: Any) -> None:
        nonlocal longest
        commits[-1:] = [commits[-1] + 1] if commits else [1]
        longest = max(longest, commits[-1])

    sa.event.listen(cloud.engine, "before_cursor_execute", statement)
    sa.event.listen(cloud.engine, "commit", lambda _: commits.append(0))
    cloud.rollouts().run_once()
    assert cloud.job(job)[0] == "done", "in one go, nobody waits for the next look"
    assert longest < 8 * 16, "and in several transactions"

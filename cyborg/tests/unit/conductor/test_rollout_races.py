# SPDX-License-Identifier: Apache-2.0
"""Changes of drivers that meet each other, reports, words that come late, and kill -9."""

import threading
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Conflict
from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.hosts import card
from cyborg.fixtures.interleave import Race
from cyborg.fixtures.rollouts import FAKE, OTHER, Cloud
from cyborg.tests.unit.conductor.test_rollouts import (
    bind,
    devices,
    install,
    uninstall,
    update,
)

HOSTS = ["c1", "c2", "c3", "c4"]


@pytest.fixture
def cloud(engine: sa.Engine) -> Cloud:
    return Cloud(engine, HOSTS)


@pytest.fixture
def light(sqlite_engine: sa.Engine) -> Cloud:
    """A cloud on one database, for what no database does its own way."""
    return Cloud(sqlite_engine, HOSTS, (FAKE, OTHER))


def wish(cloud: Cloud, backend: str = "fake") -> list[tuple[str, str]]:
    found = rows.read(cloud.engine, schema.wanted_backends, backend=backend)
    return [(row["driver"], row["wish"]) for row in found]


def test_one_name_for_two_drivers_at_once(light: Cloud) -> None:
    first = install(light, backend="x", hosts=["c1"])
    second = install(light, "other", backend="x", hosts=["c1"])
    light.run()
    assert light.job(first)[0] == "done"
    state, error, _ = light.job(second)
    assert (state, "backend x is another driver's by now" in (error or "")) == ("failed", True)
    assert wish(light, "x") == [("fake", "enabled")]
    assert light.agents["c1"].running == {"x": ("fake", {})}


def test_a_name_that_is_taken_while_its_last_driver_goes(light: Cloud) -> None:
    light.enable("c1", "x")
    going = uninstall(light)
    light.rollouts().run_once()
    coming = install(light, "other", backend="x", hosts=["c1"])
    light.run()
    assert (light.job(going)[0], light.job(coming)[0]) == ("done", "done")
    assert light.agents["c1"].running == {"x": ("other", {})}


def test_force_that_comes_as_the_job_ends(cloud: Cloud) -> None:
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
    asked = [row["arguments"] for row in rows.read(cloud.engine, schema.jobs)]
    heard = any(arguments["force"] or "forced" in arguments for arguments in asked)
    # Whoever is told that it is forced was heard before the end, or has a job of his own.
    assert isinstance(race.first, Conflict) != heard


def test_a_job_that_nobody_can_read_holds_up_no_other(light: Cloud) -> None:
    install(light, hosts=["c1"])
    with light.engine.begin() as tx:
        tx.execute(sa.update(schema.job_steps).values(before={"wish": 7}))
    good = install(light, "other", hosts=["c1"])
    light.rollouts().run_once()
    light.converge("c1")
    light.rollouts().run_once()
    assert light.job(good)[0] == "done"


def test_a_report_under_way_while_a_backend_is_closed(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    host = cloud.agents["c1"].host
    host.devices = [card(0, backend="fake"), card(1, backend="fake")]
    host.hello(cloud.hosts)
    race = Race(cloud.engine, lambda: host.report(cloud.hosts), "COMMIT", lambda: uninstall(cloud))
    assert (race.met, race.first, race.second) == (True, None, None)
    assert devices(cloud, "c1") == [("fake", True, False)] * 2


def test_a_report_under_way_while_a_backend_is_opened_again(cloud: Cloud) -> None:
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
    assert (race.met, race.first, race.second) == (True, None, None)
    assert devices(cloud, "c1") == [("fake", False, False)] * 2


def test_a_word_that_comes_with_the_deadline(cloud: Cloud) -> None:
    install(cloud, hosts=["c1"])
    cloud.rollouts().run_once()
    job = rows.read(cloud.engine, schema.jobs)[0]["uuid"]
    cloud.pass_(200)
    race = Race(
        cloud.engine,
        lambda: cloud.rollouts().run_once(),
        "UPDATE job_steps",
        lambda: cloud.converge("c1"),
    )
    assert (race.met, race.first, race.second) == (True, None, None)
    cloud.run()
    assert cloud.job(job)[2] == {"c1": "failed"}
    cloud.converge("c1")
    assert cloud.agents["c1"].running == {}, "and the host has come to the same"


def test_two_installations_at_the_same_moment_are_one(cloud: Cloud) -> None:
    made: list[str] = []
    race = Race(
        cloud.engine,
        lambda: made.append(install(cloud)),
        "INSERT INTO jobs",
        lambda: made.append(install(cloud)),
    )
    assert (race.met, race.first, race.second) == (True, None, None)
    assert made[0] == made[1]


def test_what_a_job_goes_back_to_is_of_no_moment_within_another(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    bind(cloud, "c1")
    job = uninstall(cloud, drain=True)
    race = Race(
        cloud.engine,
        lambda: update(cloud, reload=True),
        "FROM jobs WHERE jobs.",
        lambda: cloud.rollouts().cancel(job),
    )
    assert (race.met, race.second) == (True, None)
    assert race.first is None or isinstance(race.first, Conflict)
    cloud.run()
    assert devices(cloud, "c1") == [("fake", False, False)]


def test_operators_agents_and_conductors_at_once(cloud: Cloud) -> None:
    for name in HOSTS:
        cloud.enable(name, "fake")
        cloud.enable(name, "two", "other")
    bind(cloud, "c2")
    stop, wrong = threading.Event(), list[BaseException]()

    def loop(work: Any) -> None:
        while not stop.is_set():
            try:
                work()
            except Conflict:
                pass
            except BaseException as bad:  # noqa: BLE001  shown below
                wrong.append(bad)
                return

    def agent(name: str) -> Any:
        return lambda: cloud.converge(name)

    def operate() -> None:
        update(cloud, reload=True)

    def operate_other() -> None:
        cloud.drivers.update("other", None, None, {"path": "x"}, None, False)

    def withdraw() -> None:
        job = uninstall(cloud, drain=True, hosts=["c2"])
        cloud.rollouts().cancel(job)

    works = [agent(name) for name in HOSTS] + [
        lambda: cloud.rollouts().run_once(),
        lambda: cloud.rollouts().run_once(),
        operate,
        operate_other,
        withdraw,
    ]
    threads = [threading.Thread(target=loop, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    stop.wait(4)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    cloud.pass_(10)
    cloud.run(seconds=10)
    assert {row["state"] for row in rows.read(cloud.engine, schema.jobs)} <= {
        "done",
        "failed",
        "cancelled",
    }
    left = [
        (row["backend"], row["wish"]) for row in rows.read(cloud.engine, schema.wanted_backends)
    ]
    shut = [name for name in HOSTS for _, withdrawn, _ in devices(cloud, name) if withdrawn]
    assert (shut, {wish for _, wish in left}) == ([], {"enabled"}), left


class Cut(BaseException):
    """The conductor was killed here."""


def test_conductors_that_are_killed_between_any_two_statements(cloud: Cloud) -> None:
    left = [0]

    def before(*event: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Cut

    def look(statements: int) -> bool:
        """Have a conductor work that is killed before so many statements; tell whether it was."""
        left[0] = statements
        sa.event.listen(cloud.engine, "before_cursor_execute", before)
        try:
            cloud.rollouts().run_once()
        except Cut:
            cloud.pass_(60)  # the lease of the dead one
        finally:
            sa.event.remove(cloud.engine, "before_cursor_execute", before)
        return left[0] <= 0

    cloud.conf.set_override("driver_timeout", 100000.0, "conductor")
    killed = 0
    for begin in (install, lambda it: update(it, config={"count": 2}), uninstall):
        job = begin(cloud)
        for statements in range(1, 200):
            killed += look(statements)
            for name in HOSTS:
                cloud.converge(name)
            cloud.pass_(6)
            if cloud.job(job)[0] != "pending":
                break
        assert set(cloud.job(job)[2].values()) == {"done"}
    assert killed > 40
    assert [devices(cloud, name) for name in HOSTS] == [[]] * 4

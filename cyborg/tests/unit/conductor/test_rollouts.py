# SPDX-License-Identifier: Apache-2.0
"""Drivers installed, changed and given up over several hosts, on each kind of database."""

from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Conflict, InUse, Invalid, NotFound, Stale, WrongState
from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.rollouts import BROKEN, FAKE, OTHER, Cloud

HOSTS = ["c1", "c2", "c3", "c4"]


@pytest.fixture
def cloud(engine: sa.Engine) -> Cloud:
    return Cloud(engine, HOSTS)


@pytest.fixture
def light(sqlite_engine: sa.Engine) -> Cloud:
    """A cloud on one database, for what no database does its own way."""
    return Cloud(sqlite_engine, HOSTS, (FAKE, OTHER, BROKEN))


def install(cloud: Cloud, driver: str = "fake", **more: Any) -> str:
    asked = {"backend": None, "hosts": None, "config": None} | more
    return str(cloud.drivers.install(driver, **asked)["uuid"])


def update(cloud: Cloud, **more: Any) -> str:
    asked = {"backend": None, "hosts": None, "config": None, "wish": None, "reload": False} | more
    return str(cloud.drivers.update("fake", **asked)["uuid"])


def uninstall(cloud: Cloud, **more: Any) -> str:
    asked = {"backend": None, "hosts": None, "drain": False, "force": False} | more
    return str(cloud.drivers.uninstall("fake", **asked)["uuid"])


def devices(cloud: Cloud, host: str) -> list[tuple[str, bool, bool]]:
    found = rows.read(cloud.engine, schema.devices, host=host)
    return [(row["backend"], row["withdrawn"], row["draining"]) for row in found]


def bind(cloud: Cloud, host: str) -> str:
    """Have a request own a handle of a host."""
    profile = rows.profile(cloud.engine, f"profile-{host}")
    uuid = rows.request(cloud.engine, profile, state="Bound", hostname=host)
    (request,) = rows.read(cloud.engine, schema.requests, uuid=uuid)
    device = rows.read(cloud.engine, schema.devices, host=host)[0]
    (part,) = rows.read(cloud.engine, schema.deployables, device_id=device["id"])
    handle = rows.read(cloud.engine, schema.attach_handles, deployable_id=part["id"])[0]
    rows.change(cloud.engine, schema.attach_handles, handle["id"], request_id=request["id"])
    return uuid


def unbind(cloud: Cloud) -> None:
    with cloud.engine.begin() as tx:
        tx.execute(sa.update(schema.attach_handles).values(request_id=None))


def test_installed_everywhere(cloud: Cloud) -> None:
    job = install(cloud, config={"count": "2", "names": "x"})
    assert cloud.woken == ["rollouts"]
    cloud.run()
    assert cloud.job(job) == ("done", None, dict.fromkeys(HOSTS, "done"))
    running = ("fake", {"count": 2, "names": ["x"]})
    assert [cloud.agents[name].running for name in HOSTS] == [{"fake": running}] * 4
    assert devices(cloud, "c1") == [("fake", False, False)] * 2
    assert {host for host, _ in cloud.nudged} == set(HOSTS)
    wanted = rows.read(cloud.engine, schema.wanted_backends)
    assert [(row["wish"], row["applied"], row["error"]) for row in wanted] == [
        ("enabled", True, None)
    ] * 4


def test_installed_twice(cloud: Cloud) -> None:
    first = install(cloud, hosts=["c1"])
    assert install(cloud, hosts=["c1"]) == first, "while it is open, it is the same job"
    cloud.run()
    again = install(cloud, hosts=["c1"])
    cloud.run()
    assert (again != first, cloud.job(again)) == (True, ("done", None, {"c1": "done"}))
    assert (rows.read(cloud.engine, schema.services, host="c1")[0]["wanted"]) == 1
    with pytest.raises(Conflict, match="another configuration"):
        install(cloud, config={"count": 3})


def test_a_rolling_update_that_fails_at_the_third(cloud: Cloud) -> None:
    install(cloud)
    cloud.run()
    cloud.agents["c3"].failing = "count: no such card"
    job = update(cloud, config={"count": 3})
    cloud.run()
    state, error, steps = cloud.job(job)
    assert steps == {"c1": "done", "c2": "done", "c3": "rolled_back", "c4": "untouched"}
    assert state == "failed"
    assert error == "2 done, 1 rolled_back, 1 untouched; c3 (fake): count: no such card"
    cloud.agents["c3"].failing = ""
    cloud.converge("c3")
    counts = [cloud.agents[name].running["fake"][1].get("count") for name in HOSTS]
    assert counts == [3, 3, None, None]
    assert [len(devices(cloud, name)) for name in HOSTS] == [3, 3, 1, 1]


def test_one_host_at_a_time(light: Cloud) -> None:
    install(light)
    light.run()
    light.nudged.clear()
    update(light, config={"count": 2})
    for n, name in enumerate(HOSTS):
        light.rollouts().run_once()
        light.pass_(6)
        light.rollouts().run_once()
        assert len({host for host, _ in light.nudged}) == n + 1, "the others wait"
        light.converge(name)


def test_an_agent_that_never_answers(light: Cloud) -> None:
    install(light)
    light.run()
    light.agents["c2"].away = True
    job = update(light, config={"count": 2})
    light.run(seconds=30)
    state, error, steps = light.job(job)
    assert (state, steps["c1"], steps["c2"], steps["c3"]) == (
        "failed",
        "done",
        "rolled_back",
        "untouched",
    )
    assert "did not say within 150 s" in (error or "")
    light.returns("c2")
    light.converge("c2")
    assert light.agents["c2"].running["fake"] == ("fake", {})


def test_an_agent_that_was_away_comes_to_the_same(cloud: Cloud) -> None:
    cloud.down("c2")
    job = install(cloud)
    cloud.run()
    assert cloud.job(job)[2] == {"c1": "done", "c2": "away", "c3": "done", "c4": "done"}
    assert cloud.job(job)[0] == "done"
    cloud.returns("c2")
    assert cloud.converge("c2")
    assert cloud.agents["c2"].running == {"fake": ("fake", {})}
    assert devices(cloud, "c2") == [("fake", False, False)]


def test_an_installation_that_fails_on_one_host(light: Cloud) -> None:
    light.agents["c4"].failing = "DriverFailed: no card"
    job = install(light)
    light.run()
    state, error, steps = light.job(job)
    assert (state, error) == ("failed", "3 done, 1 failed; c4 (fake): DriverFailed: no card")
    assert steps == {"c1": "done", "c2": "done", "c3": "done", "c4": "failed"}
    assert [row["backend"] for row in rows.read(light.engine, schema.wanted_backends)] == [
        "fake"
    ] * 3


def test_disabled_and_enabled(cloud: Cloud) -> None:
    cloud.enable("c1", "gen0")
    cloud.enable("c1", "gen1")
    job = update(cloud, backend="gen1", wish="disabled")
    cloud.run()
    assert cloud.job(job) == ("done", None, {"c1": "done"})
    assert devices(cloud, "c1") == [("gen0", False, False), ("gen1", True, False)]
    cloud.agents["c1"].running["gen1"] = ("fake", {"count": 2})
    cloud.tell("c1")
    assert devices(cloud, "c1")[2] == ("gen1", True, False), "what comes is closed too"
    update(cloud, backend="gen1", wish="enabled")
    cloud.run()
    assert all(not withdrawn for _, withdrawn, _ in devices(cloud, "c1"))


def test_uninstalled(cloud: Cloud) -> None:
    cloud.enable("c1", "gen0")
    cloud.enable("c2", "fake")
    job = uninstall(cloud)
    assert devices(cloud, "c1") == [("gen0", True, False)], "closed from the first moment"
    cloud.run()
    assert cloud.job(job) == ("done", None, {"c1/gen0": "done", "c2/fake": "done"})
    assert (devices(cloud, "c1"), cloud.agents["c1"].running) == ([], {})
    with pytest.raises(NotFound, match="driver fake has no backend"):
        uninstall(cloud)
    install(cloud, hosts=["c2"])
    cloud.run()
    assert devices(cloud, "c2") == [("fake", False, False)]


def test_what_is_bound_stands_in_the_way(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    request = bind(cloud, "c1")
    with pytest.raises(InUse, match=request) as caught:
        uninstall(cloud)
    assert caught.value.details["requests"] == [request]
    assert devices(cloud, "c1") == [("fake", False, False)], "nothing was closed"
    assert rows.read(cloud.engine, schema.jobs) == []
    job = uninstall(cloud, drain=True)
    cloud.run(rounds=3)
    assert cloud.job(job) == ("pending", None, {"c1": "draining"})
    assert (devices(cloud, "c1"), "fake" in cloud.agents["c1"].running) == (
        [("fake", True, False)],
        True,
    )
    with pytest.raises(Conflict, match=f"wait for job {job}"):
        update(cloud, wish="enabled")
    unbind(cloud)
    cloud.run(seconds=6)
    assert (cloud.job(job)[0], devices(cloud, "c1")) == ("done", [])


def test_cancelled_while_it_drains(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    cloud.enable("c2", "fake")
    update(cloud, hosts=["c2"], config={"count": 2})
    cloud.run()
    bind(cloud, "c1")
    bind(cloud, "c2")
    job = uninstall(cloud, drain=True)
    cloud.run(rounds=2)
    assert all(withdrawn for _, withdrawn, _ in devices(cloud, "c2"))
    cloud.rollouts().cancel(job)
    assert cloud.job(job)[0] == "cancelled"
    assert cloud.job(job)[2] == {"c1": "untouched", "c2": "untouched"}
    assert devices(cloud, "c1") == [("fake", False, False)]
    assert devices(cloud, "c2") == [("fake", False, False)] * 2
    (left,) = rows.read(cloud.engine, schema.wanted_backends)
    assert (left["wish"], left["config"]) == ("enabled", {"count": 2})
    with pytest.raises(WrongState, match=f"job {job} is cancelled"):
        cloud.rollouts().cancel(job)
    with pytest.raises(NotFound):
        cloud.rollouts().cancel("5c9a5f0e-7f4e-4a53-9f6a-3b8e1d1f9b11")
    assert update(cloud, reload=True) != job, "the driver can be changed again"


def test_what_is_under_way_when_it_is_cancelled_comes_to_its_end(light: Cloud) -> None:
    install(light)
    light.run()
    job = update(light, config={"count": 2})
    light.rollouts().run_once()
    light.rollouts().cancel(job)
    assert light.job(job)[2] == {"c1": "rolling", **dict.fromkeys(HOSTS[1:], "untouched")}
    light.run(seconds=6)
    assert light.job(job)[:2] == ("cancelled", "an operator cancelled it: 1 done, 3 untouched")
    assert [len(devices(light, name)) for name in HOSTS] == [2, 1, 1, 1]


def test_force_drains_what_is_bound(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    bind(cloud, "c1")
    job = uninstall(cloud, drain=True)
    cloud.run(rounds=2)
    assert uninstall(cloud, force=True) == job, "the one that waits is forced"
    cloud.run()
    assert (cloud.job(job)[0], devices(cloud, "c1")) == ("done", [("fake", True, True)])


def test_a_dead_host(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    cloud.enable("c2", "fake")
    bind(cloud, "c2")
    cloud.down("c1")
    cloud.down("c2")
    with pytest.raises(Conflict, match="the agents of c1, c2 are down"):
        uninstall(cloud)
    job = uninstall(cloud, force=True)
    cloud.run()
    assert cloud.job(job) == ("done", None, {"c1": "away", "c2": "away"})
    assert (devices(cloud, "c1"), devices(cloud, "c2")) == ([], [("fake", True, True)])
    cloud.returns("c1")
    cloud.converge("c1")
    assert (cloud.agents["c1"].running, devices(cloud, "c1")) == ({}, [])


def test_two_at_once(light: Cloud) -> None:
    install(light, hosts=["c1"])
    with pytest.raises(Conflict, match="is being changed: wait for job"):
        install(light, hosts=["c2"])
    with pytest.raises(Conflict, match="is being changed"):
        light.drivers.install("fake", None, ["c1"], {"count": 2})
    install(light, "other", hosts=["c1"])
    light.run()
    assert set(light.agents["c1"].running) == {"fake", "other"}


def test_adopted_and_released(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    cloud.drivers.adopt("c1", "0000:77:00.0", "fake")
    cloud.run()
    assert cloud.agents["c1"].running["fake"][1] == {"adopt": ["0000:77:00.0"]}
    (device,) = rows.read(cloud.engine, schema.devices, host="c1")
    bind(cloud, "c1")
    with pytest.raises(InUse, match="cannot be released"):
        cloud.drivers.release(device["uuid"])
    unbind(cloud)
    cloud.drivers.release(device["uuid"])
    cloud.run()
    assert cloud.agents["c1"].running["fake"][1] == {
        "adopt": ["0000:77:00.0"],
        "release": [device["address"]],
    }
    cloud.drivers.adopt("c1", device["address"], "fake")
    cloud.run()
    assert cloud.agents["c1"].running["fake"][1]["release"] == []


@pytest.mark.parametrize(
    ("asked", "error", "told"),
    [
        ({"driver": "fakk"}, NotFound, "no agent has a driver 'fakk'; did you mean fake?"),
        ({"driver": "broken"}, Conflict, "c1: ImportError: no module named vendor; c2: "),
        ({"hosts": ["c1x"]}, NotFound, "no agent is of host 'c1x'; did you mean c1"),
        ({"hosts": []}, Invalid, "hosts must be a list of 1 to"),
        ({"hosts": ["c1", 7]}, Invalid, "hosts must be a string"),
        ({"backend": "a b"}, Invalid, "backend 'a b' is not usable"),
        ({"config": {"cuont": 1}}, Invalid, "no option 'cuont'; did you mean count"),
        ({"config": {"count": "many"}}, Invalid, "count: found 'many'; expected a value of type"),
        ({"config": [1]}, Invalid, "config must be an object"),
        ({"config": {"names": "x" * 70000}}, Invalid, "at most 65536"),
    ],
)
def test_bad_wishes(light: Cloud, asked: dict[str, Any], error: type, told: str) -> None:
    whole = {"driver": "fake", "backend": None, "hosts": None, "config": None} | asked
    with pytest.raises(error, match=told):
        light.drivers.install(**whole)
    assert rows.read(light.engine, schema.jobs) == []


def test_a_name_that_another_driver_has(light: Cloud) -> None:
    light.enable("c1", "fake", "other")
    with pytest.raises(Conflict, match="backend fake of host c1 is one of driver other"):
        install(light)
    with pytest.raises(Conflict, match="cannot adopt or release"):
        light.drivers.adopt("c1", "0000:77:00.0", "fake")
    with pytest.raises(NotFound, match="host c1 has no backend nope"):
        light.drivers.adopt("c1", "0000:77:00.0", "nope")


@pytest.mark.parametrize("bad", [{}, {"wish": "absent"}, {"wish": 7}])
def test_updates_that_ask_for_nothing(light: Cloud, bad: dict[str, Any]) -> None:
    light.enable("c1", "fake")
    with pytest.raises(Invalid):
        update(light, **bad)


def test_reload_is_a_new_revision(light: Cloud) -> None:
    light.enable("c1", "fake")
    update(light, reload=True)
    light.run()
    (row,) = rows.read(light.engine, schema.wanted_backends)
    assert (row["revision"], row["applied"], row["config"]) == (1, True, {})


def test_the_word_of_another_life(light: Cloud) -> None:
    install(light, hosts=["c1"])
    light.rollouts().run_once()
    room = light.rollouts()
    stranger = "5c9a5f0e-7f4e-4a53-9f6a-3b8e1d1f9b11"
    with pytest.raises(Stale):
        room.wanted("c1", stranger)
    with pytest.raises(Stale):
        room.applied("c1", stranger, 1, [{"backend": "fake", "revision": 1}])
    with pytest.raises(Invalid):
        room.applied("c1", light.agents["c1"].host.epoch, -1, [])
    with pytest.raises(Invalid, match="malformed outcome"):
        room.applied("c1", light.agents["c1"].host.epoch, 1, [{"backend": 7}])
    assert rows.read(light.engine, schema.job_steps)[0]["state"] == "rolling"


def test_a_conductor_that_dies_is_taken_over_from(light: Cloud) -> None:
    job = install(light, hosts=["c1"])
    with light.engine.begin() as tx:
        tx.execute(
            sa.update(schema.jobs).values(
                owner="dead", next_try_at=light.time, lease_until=light.time
            )
        )
    light.run()
    assert light.job(job)[0] == "done"


def test_the_hello_says_what_is_wanted(light: Cloud) -> None:
    host = light.agents["c1"].host
    assert host.hello(light.hosts)["wanted"] == 0
    install(light, hosts=["c1"])
    light.rollouts().run_once()
    assert host.hello(light.hosts)["wanted"] == 1
    host.wanted = 1
    assert host.hello(light.hosts)["wanted"] == 1

# SPDX-License-Identifier: Apache-2.0
"""Install, update and uninstall of drivers on several hosts, on each kind of database."""

from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Conflict, InUse, Invalid, NotFound, Stale, WrongState
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.rollouts import BROKEN, FAKE, HOSTS, OTHER, Cloud

pytestmark = pytest.mark.slow


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> Cloud:
    """A cloud on one database, for what no database does its own way."""
    return Cloud(sqlite_engine, HOSTS, (FAKE, OTHER, BROKEN))


def install(cloud: Cloud, driver: str = "fake", **overrides: Any) -> str:
    arguments = {"backend": None, "hosts": None, "config": None} | overrides
    return str(cloud.drivers.install(driver, **arguments)["uuid"])


def update(cloud: Cloud, **overrides: Any) -> str:
    arguments = {
        "backend": None,
        "hosts": None,
        "config": None,
        "status": None,
        "reload": False,
    } | overrides
    return str(cloud.drivers.update("fake", **arguments)["uuid"])


def uninstall(cloud: Cloud, **overrides: Any) -> str:
    arguments = {"backend": None, "hosts": None, "drain": False, "force": False} | overrides
    return str(cloud.drivers.uninstall("fake", **arguments)["uuid"])


def devices(cloud: Cloud, host: str) -> list[tuple[str, bool, bool]]:
    device_rows = rows.read(cloud.engine, schema.devices, host=host)
    return [(row["backend"], row["cordoned"], row["draining"]) for row in device_rows]


def bind(cloud: Cloud, host: str) -> str:
    """Bind a request to a handle of a host; return its uuid."""
    profile = rows.insert_profile(cloud.engine, f"profile-{host}")
    uuid = rows.insert_arq(cloud.engine, profile, state="Bound", hostname=host)
    (request,) = rows.read(cloud.engine, schema.arqs, uuid=uuid)
    device = rows.read(cloud.engine, schema.devices, host=host)[0]
    (deployable,) = rows.read(cloud.engine, schema.deployables, device_id=device["id"])
    handle = rows.read(cloud.engine, schema.attach_handles, deployable_id=deployable["id"])[0]
    rows.update(cloud.engine, schema.attach_handles, handle["id"], arq_id=request["id"])
    return uuid


def unbind(cloud: Cloud) -> None:
    with cloud.engine.begin() as tx:
        tx.execute(sa.update(schema.attach_handles).values(arq_id=None))


def test_install_without_hosts_enables_the_driver_on_all_hosts(cloud: Cloud) -> None:
    job = install(cloud, config={"count": "2", "names": "x"})
    assert cloud.woken == ["rollouts"]
    cloud.run()
    assert cloud.job(job) == ("done", None, dict.fromkeys(HOSTS, "done"))
    running = ("fake", {"count": 2, "names": ["x"]})
    assert [cloud.agents[name].running for name in HOSTS] == [{"fake": running}] * 4
    assert devices(cloud, "c1") == [("fake", False, False)] * 2
    assert {host for host, _ in cloud.notified} == set(HOSTS)
    desired = rows.read(cloud.engine, schema.desired_backends)
    assert [(row["status"], row["applied"], row["error"]) for row in desired] == [
        ("enabled", True, None)
    ] * 4


def test_repeated_install_is_idempotent(cloud: Cloud) -> None:
    first = install(cloud, hosts=["c1"])
    assert install(cloud, hosts=["c1"]) == first, "an open job with the same arguments is reused"
    cloud.run()
    second = install(cloud, hosts=["c1"])
    cloud.run()
    assert (second != first, cloud.job(second)) == (True, ("done", None, {"c1": "done"}))
    assert (rows.read(cloud.engine, schema.services, host="c1")[0]["desired_generation"]) == 1
    with pytest.raises(Conflict, match="another configuration"):
        install(cloud, config={"count": 3})


def test_update_that_fails_on_the_third_host_stops(cloud: Cloud) -> None:
    install(cloud)
    cloud.run()
    cloud.agents["c3"].failing = "count: no such card"
    job = update(cloud, config={"count": 3})
    cloud.run()
    state, error, steps = cloud.job(job)
    assert steps == {"c1": "done", "c2": "done", "c3": "rolled_back", "c4": "skipped"}
    assert state == "failed"
    assert error == "2 done, 1 rolled_back, 1 skipped; c3 (fake): count: no such card"
    cloud.agents["c3"].failing = ""
    cloud.sync_agent("c3")
    counts = [cloud.agents[name].running["fake"][1].get("count") for name in HOSTS]
    assert counts == [3, 3, None, None]
    assert [len(devices(cloud, name)) for name in HOSTS] == [3, 3, 1, 1]


def test_update_changes_one_host_at_a_time(sqlite_env: Cloud) -> None:
    install(sqlite_env)
    sqlite_env.run()
    sqlite_env.notified.clear()
    update(sqlite_env, config={"count": 2})
    for n, name in enumerate(HOSTS):
        sqlite_env.rollouts().run_once()
        sqlite_env.advance(6)
        sqlite_env.rollouts().run_once()
        assert len({host for host, _ in sqlite_env.notified}) == n + 1, "the other hosts wait"
        sqlite_env.sync_agent(name)


def test_update_without_an_answer_is_rolled_back(sqlite_env: Cloud) -> None:
    install(sqlite_env)
    sqlite_env.run()
    sqlite_env.agents["c2"].unreachable = True
    job = update(sqlite_env, config={"count": 2})
    sqlite_env.run(seconds=30)
    state, error, steps = sqlite_env.job(job)
    assert (state, steps["c1"], steps["c2"], steps["c3"]) == (
        "failed",
        "done",
        "rolled_back",
        "skipped",
    )
    assert "did not report an outcome within 150 s" in (error or "")
    sqlite_env.bring_back("c2")
    sqlite_env.sync_agent("c2")
    assert sqlite_env.agents["c2"].running["fake"] == ("fake", {})


def test_install_on_a_down_host_is_applied_when_it_returns(cloud: Cloud) -> None:
    cloud.mark_down("c2")
    job = install(cloud)
    cloud.run()
    assert cloud.job(job)[2] == {"c1": "done", "c2": "pending_agent", "c3": "done", "c4": "done"}
    assert cloud.job(job)[0] == "done"
    cloud.bring_back("c2")
    assert cloud.sync_agent("c2")
    assert cloud.agents["c2"].running == {"fake": ("fake", {})}
    assert devices(cloud, "c2") == [("fake", False, False)]


def test_install_that_fails_on_one_host_continues_on_others(sqlite_env: Cloud) -> None:
    sqlite_env.agents["c4"].failing = "DriverFailed: no card"
    job = install(sqlite_env)
    sqlite_env.run()
    state, error, steps = sqlite_env.job(job)
    assert (state, error) == ("failed", "3 done, 1 failed; c4 (fake): DriverFailed: no card")
    assert steps == {"c1": "done", "c2": "done", "c3": "done", "c4": "failed"}
    assert [row["backend"] for row in rows.read(sqlite_env.engine, schema.desired_backends)] == [
        "fake"
    ] * 3


def test_disabled_backend_cordons_its_devices_until_enabled(cloud: Cloud) -> None:
    cloud.enable("c1", "gen0")
    cloud.enable("c1", "gen1")
    job = update(cloud, backend="gen1", status="disabled")
    cloud.run()
    assert cloud.job(job) == ("done", None, {"c1": "done"})
    assert devices(cloud, "c1") == [("gen0", False, False), ("gen1", True, False)]
    cloud.agents["c1"].running["gen1"] = ("fake", {"count": 2})
    cloud.send_report("c1")
    assert devices(cloud, "c1")[2] == ("gen1", True, False), "a new device is cordoned too"
    update(cloud, backend="gen1", status="enabled")
    cloud.run()
    assert all(not cordoned for _, cordoned, _ in devices(cloud, "c1"))


def test_uninstall_removes_the_backends(cloud: Cloud) -> None:
    cloud.enable("c1", "gen0")
    cloud.enable("c2", "fake")
    job = uninstall(cloud)
    assert devices(cloud, "c1") == [("gen0", True, False)], "cordoned at once"
    cloud.run()
    assert cloud.job(job) == ("done", None, {"c1/gen0": "done", "c2/fake": "done"})
    assert (devices(cloud, "c1"), cloud.agents["c1"].running) == ([], {})
    with pytest.raises(NotFound, match="driver fake has no backend"):
        uninstall(cloud)
    install(cloud, hosts=["c2"])
    cloud.run()
    assert devices(cloud, "c2") == [("fake", False, False)]


def test_uninstall_with_bound_handles_is_refused_or_drains(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    request = bind(cloud, "c1")
    with pytest.raises(InUse, match=request) as raised:
        uninstall(cloud)
    assert raised.value.details["requests"] == [request]
    assert devices(cloud, "c1") == [("fake", False, False)], "nothing was cordoned"
    assert rows.read(cloud.engine, schema.jobs) == []
    job = uninstall(cloud, drain=True)
    cloud.run(rounds=3)
    assert cloud.job(job) == ("pending", None, {"c1": "draining"})
    assert (devices(cloud, "c1"), "fake" in cloud.agents["c1"].running) == (
        [("fake", True, False)],
        True,
    )
    with pytest.raises(Conflict, match=f"wait for job {job}"):
        update(cloud, status="enabled")
    unbind(cloud)
    cloud.run(seconds=6)
    assert (cloud.job(job)[0], devices(cloud, "c1")) == ("done", [])


def test_cancel_while_draining_uncordons(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    cloud.enable("c2", "fake")
    update(cloud, hosts=["c2"], config={"count": 2})
    cloud.run()
    bind(cloud, "c1")
    bind(cloud, "c2")
    job = uninstall(cloud, drain=True)
    cloud.run(rounds=2)
    assert all(cordoned for _, cordoned, _ in devices(cloud, "c2"))
    cloud.rollouts().cancel(job)
    assert cloud.job(job)[0] == "cancelled"
    assert cloud.job(job)[2] == {"c1": "skipped", "c2": "skipped"}
    assert devices(cloud, "c1") == [("fake", False, False)]
    assert devices(cloud, "c2") == [("fake", False, False)] * 2
    (backend,) = rows.read(cloud.engine, schema.desired_backends)
    assert (backend["status"], backend["config"]) == ("enabled", {"count": 2})
    with pytest.raises(WrongState, match=f"job {job} is cancelled"):
        cloud.rollouts().cancel(job)
    with pytest.raises(NotFound):
        cloud.rollouts().cancel("5c9a5f0e-7f4e-4a53-9f6a-3b8e1d1f9b11")
    assert update(cloud, reload=True) != job, "another job can be created"


def test_cancel_lets_steps_in_progress_finish(sqlite_env: Cloud) -> None:
    install(sqlite_env)
    sqlite_env.run()
    job = update(sqlite_env, config={"count": 2})
    sqlite_env.rollouts().run_once()
    sqlite_env.rollouts().cancel(job)
    assert sqlite_env.job(job)[2] == {"c1": "in_progress", **dict.fromkeys(HOSTS[1:], "skipped")}
    sqlite_env.run(seconds=6)
    assert sqlite_env.job(job)[:2] == ("cancelled", "cancelled by an operator: 1 done, 3 skipped")
    assert [len(devices(sqlite_env, name)) for name in HOSTS] == [2, 1, 1, 1]


def test_forced_uninstall_drains_bound_devices(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    bind(cloud, "c1")
    job = uninstall(cloud, drain=True)
    cloud.run(rounds=2)
    assert uninstall(cloud, force=True) == job, "the waiting job is forced"
    cloud.run()
    assert (cloud.job(job)[0], devices(cloud, "c1")) == ("done", [("fake", True, True)])


def test_forced_uninstall_does_not_wait_for_down_hosts(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    cloud.enable("c2", "fake")
    bind(cloud, "c2")
    cloud.mark_down("c1")
    cloud.mark_down("c2")
    with pytest.raises(Conflict, match="the agents of c1, c2 are down"):
        uninstall(cloud)
    job = uninstall(cloud, force=True)
    cloud.run()
    assert cloud.job(job) == ("done", None, {"c1": "pending_agent", "c2": "pending_agent"})
    assert (devices(cloud, "c1"), devices(cloud, "c2")) == ([], [("fake", True, True)])
    cloud.bring_back("c1")
    cloud.sync_agent("c1")
    assert (cloud.agents["c1"].running, devices(cloud, "c1")) == ({}, [])


def test_second_job_for_a_driver_is_refused(sqlite_env: Cloud) -> None:
    install(sqlite_env, hosts=["c1"])
    with pytest.raises(Conflict, match="is being changed: wait for job"):
        install(sqlite_env, hosts=["c2"])
    with pytest.raises(Conflict, match="is being changed"):
        sqlite_env.drivers.install("fake", None, ["c1"], {"count": 2})
    install(sqlite_env, "other", hosts=["c1"])
    sqlite_env.run()
    assert set(sqlite_env.agents["c1"].running) == {"fake", "other"}


def test_adopt_and_release_change_the_configuration(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    cloud.drivers.adopt("c1", "0000:77:00.0", "fake", False)
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
    cloud.drivers.adopt("c1", device["address"], "fake", False)
    cloud.run()
    assert cloud.agents["c1"].running["fake"][1]["release"] == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"driver": "fakk"}, NotFound, "no agent has a driver 'fakk'; did you mean fake?"),
        ({"driver": "broken"}, Conflict, "c1: ImportError: no module named vendor; c2: "),
        ({"hosts": ["c1x"]}, NotFound, "no agent on host 'c1x'; did you mean c1"),
        ({"hosts": []}, Invalid, "hosts must be a list of 1 to"),
        ({"hosts": ["c1", 7]}, Invalid, "hosts: invalid value '7', expected a string"),
        ({"backend": "a b"}, Invalid, "invalid backend name 'a b'"),
        ({"config": {"cuont": 1}}, Invalid, "no option 'cuont'; did you mean count"),
        ({"config": {"count": "many"}}, Invalid, "count: found 'many'; expected a value of type"),
        ({"config": [1]}, Invalid, "config must be an object"),
        ({"config": {"names": "x" * 70000}}, Invalid, "at most 65536"),
    ],
)
def test_install_with_invalid_arguments_is_refused(
    sqlite_env: Cloud, arguments: dict[str, Any], error: type, message: str
) -> None:
    arguments = {"driver": "fake", "backend": None, "hosts": None, "config": None} | arguments
    with pytest.raises(error, match=message):
        sqlite_env.drivers.install(**arguments)
    assert rows.read(sqlite_env.engine, schema.jobs) == []


def test_install_with_the_backend_name_of_another_driver_is_refused(sqlite_env: Cloud) -> None:
    sqlite_env.enable("c1", "fake", "other")
    with pytest.raises(Conflict, match="backend fake of host c1 has driver other"):
        install(sqlite_env)
    with pytest.raises(Conflict, match="cannot adopt single devices: it has no option adopt"):
        sqlite_env.drivers.adopt("c1", "0000:77:00.0", "fake", False)
    with pytest.raises(Conflict, match="cannot adopt devices that the host uses: it has no option"):
        sqlite_env.drivers.adopt("c1", "0000:77:00.0", "fake", True)
    with pytest.raises(NotFound, match="host c1 has no backend nope"):
        sqlite_env.drivers.adopt("c1", "0000:77:00.0", "nope", False)


def test_uninstallation_serves_no_server_in_build(cloud: Cloud) -> None:
    """The number of bound handles must not rise while it waits for their release."""
    cloud.enable("c1", "fake")
    cloud.drivers.adopt("c1", "0000:77:00.0", "fake", False)
    cloud.run()
    update(cloud, status="disabled")
    cloud.run()
    assert [d["cordoned_since"] is None for d in rows.read(cloud.engine, schema.devices)] == [False]
    uninstall(cloud, drain=True)
    (device,) = rows.read(cloud.engine, schema.devices)
    assert (device["cordoned"], device["cordoned_since"]) == (True, None)


@pytest.mark.parametrize("changes", [{}, {"status": "absent"}, {"status": 7}])
def test_update_without_changes_is_refused(sqlite_env: Cloud, changes: dict[str, Any]) -> None:
    sqlite_env.enable("c1", "fake")
    with pytest.raises(Invalid):
        update(sqlite_env, **changes)


def test_reload_raises_the_generation(sqlite_env: Cloud) -> None:
    sqlite_env.enable("c1", "fake")
    update(sqlite_env, reload=True)
    sqlite_env.run()
    (row,) = rows.read(sqlite_env.engine, schema.desired_backends)
    assert (row["generation"], row["applied"], row["config"]) == (1, True, {})


def test_outcomes_of_an_unknown_epoch_are_refused(sqlite_env: Cloud) -> None:
    install(sqlite_env, hosts=["c1"])
    sqlite_env.rollouts().run_once()
    controller = sqlite_env.rollouts()
    unknown_epoch = "5c9a5f0e-7f4e-4a53-9f6a-3b8e1d1f9b11"
    with pytest.raises(Stale):
        controller.get_desired_state("c1", unknown_epoch)
    with pytest.raises(Stale):
        controller.record_outcomes("c1", unknown_epoch, 1, [{"backend": "fake", "generation": 1}])
    with pytest.raises(Invalid):
        controller.record_outcomes("c1", sqlite_env.agents["c1"].host.epoch, -1, [])
    with pytest.raises(Invalid, match="malformed outcome"):
        controller.record_outcomes("c1", sqlite_env.agents["c1"].host.epoch, 1, [{"backend": 7}])
    assert rows.read(sqlite_env.engine, schema.job_steps)[0]["state"] == "in_progress"


def test_job_of_a_dead_conductor_is_taken_over(sqlite_env: Cloud) -> None:
    job = install(sqlite_env, hosts=["c1"])
    with sqlite_env.engine.begin() as tx:
        tx.execute(
            sa.update(schema.jobs).values(
                owner="dead", next_try_at=sqlite_env.time, lease_until=sqlite_env.time
            )
        )
    sqlite_env.run()
    assert sqlite_env.job(job)[0] == "done"


def test_heartbeat_returns_the_desired_generation(sqlite_env: Cloud) -> None:
    host = sqlite_env.agents["c1"].host
    assert host.hello(sqlite_env.hosts)["desired_generation"] == 0
    install(sqlite_env, hosts=["c1"])
    sqlite_env.rollouts().run_once()
    assert host.hello(sqlite_env.hosts)["desired_generation"] == 1
    host.desired_generation = 1
    assert host.hello(sqlite_env.hosts)["desired_generation"] == 1

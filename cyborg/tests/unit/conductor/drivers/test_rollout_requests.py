# SPDX-License-Identifier: Apache-2.0
"""Requests on drivers with open or ended jobs."""

from dataclasses import replace

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Conflict, Invalid
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.rollouts import FAKE, HOSTS, OTHER, Cloud
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.unit.conductor.drivers.test_rollout_controller import (
    bind,
    devices,
    install,
    uninstall,
    update,
)

pytestmark = pytest.mark.slow


def test_force_applies_only_to_named_hosts(cloud: Cloud) -> None:
    for name in ("c1", "c2"):
        cloud.enable(name, "fake")
        bind(cloud, name)
    job = uninstall(cloud, drain=True)
    cloud.run(rounds=2)
    cloud.enable("c3", "fake")
    with pytest.raises(Conflict, match=f"wait for job {job}, which does not wait for .* c3"):
        cloud.drivers.uninstall("fake", None, ["c3"], drain=False, force=True)
    assert uninstall(cloud, hosts=["c1"], force=True) == job
    cloud.run(rounds=3)
    assert cloud.job(job)[2] == {"c1": "done", "c2": "draining"}
    assert uninstall(cloud, force=True) == job, "all backends that the job waits for"
    cloud.run()
    assert cloud.job(job)[0] == "done"


def test_failed_update_stops_later_hosts(sqlite_env: Cloud) -> None:
    for name in HOSTS:
        sqlite_env.enable(name, "fake")
    sqlite_env.mark_down("c3")
    sqlite_env.agents["c2"].failing = "no such count"
    job = update(sqlite_env, config={"count": 2})
    sqlite_env.run()
    assert sqlite_env.job(job)[2] == {
        "c1": "done",
        "c2": "rolled_back",
        "c3": "skipped",
        "c4": "skipped",
    }


def test_cordon_alone_is_not_part_of_the_desired_state(sqlite_env: Cloud) -> None:
    sqlite_env.enable("c1", "fake")
    bind(sqlite_env, "c1")
    uninstall(sqlite_env, drain=True)
    sqlite_env.run(rounds=2)
    assert (
        sqlite_env.rollouts().get_desired_state("c1", sqlite_env.agents["c1"].host.epoch)[
            "backends"
        ]
        == []
    )


def test_failed_install_is_retried_by_another_install(sqlite_env: Cloud) -> None:
    sqlite_env.mark_down("c1")
    install(sqlite_env, hosts=["c1"])
    sqlite_env.run()
    sqlite_env.bring_back("c1")
    sqlite_env.agents["c1"].failing = "no card"
    sqlite_env.sync_agent("c1")
    assert sqlite_env.agents["c1"].running == {}
    sqlite_env.agents["c1"].failing = ""
    job = install(sqlite_env, hosts=["c1"])
    sqlite_env.run()
    assert (sqlite_env.job(job)[0], sqlite_env.agents["c1"].running) == (
        "done",
        {"fake": ("fake", {})},
    )


def test_update_with_null_resets_options_to_the_file(sqlite_env: Cloud) -> None:
    sqlite_env.enable("c1", "fake")
    update(sqlite_env, config={"count": 2, "names": ["x"]})
    sqlite_env.run()
    update(sqlite_env, config={"count": None})
    sqlite_env.run()
    assert sqlite_env.agents["c1"].running["fake"] == ("fake", {"names": ["x"]})
    with pytest.raises(Invalid, match="no option 'cuont'"):
        update(sqlite_env, config={"cuont": None})
    with pytest.raises(Invalid, match="count: found 'None'"):
        install(sqlite_env, hosts=["c2"], config={"count": None})


def test_adopt_with_an_invalid_address_is_refused(sqlite_env: Cloud) -> None:
    sqlite_env.enable("c1", "fake")
    with pytest.raises(Invalid):
        sqlite_env.drivers.adopt("c1", "a\tb", "fake", False)
    sqlite_env.drivers.adopt("c1", "0A:00.0", "fake", False)
    sqlite_env.run()
    assert sqlite_env.agents["c1"].running["fake"][1]["adopt"] == ["0000:0a:00.0"]
    update(sqlite_env, config={"adopt": [f"x{n}" for n in range(256)]})
    sqlite_env.run()
    with pytest.raises(Invalid, match="adopt: found"):
        sqlite_env.drivers.adopt("c1", "0000:0b:00.0", "fake", False)


def test_install_over_the_limit_of_backend_names_is_refused(sqlite_env: Cloud) -> None:
    (agent,) = [row["id"] for row in rows.read(sqlite_env.engine, schema.services, host="c1")]
    with sqlite_env.engine.begin() as tx:
        values = {"driver": "fake", "status": "absent", "config": {}, "generation": 1}
        tx.execute(
            sa.insert(schema.desired_backends),
            [{"service_id": agent, "backend": f"b{n}", **values} for n in range(240)],
        )
    with pytest.raises(Conflict, match="c1: limit of 240 backend names is reached"):
        install(sqlite_env)
    install(sqlite_env, backend="b7", hosts=["c1"])
    install(sqlite_env, "other", hosts=["c2"])


def test_new_device_while_draining_is_cordoned(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    bind(cloud, "c1")
    uninstall(cloud, drain=True)
    cloud.run(rounds=2)
    cloud.agents["c1"].running["fake"] = ("fake", {"count": 2})
    cloud.send_report("c1")
    assert devices(cloud, "c1") == [("fake", True, False)] * 2


def test_host_without_an_outcome_is_notified_again(sqlite_env: Cloud) -> None:
    install(sqlite_env, hosts=["c1"])
    sqlite_env.run()
    sqlite_env.agents["c1"].failing = "no"
    sqlite_env.notified.clear()

    def assert_notified(*expected: int) -> None:
        wait_until(
            "it is notified", lambda: sqlite_env.notified == [("c1", n) for n in expected], 10
        )

    update(sqlite_env, hosts=["c1"], config={"count": 2})
    sqlite_env.rollouts().run_once()
    assert_notified(2)
    sqlite_env.advance(6)
    sqlite_env.rollouts().run_once()
    assert_notified(2, 2)
    sqlite_env.sync_agent("c1")
    # The rollback is notified too, so that it need not wait for the next heartbeat.
    assert_notified(2, 2, 3)


def test_host_only_option_is_refused_without_a_job(sqlite_env: Cloud) -> None:
    refused = "path: can only be set in the configuration file of the host"
    with pytest.raises(Invalid, match=refused):
        install(sqlite_env, "other", config={"path": "/etc/passwd"})
    sqlite_env.enable("c1", "other", "other")
    with pytest.raises(Invalid, match=refused):
        sqlite_env.drivers.update("other", None, None, {"path": "/etc/passwd"}, None, False)
    assert rows.read(sqlite_env.engine, schema.jobs) == []


def test_reference_driver_is_refused_on_hosts_that_do_not_allow_it(sqlite_env: Cloud) -> None:
    for name in ("c1", "c2"):
        sqlite_env.agents[name].host.drivers = (replace(FAKE, installable=False), OTHER)
        sqlite_env.send_report(name)
    with pytest.raises(Conflict, match=r"c1: it is a reference driver, and \[agent\] allow_ref"):
        install(sqlite_env, hosts=["c1", "c3"])
    sqlite_env.enable("c1", "fake")
    job = install(sqlite_env)
    assert sorted(sqlite_env.job(job)[2]) == ["c1", "c3", "c4"], (
        "c2 is left out; c1 has the backend already"
    )

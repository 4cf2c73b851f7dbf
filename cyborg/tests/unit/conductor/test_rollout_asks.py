# SPDX-License-Identifier: Apache-2.0
"""What operators may ask of drivers that are being changed, or have been."""

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Conflict, Invalid
from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.processes import until
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


def test_force_is_for_those_whom_it_names(cloud: Cloud) -> None:
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
    assert uninstall(cloud, force=True) == job, "all that it waits for"
    cloud.run()
    assert cloud.job(job)[0] == "done"


def test_an_update_does_not_overtake(light: Cloud) -> None:
    for name in HOSTS:
        light.enable(name, "fake")
    light.down("c3")
    light.agents["c2"].failing = "no such count"
    job = update(light, config={"count": 2})
    light.run()
    assert light.job(job)[2] == {
        "c1": "done",
        "c2": "rolled_back",
        "c3": "untouched",
        "c4": "untouched",
    }


def test_what_is_only_closed_no_agent_hears_of(light: Cloud) -> None:
    light.enable("c1", "fake")
    bind(light, "c1")
    uninstall(light, drain=True)
    light.run(rounds=2)
    assert light.rollouts().wanted("c1", light.agents["c1"].host.epoch)["backends"] == []


def test_an_installation_is_tried_again(light: Cloud) -> None:
    light.down("c1")
    install(light, hosts=["c1"])
    light.run()
    light.returns("c1")
    light.agents["c1"].failing = "no card"
    light.converge("c1")
    assert light.agents["c1"].running == {}
    light.agents["c1"].failing = ""
    job = install(light, hosts=["c1"])
    light.run()
    assert (light.job(job)[0], light.agents["c1"].running) == ("done", {"fake": ("fake", {})})


def test_options_go_back_to_the_file(light: Cloud) -> None:
    light.enable("c1", "fake")
    update(light, config={"count": 2, "names": ["x"]})
    light.run()
    update(light, config={"count": None})
    light.run()
    assert light.agents["c1"].running["fake"] == ("fake", {"names": ["x"]})
    with pytest.raises(Invalid, match="no option 'cuont'"):
        update(light, config={"cuont": None})
    with pytest.raises(Invalid, match="count: found 'None'"):
        install(light, hosts=["c2"], config={"count": None})


def test_an_address_that_no_driver_would_take(light: Cloud) -> None:
    light.enable("c1", "fake")
    with pytest.raises(Invalid):
        light.drivers.adopt("c1", "a\tb", "fake")
    light.drivers.adopt("c1", "0A:00.0", "fake")
    light.run()
    assert light.agents["c1"].running["fake"][1]["adopt"] == ["0000:0a:00.0"]
    update(light, config={"adopt": [f"x{n}" for n in range(256)]})
    light.run()
    with pytest.raises(Invalid, match="adopt: found"):
        light.drivers.adopt("c1", "0000:0b:00.0", "fake")


def test_a_host_on_which_too_many_were_named(light: Cloud) -> None:
    (agent,) = [row["id"] for row in rows.read(light.engine, schema.services, host="c1")]
    with light.engine.begin() as tx:
        values = {"driver": "fake", "wish": "absent", "config": {}, "revision": 1}
        tx.execute(
            sa.insert(schema.wanted_backends),
            [{"service_id": agent, "backend": f"b{n}", **values} for n in range(240)],
        )
    with pytest.raises(Conflict, match="c1: 240 backends have been named there"):
        install(light)
    install(light, backend="b7", hosts=["c1"])
    install(light, "other", hosts=["c2"])


def test_what_comes_while_it_drains_is_closed(cloud: Cloud) -> None:
    cloud.enable("c1", "fake")
    bind(cloud, "c1")
    uninstall(cloud, drain=True)
    cloud.run(rounds=2)
    cloud.agents["c1"].running["fake"] = ("fake", {"count": 2})
    cloud.tell("c1")
    assert devices(cloud, "c1") == [("fake", True, False)] * 2


def test_whose_word_does_not_come_is_nudged_again(light: Cloud) -> None:
    install(light, hosts=["c1"])
    light.run()
    light.agents["c1"].failing = "no"
    light.nudged.clear()

    def nudged(*expected: int) -> None:
        until("it is nudged", lambda: light.nudged == [("c1", n) for n in expected], 10)

    update(light, hosts=["c1"], config={"count": 2})
    light.rollouts().run_once()
    nudged(2)
    light.pass_(6)
    light.rollouts().run_once()
    nudged(2, 2)
    light.converge("c1")
    # It has been taken back, of which its agent should not hear with its next hello only.
    nudged(2, 2, 3)

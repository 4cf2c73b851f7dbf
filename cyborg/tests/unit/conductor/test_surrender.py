# SPDX-License-Identifier: Apache-2.0
"""Handles that cannot be cleaned any more, for their backend was uninstalled."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import sqlalchemy as sa

from cyborg.conductor.jobs import Jobs
from cyborg.core.errors import InUse
from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.hosts import card
from cyborg.fixtures.rollouts import Cloud
from cyborg.fixtures.workers import AWAY, Workers
from cyborg.tests.unit.conductor.test_rollouts import bind, devices, install, uninstall

Clean = Callable[[], None]


@pytest.fixture
def cloud(engine: sa.Engine) -> Cloud:
    made = Cloud(engine, ["c1"])
    made.enable("c1", "fake")
    return made


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def clean(cloud: Cloud, workers: Workers) -> Clean:
    """Have the conductor's jobs worked on, as some time later."""

    def work() -> None:
        cloud.pass_(700)
        jobs = Jobs(cloud.conf, cloud.uow, workers, now=cloud.now, at_once=1)
        jobs.sweep()
        jobs.run_once()

    return work


def prepared(cloud: Cloud, *, owned: bool, which: int = 0) -> int:
    """Have a handle of c1 be one that its host has prepared, and return its row id."""
    handle = rows.read(cloud.engine, schema.attach_handles)[which]
    values = {} if owned else {"request_id": None}
    rows.change(cloud.engine, schema.attach_handles, handle["id"], prepared=True, **values)
    return int(handle["id"])


def handles(cloud: Cloud) -> list[tuple[str, bool, bool]]:
    found = rows.read(cloud.engine, schema.attach_handles)
    return [(row["address"], row["prepared"], row["draining"]) for row in found]


def release(cloud: Cloud, handle: int) -> None:
    rows.change(cloud.engine, schema.attach_handles, handle, request_id=None)


@pytest.mark.parametrize("answer", ["failed", AWAY])
def test_what_is_released_after_a_forced_end(
    cloud: Cloud, workers: Workers, clean: Clean, answer: str
) -> None:
    bind(cloud, "c1")
    handle = prepared(cloud, owned=True)
    if answer == AWAY:
        cloud.down("c1")
    uninstall(cloud, force=True)
    cloud.run()
    assert devices(cloud, "c1") == [("fake", True, True)], "nothing goes from under an instance"
    release(cloud, handle)
    workers.answers["release"] = answer
    clean()
    assert (devices(cloud, "c1"), handles(cloud)) == ([], []), "and then nothing is left"
    clean()
    assert {row["state"] for row in rows.read(cloud.engine, schema.jobs, kind="release")} == {
        "failed"
    }


def test_what_is_dirty_when_a_dead_host_is_given_up(cloud: Cloud) -> None:
    prepared(cloud, owned=False)
    cloud.down("c1")
    uninstall(cloud, force=True)
    cloud.run()
    assert (devices(cloud, "c1"), handles(cloud)) == ([], [])


def test_what_was_not_cleaned_is_cleaned_when_it_returns(
    cloud: Cloud, workers: Workers, clean: Clean
) -> None:
    prepared(cloud, owned=False)
    cloud.down("c1")
    uninstall(cloud, force=True)
    cloud.run()
    cloud.returns("c1")
    cloud.converge("c1")
    assert devices(cloud, "c1") == []
    install(cloud)
    cloud.run()
    assert handles(cloud) == [("0000", True, False), ("0001", False, False)]
    clean()
    assert handles(cloud) == [("0000", False, False), ("0001", False, False)]
    assert [item["handle"] for item in workers.asked[-1]["items"]] == ["0000"]


def test_what_is_held_beside_it_keeps_it(cloud: Cloud, workers: Workers, clean: Clean) -> None:
    bind(cloud, "c1")
    owned = prepared(cloud, owned=True)
    prepared(cloud, owned=False, which=1)
    cloud.down("c1")
    uninstall(cloud, force=True)
    cloud.run()
    workers.answers["release"] = AWAY
    clean()
    assert handles(cloud) == [("0000", True, True), ("0001", True, True)]
    release(cloud, owned)
    clean()
    assert handles(cloud) == []


def test_a_backend_that_is_wanted_is_cleaned_until_it_is_clean(
    cloud: Cloud, workers: Workers, clean: Clean
) -> None:
    prepared(cloud, owned=False)
    workers.answers["release"] = "failed"
    clean()
    clean()
    assert handles(cloud) == [("0000", True, False), ("0001", False, False)]
    with pytest.raises(InUse, match="1 accelerators are in use or being cleaned; drain waits"):
        uninstall(cloud)
    job = uninstall(cloud, drain=True)
    cloud.run(rounds=2)
    assert cloud.job(job)[2] == {"c1": "draining"}
    workers.answers = {}
    clean()
    cloud.run()
    assert (cloud.job(job)[0], handles(cloud)) == ("done", [])


def test_a_device_that_is_being_cleaned_is_not_released(cloud: Cloud) -> None:
    prepared(cloud, owned=False)
    (device,) = rows.read(cloud.engine, schema.devices)
    with pytest.raises(InUse, match="1 of its handles are being cleaned"):
        cloud.drivers.release(device["uuid"])


def test_a_part_of_several_that_goes_alone(cloud: Cloud) -> None:
    """One part is held, the other dirty: only the other goes, and is remembered."""
    pattern = card(0, backend="fake")
    other = replace(pattern.deployables[0], address="0000:00:00.1")
    device = replace(pattern, deployables=(pattern.deployables[0], other))
    cloud.agents["c1"].host.tell(cloud.hosts, device)
    profile = rows.profile(cloud.engine, "p")
    uuid = rows.request(cloud.engine, profile, state="Bound", hostname="c1")
    (request,) = rows.read(cloud.engine, schema.requests, uuid=uuid)
    first, *_, last = rows.read(cloud.engine, schema.attach_handles)
    rows.change(cloud.engine, schema.attach_handles, first["id"], request_id=request["id"])
    rows.change(cloud.engine, schema.attach_handles, last["id"], prepared=True)
    cloud.down("c1")
    uninstall(cloud, force=True)
    cloud.run()
    assert handles(cloud) == [("0000", False, True)]
    (left,) = rows.read(cloud.engine, schema.departed)
    assert left["parts"]["0000:00:00.1"]["dirty"] == ["0001"]

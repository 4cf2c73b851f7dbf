# SPDX-License-Identifier: Apache-2.0
"""Each race of the engine, interleaved at every statement of the first transaction."""

from collections.abc import Callable
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.device_profiles import DeviceProfiles
from cyborg.conductor.inventory.devices import Devices
from cyborg.core.errors import Conflict, InUse, NoHandle, NotFound, ServiceTokenRequired
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.interleave import Race
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.host_work import JobsEnv
from cyborg.tests.fixtures.machine.options import make_notification_conf

POINTS = (
    "FROM arqs WHERE arqs.uuid IN",
    "FROM deployables",
    "UPDATE arqs SET",
    "FROM attach_handles",
    "UPDATE attach_handles SET",
    "INSERT INTO outbox",
    "COMMIT",
)
AFTER_THE_CLAIM = POINTS[5:]
points = pytest.mark.parametrize("at", POINTS)


@pytest.fixture
def env(engine: sa.Engine) -> JobsEnv:
    # Each bind writes to the outbox.
    return JobsEnv(engine, make_notification_conf())


def assert_invariants(env: JobsEnv) -> None:
    """Check that exactly the ARQs in a holding state own a handle, one each."""
    holding = sorted(
        row["id"]
        for row in rows.read(env.engine, schema.arqs)
        if row["state"] in ("Bound", "BindStarted")
    )
    owners = [row["arq_id"] for row in rows.read(env.engine, schema.attach_handles)]
    assert sorted(owner for owner in owners if owner) == holding


def plain(env: JobsEnv, **values: int) -> rows.Card:
    return env.add_card(abilities=[], **values)


@points
@pytest.mark.parametrize("allow_bound", [False, True])
def test_delete_concurrent_with_bind(env: JobsEnv, at: str, allow_bound: bool) -> None:
    card, request = plain(env), env.add_arq()
    race = Race(
        env.engine,
        lambda: env.bind(card, request),
        at,
        lambda: env.arqs.delete([request], None, None, allow_bound),
    )
    assert race.reached
    assert_invariants(env)
    remaining = rows.read(env.engine, schema.arqs)
    if isinstance(race.first, NotFound):
        assert race.second is None
        assert remaining == []
    elif allow_bound:
        assert (race.first, race.second, remaining) == (None, None, [])
    else:
        assert race.first is None
        assert isinstance(race.second, ServiceTokenRequired)
        assert [row["state"] for row in remaining] == ["Bound"]


@points
def test_bind_concurrent_with_disable(env: JobsEnv, at: str) -> None:
    card, request = plain(env), env.add_arq()
    (device,) = rows.read(env.engine, schema.devices)
    race = Race(
        env.engine,
        lambda: env.bind(card, request),
        at,
        lambda: build(Devices, env.uow).set_status(device["uuid"], "maintaining"),
    )
    assert race.reached
    assert_invariants(env)
    assert race.second is None
    before_the_claim = at not in AFTER_THE_CLAIM
    # On a busy machine the second may seem to wait for a lock, and still be the first to commit.
    if before_the_claim and (not race.waited or race.first is not None):
        assert isinstance(race.first, NoHandle), race.first
        assert "maintenance" in race.first.message
    else:
        assert race.first is None
        assert env.states() == {"Bound": 1}


@points
def test_two_concurrent_binds_for_one_instance(env: JobsEnv, at: str) -> None:
    card, first, second, instance = plain(env), env.add_arq(), env.add_arq(), str(uuid4())
    race = Race(
        env.engine,
        lambda: env.bind(card, first, instance=instance),
        at,
        lambda: env.bind(card, second, instance=instance),
    )
    assert_invariants(env)
    errors = [error for error in (race.first, race.second) if error is not None]
    assert len(errors) == 1
    assert isinstance(errors[0], Conflict)
    assert env.states() == {"Bound": 1, "Initial": 1}


@points
def test_two_concurrent_binds_for_the_last_handle(env: JobsEnv, at: str) -> None:
    card, first, second = plain(env, handles=1), env.add_arq(), env.add_arq()
    race = Race(env.engine, lambda: env.bind(card, first), at, lambda: env.bind(card, second))
    assert_invariants(env)
    assert [type(exc) for exc in (race.first, race.second) if exc] == [NoHandle]
    assert env.states() == {"Bound": 1, "Initial": 1}


@points
def test_bind_concurrent_with_program(env: JobsEnv, at: str) -> None:
    card, request = env.add_card(abilities=["programs"]), env.add_arq()
    (part,) = rows.read(env.engine, schema.deployables)
    race = Race(
        env.engine,
        lambda: env.bind(card, request),
        at,
        lambda: env.programs.start(part["uuid"], str(uuid4())),
    )
    assert_invariants(env)
    (part,) = rows.read(env.engine, schema.deployables)
    if part["job_id"] is None:
        assert isinstance(race.second, InUse)
        assert env.states() == {"Bound": 1}
    else:
        assert isinstance(race.first, NoHandle)
        assert env.states() == {"Initial": 1}


@pytest.mark.parametrize("at", ["FROM device_profiles", "INSERT INTO arqs", "COMMIT"])
def test_profile_delete_concurrent_with_arq_create(env: JobsEnv, at: str) -> None:
    race = Race(
        env.engine,
        lambda: env.arqs.create("fpga", None),
        at,
        lambda: build(DeviceProfiles, env.uow).delete(["fpga"]),
    )
    _one_of_the_two(env, race.first, race.second)


@pytest.mark.parametrize("at", ["FROM device_profiles", "DELETE FROM device_profiles", "COMMIT"])
def test_arq_create_concurrent_with_profile_delete(env: JobsEnv, at: str) -> None:
    race = Race(
        env.engine,
        lambda: build(DeviceProfiles, env.uow).delete(["fpga"]),
        at,
        lambda: env.arqs.create("fpga", None),
    )
    _one_of_the_two(env, race.second, race.first)


def _one_of_the_two(
    env: JobsEnv, creation_error: Exception | None, deleted: Exception | None
) -> None:
    profiles = rows.read(env.engine, schema.device_profiles)
    requests = rows.read(env.engine, schema.arqs)
    if creation_error is None:
        assert isinstance(deleted, InUse)
        assert (len(profiles), len(requests)) == (1, 1)
    else:
        assert isinstance(creation_error, NotFound)
        assert (deleted, profiles, requests) == (None, [], [])


ENDS: dict[str, Callable[[JobsEnv, str, str], None]] = {
    "it ends well": lambda env, job, _: env.jobs.complete(job, "compute-1", "done", None),
    "it fails": lambda env, job, _: env.jobs.complete(job, "compute-1", "failed", "broken"),
    "its server goes": lambda env, _, server: env.arqs.delete(None, server, None, True),
}
CUTS = ("FROM arqs WHERE", "UPDATE jobs SET", "UPDATE arqs SET", "COMMIT")


@pytest.mark.parametrize("at", CUTS)
@pytest.mark.parametrize("first_status", ENDS)
@pytest.mark.parametrize("second_status", ENDS)
def test_two_concurrent_results_for_one_job(
    env: JobsEnv, first_status: str, second_status: str, at: str
) -> None:
    server = env.bind(env.add_card())
    (job,) = rows.read(env.engine, schema.jobs)
    race = Race(
        env.engine,
        lambda: ENDS[first_status](env, job["uuid"], server),
        at,
        lambda: ENDS[second_status](env, job["uuid"], server),
    )
    assert (race.first, race.outcomes.get("second")) == (None, None)
    assert_invariants(env)
    assert env.states() in ({}, {"Bound": 1}, {"BindFailed": 1})
    if "its server goes" in (first_status, second_status) and race.reached:
        assert env.states() == {}
    assert len(env.events()) <= 1
    for row in rows.read(env.engine, schema.attach_handles):
        dirty = row["needs_cleaning"] and row["arq_id"] is None
        assert dirty == (row["job_id"] is not None)
    env.jobs.run_once()
    assert env.handles()["dirty"] == 0

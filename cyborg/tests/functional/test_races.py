# SPDX-License-Identifier: Apache-2.0
"""Each race that the engine decides, interleaved on purpose at every statement of the first."""

from collections.abc import Callable
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.device_profiles import DeviceProfiles
from cyborg.conductor.devices import Devices
from cyborg.core.errors import Conflict, InUse, NoHandle, NotFound, ServiceTokenRequired
from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.interleave import Race
from cyborg.fixtures.workers import Conductors

POINTS = (
    "FROM requests WHERE requests.uuid IN",
    "FROM deployables",
    "UPDATE requests SET",
    "FROM attach_handles",
    "UPDATE attach_handles SET",
    "INSERT INTO outbox",
    "COMMIT",
)
AFTER_THE_CLAIM = POINTS[5:]
points = pytest.mark.parametrize("at", POINTS)


@pytest.fixture
def bed(engine: sa.Engine) -> Conductors:
    return Conductors(engine)


def sound(bed: Conductors) -> None:
    """Hold what must be true after any race: who holds has one handle, nobody else any."""
    holding = sorted(
        row["id"]
        for row in rows.read(bed.engine, schema.requests)
        if row["state"] in ("Bound", "BindStarted")
    )
    owners = [row["request_id"] for row in rows.read(bed.engine, schema.attach_handles)]
    assert sorted(owner for owner in owners if owner) == holding


def plain(bed: Conductors, **values: int) -> rows.Card:
    return bed.card(abilities=[], **values)


@points
@pytest.mark.parametrize("bound_too", [False, True])
def test_delete_races_bind(bed: Conductors, at: str, bound_too: bool) -> None:
    card, request = plain(bed), bed.make()
    race = Race(
        bed.engine,
        lambda: bed.bind(card, request),
        at,
        lambda: bed.requests.delete([request], None, None, bound_too),
    )
    assert race.met
    sound(bed)
    left = rows.read(bed.engine, schema.requests)
    if isinstance(race.first, NotFound):
        assert race.second is None
        assert left == []
    elif bound_too:
        assert (race.first, race.second, left) == (None, None, [])
    else:
        assert race.first is None
        assert isinstance(race.second, ServiceTokenRequired)
        assert [row["state"] for row in left] == ["Bound"]


@points
def test_bind_races_disable(bed: Conductors, at: str) -> None:
    card, request = plain(bed), bed.make()
    (device,) = rows.read(bed.engine, schema.devices)
    race = Race(
        bed.engine,
        lambda: bed.bind(card, request),
        at,
        lambda: Devices(bed.uow).set_status(device["uuid"], "maintaining"),
    )
    assert race.met
    sound(bed)
    assert race.second is None
    closed_first = at not in AFTER_THE_CLAIM and not race.waited
    if closed_first:
        assert isinstance(race.first, NoHandle), race.first
        assert "maintenance" in race.first.message
    else:
        assert race.first is None
        assert bed.states() == {"Bound": 1}


@points
def test_two_binds_race_for_one_instance(bed: Conductors, at: str) -> None:
    card, first, second, instance = plain(bed), bed.make(), bed.make(), str(uuid4())
    race = Race(
        bed.engine,
        lambda: bed.bind(card, first, instance=instance),
        at,
        lambda: bed.bind(card, second, instance=instance),
    )
    sound(bed)
    lost = [bad for bad in (race.first, race.second) if bad is not None]
    assert len(lost) == 1
    assert isinstance(lost[0], Conflict)
    assert bed.states() == {"Bound": 1, "Initial": 1}


@points
def test_two_binds_race_for_the_last_handle(bed: Conductors, at: str) -> None:
    card, first, second = plain(bed, handles=1), bed.make(), bed.make()
    race = Race(bed.engine, lambda: bed.bind(card, first), at, lambda: bed.bind(card, second))
    sound(bed)
    assert [type(bad) for bad in (race.first, race.second) if bad] == [NoHandle]
    assert bed.states() == {"Bound": 1, "Initial": 1}


@points
def test_bind_races_program(bed: Conductors, at: str) -> None:
    card, request = bed.card(abilities=["programs"]), bed.make()
    (part,) = rows.read(bed.engine, schema.deployables)
    race = Race(
        bed.engine,
        lambda: bed.bind(card, request),
        at,
        lambda: bed.programs.start(part["uuid"], str(uuid4())),
    )
    sound(bed)
    (part,) = rows.read(bed.engine, schema.deployables)
    if part["job_id"] is None:
        assert isinstance(race.second, InUse)
        assert bed.states() == {"Bound": 1}
    else:
        assert isinstance(race.first, NoHandle)
        assert bed.states() == {"Initial": 1}


@pytest.mark.parametrize("at", ["FROM device_profiles", "INSERT INTO requests", "COMMIT"])
def test_profile_delete_races_create(bed: Conductors, at: str) -> None:
    race = Race(
        bed.engine,
        lambda: bed.requests.create("fpga", None),
        at,
        lambda: DeviceProfiles(bed.uow).delete(["fpga"]),
    )
    _one_of_the_two(bed, race.first, race.second)


@pytest.mark.parametrize("at", ["FROM device_profiles", "DELETE FROM device_profiles", "COMMIT"])
def test_create_races_profile_delete(bed: Conductors, at: str) -> None:
    race = Race(
        bed.engine,
        lambda: DeviceProfiles(bed.uow).delete(["fpga"]),
        at,
        lambda: bed.requests.create("fpga", None),
    )
    _one_of_the_two(bed, race.second, race.first)


def _one_of_the_two(bed: Conductors, made: Exception | None, deleted: Exception | None) -> None:
    profiles = rows.read(bed.engine, schema.device_profiles)
    requests = rows.read(bed.engine, schema.requests)
    if made is None:
        assert isinstance(deleted, InUse)
        assert (len(profiles), len(requests)) == (1, 1)
    else:
        assert isinstance(made, NotFound)
        assert (deleted, profiles, requests) == (None, [], [])


ENDS: dict[str, Callable[[Conductors, str, str], None]] = {
    "it ends well": lambda bed, job, _: bed.jobs.done(job, "compute-1", "done", None),
    "it fails": lambda bed, job, _: bed.jobs.done(job, "compute-1", "failed", "broken"),
    "its server goes": lambda bed, _, server: bed.requests.delete(None, server, None, True),
}
CUTS = ("FROM requests WHERE", "UPDATE jobs SET", "UPDATE requests SET", "COMMIT")


@pytest.mark.parametrize("at", CUTS)
@pytest.mark.parametrize("one", ENDS)
@pytest.mark.parametrize("other", ENDS)
def test_two_ends_race_for_one_job(bed: Conductors, one: str, other: str, at: str) -> None:
    server = bed.bind(bed.card())
    (job,) = rows.read(bed.engine, schema.jobs)
    race = Race(
        bed.engine,
        lambda: ENDS[one](bed, job["uuid"], server),
        at,
        lambda: ENDS[other](bed, job["uuid"], server),
    )
    assert (race.first, race.outcomes.get("second")) == (None, None)
    sound(bed)
    assert bed.states() in ({}, {"Bound": 1}, {"BindFailed": 1})
    if "its server goes" in (one, other) and race.met:
        assert bed.states() == {}
    assert len(bed.events()) <= 1
    for row in rows.read(bed.engine, schema.attach_handles):
        dirty = row["prepared"] and row["request_id"] is None
        assert dirty == (row["job_id"] is not None)
    bed.jobs.run_once()
    assert bed.handles()["dirty"] == 0

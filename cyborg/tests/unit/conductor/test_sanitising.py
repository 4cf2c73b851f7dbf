# SPDX-License-Identifier: Apache-2.0
"""Handles that must be wiped after their instance, whether they had to be prepared or not."""

from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.core.errors import NoHandle
from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.workers import Conductors


@pytest.fixture
def bed(engine: sa.Engine) -> Conductors:
    return Conductors(engine)


@pytest.fixture
def light(sqlite_engine: sa.Engine) -> Conductors:
    return Conductors(sqlite_engine)


def test_bound_at_once_and_wiped_before_anybody_else_gets_it(bed: Conductors) -> None:
    card = bed.card(handles=1, abilities=["sanitises"])
    instance = bed.bind(card)
    assert bed.states() == {"Bound": 1}
    assert bed.open_jobs() == []
    bed.requests.delete(None, instance, None, bound_too=True)
    assert bed.handles() == {"dirty": 1}
    assert bed.open_jobs() == ["release"]
    with pytest.raises(NoHandle, match="being cleaned"):
        bed.bind(card)
    assert bed.jobs.run_once() == 1
    assert bed.workers.kinds() == ["release"]
    assert bed.handles() == {"free": 1}
    bed.bind(card)
    assert bed.handles() == {"owned": 1}


def test_unbinding_wipes_as_deleting_does(light: Conductors) -> None:
    uuid = light.make()
    light.bind(light.card(abilities=["sanitises"]), uuid)
    light.requests.patch([{"request": uuid}], "unbind", None)
    assert light.states() == {"Unbound": 1}
    assert light.handles() == {"dirty": 1, "free": 15}
    light.jobs.run_once()
    assert light.handles() == {"free": 16}


def test_wiping_that_fails_is_tried_again_and_nobody_gets_the_handle(light: Conductors) -> None:
    card = light.card(handles=1, abilities=["sanitises"])
    instance = light.bind(card)
    light.workers.answers["release"] = "failed"
    light.requests.delete(None, instance, None, bound_too=True)
    for _ in range(3):
        light.jobs.run_once()
        assert light.handles() == {"dirty": 1}
        light.later(700)
    light.workers.answers = {}
    light.jobs.run_once()
    assert light.handles() == {"free": 1}


def test_an_agent_that_is_away_keeps_nobody_from_a_handle_that_is_clean(light: Conductors) -> None:
    card = light.card(abilities=["sanitises"])
    light.later(10 * light.conf.conductor.prepare_timeout)
    light.bind(card)
    assert light.states() == {"Bound": 1}


def test_one_that_is_prepared_and_wiped_takes_one_job_each_way(light: Conductors) -> None:
    card = light.card(handles=1, abilities=["prepares", "sanitises"])
    instance = light.bind(card)
    assert light.states() == {"BindStarted": 1}
    light.jobs.run_once()
    light.requests.delete(None, instance, None, bound_too=True)
    light.jobs.run_once()
    assert light.workers.kinds() == ["prepare", "release"]
    assert light.handles() == {"free": 1}


def test_a_bind_that_comes_to_nothing_wipes_what_it_had(light: Conductors) -> None:
    wiped = light.card(abilities=["sanitises"], address="0000:02:00.0")
    prepared = light.card(abilities=["prepares"])
    instance, first, second = str(uuid4()), light.make(), light.make()
    wishes = [
        {
            "request": uuid,
            "hostname": card.host,
            "device_rp_uuid": card.provider,
            "instance_uuid": instance,
        }
        for uuid, card in ((first, wiped), (second, prepared))
    ]
    light.requests.patch(wishes, "bind", None)
    light.workers.answers["prepare"] = "failed"
    light.jobs.run_once()
    assert light.states() == {"BindFailed": 2}
    prepare, release = light.workers.asked
    assert [item["device"] for item in prepare["items"]] == ["0000:01:00.0"]
    assert sorted(item["device"] for item in release["items"]) == ["0000:01:00.0", "0000:02:00.0"]
    assert light.handles() == {"free": 32}


def test_what_was_given_out_before_is_not_wiped(light: Conductors) -> None:
    """Only from the next bind on: nobody knows what the host would find."""
    card = light.card(handles=1, abilities=[])
    instance = light.bind(card)
    (device,) = rows.read(light.engine, schema.devices)
    rows.change(light.engine, schema.devices, device["id"], abilities=["sanitises"])
    light.requests.delete(None, instance, None, bound_too=True)
    assert light.handles() == {"free": 1}

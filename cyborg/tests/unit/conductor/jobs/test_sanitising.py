# SPDX-License-Identifier: Apache-2.0
"""Handles that must be cleaned after their instance, whether they were prepared or not."""

from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.core.errors import NoHandle
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.host_work import JobsEnv


@pytest.fixture
def env(engine: sa.Engine) -> JobsEnv:
    return JobsEnv(engine)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> JobsEnv:
    return JobsEnv(sqlite_engine)


def test_sanitised_handle_is_bound_at_once_and_cleaned_before_reuse(env: JobsEnv) -> None:
    card = env.add_card(handles=1, abilities=["sanitises"])
    instance = env.bind(card)
    assert env.states() == {"Bound": 1}
    assert env.open_jobs() == []
    env.arqs.delete(None, instance, None, allow_bound=True)
    assert env.handles() == {"dirty": 1}
    assert env.open_jobs() == ["release"]
    with pytest.raises(NoHandle, match="being cleaned"):
        env.bind(card)
    assert env.jobs.run_once() == 1
    assert env.agents.kinds() == ["release"]
    assert env.handles() == {"free": 1}
    env.bind(card)
    assert env.handles() == {"owned": 1}


def test_unbind_cleans_sanitised_handles(sqlite_env: JobsEnv) -> None:
    uuid = sqlite_env.add_arq()
    sqlite_env.bind(sqlite_env.add_card(abilities=["sanitises"]), uuid)
    sqlite_env.arqs.unbind([{"request": uuid}], None)
    assert sqlite_env.states() == {"Unbound": 1}
    assert sqlite_env.handles() == {"dirty": 1, "free": 15}
    sqlite_env.jobs.run_once()
    assert sqlite_env.handles() == {"free": 16}


def test_failed_cleaning_is_retried_and_keeps_the_handle_dirty(sqlite_env: JobsEnv) -> None:
    card = sqlite_env.add_card(handles=1, abilities=["sanitises"])
    instance = sqlite_env.bind(card)
    sqlite_env.agents.answers["release"] = "failed"
    sqlite_env.arqs.delete(None, instance, None, allow_bound=True)
    for _ in range(3):
        sqlite_env.jobs.run_once()
        assert sqlite_env.handles() == {"dirty": 1}
        sqlite_env.advance(700)
    sqlite_env.agents.answers = {}
    sqlite_env.jobs.run_once()
    assert sqlite_env.handles() == {"free": 1}


def test_bind_of_a_clean_handle_needs_no_agent(sqlite_env: JobsEnv) -> None:
    card = sqlite_env.add_card(abilities=["sanitises"])
    sqlite_env.advance(10 * sqlite_env.conf.conductor.prepare_timeout)
    sqlite_env.bind(card)
    assert sqlite_env.states() == {"Bound": 1}


def test_prepared_and_sanitised_handle_has_one_job_per_direction(sqlite_env: JobsEnv) -> None:
    card = sqlite_env.add_card(handles=1, abilities=["prepares", "sanitises"])
    instance = sqlite_env.bind(card)
    assert sqlite_env.states() == {"BindStarted": 1}
    sqlite_env.jobs.run_once()
    sqlite_env.arqs.delete(None, instance, None, allow_bound=True)
    sqlite_env.jobs.run_once()
    assert sqlite_env.agents.kinds() == ["prepare", "release"]
    assert sqlite_env.handles() == {"free": 1}


def test_failed_bind_cleans_its_handles(sqlite_env: JobsEnv) -> None:
    sanitised = sqlite_env.add_card(abilities=["sanitises"], address="0000:02:00.0")
    prepared = sqlite_env.add_card(abilities=["prepares"])
    instance, first, second = str(uuid4()), sqlite_env.add_arq(), sqlite_env.add_arq()
    bind_requests = [
        {
            "request": uuid,
            "hostname": card.host,
            "device_rp_uuid": card.provider,
            "instance_uuid": instance,
        }
        for uuid, card in ((first, sanitised), (second, prepared))
    ]
    sqlite_env.arqs.bind(bind_requests, None)
    sqlite_env.agents.answers["prepare"] = "failed"
    sqlite_env.jobs.run_once()
    assert sqlite_env.states() == {"BindFailed": 2}
    prepare, release = sqlite_env.agents.calls
    assert [item["device"] for item in prepare["items"]] == ["0000:01:00.0"]
    assert sorted(item["device"] for item in release["items"]) == ["0000:01:00.0", "0000:02:00.0"]
    assert sqlite_env.handles() == {"free": 32}


def test_handle_bound_before_the_ability_is_not_cleaned(sqlite_env: JobsEnv) -> None:
    """The ability applies from the next bind on."""
    card = sqlite_env.add_card(handles=1, abilities=[])
    instance = sqlite_env.bind(card)
    (device,) = rows.read(sqlite_env.engine, schema.devices)
    rows.update(sqlite_env.engine, schema.devices, device["id"], abilities=["sanitises"])
    sqlite_env.arqs.delete(None, instance, None, allow_bound=True)
    assert sqlite_env.handles() == {"free": 1}

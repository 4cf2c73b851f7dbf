# SPDX-License-Identifier: Apache-2.0
"""The custody records of binds, releases, cleaning, programming and reports, on each database."""

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.custody import entries
from cyborg.conductor.hosts.heartbeats import Hosts
from cyborg.core.errors import NoHandle
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.host_work import UNREACHABLE, JobsEnv
from cyborg.tests.fixtures.hosts.hosts import Host, card


@pytest.fixture
def env(engine: sa.Engine) -> JobsEnv:
    return JobsEnv(engine)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> JobsEnv:
    return JobsEnv(sqlite_engine)


def records(env: JobsEnv) -> list[dict[str, Any]]:
    return rows.read(env.engine, schema.custody_records)


def events(env: JobsEnv) -> list[str]:
    return [row["event"] for row in records(env)]


def details(env: JobsEnv, event: str) -> Mapping[str, Any]:
    """Return the details of the only record of an event."""
    (row,) = rows.read(env.engine, schema.custody_records, event=event)
    return dict(row["details"])


def test_life_of_a_prepared_handle_is_recorded(env: JobsEnv) -> None:
    env.add_card(handles=1)
    (device,) = rows.read(env.engine, schema.devices)
    (handle,) = rows.read(env.engine, schema.attach_handles)
    arq = env.add_arq()
    instance = env.bind(rows_card(env), arq)
    env.jobs.run_once()
    env.arqs.delete(None, instance, None, allow_bound=True)
    env.jobs.run_once()
    assert events(env) == ["claimed", "prepared", "released", "cleaned"]
    owner = {"arq": arq, "instance": instance, "project": "project-1"}
    place = {
        "handle": handle["uuid"],
        "handle_address": handle["address"],
        "deployable_address": device["address"],
    }
    prepare, release = rows.read(env.engine, schema.jobs)
    assert details(env, "claimed") == {**place, **owner}
    assert details(env, "prepared") == {**place, **owner, "accel": {}, "job": prepare["uuid"]}
    assert details(env, "released") == {
        **place,
        **owner,
        "reason": "deleted",
        "needs_cleaning": True,
    }
    assert details(env, "cleaned") == {**place, "abilities": "prepares", "job": release["uuid"]}
    for row in records(env):
        assert (row["device_uuid"], row["host"]) == (device["uuid"], device["host"])
        assert (row["recorded_at"], row["sequence"], row["hash"]) == (env.time, None, None)


def rows_card(env: JobsEnv) -> rows.Card:
    """Return the only card."""
    (device,) = rows.read(env.engine, schema.devices)
    (deployable,) = rows.read(env.engine, schema.deployables)
    return rows.Card(device["host"], device["id"], deployable["id"], deployable["rp_uuid"])


def test_handle_without_host_work_is_claimed_and_released_only(env: JobsEnv) -> None:
    card_ = env.add_card(abilities=[])
    arq = env.add_arq()
    env.bind(card_, arq)
    env.arqs.unbind([{"request": arq}], None)
    assert events(env) == ["claimed", "released"]
    assert details(env, "released")["reason"] == "unbound"
    assert details(env, "released")["needs_cleaning"] is False


def test_only_handles_that_the_host_prepares_are_recorded_as_prepared(env: JobsEnv) -> None:
    cards = [
        env.add_card(abilities=[ability], address=f"0000:0{number}:00.0")
        for number, ability in enumerate(("prepares", "sanitises"), 1)
    ]
    instance = str(uuid4())
    requests = [
        {
            "request": env.add_arq(),
            "hostname": card_.host,
            "device_rp_uuid": card_.provider,
            "instance_uuid": instance,
        }
        for card_ in cards
    ]
    env.arqs.bind(requests, None)
    env.jobs.run_once()
    assert events(env) == ["claimed", "claimed", "prepared"]
    assert details(env, "prepared")["deployable_address"] == "0000:01:00.0"


def test_bind_of_many_handles_takes_one_more_statement(sqlite_env: JobsEnv) -> None:
    cards = [sqlite_env.add_card(abilities=[], address=f"0000:0{n}:00.0") for n in range(2)]
    counts = []
    for number, card_ in zip((1, 8), cards, strict=True):
        arqs = [sqlite_env.add_arq() for _ in range(number)]
        with count_statements(sqlite_env.engine) as count:
            sqlite_env.bind(card_, *arqs)
        counts.append([s for s in count.statements if "custody" in s])
    assert [len(statements) for statements in counts] == [1, 1]
    assert len(records(sqlite_env)) == 9
    with count_statements(sqlite_env.engine) as count:
        sqlite_env.arqs.unbind([{"request": arq} for arq in arqs], None)
    assert len([s for s in count.statements if "INSERT INTO custody" in s]) == 1
    assert len(records(sqlite_env)) == 17


def test_refused_bind_records_nothing(env: JobsEnv) -> None:
    card_ = env.add_card(handles=0)
    with pytest.raises(NoHandle):
        env.bind(card_)
    assert events(env) == []


def test_failed_prepare_records_why_the_handle_was_released(env: JobsEnv) -> None:
    env.bind(env.add_card())
    env.agents.answers["prepare"] = "failed"
    env.jobs.run_once()
    assert events(env) == ["claimed", "released", "cleaned"]
    released = details(env, "released")
    assert (released["reason"], released["error"]) == ("bind_failed", "it broke")


@pytest.mark.parametrize("keep", [True, False])
def test_released_handles_of_other_arqs_of_a_cancelled_bind_have_failed(
    env: JobsEnv, keep: bool
) -> None:
    first, second = env.add_arq(), env.add_arq()
    env.bind(env.add_card(), first, second)
    if keep:
        env.arqs.unbind([{"request": first}], None)
    else:
        env.arqs.delete([first], None, None, allow_bound=True)
    released = rows.read(env.engine, schema.custody_records, event="released")
    found = {row["details"]["arq"]: row["details"] for row in released}
    assert found[first]["reason"] == ("unbound" if keep else "deleted")
    assert "error" not in found[first]
    assert found[second]["reason"] == "bind_failed"
    assert "unbound or deleted" in found[second]["error"]


def test_failed_cleaning_is_recorded_once_for_each_error(env: JobsEnv) -> None:
    card_ = env.add_card(abilities=["sanitises"], handles=1)
    instance = env.bind(card_)
    env.arqs.delete(None, instance, None, allow_bound=True)
    for answer in (UNREACHABLE, "failed", "failed", "done"):
        env.agents.answers["release"] = answer
        env.jobs.run_once()
        env.advance(700)
    # An agent that does not answer has not tried.
    assert events(env) == ["claimed", "released", "cleaning_failed", "cleaned"]
    failed, cleaned = details(env, "cleaning_failed"), details(env, "cleaned")
    assert (failed["error"], failed["abilities"]) == ("it broke", "sanitises")
    assert (cleaned["error"], cleaned["handle"]) == ("it broke", failed["handle"])


@pytest.mark.parametrize(
    ("answer", "event"), [("done", "programmed"), ("failed", "program_failed")]
)
def test_programming_is_recorded_with_its_result(env: JobsEnv, answer: str, event: str) -> None:
    env.add_card()
    (deployable,) = rows.read(env.engine, schema.deployables)
    image = str(uuid4())
    env.agents.answers["program"] = answer
    env.programs.start(deployable["uuid"], image)
    env.jobs.run_once()
    (job,) = rows.read(env.engine, schema.jobs)
    expected = {
        "deployable": deployable["uuid"],
        "deployable_address": deployable["address"],
        "image": image,
        "job": job["uuid"],
    }
    assert events(env) == [event]
    failed = answer == "failed"
    assert details(env, event) == expected | ({"error": "it broke"} if failed else {})


@pytest.mark.parametrize("error", [None, "it broke"])
def test_change_of_layout_is_recorded_with_its_result(env: JobsEnv, error: str | None) -> None:
    device = str(uuid4())
    arguments: dict[str, Any] = {"items": [], "layout": "4", "previous_layout": None}
    values = {"kind": "partition", "host": "compute-1", "subject": device, "next_try_at": env.time}
    rows.insert(env.engine, schema.jobs, arguments=arguments, **values)
    jobs: Any = rows.read(env.engine, schema.jobs)
    env.uow.run(lambda tx: entries.record_partitioned(tx, jobs[0], error, env.time))
    (row,) = records(env)
    assert (row["device_uuid"], row["host"]) == (device, "compute-1")
    event = "partitioned" if error is None else "partition_failed"
    expected = {"layout": "4", "job": jobs[0]["uuid"]} | ({"error": error} if error else {})
    assert (row["event"], row["details"]) == (event, expected)


def test_devices_are_recorded_when_they_come_move_and_go(env: JobsEnv) -> None:
    hosts, host = build(Hosts, env.conf, env.uow, now=env.now), Host("compute-1")
    host.send(hosts, card(0), card(1))
    first = {row["address"]: row["uuid"] for row in rows.read(env.engine, schema.devices)}
    assert events(env) == ["device_added", "device_added"]
    host.send(hosts, card(0), card(1))
    assert len(records(env)) == 2
    host.send(hosts, card(0))
    (removed,) = rows.read(env.engine, schema.custody_records, event="device_removed")
    assert removed["device_uuid"] == first[removed["details"]["address"]]
    host.send(hosts, card(0), card(1))
    # Its tombstone gives the device its uuid, so its log goes on.
    added = rows.read(env.engine, schema.custody_records, event="device_added")
    assert added[-1]["device_uuid"] == removed["device_uuid"]

# SPDX-License-Identifier: Apache-2.0
import threading
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.jobs import Jobs
from cyborg.core.errors import Invalid, NoHandle, NotFound, TimedOut
from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.workers import AWAY, Conductors


@pytest.fixture
def bed(engine: sa.Engine) -> Conductors:
    return Conductors(engine)


@pytest.fixture
def light(sqlite_engine: sa.Engine) -> Conductors:
    return Conductors(sqlite_engine)


def test_work_that_ends_well_makes_the_requests_bound(bed: Conductors) -> None:
    card = bed.card()
    uuids = [bed.make(), bed.make()]
    instance = bed.bind(card, *uuids)
    assert bed.states() == {"BindStarted": 2}
    assert bed.handles() == {"owned": 2, "free": 14}
    assert bed.events() == []
    assert bed.jobs.run_once() == 1
    (asked,) = bed.workers.asked
    assert (asked["host"], asked["kind"], asked["instance"]) == (card.host, "prepare", instance)
    assert len({item["handle"] for item in asked["items"]}) == 2
    assert {item["backend"] for item in asked["items"]} == {"fake"}
    assert bed.states() == {"Bound": 2}
    assert bed.events() == ["completed"] * 2
    assert bed.open_jobs() == []
    assert bed.settled[-1].events == 2
    bed.bind(card, *uuids, instance=instance)
    assert bed.jobs.run_once() == 0


def test_the_same_bind_while_the_host_works_is_the_same_answer(bed: Conductors) -> None:
    card, uuid = bed.card(), bed.make()
    instance = bed.bind(card, uuid)
    bed.bind(card, uuid, instance=instance)
    assert bed.open_jobs() == ["prepare"]
    assert bed.handles()["owned"] == 1


def test_work_that_fails_is_undone_and_nova_is_told(bed: Conductors) -> None:
    card = bed.card()
    bed.bind(card, bed.make(), bed.make())
    bed.workers.answers["prepare"] = "failed"
    bed.jobs.run_once()
    assert bed.states() == {"BindFailed": 2}
    assert bed.events() == ["failed"] * 2
    # The loop goes on until nothing is due, and the release is due at once.
    assert bed.workers.kinds() == ["prepare", "release"]
    prepare, release = bed.workers.asked
    assert release["cancels"] == [prepare["job"]]
    assert {item["handle"] for item in release["items"]} == {
        item["handle"] for item in prepare["items"]
    }
    assert bed.handles() == {"free": 16}
    (failed, done) = rows.read(bed.engine, schema.jobs)
    assert (failed["state"], failed["error"], done["state"]) == ("failed", "it broke", "done")


def test_an_agent_that_is_away_is_asked_until_the_deadline(bed: Conductors) -> None:
    bed.bind(bed.card())
    bed.workers.answers = {"prepare": AWAY, "release": AWAY}
    for _ in range(100):
        bed.jobs.run_once()
        bed.later(5)
        if bed.states() == {"BindFailed": 1}:
            break
    tries = bed.workers.kinds().count("prepare")
    assert 20 < tries < 60
    assert bed.conf.conductor.prepare_timeout <= 5 * 49
    assert bed.events() == ["failed"]
    assert bed.handles() == {"dirty": 1, "free": 15}
    bed.workers.answers = {}
    bed.later(700)
    bed.jobs.run_once()
    assert bed.handles() == {"free": 16}


def test_work_that_hangs_is_looked_at_seldom_and_given_up(bed: Conductors) -> None:
    bed.bind(bed.card())
    bed.workers.answers["prepare"] = "running"
    bed.jobs.run_once()
    assert bed.jobs.run_once() == 0
    bed.later(16)
    assert bed.jobs.run_once() == 1
    assert bed.states() == {"BindStarted": 1}
    bed.later(bed.conf.conductor.prepare_timeout)
    bed.workers.answers["release"] = "running"
    bed.jobs.run_once()
    assert bed.states() == {"BindFailed": 1}
    assert bed.handles()["dirty"] == 1
    assert bed.open_jobs() == ["release"]


def test_work_that_ended_well_is_not_undone_however_late(light: Conductors) -> None:
    light.bind(light.card())
    light.later(10 * light.conf.conductor.prepare_timeout)
    light.jobs.run_once()
    assert light.states() == {"Bound": 1}


def test_the_agents_word_settles_a_job_at_once(bed: Conductors) -> None:
    card = bed.card()
    bed.bind(card)
    bed.workers.answers["prepare"] = "running"
    bed.jobs.run_once()
    uuid = bed.workers.asked[0]["job"]
    with pytest.raises(NotFound):
        bed.jobs.done(uuid, "compute-9", "done", None)
    assert bed.states() == {"BindStarted": 1}
    bed.jobs.done(uuid, card.host, "done", None)
    assert bed.states() == {"Bound": 1}
    # A late or repeated word changes nothing.
    bed.jobs.done(uuid, card.host, "failed", "no, it failed")
    assert bed.states() == {"Bound": 1}
    assert bed.events() == ["completed"]


def test_what_is_no_state_is_refused(light: Conductors) -> None:
    with pytest.raises(Invalid, match="state"):
        light.jobs.done("6e21dbd6-6bd6-4a3a-8bb6-1ef8b2a0c1d1", "compute-1", "half", None)


def test_a_job_passes_to_another_conductor_when_its_lease_ends(bed: Conductors) -> None:
    bed.bind(bed.card())
    with bed.engine.begin() as tx:  # one that leased the job and died
        tx.execute(
            sa.update(schema.jobs).values(
                owner="dead", lease_until=bed.time, next_try_at=bed.time, attempts=1
            )
        )
    other = bed.another()
    bed.later(-1)
    assert other.run_once() == 0
    bed.later(2)
    assert other.run_once() == 1
    assert bed.states() == {"Bound": 1}


@pytest.mark.parametrize("way", ["unbind", "delete", "delete by instance"])
def test_a_bind_in_progress_is_cancelled(bed: Conductors, way: str) -> None:
    first, second = bed.make(), bed.make()
    instance = bed.bind(bed.card(), first, second)
    bed.workers.answers["prepare"] = "running"
    bed.jobs.run_once()
    (prepare,) = bed.workers.asked
    match way:
        case "unbind":
            bed.requests.patch([{"request": first}], "unbind", None)
            # All or nothing for an instance: the other one cannot stay.
            assert bed.states() == {"Unbound": 1, "BindFailed": 1}
            assert bed.events() == ["failed"]
        case "delete":
            bed.requests.delete([first], None, None, bound_too=True)
            assert bed.states() == {"BindFailed": 1}
        case _:
            bed.requests.delete(None, instance, None, bound_too=True)
            assert bed.states() == {}
            assert bed.events() == []
    assert bed.handles() == {"dirty": 2, "free": 14}
    assert bed.open_jobs() == ["release"]
    bed.jobs.run_once()
    assert bed.workers.asked[-1]["cancels"] == [prepare["job"]]
    assert bed.handles() == {"free": 16}
    # The agent's late word finds the job cancelled.
    bed.jobs.done(prepare["job"], "compute-1", "done", None)
    assert bed.handles() == {"free": 16}


def test_a_prepared_handle_is_cleaned_before_anybody_gets_it(bed: Conductors) -> None:
    card = bed.card(handles=1)
    instance = bed.bind(card)
    bed.jobs.run_once()
    bed.requests.delete(None, instance, None, bound_too=True)
    assert bed.handles() == {"dirty": 1}
    with pytest.raises(NoHandle, match="being cleaned"):
        bed.bind(card)
    bed.jobs.run_once()
    bed.bind(card)
    assert bed.handles() == {"owned": 1}


def test_a_handle_that_cannot_be_cleaned_is_reserved_in_placement(light: Conductors) -> None:
    card = light.card(handles=2)
    instance = light.bind(card)
    light.jobs.run_once()
    light.requests.delete(None, instance, None, bound_too=True)
    light.workers.answers["release"] = "failed"

    def provider() -> tuple[int, int]:
        from cyborg.conductor import rendering
        from cyborg.db.store import deployables

        with light.engine.connect() as connection:
            found = rendering.wanted("root", deployables.desired(connection, [card.provider]))
        (inventory,) = found[card.provider].inventories.values()
        return inventory.total, inventory.reserved

    assert provider() == (2, 0)
    light.jobs.run_once()
    assert provider() == (2, 1)
    (row,) = rows.read(light.engine, schema.providers)
    assert row["stale_since"] == light.time
    light.workers.answers = {}
    light.later(60)
    light.jobs.run_once()
    assert provider() == (2, 0)
    assert rows.read(light.engine, schema.providers)[0]["revision"] == row["revision"] + 1


def test_a_host_whose_agent_is_down_is_refused_in_the_call(light: Conductors) -> None:
    card = light.card()
    light.later(3600)
    with pytest.raises(NoHandle, match="agent of host compute-1 is down"):
        light.bind(card)
    assert light.states() == {"Initial": 1}
    assert light.handles() == {"free": 16}


def test_the_sweep_finishes_what_nobody_sees_to(bed: Conductors) -> None:
    card = bed.card()
    bed.bind(card)
    with bed.engine.begin() as tx:  # as a restored database may have it
        tx.execute(sa.update(schema.jobs).values(state="done"))
    assert bed.jobs.sweep() == 1
    assert bed.states() == {"BindFailed": 1}
    assert bed.events() == ["failed"]
    assert bed.open_jobs() == ["release"]
    bed.jobs.run_once()
    assert bed.handles() == {"free": 16}
    with bed.engine.begin() as tx:
        tx.execute(
            sa.update(schema.attach_handles)
            .where(schema.attach_handles.c.id < 4)
            .values(prepared=True)
        )
    bed.jobs.sweep()
    bed.jobs.run_once()
    assert bed.handles() == {"free": 16}
    bed.later(90000)
    assert bed.jobs.sweep() > 0
    assert rows.read(bed.engine, schema.jobs) == []
    assert bed.jobs.sweep() == 0


def test_an_agent_that_refuses_a_job_ends_it(light: Conductors) -> None:
    light.bind(light.card())
    light.workers.refuse = NotFound("no backend fake")
    light.jobs.run_once()
    assert light.states() == {"BindFailed": 1}
    assert light.handles()["dirty"] == 1


@pytest.mark.parametrize("odd", ["\udcff", "nul\0", "x" * 5000, 7])
def test_odd_words_of_a_driver_keep_no_job_open(bed: Conductors, odd: Any) -> None:
    bed.bind(bed.card())
    bed.workers.job = lambda *asked: {"state": "failed", "error": odd}  # type: ignore[method-assign]
    bed.jobs.run_once()
    assert bed.states() == {"BindFailed": 1}
    assert bed.events() == ["failed"]


@pytest.mark.parametrize("answer", [None, [], "done", 7])
def test_an_answer_that_is_no_object_is_a_failure(light: Conductors, answer: Any) -> None:
    light.bind(light.card())
    light.workers.job = lambda *asked: answer  # type: ignore[method-assign]
    light.jobs.run_once()
    assert light.states() == {"BindFailed": 1}


def test_an_instance_with_a_device_that_needs_no_work(bed: Conductors) -> None:
    working = bed.card(handles=1)
    plain = bed.card(address="0000:02:00.0", handles=1, abilities=[])
    first, second, instance = bed.make(), bed.make(), str(uuid4())
    wishes = [
        {
            "request": request,
            "hostname": card.host,
            "device_rp_uuid": card.provider,
            "instance_uuid": instance,
        }
        for request, card in ((first, working), (second, plain))
    ]
    bed.requests.patch(wishes, "bind", None)
    assert bed.states() == {"BindStarted": 2}
    bed.jobs.run_once()
    (asked,) = bed.workers.asked
    assert [item["device"] for item in asked["items"]] == ["0000:01:00.0"]
    assert bed.states() == {"Bound": 2}
    bed.requests.delete(None, instance, None, bound_too=True)
    assert bed.handles() == {"dirty": 1, "free": 1}
    bed.jobs.run_once()
    assert len(bed.workers.asked[-1]["items"]) == 1
    assert bed.handles() == {"free": 2}


def test_a_job_that_nobody_can_read_is_given_up(bed: Conductors) -> None:
    bed.bind(bed.card())
    with bed.engine.begin() as tx:
        tx.execute(sa.update(schema.jobs).values(kind="levitate"))
    bed.jobs.run_once()
    assert bed.states() == {"BindStarted": 1}
    bed.later(bed.conf.conductor.prepare_timeout + 301)
    bed.jobs.sweep()
    assert bed.states() == {"BindFailed": 1}
    assert bed.events() == ["failed"]
    assert bed.open_jobs() == ["release"]


def test_many_handles_are_cleaned_by_several_jobs(light: Conductors) -> None:
    card = light.card(handles=100)
    instance = light.bind(card, *(light.make() for _ in range(100)))
    light.jobs.run_once()
    light.requests.delete(None, instance, None, bound_too=True)
    assert light.open_jobs() == ["release"] * 2
    light.jobs.run_once()
    assert light.handles() == {"free": 100}


def test_a_silent_host_does_not_hold_up_another(light: Conductors) -> None:
    dead, alive = light.card(host="dead"), light.card(host="alive")
    end = threading.Event()
    ask = light.workers.job

    def job(host: str, *rest: Any) -> Any:
        if host == "dead":
            end.wait(30)
            raise TimedOut("no answer")
        return ask(host, *rest)

    light.workers.job = job  # type: ignore[method-assign]
    try:
        for _ in range(6):
            light.bind(dead)
        light.jobs.run_once()
        light.bind(alive)
        light.jobs.run_once()
        assert light.states() == {"BindStarted": 6, "Bound": 1}
    finally:
        end.set()
    for thread in threading.enumerate():
        if thread.name == "job":
            thread.join(20)


def test_many_binds_of_one_host_are_begun_at_once(light: Conductors) -> None:
    cards = [light.card(address=f"0000:{n:02x}:00.0", handles=4) for n in range(16)]
    light.jobs = Jobs(light.conf, light.uow, light.workers, now=light.now)
    for card in cards:
        light.bind(card)
    assert light.jobs.run_once() == 16
    assert light.states() == {"Bound": 16}

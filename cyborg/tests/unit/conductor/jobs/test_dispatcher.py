# SPDX-License-Identifier: Apache-2.0
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.jobs.answers import POLL_INTERVAL
from cyborg.conductor.jobs.dispatcher import JobDispatcher
from cyborg.core.errors import Invalid, NoHandle, NotFound, Stale, TimedOut
from cyborg.core.hosts import RESULT_EPOCHS
from cyborg.db import schema
from cyborg.telemetry.recorder import BIND_SECONDS, BINDS, MetricRecorder
from cyborg.telemetry.server import MemoryValues
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.host_work import UNREACHABLE, JobsEnv


@pytest.fixture
def env(engine: sa.Engine) -> JobsEnv:
    return JobsEnv(engine)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> JobsEnv:
    return JobsEnv(sqlite_engine)


def test_successful_prepare_job_binds_the_requests(env: JobsEnv) -> None:
    card = env.add_card()
    uuids = [env.add_arq(), env.add_arq()]
    instance = env.bind(card, *uuids)
    assert env.states() == {"BindStarted": 2}
    assert env.handles() == {"owned": 2, "free": 14}
    assert env.events() == []
    assert env.jobs.run_once() == 1
    (call,) = env.agents.calls
    assert (call["host"], call["kind"], call["instance"]) == (card.host, "prepare", instance)
    assert len({item["handle"] for item in call["items"]}) == 2
    assert {item["backend"] for item in call["items"]} == {"fake"}
    assert env.states() == {"Bound": 2}
    assert env.events() == ["completed"] * 2
    assert env.open_jobs() == []
    assert env.results[-1].events == 2
    env.bind(card, *uuids, instance=instance)
    assert env.jobs.run_once() == 0


def test_repeated_bind_during_its_job_changes_nothing(env: JobsEnv) -> None:
    card, uuid = env.add_card(), env.add_arq()
    instance = env.bind(card, uuid)
    env.bind(card, uuid, instance=instance)
    assert env.open_jobs() == ["prepare"]
    assert env.handles()["owned"] == 1


def test_failed_prepare_job_is_undone_and_notifies_nova(env: JobsEnv) -> None:
    card = env.add_card()
    env.bind(card, env.add_arq(), env.add_arq())
    env.agents.answers["prepare"] = "failed"
    env.jobs.run_once()
    assert env.states() == {"BindFailed": 2}
    assert env.events() == ["failed"] * 2
    # The loop runs until no job is due, and the release job is due at once.
    assert env.agents.kinds() == ["prepare", "release"]
    prepare, release = env.agents.calls
    assert release["cancels"] == [prepare["job"]]
    assert {item["handle"] for item in release["items"]} == {
        item["handle"] for item in prepare["items"]
    }
    assert env.handles() == {"free": 16}
    (failed, done) = rows.read(env.engine, schema.jobs)
    assert (failed["state"], failed["error"], done["state"]) == ("failed", "it broke", "done")


@pytest.mark.slow
def test_unreachable_agent_is_queried_until_the_deadline(env: JobsEnv) -> None:
    env.bind(env.add_card())
    env.agents.answers = {"prepare": UNREACHABLE, "release": UNREACHABLE}
    for _ in range(100):
        env.jobs.run_once()
        env.advance(5)
        if env.states() == {"BindFailed": 1}:
            break
    attempts = env.agents.kinds().count("prepare")
    assert 20 < attempts < 60
    assert env.conf.conductor.prepare_timeout <= 5 * 49
    assert env.events() == ["failed"]
    assert env.handles() == {"dirty": 1, "free": 15}
    env.agents.answers = {}
    env.advance(700)
    env.jobs.run_once()
    assert env.handles() == {"free": 16}


def test_hanging_job_is_polled_and_fails_at_its_deadline(env: JobsEnv) -> None:
    env.bind(env.add_card())
    env.agents.answers["prepare"] = "running"
    env.jobs.run_once()
    assert env.jobs.run_once() == 0
    env.advance(16)
    assert env.jobs.run_once() == 1
    assert env.states() == {"BindStarted": 1}
    env.advance(env.conf.conductor.prepare_timeout)
    env.agents.answers["release"] = "running"
    env.jobs.run_once()
    assert env.states() == {"BindFailed": 1}
    assert env.handles()["dirty"] == 1
    assert env.open_jobs() == ["release"]


def test_activity_of_a_running_job_is_stored_without_a_statement_of_its_own(env: JobsEnv) -> None:
    env.bind(env.add_card())
    env.agents.answers["prepare"] = "running"
    counts, stored = [], []
    fetch = {"step": "fetch image", "done": 4, "total": 10}
    # An older agent shows nothing; a malformed activity is ignored.
    for activity in (None, fetch, {"step": 1}, fetch):
        env.agents.activity = activity
        with count_statements(env.engine) as count:
            assert env.jobs.run_once() == 1
        counts.append(len(count))
        stored += [row["activity"] for row in rows.read(env.engine, schema.jobs)]
        env.advance(POLL_INTERVAL + 1)
    assert stored == [None, fetch, None, fetch]
    assert len(set(counts)) == 1, counts
    env.agents.answers["prepare"] = UNREACHABLE
    env.jobs.run_once()
    assert [row["activity"] for row in rows.read(env.engine, schema.jobs)] == [None]


def test_late_success_is_accepted(sqlite_env: JobsEnv) -> None:
    sqlite_env.bind(sqlite_env.add_card())
    sqlite_env.advance(10 * sqlite_env.conf.conductor.prepare_timeout)
    sqlite_env.jobs.run_once()
    assert sqlite_env.states() == {"Bound": 1}


def test_complete_ends_a_job_once(env: JobsEnv) -> None:
    card = env.add_card()
    env.bind(card)
    env.agents.answers["prepare"] = "running"
    env.jobs.run_once()
    uuid = env.agents.calls[0]["job"]
    with pytest.raises(NotFound):
        env.jobs.complete(uuid, "compute-9", "done", None)
    assert env.states() == {"BindStarted": 1}
    env.jobs.complete(uuid, card.host, "done", None)
    assert env.states() == {"Bound": 1}
    # A late or repeated result changes nothing.
    env.jobs.complete(uuid, card.host, "failed", "no, it failed")
    assert env.states() == {"Bound": 1}
    assert env.events() == ["completed"]


def test_complete_with_another_epoch_cleans_no_handle(
    env: JobsEnv, caplog: pytest.LogCaptureFixture
) -> None:
    """A former process of the agent, or another host, does not end a release job."""
    card = env.add_card()
    env.bind(card)
    env.agents.answers["prepare"] = "failed"
    env.agents.answers["release"] = "running"
    env.jobs.run_once()
    uuid = env.agents.calls[-1]["job"]
    (agent,) = rows.read(env.engine, schema.services, host=card.host)
    rows.update(env.engine, schema.services, agent["id"], versions={RESULT_EPOCHS: True})
    for epoch in (str(uuid4()), None):
        with pytest.raises(Stale, match=f"epoch .*for host {card.host}"):
            env.jobs.complete(uuid, card.host, "done", None, epoch)
    assert env.open_jobs() == ["release"]
    assert env.handles() == {"dirty": 1, "free": 15}
    caplog.set_level("INFO")
    env.jobs.complete(uuid, card.host, "done", None, agent["epoch"])
    assert env.handles() == {"free": 16}
    assert "ignored" not in caplog.text
    env.jobs.complete(uuid, card.host, "done", None, agent["epoch"])
    assert "Result done ignored, because the job has ended" in caplog.text


def test_complete_with_an_unknown_state_is_refused(sqlite_env: JobsEnv) -> None:
    with pytest.raises(Invalid, match="state"):
        sqlite_env.jobs.complete("6e21dbd6-6bd6-4a3a-8bb6-1ef8b2a0c1d1", "compute-1", "half", None)


def test_job_with_expired_lease_is_taken_over(env: JobsEnv) -> None:
    env.bind(env.add_card())
    with env.engine.begin() as tx:  # as left by a conductor that died with the lease
        tx.execute(
            sa.update(schema.jobs).values(
                owner="dead", lease_until=env.time, next_try_at=env.time, attempts=1
            )
        )
    other = env.new_dispatcher()
    env.advance(-1)
    assert other.run_once() == 0
    env.advance(2)
    assert other.run_once() == 1
    assert env.states() == {"Bound": 1}


@pytest.mark.parametrize("operation", ["unbind", "delete", "delete by instance"])
def test_unbind_or_delete_cancels_a_bind_in_progress(env: JobsEnv, operation: str) -> None:
    first, second = env.add_arq(), env.add_arq()
    instance = env.bind(env.add_card(), first, second)
    env.agents.answers["prepare"] = "running"
    env.jobs.run_once()
    (prepare,) = env.agents.calls
    match operation:
        case "unbind":
            env.arqs.unbind([{"request": first}], None)
            # An instance has all of its requests or none: the other bind fails too.
            assert env.states() == {"Unbound": 1, "BindFailed": 1}
            assert env.events() == ["failed"]
        case "delete":
            env.arqs.delete([first], None, None, allow_bound=True)
            assert env.states() == {"BindFailed": 1}
        case _:
            env.arqs.delete(None, instance, None, allow_bound=True)
            assert env.states() == {}
            assert env.events() == []
    assert env.handles() == {"dirty": 2, "free": 14}
    assert env.open_jobs() == ["release"]
    env.jobs.run_once()
    assert env.agents.calls[-1]["cancels"] == [prepare["job"]]
    assert env.handles() == {"free": 16}
    # The agent's late result is ignored: the job is cancelled.
    env.jobs.complete(prepare["job"], "compute-1", "done", None)
    assert env.handles() == {"free": 16}


def test_prepared_handle_is_cleaned_before_reuse(env: JobsEnv) -> None:
    card = env.add_card(handles=1)
    instance = env.bind(card)
    env.jobs.run_once()
    env.arqs.delete(None, instance, None, allow_bound=True)
    assert env.handles() == {"dirty": 1}
    with pytest.raises(NoHandle, match="being cleaned"):
        env.bind(card)
    env.jobs.run_once()
    env.bind(card)
    assert env.handles() == {"owned": 1}


def test_handle_whose_cleaning_fails_is_reserved_in_placement(sqlite_env: JobsEnv) -> None:
    card = sqlite_env.add_card(handles=2)
    instance = sqlite_env.bind(card)
    sqlite_env.jobs.run_once()
    sqlite_env.arqs.delete(None, instance, None, allow_bound=True)
    sqlite_env.agents.answers["release"] = "failed"

    def provider() -> tuple[int, int]:
        from cyborg.conductor.placement import reconciler
        from cyborg.db.deployables import write as deployables

        with sqlite_env.engine.connect() as connection:
            providers = reconciler.desired_providers(
                "root", deployables.desired_state(connection, [card.provider])
            )
        (inventory,) = providers[card.provider].inventories.values()
        return inventory.total, inventory.reserved

    assert provider() == (2, 0)
    sqlite_env.jobs.run_once()
    assert provider() == (2, 1)
    (row,) = rows.read(sqlite_env.engine, schema.providers)
    assert row["stale_since"] == sqlite_env.time
    sqlite_env.agents.answers = {}
    sqlite_env.advance(60)
    sqlite_env.jobs.run_once()
    assert provider() == (2, 0)
    assert rows.read(sqlite_env.engine, schema.providers)[0]["revision"] == row["revision"] + 1


def test_bind_on_a_host_with_a_down_agent_is_refused(sqlite_env: JobsEnv) -> None:
    card = sqlite_env.add_card()
    sqlite_env.mark_agents_down()
    with pytest.raises(NoHandle, match="agent of host compute-1 is down"):
        sqlite_env.bind(card)
    assert sqlite_env.states() == {"Initial": 1}
    assert sqlite_env.handles() == {"free": 16}


def test_bind_after_an_outage_of_the_conductors_is_prepared(env: JobsEnv) -> None:
    """The deadlines of all agents have passed; no agent is marked down, nor its host cordoned."""
    card = env.add_card()
    env.advance(3600)
    env.bind(card)
    assert env.states() == {"BindStarted": 1}
    env.jobs.run_once()
    assert env.agents.kinds() == ["prepare"]
    assert env.states() == {"Bound": 1}


def test_sweep_repairs_objects_without_an_open_job(env: JobsEnv) -> None:
    card = env.add_card()
    env.bind(card)
    with env.engine.begin() as tx:  # as in a restored database
        tx.execute(sa.update(schema.jobs).values(state="done"))
    assert env.jobs.sweep() == 1
    assert env.states() == {"BindFailed": 1}
    assert env.events() == ["failed"]
    assert env.open_jobs() == ["release"]
    env.jobs.run_once()
    assert env.handles() == {"free": 16}
    with env.engine.begin() as tx:
        tx.execute(
            sa.update(schema.attach_handles)
            .where(schema.attach_handles.c.id < 4)
            .values(needs_cleaning=True)
        )
    env.jobs.sweep()
    env.jobs.run_once()
    assert env.handles() == {"free": 16}
    env.advance(90000)
    assert env.jobs.sweep() > 0
    assert rows.read(env.engine, schema.jobs) == []
    assert env.jobs.sweep() == 0


def test_job_refused_by_the_agent_fails(sqlite_env: JobsEnv) -> None:
    sqlite_env.bind(sqlite_env.add_card())
    sqlite_env.agents.error = NotFound("no backend fake")
    sqlite_env.jobs.run_once()
    assert sqlite_env.states() == {"BindFailed": 1}
    assert sqlite_env.handles()["dirty"] == 1


@pytest.mark.parametrize("malformed", ["\udcff", "nul\0", "x" * 5000, 7])
def test_job_with_malformed_error_text_fails(env: JobsEnv, malformed: Any) -> None:
    env.bind(env.add_card())
    env.agents.job = lambda *args: {"state": "failed", "error": malformed}  # type: ignore[method-assign]
    env.jobs.run_once()
    assert env.states() == {"BindFailed": 1}
    assert env.events() == ["failed"]


@pytest.mark.parametrize("answer", [None, [], "done", 7])
def test_malformed_answer_of_the_agent_fails_the_job(sqlite_env: JobsEnv, answer: Any) -> None:
    sqlite_env.bind(sqlite_env.add_card())
    sqlite_env.agents.job = lambda *args: answer  # type: ignore[method-assign]
    sqlite_env.jobs.run_once()
    assert sqlite_env.states() == {"BindFailed": 1}


def test_bind_with_a_device_without_host_work_prepares_only_the_other(env: JobsEnv) -> None:
    with_work = env.add_card(handles=1)
    without_work = env.add_card(address="0000:02:00.0", handles=1, abilities=[])
    first, second, instance = env.add_arq(), env.add_arq(), str(uuid4())
    bind_requests = [
        {
            "request": request,
            "hostname": card.host,
            "device_rp_uuid": card.provider,
            "instance_uuid": instance,
        }
        for request, card in ((first, with_work), (second, without_work))
    ]
    env.arqs.bind(bind_requests, None)
    assert env.states() == {"BindStarted": 2}
    env.jobs.run_once()
    (call,) = env.agents.calls
    assert [item["device"] for item in call["items"]] == ["0000:01:00.0"]
    assert env.states() == {"Bound": 2}
    env.arqs.delete(None, instance, None, allow_bound=True)
    assert env.handles() == {"dirty": 1, "free": 1}
    env.jobs.run_once()
    assert len(env.agents.calls[-1]["items"]) == 1
    assert env.handles() == {"free": 2}


def test_unreadable_job_is_failed_by_the_sweep(env: JobsEnv) -> None:
    env.bind(env.add_card())
    with env.engine.begin() as tx:
        tx.execute(sa.update(schema.jobs).values(kind="levitate"))
    env.jobs.run_once()
    assert env.states() == {"BindStarted": 1}
    env.advance(env.conf.conductor.prepare_timeout + 301)
    env.jobs.sweep()
    assert env.states() == {"BindFailed": 1}
    assert env.events() == ["failed"]
    assert env.open_jobs() == ["release"]


def test_release_of_many_handles_enqueues_several_jobs(sqlite_env: JobsEnv) -> None:
    card = sqlite_env.add_card(handles=100)
    instance = sqlite_env.bind(card, *(sqlite_env.add_arq() for _ in range(100)))
    sqlite_env.jobs.run_once()
    sqlite_env.arqs.delete(None, instance, None, allow_bound=True)
    assert sqlite_env.open_jobs() == ["release"] * 2
    sqlite_env.jobs.run_once()
    assert sqlite_env.handles() == {"free": 100}


@pytest.mark.slow
def test_unreachable_host_does_not_delay_others(
    sqlite_env: JobsEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable_card, up_card = sqlite_env.add_card(host="dead"), sqlite_env.add_card(host="alive")
    release = threading.Event()
    call_agent = sqlite_env.agents.job

    def job(host: str, *args: Any) -> Any:
        if host == "dead":
            release.wait(30)
            raise TimedOut("no answer")
        return call_agent(host, *args)

    monkeypatch.setattr(sqlite_env.agents, "job", job)
    try:
        for _ in range(6):
            sqlite_env.bind(unreachable_card)
        sqlite_env.jobs.run_once()
        sqlite_env.bind(up_card)
        sqlite_env.jobs.run_once()
        assert sqlite_env.states() == {"BindStarted": 6, "Bound": 1}
    finally:
        release.set()
    for thread in threading.enumerate():
        if thread.name == "job":
            thread.join(120)


def test_jobs_of_one_host_run_in_one_round(sqlite_env: JobsEnv) -> None:
    cards = [sqlite_env.add_card(address=f"0000:{n:02x}:00.0", handles=4) for n in range(16)]
    sqlite_env.jobs = build(
        JobDispatcher,
        sqlite_env.conf,
        sqlite_env.uow,
        sqlite_env.agents,
        now=sqlite_env.now,
    )
    for card in cards:
        sqlite_env.bind(card)
    assert sqlite_env.jobs.run_once() == 16
    assert sqlite_env.states() == {"Bound": 16}


def counted_binds(store: MemoryValues) -> dict[str, float]:
    samples = store.read().samples
    return {key[1]: values[0] for key, values in samples.items() if key[0] == BINDS.name}


def test_binds_that_a_sweep_ends_are_counted_once_by_two_conductors(env: JobsEnv) -> None:
    recorder, counts = MetricRecorder(), MemoryValues()
    recorder.open(counts)
    dispatchers = [env.new_dispatcher(recorder) for _ in range(2)]
    card = env.add_card()
    env.bind(card, env.add_arq(), env.add_arq())
    env.bind(card)
    with env.engine.begin() as tx:
        tx.execute(sa.update(schema.jobs).values(kind="levitate"))
    env.advance(env.conf.conductor.prepare_timeout + 301)
    with ThreadPoolExecutor(len(dispatchers)) as pool:
        list(pool.map(lambda dispatcher: dispatcher.sweep(), dispatchers))
    assert env.states() == {"BindFailed": 3}
    assert counted_binds(counts) == {"prepare_failed": 2}


def test_bind_with_host_work_is_counted_at_the_end_of_its_job(sqlite_env: JobsEnv) -> None:
    recorder, counts = MetricRecorder(), MemoryValues()
    recorder.open(counts)
    dispatcher = sqlite_env.new_dispatcher(recorder)
    card = sqlite_env.add_card()
    sqlite_env.bind(card, sqlite_env.add_arq(), sqlite_env.add_arq())
    dispatcher.run_once()
    assert counted_binds(counts) == {"bound": 1}
    sqlite_env.bind(card)
    sqlite_env.agents.answers["prepare"] = "failed"
    dispatcher.run_once()
    assert counted_binds(counts) == {"bound": 1, "prepare_failed": 1}
    # The values of a histogram are the numbers of observations, and the sum of these.
    assert sum(counts.read().samples[BIND_SECONDS.name, "prepare"][:-1]) == 2


def test_prepare_job_without_a_bind_is_not_counted(sqlite_env: JobsEnv) -> None:
    recorder, counts = MetricRecorder(), MemoryValues()
    recorder.open(counts)
    dispatcher = sqlite_env.new_dispatcher(recorder)
    sqlite_env.bind(sqlite_env.add_card())
    with sqlite_env.engine.begin() as tx:
        tx.execute(sa.update(schema.arqs).values(job_id=None))
    dispatcher.run_once()
    (job,) = rows.read(sqlite_env.engine, schema.jobs, kind="prepare")
    assert job["state"] == "done"
    assert counted_binds(counts) == {}
    assert (BIND_SECONDS.name, "prepare") not in counts.read().samples

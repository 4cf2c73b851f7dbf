# SPDX-License-Identifier: Apache-2.0
"""ARQs whose host cannot clean the released handle before its deadline."""

from datetime import timedelta

import pytest
import sqlalchemy as sa

from cyborg.core.audit.compare import compare_arqs
from cyborg.core.audit.sources import HostSnapshot
from cyborg.core.errors import WrongState
from cyborg.db import schema
from cyborg.db.audits import read as audit_sources
from cyborg.db.binding import accelerators
from cyborg.db.deployables import write as deployables
from cyborg.db.devices import read as devices
from cyborg.db.orphans import write as orphans
from cyborg.rpc.notifications import GROUP
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.host_work import UNREACHABLE, JobsEnv


class UnbindEnv(JobsEnv):
    """An ARQ with a handle that the host must clean."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine)
        self.card = self.add_card(handles=2, abilities=["sanitises"])
        self.arq = self.add_arq()
        self.bind(self.card, self.arq)

    def enable_notifications(self) -> None:
        self.conf.set_override("driver", ["log"], GROUP)
        self.jobs = self.new_dispatcher()

    def unbind(self) -> None:
        self.arqs.unbind([{"request": self.arq}], None)

    def pass_deadline(self) -> None:
        """Let the dispatcher process the release job at its deadline."""
        self.jobs.run_once()
        self.advance(self.conf.conductor.release_timeout)
        self.jobs.run_once()

    def notices(self) -> list[tuple[str, str, str | None]]:
        """Return event type, state and error of the notifications about the unbind."""
        payloads = [
            r["payload"] for r in rows.read(self.engine, schema.outbox, kind="notification")
        ]
        return [
            (p["event_type"], p["payload"]["data"]["state"], p["payload"]["data"]["error"])
            for p in payloads
            if ".unbind." in p["event_type"]
        ]


@pytest.fixture
def env(engine: sa.Engine) -> UnbindEnv:
    return UnbindEnv(engine)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> UnbindEnv:
    return UnbindEnv(sqlite_engine)


def test_state_is_entered_at_the_deadline_and_left_when_the_handle_is_clean(env: UnbindEnv) -> None:
    env.enable_notifications()
    env.agents.answers["release"] = "failed"
    env.unbind()
    env.jobs.run_once()
    assert env.states() == {"Unbound": 1}, "the deadline has not passed"
    env.advance(env.conf.conductor.release_timeout - 1)
    env.jobs.run_once()
    assert env.states() == {"Unbound": 1}
    env.advance(1)
    env.jobs.run_once()
    assert env.states() == {"UnbindFailed": 1}
    assert env.handles() == {"dirty": 1, "free": 1}
    env.advance(700)
    env.jobs.run_once()
    failed = ("accelerator_request.unbind.error", "UnbindFailed", "host compute-1: it broke")
    assert env.notices() == [failed], "a repeated failure is not notified again"
    env.agents.answers = {}
    env.advance(700)
    env.jobs.run_once()
    assert env.states() == {"Unbound": 1}
    assert env.handles() == {"free": 2}
    assert env.notices() == [failed, ("accelerator_request.unbind.end", "Unbound", None)]
    (arq,) = rows.read(env.engine, schema.arqs)
    assert arq["job_id"] is None
    env.bind(env.card, env.arq)
    assert env.states() == {"Bound": 1}


@pytest.mark.parametrize(
    ("answer", "error"),
    [("failed", "it broke"), ("running", "not completed in time"), (UNREACHABLE, "is away")],
)
def test_each_reason_enters_the_state(sqlite_env: UnbindEnv, answer: str, error: str) -> None:
    env = sqlite_env
    env.agents.answers["release"] = answer
    env.unbind()
    env.pass_deadline()
    assert env.states() == {"UnbindFailed": 1}
    (job,) = rows.read(env.engine, schema.jobs, kind="release")
    assert job["state"] == "pending"
    assert error in job["error"]


def test_cleaning_in_time_never_enters_the_state(sqlite_env: UnbindEnv) -> None:
    env = sqlite_env
    env.enable_notifications()
    env.unbind()
    env.pass_deadline()
    assert env.states() == {"Unbound": 1}
    (arq,) = rows.read(env.engine, schema.arqs)
    assert arq["job_id"] is None
    assert env.notices() == []


def test_agent_gets_the_whole_time_after_the_deadline(sqlite_env: UnbindEnv) -> None:
    """The rest of the time until the deadline would be too short for another attempt."""
    env = sqlite_env
    env.agents.answers["release"] = "failed"
    env.unbind()
    env.pass_deadline()
    assert {call["seconds"] for call in env.agents.calls} == {env.conf.conductor.prepare_timeout}


def test_failed_arq_cannot_be_bound_and_the_error_has_the_reason(sqlite_env: UnbindEnv) -> None:
    env = sqlite_env
    env.agents.answers["release"] = "failed"
    env.unbind()
    env.pass_deadline()
    (job,) = rows.read(env.engine, schema.jobs, kind="release")
    with pytest.raises(WrongState, match=f"UnbindFailed.*{job['uuid']}: it broke"):
        env.bind(env.card, env.arq)
    env.unbind()  # changes nothing
    assert env.states() == {"UnbindFailed": 1}
    assert env.open_jobs() == ["release"]


@pytest.mark.parametrize("failed", [False, True])
def test_deleted_arq_leaves_its_handle_reserved_until_it_is_clean(
    env: UnbindEnv, failed: bool
) -> None:
    env.agents.answers["release"] = "failed"
    env.unbind()
    if failed:
        env.pass_deadline()
    # The ARQ owns no handle: no service token is needed.
    env.arqs.delete([env.arq], None, None, allow_bound=False)
    assert env.states() == {}
    assert env.open_jobs() == ["release"], "the job goes on without the ARQ"
    assert env.handles() == {"dirty": 1, "free": 1}
    env.agents.answers = {}
    env.advance(700)
    env.jobs.run_once()
    assert env.handles() == {"free": 2}


def test_arq_of_a_deleted_instance_is_gone_at_once(sqlite_env: UnbindEnv) -> None:
    """Nova deletes by instance: the answer does not depend on the host."""
    env = sqlite_env
    env.agents.answers["release"] = "failed"
    instance = rows.read(env.engine, schema.arqs)[0]["instance_uuid"]
    for _ in range(2):
        env.arqs.delete(None, instance, None, allow_bound=True)
        env.pass_deadline()
        assert env.states() == {}
    assert env.handles() == {"dirty": 1, "free": 1}


def test_unbound_arq_can_be_bound_while_its_last_handle_is_cleaned(sqlite_env: UnbindEnv) -> None:
    env = sqlite_env
    env.agents.answers["release"] = "failed"
    env.unbind()
    env.bind(env.card, env.arq)
    env.pass_deadline()
    assert env.states() == {"Bound": 1}, "it does not wait for the first handle any more"
    env.agents.answers = {}
    env.advance(700)
    env.jobs.run_once()
    assert env.states() == {"Bound": 1}
    assert env.handles() == {"owned": 1, "free": 1}


def test_handle_and_device_show_the_error(sqlite_env: UnbindEnv) -> None:
    env = sqlite_env
    env.agents.answers["release"] = "failed"
    env.unbind()
    with env.engine.connect() as connection:
        assert [row["state"] for row in accelerators.find(connection)] == ["dirty", "free"]
    env.pass_deadline()
    (job,) = rows.read(env.engine, schema.jobs, kind="release")
    with env.engine.connect() as connection:
        states = [(row["state"], row["error"]) for row in accelerators.find(connection)]
        selected = accelerators.find(connection, states=["error"])
        (device,) = devices.find(connection)
        (desired,) = deployables.desired_state(connection, [env.card.provider])
    assert sorted(states, key=str) == [("error", "it broke"), ("free", None)]
    assert [row["error"] for row in selected] == ["it broke"]
    (text,) = device["job_errors"]
    assert text.endswith(f"release job {job['uuid']}: it broke")
    assert desired["stuck"] == 1, "one unit is reserved in Placement"


def test_running_cleaning_is_reserved_after_the_deadline(sqlite_env: UnbindEnv) -> None:
    env = sqlite_env
    env.agents.answers["release"] = "running"
    env.unbind()
    env.pass_deadline()
    with env.engine.connect() as connection:
        (desired,) = deployables.desired_state(connection, [env.card.provider])
    assert desired["stuck"] == 1, "one unit is reserved in Placement"


def test_arq_waits_for_the_next_job_of_its_handle(sqlite_env: UnbindEnv) -> None:
    """A job that ends without cleaning is replaced by the sweep, with its ARQs."""
    env = sqlite_env
    env.agents.answers["release"] = "failed"
    env.unbind()
    env.pass_deadline()
    (first,) = rows.read(env.engine, schema.jobs, kind="release")
    rows.update(env.engine, schema.jobs, first["id"], state="failed")
    env.jobs.sweep()
    assert env.states() == {"UnbindFailed": 1}
    assert env.open_jobs() == ["release"]
    env.agents.answers = {}
    env.jobs.run_once()
    assert env.states() == {"Unbound": 1}


def test_arq_of_a_removed_handle_is_unbound_by_the_sweep(sqlite_env: UnbindEnv) -> None:
    env = sqlite_env
    env.agents.answers["release"] = "failed"
    env.unbind()
    env.pass_deadline()
    (job,) = rows.read(env.engine, schema.jobs, kind="release")
    rows.update(env.engine, schema.jobs, job["id"], state="failed")
    for handle in rows.read(env.engine, schema.attach_handles):
        rows.update(
            env.engine, schema.attach_handles, handle["id"], needs_cleaning=False, job_id=None
        )
    assert env.jobs.sweep() == 1
    assert env.states() == {"Unbound": 1}
    assert env.jobs.sweep() == 0


def test_audit_has_no_finding(sqlite_env: UnbindEnv) -> None:
    """The state is no inconsistency: a job works on it."""
    env = sqlite_env
    env.agents.answers["release"] = "failed"
    env.unbind()
    env.pass_deadline()
    with env.engine.connect() as connection:
        database = audit_sources.read_snapshot(connection, env.card.host)
    (device,) = database.devices
    assert [handle.cleaning for handle in device.deployables[0].handles] == [True, False]
    snapshot = HostSnapshot(env.card.host, env.time + timedelta(days=1), database=database)
    assert list(compare_arqs(snapshot)) == []


def test_only_arqs_without_a_handle_expire(sqlite_env: UnbindEnv) -> None:
    env = sqlite_env
    env.agents.answers["release"] = "failed"
    env.unbind()
    env.pass_deadline()
    later = env.uow.clock().replace(year=2100)
    assert env.uow.run(lambda tx: orphans.delete_expired(tx, later, 10)) == 0
    assert env.states() == {"UnbindFailed": 1}

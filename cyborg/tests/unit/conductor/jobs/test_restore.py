# SPDX-License-Identifier: Apache-2.0
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.hosts.heartbeats import Hosts
from cyborg.conductor.jobs.programming import Partitions
from cyborg.conductor.placement import reconciler
from cyborg.core.errors import NoHandle
from cyborg.core.inventory import device_state
from cyborg.core.inventory.device import Ability, Layout
from cyborg.core.jobs.job import GIVE_UP_ATTEMPTS, JobState
from cyborg.db import schema
from cyborg.db.binding import accelerators
from cyborg.db.deployables import write as deployables
from cyborg.db.devices import read as devices
from cyborg.rpc.notifications import GROUP, is_enabled
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.host_work import UNREACHABLE, JobsEnv
from cyborg.tests.fixtures.hosts.hosts import Host, card


class RebootEnv(JobsEnv):
    """Jobs of a host that can reboot."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine)
        self.hosts = build(Hosts, self.conf, self.uow, now=self.now)
        self.card = self.add_card()
        self.agent = Host(self.card.host, boot_id=str(uuid4()))
        self.agent.hello(self.hosts)

    def restart_agent(self, boot_id: str | None) -> None:
        """Let a new agent process send its first heartbeat."""
        self.agent = replace(self.agent, epoch=str(uuid4()), boot_id=boot_id)
        self.agent.hello(self.hosts)

    def reboot(self) -> None:
        """Let the agent send its first heartbeat after a reboot of the host."""
        self.restart_agent(str(uuid4()))

    def bind_card(self, *uuids: str) -> str:
        """Bind ARQs of a new instance to the card, with their host work; return the instance."""
        instance = self.bind(self.card, *uuids)
        self.jobs.run_once()
        assert self.states()["BindStarted"] == 0
        self.agents.calls.clear()
        return instance


@pytest.fixture
def env(engine: sa.Engine) -> RebootEnv:
    return RebootEnv(engine)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> RebootEnv:
    return RebootEnv(sqlite_engine)


def test_bound_handles_are_prepared_again_after_a_reboot(env: RebootEnv) -> None:
    uuids = [env.add_arq(), env.add_arq()]
    instance = env.bind_card(*uuids)
    owners = {row["address"]: row["arq_id"] for row in rows.read(env.engine, schema.attach_handles)}
    bound_at = [row["updated_at"] for row in rows.read(env.engine, schema.arqs)]
    env.reboot()
    assert env.open_jobs() == ["restore"] * 2
    env.jobs.run_once()
    assert [call["instance"] for call in env.agents.calls] == [instance] * 2
    handles = {item["handle"] for call in env.agents.calls for item in call["items"]}
    assert handles == {address for address, owner in owners.items() if owner}
    assert env.open_jobs() == []
    assert env.states() == {"Bound": 2}
    arqs = rows.read(env.engine, schema.arqs)
    assert [row["job_id"] for row in arqs] == [None, None]
    assert [row["updated_at"] for row in arqs] == bound_at
    assert env.events() == ["completed"] * 2, "Nova does not wait for a restore"


def test_restart_of_the_agent_alone_restores_nothing(sqlite_env: RebootEnv) -> None:
    sqlite_env.bind_card()
    sqlite_env.restart_agent(sqlite_env.agent.boot_id)
    sqlite_env.restart_agent(None)  # an older agent
    assert sqlite_env.open_jobs() == []


def test_only_prepared_devices_are_restored(sqlite_env: RebootEnv) -> None:
    plain = sqlite_env.add_card(host="compute-2", abilities=[])
    agent = Host("compute-2", boot_id=str(uuid4()))
    agent.hello(sqlite_env.hosts)
    sqlite_env.bind(plain)
    assert sqlite_env.states() == {"Bound": 1}
    replace(agent, epoch=str(uuid4()), boot_id=str(uuid4())).hello(sqlite_env.hosts)
    assert sqlite_env.open_jobs() == []


LAYOUT: dict[str, Any] = {
    "layout": "2",
    "layouts": [{"name": str(n), "offers": {"FPGA": n}, "traits": []} for n in (1, 2)],
}


def add_partitioned(env: RebootEnv, **values: object) -> rows.Card:
    """Insert a card with two virtual functions, which its driver creates as a layout."""
    values = {"abilities": ["partitions"], **LAYOUT, **values}
    return env.add_card(address="0000:02:00.0", handles=2, **values)


def read_partitioned(env: RebootEnv) -> tuple[str | None, int, int | None]:
    """Return layout and number of handles of the card, and the job of its deployable."""
    (device,) = rows.read(env.engine, schema.devices, address="0000:02:00.0")
    (part,) = rows.read(env.engine, schema.deployables, device_id=device["id"])
    handles = rows.read(env.engine, schema.attach_handles, deployable_id=part["id"])
    return device["layout"], len([h for h in handles if not h["draining"]]), part["job_id"]


def report_partitioned(
    env: RebootEnv, layout: str, count: int, layouts: Sequence[dict[str, Any]] = ()
) -> None:
    """Let the agent report the card alone, with this layout and this number of handles."""
    facts = {"layout": layout, "layouts": tuple(map(Layout.from_dict, layouts))}
    device = card(2, count, abilities=frozenset({Ability.PARTITIONS}), **facts)
    parts = tuple(replace(part, resource_class="FPGA") for part in device.deployables)
    env.agent.send(env.hosts, replace(device, deployables=parts))


def test_layout_of_a_device_in_use_is_applied_again_after_a_reboot(env: RebootEnv) -> None:
    env.bind(add_partitioned(env))
    env.reboot()
    assert env.open_jobs() == ["partition"]
    report_partitioned(env, "1", 1)
    assert read_partitioned(env)[:2] == ("2", 2), "the report after the boot changes nothing"
    env.jobs.run_once()
    (call,) = (call for call in env.agents.calls if call["kind"] == "partition")
    assert (call["layout"], call["previous_layout"]) == ("2", None)
    report_partitioned(env, "2", 2)
    assert read_partitioned(env) == ("2", 2, None)
    assert env.states() == {"Bound": 1}


@pytest.mark.parametrize("answer", ["done", "failed"])
def test_layout_is_applied_before_the_handles_are_restored(env: RebootEnv, answer: str) -> None:
    env.bind(add_partitioned(env, abilities=["partitions", "prepares"]))
    env.bind_card()
    env.reboot()
    assert Counter(env.open_jobs()) == {"partition": 1, "restore": 2}
    env.agents.answers["partition"] = "running"
    for _ in range(2):
        env.agents.calls.clear()
        env.advance(20)
        env.jobs.run_once()
        assert set(env.agents.kinds()) <= {"partition", "restore"}
        restored = {c["items"][0]["device"] for c in env.agents.calls if c["kind"] == "restore"}
        assert "0000:02:00.0" not in restored, "its virtual functions do not exist yet"
    assert env.open_jobs() != ["partition"], "the restore waits"
    env.agents.answers["partition"] = answer
    env.advance(20)
    env.agents.calls.clear()
    env.jobs.run_once()
    env.jobs.run_once()
    assert env.agents.kinds() == ["partition", "restore"]
    assert env.open_jobs() == (["partition"] if answer == "failed" else [])


def test_device_that_drains_gets_its_old_layout_after_a_reboot(env: RebootEnv) -> None:
    """Its server still uses it, also after the reboot."""
    (arq, card_) = (env.add_arq(), add_partitioned(env))
    env.bind(card_, arq)
    (device,) = rows.read(env.engine, schema.devices, address="0000:02:00.0")
    drain = build(Partitions, env.conf, env.uow, now=env.now).start(device["uuid"], "1", True)[
        "uuid"
    ]
    env.reboot()
    assert env.open_jobs() == ["partition"] * 2
    env.jobs.run_once()
    assert [call["layout"] for call in env.agents.calls] == ["2"]
    (job,) = rows.read(env.engine, schema.jobs, state="pending")
    assert job["uuid"] == drain
    report_partitioned(env, "2", 2)
    assert read_partitioned(env) == ("2", 2, None)
    env.arqs.delete([arq], None, None, allow_bound=True)
    env.advance(20)
    env.jobs.run_once()
    assert env.open_jobs() == ["partition"], "without layouts, its kernel driver may be missing"
    report_partitioned(env, "2", 2, LAYOUT["layouts"])
    env.advance(20)
    env.jobs.run_once()
    env.jobs.run_once()
    assert [call["layout"] for call in env.agents.calls] == ["2", "1"]


def fail_layout(env: RebootEnv) -> None:
    """Bind the card, and let its layout fail after a reboot."""
    env.bind(add_partitioned(env))
    env.reboot()
    env.agents.answers["partition"] = "failed"
    env.jobs.run_once()
    assert read_partitioned(env)[:2] == ("2", 2)


def retry_layout(env: RebootEnv) -> None:
    """Let the layout fail until the job ends if it is impossible."""
    for _ in range(GIVE_UP_ATTEMPTS):
        env.advance(90)
        env.agent.hello(env.hosts)
        env.jobs.run_once()


def test_layout_that_does_not_exist_any_more_is_given_up(env: RebootEnv) -> None:
    """Another card is in the slot: what is bound is drained, and this is notified."""
    fail_layout(env)
    retry_layout(env)
    report_partitioned(env, "0", 0)
    env.jobs.run_once()
    assert env.open_jobs() == ["partition"], "without layouts, its kernel driver may be missing"
    report_partitioned(env, "0", 0, LAYOUT["layouts"][:1])
    env.advance(90)
    env.jobs.run_once()
    assert env.open_jobs() == []
    report_partitioned(env, "0", 0)
    assert read_partitioned(env) == ("0", 0, None)
    assert env.states() == {"Bound": 1}


def test_layout_of_a_device_that_is_gone_is_given_up(env: RebootEnv) -> None:
    fail_layout(env)
    env.agent.send(env.hosts)
    env.advance(90)
    env.jobs.run_once()
    assert env.open_jobs() == ["partition"], "it may appear some minutes after the boot"
    retry_layout(env)
    (agent,) = rows.read(env.engine, schema.services)
    assert agent["digest"] is None, "a report is requested: the last one may lack the device"
    env.agent.send(env.hosts)
    env.advance(90)
    env.jobs.run_once()
    assert env.open_jobs() == []
    env.agent.send(env.hosts)
    (device,) = rows.read(env.engine, schema.devices, address="0000:02:00.0")
    assert device["draining"]
    assert env.states() == {"Bound": 1}


def test_layout_of_a_backend_that_was_removed_is_given_up(sqlite_env: RebootEnv) -> None:
    env = sqlite_env
    fail_layout(env)
    retry_layout(env)
    env.agent = replace(env.agent, backends=())
    env.agent.send(env.hosts)
    env.advance(90)
    env.jobs.run_once()
    assert env.open_jobs() == []


@pytest.mark.parametrize(
    "values",
    [
        {"abilities": []},
        {"layout": None},
        {"layouts": []},
        {"layouts": LAYOUT["layouts"][1:]},
        {"abilities": ["sanitises"]},
    ],
)
def test_device_without_a_layout_is_not_partitioned_after_a_reboot(
    sqlite_env: RebootEnv, values: dict[str, object]
) -> None:
    sqlite_env.bind(add_partitioned(sqlite_env, **values))
    sqlite_env.reboot()
    assert sqlite_env.open_jobs() == []


def test_device_that_is_not_in_use_keeps_the_layout_after_a_reboot(sqlite_env: RebootEnv) -> None:
    add_partitioned(sqlite_env)
    sqlite_env.reboot()
    assert sqlite_env.open_jobs() == []


def test_device_that_is_being_partitioned_gets_no_second_job(sqlite_env: RebootEnv) -> None:
    sqlite_env.bind(add_partitioned(sqlite_env))
    sqlite_env.reboot()
    sqlite_env.reboot()
    assert sqlite_env.open_jobs() == ["partition"]


def restore_events(env: JobsEnv) -> list[str]:
    """Return the types of the notifications about restores."""
    notices = rows.read(env.engine, schema.outbox, kind="notification")
    types = [row["payload"]["event_type"] for row in notices]
    return [event for event in types if "restore" in event]


def test_answer_to_another_conductor_is_recorded_once(env: RebootEnv) -> None:
    """The agent reports to any conductor, which need not be the one that leased the job."""
    env.conf.set_override("driver", ["log"], GROUP)
    env.jobs = env.new_dispatcher()
    env.bind_card()
    env.agents.answers["restore"] = "running"
    env.reboot()
    env.jobs.run_once()
    other = env.new_dispatcher()
    for _ in range(2):
        other.complete(env.agents.calls[0]["job"], env.card.host, "failed", "it broke")
    (job,) = rows.read(env.engine, schema.jobs, kind="restore")
    assert job["error"] == "it broke"
    assert restore_events(env) == ["accelerator_request.restore.error"]


def test_restored_handle_is_cleaned_after_its_release(sqlite_env: RebootEnv) -> None:
    """The driver may have begun to prepare devices after the bind."""
    env, device = sqlite_env, rows.read(sqlite_env.engine, schema.devices)[0]["id"]
    rows.update(env.engine, schema.devices, device, abilities=[])
    arq = env.add_arq()
    env.bind_card(arq)
    rows.update(env.engine, schema.devices, device, abilities=["prepares"])
    env.reboot()
    env.jobs.run_once()
    env.arqs.delete([arq], None, None, allow_bound=True)
    assert env.open_jobs() == ["release"]


def test_failed_restore_is_retried_and_stays_bound(env: RebootEnv) -> None:
    assert not is_enabled(env.conf)
    env.conf.set_override("driver", ["log"], GROUP)
    env.jobs = env.new_dispatcher()
    env.bind_card()
    env.agents.answers["restore"] = UNREACHABLE
    env.reboot()
    env.jobs.run_once()
    assert restore_events(env) == [], "an agent that does not answer has not failed"
    env.agents.answers["restore"] = "failed"
    for _ in range(2):
        env.advance(120)
        env.jobs.run_once()
    assert env.agents.kinds() == ["restore"] * 3
    assert env.states() == {"Bound": 1}
    env.agents.answers = {}
    env.advance(120)
    env.jobs.run_once()
    assert env.open_jobs() == []
    assert restore_events(env) == [
        "accelerator_request.restore.error",
        "accelerator_request.restore.end",
    ]
    (count,) = rows.read(env.engine, schema.self_heal_counters, kind="handles_restored")
    assert count["count"] == 1


def fail_restore(env: RebootEnv) -> None:
    """Reboot the host; it cannot prepare the handles again."""
    env.agents.answers["restore"] = "failed"
    env.reboot()
    for row in rows.read(env.engine, schema.providers):
        rows.update(env.engine, schema.providers, row["id"], stale_since=None)
    env.jobs.run_once()


def shown_states(env: RebootEnv) -> dict[str, tuple[str, ...]]:
    """Return the reasons why devices are not schedulable, by address."""
    with env.engine.connect() as connection:
        return {
            row["address"]: device_state.evaluate_row(row, withheld=False).reasons
            for row in devices.find(connection)
        }


def stale_providers(env: RebootEnv) -> set[str]:
    return {r["uuid"] for r in rows.read(env.engine, schema.providers) if r["stale_since"]}


def test_failed_restore_cordons_its_device_alone(env: RebootEnv) -> None:
    neighbour = env.add_card(address="0000:02:00.0")
    arq = env.add_arq()
    env.bind_card(arq)
    fail_restore(env)
    assert shown_states(env) == {"0000:01:00.0": ("restore_failed",), "0000:02:00.0": ()}
    assert stale_providers(env) == {env.card.provider}
    (owner,) = rows.read(env.engine, schema.arqs, state="Bound")
    with env.engine.connect() as connection:
        desired = deployables.desired_state(connection, [env.card.provider, neighbour.provider])
        assert [reconciler.is_cordoned(row) for row in desired] == [True, False]
        (device, _) = devices.find(connection)
        (accelerator,) = accelerators.find(connection, instance_uuid=owner["instance_uuid"])
        cordoned = accelerators.find(connection, states=["cordoned"])
    (job,) = rows.read(env.engine, schema.jobs, kind="restore")
    (error,) = device["job_errors"]
    assert error.endswith(f", restore job {job['uuid']}: it broke")
    assert (accelerator["state"], accelerator["error"]) == ("bound", "it broke")
    assert {row["state_reasons"][0] for row in cordoned} == {"restore_failed"}
    assert len(cordoned) == 15
    with pytest.raises(NoHandle, match="could not be prepared again"):
        env.bind(env.card)
    env.bind(neighbour)


@pytest.mark.parametrize("way", ["success", "delete", "unbind"])
def test_device_is_ready_again_after_the_restore_or_the_release(env: RebootEnv, way: str) -> None:
    arq = env.add_arq()
    env.bind_card(arq)
    fail_restore(env)
    for row in rows.read(env.engine, schema.providers):
        rows.update(env.engine, schema.providers, row["id"], stale_since=None)
    if way == "delete":
        env.arqs.delete([arq], None, None, allow_bound=True)
    elif way == "unbind":
        env.arqs.unbind([{"request": arq}], None)
    else:
        env.agents.answers = {}
        env.advance(120)
        env.jobs.run_once()
        assert env.results[-1].providers == 1, "the publisher is woken"
    assert shown_states(env) == {"0000:01:00.0": ()}
    assert stale_providers(env) == {env.card.provider}


def test_restore_comes_before_all_other_jobs(sqlite_env: RebootEnv) -> None:
    env = sqlite_env
    kept, removed = env.add_arq(), env.add_arq()
    env.bind_card(kept)
    env.bind_card(removed)
    env.arqs.delete([removed], None, None, allow_bound=True)
    env.bind(env.card)
    env.reboot()
    env.jobs.run_once()
    assert env.agents.kinds() == ["restore", "prepare", "release"]


def test_second_reboot_creates_no_second_job(sqlite_env: RebootEnv) -> None:
    sqlite_env.bind_card()
    sqlite_env.agents.answers["restore"] = "failed"
    sqlite_env.reboot()
    sqlite_env.jobs.run_once()
    sqlite_env.reboot()
    assert sqlite_env.open_jobs() == ["restore"]
    sqlite_env.agents.answers = {}
    sqlite_env.jobs.run_once()
    assert sqlite_env.open_jobs() == []


def test_unbind_cancels_only_its_own_restore(env: RebootEnv) -> None:
    kept, removed = env.add_arq(), env.add_arq()
    env.bind_card(kept, removed)
    env.reboot()
    env.arqs.delete([removed], None, None, allow_bound=True)
    env.jobs.run_once()
    restores = [call for call in env.agents.calls if call["kind"] == "restore"]
    (release,) = (call for call in env.agents.calls if call["kind"] == "release")
    assert len(restores) == 1
    (cancelled,) = release["cancels"]
    jobs = {row["uuid"]: row["state"] for row in rows.read(env.engine, schema.jobs)}
    assert jobs[cancelled] == JobState.CANCELLED
    assert restores[0]["job"] != cancelled
    assert env.states() == {"Bound": 1}
    assert env.handles() == {"owned": 1, "free": 15}


def test_bind_in_progress_at_the_reboot_is_not_restored(sqlite_env: RebootEnv) -> None:
    sqlite_env.bind(sqlite_env.card)
    sqlite_env.reboot()
    assert sqlite_env.open_jobs() == ["prepare"]

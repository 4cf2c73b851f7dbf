# SPDX-License-Identifier: Apache-2.0
"""Attach to running guests and detach from them, with a real Placement and guests in memory."""

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg import os_acc
from cyborg.agent.guests.devices import GuestDevices
from cyborg.agent.guests.reassertion import load_devices
from cyborg.core.errors import Conflict, Invalid, Stale, Unavailable, WrongState
from cyborg.db import schema
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import Crash, Env
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.tiers import pick_points, sample

__all__ = ["node", "placement_adapter"]

HOST_WORK = ("prepares", "sanitises")
PLAIN_FLAVOR = {"original_name": "small", "extra_specs": {}}
UNKNOWN = "6f4fa6e9-3c5c-4a8b-9a35-3f4b0c3e1a11"


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Env:
    return Env(sqlite_engine, node, fake_nova, handles=8, abilities=HOST_WORK, live=True)


def attach(env: Env, **values: Any) -> dict[str, Any]:
    """Attach to the running guest, and wait for the end."""
    env.attach(mode="live", **values)
    env.settle()
    (row,) = env.rows()
    return row


def devices_of_host(env: Env) -> Any:
    """Return what the conductor answers to the agent of the host."""
    (agent,) = rows.read(env.engine, schema.services)
    return env.runner.guests.list_of_host(env.node.name, agent["epoch"])


def reassert(env: Env) -> bool:
    """Check the guests of the host as its agent does."""
    return env.guests.reassert(load_devices(devices_of_host(env))).is_complete


def test_running_guest_gets_the_device_and_loses_it(env: Env) -> None:
    assert attach(env)["state"] == "attached"
    assert env.check() == "attached"
    assert env.hypervisor.count(env.instance) == 1
    assert env.nova.reboots == []
    env.detach()
    env.settle()
    assert env.check() == "detached"
    assert (env.hypervisor.count(env.instance), env.nova.reboots) == (0, [])


@pytest.mark.matrix
def test_flavor_without_profile_gets_the_device(env: Env) -> None:
    env.nova.servers[env.instance]["flavor"] = PLAIN_FLAVOR
    assert attach(env)["state"] == "attached"
    assert env.hypervisor.count(env.instance) == 1


def test_guest_gets_the_device_after_the_host_has_prepared_it(env: Env) -> None:
    env.attach(mode="live")
    env.runner.run_once()
    assert (env.step(), env.hypervisor.count(env.instance)) == ("prepare", 0)
    env.settle()
    kinds = [row["kind"] for row in rows.read(env.engine, schema.jobs)]
    assert kinds[-2:] == ["prepare", "plug"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"status": "SHUTOFF"}, "is SHUTOFF, an accelerator can be attached .live. to a server"),
        ({"OS-EXT-STS:task_state": "rebooting"}, "busy .rebooting"),
        ({"locked": True}, "is locked"),
    ],
)
def test_unsuitable_server_is_refused(env: Env, fields: dict[str, Any], text: str) -> None:
    env.nova.servers[env.instance].update(fields)
    with pytest.raises(WrongState, match=text):
        env.attach(mode="live")
    assert env.rows() == []


def test_host_without_live_attach_is_refused(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = Env(sqlite_engine, node, fake_nova)
    with pytest.raises(Conflict, match=f"live attach is not enabled on host {node.name}") as found:
        env.attach(mode="live")
    assert found.value.details["field"] == "mode"
    assert env.rows() == []


def test_host_that_loses_live_attach_is_undone(env: Env) -> None:
    """The host is known for certain only when its devices are bound."""
    env.attach(mode="live")
    with env.engine.begin() as tx:
        tx.execute(sa.update(schema.services).values(versions={}))
    env.settle()
    assert env.check() == "error"
    assert "live attach is not enabled" in env.rows()[0]["error"]


def test_repeated_request_with_another_mode_is_a_conflict(env: Env) -> None:
    first = attach(env)
    assert env.attach(mode="live")["uuid"] == first["uuid"]
    with pytest.raises(Conflict, match="already has attachment") as found:
        env.attach()
    assert found.value.details["field"] == "mode"
    assert "with mode live; detach it, or request another" in found.value.message
    with pytest.raises(Conflict, match=r"exists and differs in mode$"):
        env.attachments.create(
            {
                "uuid": first["uuid"],
                "instance_uuid": env.instance,
                "device_profile": first["device_profile_name"],
            },
            None,
        )


def test_guest_that_cannot_take_the_device_is_undone(env: Env) -> None:
    del env.hypervisor.guests[env.instance]
    row = attach(env)
    assert env.check() == "error"
    assert "does not run on this host" in row["error"]


def test_device_that_the_guest_keeps_is_not_freed(env: Env) -> None:
    attach(env)
    env.hypervisor.keeps = True
    env.detach()
    for _ in range(5):
        env.runner.run_once()
        env.finish_jobs()
        env.now += timedelta(seconds=30)
    env.runner.run_once()
    (row,) = env.rows()
    assert (row["step"], row["state"], env.owned()) == ("unplug", "detaching", 2)
    assert "must confirm the removal" in row["error"]
    assert env.hypervisor.requests > 1
    assert len(env.listed()) == 1
    env.hypervisor.keeps = False
    env.settle()
    assert env.check() == "detached"


def test_stopped_guest_is_detached(env: Env) -> None:
    attach(env)
    env.hypervisor.guests[env.instance].runs = False
    env.nova.servers[env.instance]["status"] = "SHUTOFF"
    env.detach()
    env.settle()
    assert env.check() == "detached"


@pytest.mark.matrix
def test_hypervisor_that_answers_late_delays_the_attach(env: Env) -> None:
    env.hypervisor.error = Unavailable("libvirt has not answered for 60 s")
    answers = iter([None, env.hypervisor.error])

    def sleep(seconds: float) -> None:
        env.hypervisor.error = next(answers)

    env.guests = GuestDevices(env.hypervisor, 20.0, sleep=sleep)
    assert attach(env)["state"] == "attached"
    env.hypervisor.error = None
    assert env.check() == "attached"


def test_start_in_progress_is_awaited_before_the_device_is_taken(env: Env) -> None:
    """Nova may have read the ARQs before the detach, and composes the guest with the device."""
    attach(env)
    (device,) = env.hypervisor.guests[env.instance].running.values()
    env.nova.servers[env.instance]["OS-EXT-STS:task_state"] = "rebooting_hard"
    env.hypervisor.guests[env.instance].runs = False
    env.detach()
    env.runner.run_once()
    assert (env.step(), env.owned()) == ("guest", 2)
    env.hypervisor.start(env.instance, device)
    env.nova.servers[env.instance]["OS-EXT-STS:task_state"] = None
    env.now += timedelta(minutes=2)
    env.settle()
    assert env.check() == "detached"
    # Also from the definition, which a soft reboot starts.
    assert env.hypervisor.guests[env.instance].defined == {}


def test_guest_gets_the_device_again_after_its_start(env: Env) -> None:
    attach(env)
    env.hypervisor.start(env.instance)
    assert env.hypervisor.count(env.instance) == 0
    assert reassert(env)
    assert env.hypervisor.count(env.instance) == 1
    assert reassert(env)
    assert env.hypervisor.attached == 2


def test_device_is_not_given_again_before_the_host_has_restored_it(env: Env) -> None:
    attach(env)
    env.hypervisor.start(env.instance)
    (arq,) = rows.read(env.engine, schema.arqs, attachment_id=env.rows()[0]["id"])
    job = rows.insert(
        env.engine,
        schema.jobs,
        kind="restore",
        host=env.node.name,
        subject=env.instance,
        arguments={},
        next_try_at=env.now,
    )
    rows.update(env.engine, schema.arqs, arq["id"], job_id=job)
    assert not reassert(env)
    assert env.hypervisor.count(env.instance) == 0
    rows.update(env.engine, schema.jobs, job, state="done")
    assert reassert(env)
    assert env.hypervisor.count(env.instance) == 1


def test_device_that_is_being_detached_is_not_given_again(env: Env) -> None:
    attach(env)
    devices = devices_of_host(env)
    env.hypervisor.keeps = True
    env.detach()
    assert devices_of_host(env) == {"devices": []}
    env.runner.run_once()
    env.finish_jobs()
    env.hypervisor.keeps = False
    env.hypervisor.start(env.instance)
    # A list that is older than the detach, which the agent has received late.
    env.guests.reassert(load_devices(devices))
    assert env.hypervisor.count(env.instance) == 0
    env.settle()
    assert env.check() == "detached"


def test_only_the_present_agent_learns_the_devices(env: Env) -> None:
    with pytest.raises(Stale, match="unknown agent epoch"):
        env.runner.guests.list_of_host(env.node.name, UNKNOWN)


def test_unplug_job_that_was_ended_is_replaced(env: Env) -> None:
    """Such as by the deletion of the agent's service."""
    attach(env)
    env.detach()
    env.runner.run_once()
    (job,) = rows.read(env.engine, schema.jobs, kind="unplug")
    rows.update(env.engine, schema.jobs, job["id"], state="failed", error="service deleted")
    env.now += timedelta(seconds=30)
    env.runner.run_once()
    assert env.step() == "unplug"
    assert len(rows.read(env.engine, schema.jobs, kind="unplug")) == 2
    env.now += timedelta(seconds=30)
    env.settle()
    assert env.check() == "detached"


def test_attach_that_takes_too_long_is_undone_and_cancels_its_job(env: Env) -> None:
    env.attach(mode="live")
    env.runner.run_once()
    env.finish_jobs()
    env.now += timedelta(seconds=5)
    env.runner.run_once()
    (plug,) = rows.read(env.engine, schema.jobs, kind="plug")
    assert (env.step(), plug["state"]) == ("plug", "pending")
    env.now += timedelta(hours=1)
    env.runner.run_once()
    (plug,) = rows.read(env.engine, schema.jobs, kind="plug")
    (unplug,) = rows.read(env.engine, schema.jobs, kind="unplug")
    assert (env.step(), plug["state"]) == ("unplug", "failed")
    assert unplug["arguments"]["cancels"] == [plug["uuid"]]
    env.settle()
    assert env.check() == "error"
    assert "not complete after" in env.rows()[0]["error"]
    assert env.hypervisor.attached == 0


def test_deleted_requests_need_no_agent(env: Env) -> None:
    """Nova has ended the guest and deleted its ARQs while the host was down."""
    attach(env)
    env.hypervisor.error = Unavailable("libvirt has not answered for 60 s")
    env.detach()
    env.runner.run_once()
    env.finish_jobs()
    del env.nova.servers[env.instance], env.hypervisor.guests[env.instance]
    env.arqs().delete(None, env.instance, None, True)
    for row in rows.read(env.engine, schema.jobs, kind="unplug"):
        rows.update(env.engine, schema.jobs, row["id"], state="failed", error="down")
    env.node.deallocate(env.instance)
    env.now += timedelta(seconds=60)
    env.hypervisor.error = None
    env.settle()
    assert (env.rows(), env.owned()) == ([], 0)


def test_hanging_hypervisor_fails_the_attach_with_its_reason(env: Env) -> None:
    env.hypervisor.error = Unavailable("libvirt has not answered for 60 s")
    env.attach(mode="live")
    for _ in range(3):
        env.runner.run_once()
        env.finish_jobs()
        env.now += timedelta(seconds=5)
    env.runner.run_once()
    assert "libvirt has not answered" in env.rows()[0]["error"]
    env.hypervisor.error = None
    env.settle()
    assert env.check() == "error"


def run_scenario(env: Env, scenario: str, crash_at: int | None) -> str:
    """Attach or detach; the conductor may crash at a point. Return the state of the end."""
    if scenario == "detach":
        attach(env)
    if scenario == "undo":
        del env.hypervisor.guests[env.instance]
    env.start_conductor(crash_at)
    if scenario == "detach":
        env.detach()
    else:
        env.attach(mode="live")
    try:
        env.settle()
    except Crash:
        env.start_agent()
        env.recover_with("done")
    if scenario == "undo":
        env.hypervisor.start(env.instance)
    return env.check()


ENDS = {"attach": ("attached", 1), "undo": ("error", 0), "detach": ("detached", 0)}


@pytest.mark.parametrize("scenario", sample(ENDS, "attach", "detach"))
def test_crash_between_any_two_effects_ends_finished_or_undone(env: Env, scenario: str) -> None:
    end, devices = ENDS[scenario]
    assert run_scenario(env, scenario, None) == end
    total = len(env.points.passed)
    assert total > 10
    for crash_at in pick_points(total):
        env.forget_server()
        assert run_scenario(env, scenario, crash_at) == end, crash_at
        assert env.hypervisor.count(env.instance) == devices, crash_at
        assert env.nova.reboots == []


def test_live_attach_on_each_database(engine: sa.Engine, node: Node, fake_nova: FakeNova) -> None:
    env = Env(engine, node, fake_nova, handles=8, abilities=HOST_WORK, live=True)
    attach(env)
    assert env.check() == "attached"
    (item,) = devices_of_host(env)["devices"]
    assert (item["instance"], item["ready"]) == (env.instance, True)
    assert os_acc.get_config(item["arq"])["attach_handle_type"] == "TEST_PCI"
    env.detach()
    env.settle()
    assert env.check() == "detached"


def test_wrong_answer_of_a_conductor_is_refused() -> None:
    with pytest.raises(KeyError):
        load_devices({"guests": []})


def test_malformed_device_does_not_hide_the_others(env: Env) -> None:
    attach(env)
    answer = devices_of_host(env)
    for broken in ({"instance": "x"}, 1, {**answer["devices"][0], "arq": {}}):
        assert len(load_devices({"devices": [broken, *answer["devices"]]})) == 1


def start_detach(env: Env) -> str:
    """Attach and start to detach, up to the unplug job; return the device."""
    attach(env)
    (device,) = env.hypervisor.guests[env.instance].running.values()
    env.detach()
    env.runner.run_once()
    assert env.step() == "unplug"
    return device


def test_device_that_nova_gives_back_in_a_hard_reboot_is_taken_again(env: Env) -> None:
    """Nova starts the guest with the mediated devices that it had before its end."""
    device = start_detach(env)
    guest = env.hypervisor.guests[env.instance]
    guest.runs, guest.running, guest.defined = False, {}, {}
    env.nova.add_action(env.instance, "reboot")
    env.nova.servers[env.instance]["OS-EXT-STS:task_state"] = "rebooting_hard"
    env.finish_jobs()
    env.now += timedelta(seconds=5)
    env.runner.run_once()
    assert (env.step(), env.owned()) == ("guest", 2)
    env.hypervisor.start(env.instance, device)
    env.nova.servers[env.instance]["OS-EXT-STS:task_state"] = None
    env.now += timedelta(minutes=2)
    env.settle()
    assert env.check() == "detached"
    assert env.hypervisor.count(env.instance) == 0


@pytest.mark.matrix
def test_completed_reboot_during_the_unplug_job_repeats_it(env: Env) -> None:
    device = start_detach(env)
    env.finish_jobs()
    env.nova.add_action(env.instance, "reboot")
    env.hypervisor.start(env.instance, device)
    env.now += timedelta(minutes=2)
    env.settle()
    assert env.check() == "detached"
    assert env.hypervisor.count(env.instance) == 0
    assert len(rows.read(env.engine, schema.jobs, kind="unplug")) == 2


@pytest.mark.parametrize("status", sample(["RESCUE", "SUSPENDED", "ERROR"], "RESCUE"))
def test_server_of_which_nova_keeps_a_copy_is_awaited(env: Env, status: str) -> None:
    """Such as the end of a rescue: Nova starts the guest with the devices that it had before."""
    attach(env)
    env.nova.servers[env.instance]["status"] = status
    env.detach()
    env.runner.run_once()
    (row,) = env.rows()
    assert (env.step(), env.owned()) == ("guest", 2)
    assert f"in state {status}" in row["error"]
    env.nova.servers[env.instance]["status"] = "PAUSED"
    env.now += timedelta(minutes=2)
    env.settle()
    assert env.check() == "detached"


@pytest.mark.matrix
def test_rescue_during_the_unplug_job_is_awaited(env: Env) -> None:
    start_detach(env)
    env.finish_jobs()
    env.nova.servers[env.instance]["status"] = "RESCUE"
    env.now += timedelta(seconds=30)
    env.runner.run_once()
    assert (env.step(), env.owned()) == ("guest", 2)
    env.nova.servers[env.instance]["status"] = "ACTIVE"
    env.now += timedelta(minutes=2)
    env.settle()
    assert env.check() == "detached"


def test_missing_guest_of_a_running_server_is_no_proof(env: Env) -> None:
    """Such as with the connection of another hypervisor."""
    start_detach(env)
    found = env.hypervisor.guests.pop(env.instance)
    env.finish_jobs()
    env.now += timedelta(seconds=30)
    env.runner.run_once()
    (row,) = env.rows()
    assert (row["step"], env.owned()) == ("unplug", 2)
    assert "connection_uri must name the hypervisor of nova-compute" in row["error"]
    env.hypervisor.guests[env.instance] = found
    env.settle()
    assert env.check() == "detached"


@pytest.mark.matrix
def test_missing_guest_of_a_server_that_was_stopped_since_is_detached(env: Env) -> None:
    start_detach(env)
    del env.hypervisor.guests[env.instance]
    env.finish_jobs()
    env.nova.servers[env.instance]["status"] = "SHUTOFF"
    env.now += timedelta(seconds=30)
    env.settle()
    assert env.check() == "detached"


def test_detach_with_a_reboot_is_refused(env: Env) -> None:
    attach(env)
    with pytest.raises(Invalid, match="the mode live needs no reboot") as found:
        env.detach(reboot=True)
    assert found.value.details["field"] == "reboot"
    assert env.check() == "attached"


@pytest.mark.matrix
def test_cancel_of_an_attach_whose_guest_is_missing_is_undone(env: Env) -> None:
    """The attach waits because its host does not have the guest: its undo must not do so too."""
    env.attach(mode="live")
    env.runner.run_once()
    env.finish_jobs()
    env.now += timedelta(seconds=5)
    env.runner.run_once()
    assert env.step() == "plug"
    del env.hypervisor.guests[env.instance]
    env.detach()
    env.settle()
    assert env.check() == "detached"

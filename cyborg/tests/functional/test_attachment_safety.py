# SPDX-License-Identifier: Apache-2.0
"""No device of a guest is freed, and no unit of Nova is removed, whatever happens meanwhile."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.attachments import runner
from cyborg.core.attachments.attachment import Step
from cyborg.core.errors import Conflict, TimedOut, Unavailable, WrongState
from cyborg.db import schema
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import PROJECT, Crash, Env
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.tiers import sample

__all__ = ["node", "placement_adapter"]

HOST_WORK = ("prepares", "sanitises")


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Env:
    """Return a server whose devices need no host work."""
    return Env(sqlite_engine, node, fake_nova)


@pytest.fixture
def prepared_env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Env:
    """Return a server whose devices are prepared and cleaned by the host."""
    return Env(sqlite_engine, node, fake_nova, abilities=HOST_WORK)


def test_failed_reboot_does_not_free_the_device(prepared_env: Env) -> None:
    """Nova records the action first; if it fails, the guest runs on with its devices."""
    env = prepared_env
    env.attach(reboot=True)
    env.settle()
    env.nova.result = "Error"
    env.detach(reboot=True)
    for _ in range(5):
        env.runner.run_once()
        env.now += timedelta(minutes=1)
    assert (env.step(), env.owned(), env.allocated()) == ("guest", 2, 2)
    assert 3 < len(env.nova.reboots) < 8
    assert "Nova failed to reboot" in env.rows()[0]["error"]
    env.nova.result = "Success"
    env.settle()
    assert env.check() == "detached"


@pytest.mark.parametrize("result", sample(["Error", None], None))
def test_attach_repeats_a_reboot_that_failed_or_was_lost(
    prepared_env: Env, result: str | None
) -> None:
    """nova-compute may stop before or while it reboots the server."""
    env = prepared_env
    env.nova.result = result
    env.attach(reboot=True)
    env.runner.run_once()
    env.finish_jobs()
    for _ in range(6):
        env.now += timedelta(minutes=1)
        env.runner.run_once()
    assert (env.step(), env.owned(), len(env.listed())) == ("reboot", 2, 2)
    assert 1 < len(env.nova.reboots) < 7
    assert "Nova failed to reboot" in env.rows()[0]["error"]
    env.nova.result = "Success"
    env.settle()
    assert env.check() == "attached"
    assert env.rows()[0]["error"] is None


def test_attach_without_a_user_of_keystone_reboots_once(env: Env) -> None:
    env.nova_client.own_user = lambda: None  # type: ignore[method-assign]
    env.attach(reboot=True)
    env.settle()
    assert (env.check(), len(env.nova.reboots)) == ("attached", 1)


def test_user_without_keystone_frees_nothing_by_a_reboot(prepared_env: Env) -> None:
    env = prepared_env
    env.attach()
    env.settle()
    env.nova.add_action(env.instance, "start")
    env.nova_client.own_user = lambda: None  # type: ignore[method-assign]
    env.detach(reboot=True)
    env.nova.add_action(env.instance, "reboot")
    for _ in range(3):
        env.runner.run_once()
        env.now += timedelta(minutes=1)
    assert (env.step(), env.owned(), env.nova.reboots) == ("guest", 2, [])
    assert "stop the server" in env.rows()[0]["error"]
    env.nova.servers[env.instance]["status"] = "SHUTOFF"
    env.settle()
    assert env.check() == "detached"


def test_hidden_host_does_not_free_the_device(prepared_env: Env) -> None:
    """A server whose host Nova does not show may have a guest."""
    env = prepared_env
    env.attach(reboot=True)
    env.settle()
    host = env.nova.servers[env.instance].pop("OS-EXT-SRV-ATTR:host")
    with pytest.raises(Unavailable, match="does not show"):
        env.detach()
    assert env.check() == "attached"
    env.detach(reboot=True)
    env.runner.run_once()
    assert (env.step(), env.owned()) == ("guest", 2)
    assert "does not show" in env.rows()[0]["error"]
    env.nova.servers[env.instance]["OS-EXT-SRV-ATTR:host"] = host
    env.now += timedelta(minutes=1)
    env.settle()
    assert env.check() == "detached"


def unshelve(env: Env, *, bind: bool = True) -> None:
    """Do what Nova does when it shelves and unshelves the server on the same host."""
    env.arqs().delete(None, env.instance, None, True)
    env.finish_jobs()
    env.node.deallocate(env.instance)
    body = {
        "allocations": {
            env.card.provider: {"resources": {"FPGA": 1}},
            env.node.uuid: {"resources": {"VCPU": 2, "MEMORY_MB": 512}},
        },
        "project_id": PROJECT,
        "user_id": "user-1",
        "consumer_generation": None,
        "consumer_type": "INSTANCE",
    }
    assert env.node.client.put(f"/allocations/{env.instance}", json=body).status_code == 204
    if bind:
        bind_flavor(env)


def bind_flavor(env: Env) -> None:
    """Bind the accelerator of the flavor, as Nova does when it builds the server."""
    item = {
        "request": rows.insert_arq(env.engine, env.profile),
        "hostname": env.node.name,
        "device_rp_uuid": env.card.provider,
        "instance_uuid": env.instance,
    }
    env.arqs().bind([item], None)
    env.finish_jobs()


def crash_before(env: Env, step: Step) -> None:
    """Stop the conductor when it begins a step."""

    def crash(work: object) -> None:
        raise Crash(step)

    steps: dict[Step, Callable[..., Any]] = {**env.runner._steps, step: crash}
    env.runner._steps = steps
    with pytest.raises(Crash):
        env.runner.run_once()


@pytest.mark.parametrize("bind", sample([True, False], False))
def test_unshelve_on_the_same_host_keeps_its_allocation(env: Env, bind: bool) -> None:
    env.attach(reboot=True)
    env.settle()
    assert env.check() == "attached"
    unshelve(env, bind=bind)
    assert env.runner.sweep() == 1
    env.settle()
    assert (env.rows(), env.allocated()) == ([], 1)
    if not bind:
        bind_flavor(env)
    assert env.check() == "detached"


@pytest.mark.matrix
def test_shrink_keeps_what_other_accelerators_of_the_server_need(env: Env) -> None:
    """The allocation was replaced within the same consumer."""
    env.attach()
    env.settle()
    known = env.node.placement.consumer(env.instance)
    assert known is not None
    amounts = {**known.amounts, env.card.provider: {"FPGA": 1}}
    env.node.placement.set_consumer(env.instance, amounts, known)
    env.detach()
    env.settle()
    assert env.check() == "detached"


@pytest.mark.parametrize(
    ("step", "bind"),
    sample(
        [(Step.BIND, True), (Step.BIND, False), (Step.EXPOSE, True)],
        (Step.BIND, False),
        (Step.EXPOSE, True),
    ),
)
def test_replaced_allocation_ends_the_attach(env: Env, step: Step, bind: bool) -> None:
    """No accelerator is attached without an allocation."""
    env.attach()
    crash_before(env, step)
    (owned,) = {env.owned()}
    assert owned == (1 if step is Step.BIND else 2)
    known = env.node.placement.consumer(env.instance)
    assert known is not None
    if step is Step.BIND:
        unshelve(env, bind=bind)
    else:
        amounts = {**known.amounts, env.card.provider: {"FPGA": 1}}
        env.node.placement.set_consumer(env.instance, amounts, known)
    env.recover_with("done")
    if step is Step.BIND and not bind:
        bind_flavor(env)
    assert env.check() == "error"
    assert "was replaced" in env.rows()[0]["error"]


def test_unknown_outcome_of_the_bind_at_the_deadline_leaks_nothing(prepared_env: Env) -> None:
    env = prepared_env
    env.attach()
    bind = env.runner._steps[Step.BIND]

    def lose_answer(work: Any) -> None:
        before = work.row
        bind(work)
        work.row = before
        env.now += timedelta(seconds=1000)
        raise TimedOut("it is unknown whether the change was made")

    env.runner._steps = {**env.runner._steps, Step.BIND: lose_answer}
    env.settle()
    assert env.check() in ("attached", "error")
    env.detach()
    env.settle()
    assert env.check() == "detached"
    assert len(rows.read(env.engine, schema.arqs)) == 1


def test_shrink_waits_for_bound_accelerators(prepared_env: Env) -> None:
    env = prepared_env
    env.attach()
    crash_before(env, Step.PREPARE)
    with env.engine.begin() as tx:
        values = {"step": "shrink", "failure": "late"}
        tx.execute(sa.update(schema.attachments).values(**values))
    env.recover_with("done")
    assert env.check() == "error"


@pytest.mark.matrix
def test_locked_server_is_not_rebooted(env: Env) -> None:
    env.attach()
    env.settle()
    env.nova.add_action(env.instance, "start")
    server = env.nova.servers[env.instance]
    server["locked"] = True
    for reboot in (False, True):
        with pytest.raises(WrongState, match="is locked"):
            env.detach(PROJECT, reboot=reboot)
    assert env.check() == "attached"
    env.detach(reboot=True)
    env.runner.run_once()
    assert (env.step(), env.nova.reboots) == ("guest", [])
    assert "is locked" in env.rows()[0]["error"]
    server["locked"] = False
    env.now += timedelta(minutes=1)
    env.settle()
    assert (env.check(), len(env.nova.reboots)) == ("detached", 1)


def test_lock_after_the_request_stops_the_reboot(env: Env) -> None:
    env.attach(reboot=True)
    crash_before(env, Step.REBOOT)
    env.nova.servers[env.instance]["locked"] = True
    env.start_conductor()
    env.now += timedelta(minutes=5)
    env.runner.run_once()
    assert (env.step(), env.nova.reboots) == ("reboot", [])
    env.nova.servers[env.instance]["locked"] = False
    env.now += timedelta(minutes=1)
    env.settle()
    assert (env.check(), len(env.nova.reboots)) == ("attached", 1)


def test_hidden_accelerators_do_not_prevent_the_bind_of_nova(prepared_env: Env) -> None:
    env = prepared_env
    env.attach()
    crash_before(env, Step.PREPARE)
    flavor, hidden = rows.read(env.engine, schema.arqs)
    assert (flavor["hidden"], hidden["hidden"]) == (False, True)
    env.arqs().delete([flavor["uuid"]], None, None, True)
    env.finish_jobs()
    bind_flavor(env)
    slots = [row["instance_slot"] for row in rows.read(env.engine, schema.arqs)]
    assert len(set(slots)) == len(slots) == 2
    with pytest.raises(Conflict, match="already has other accelerator requests"):
        bind_flavor(env)


def test_member_deletes_no_accelerator_of_an_attachment(prepared_env: Env) -> None:
    """Its handle would be free before the host has cleaned it."""
    env = prepared_env
    env.attach()
    env.settle()
    env.detach()
    env.runner.run_once()
    assert env.step() == "clean"
    unbound = [row["uuid"] for row in rows.read(env.engine, schema.arqs, state="Unbound")]
    assert len(unbound) == 1
    with pytest.raises(WrongState, match="belongs to an attachment"):
        env.arqs().delete(unbound, None, PROJECT, False)
    env.settle()
    assert env.check() == "detached"


@pytest.mark.matrix
def test_one_reboot_serves_all_attachments_of_the_server(env: Env) -> None:
    env.attach(uuid=str(uuid4()))
    env.attach(uuid=str(uuid4()))
    env.settle()
    env.nova.add_action(env.instance, "start")
    env.detach(reboot=True)
    env.settle()
    assert (env.check(), len(env.nova.reboots)) == ("detached", 1)


def test_full_provider_is_not_tried_again(env: Env) -> None:
    """Another server takes the only unit of the chosen provider before the allocation."""
    full, placement = str(uuid4()), env.node.placement
    generation = placement.create(full, "full", env.node.uuid)
    placement.set_inventories(full, generation, {"FPGA": {"total": 1}})
    body = {
        "allocations": {full: {"resources": {"FPGA": 1}}},
        "project_id": PROJECT,
        "user_id": "user-1",
        "consumer_generation": None,
        "consumer_type": "INSTANCE",
    }
    assert env.node.client.put(f"/allocations/{uuid4()}", json=body).status_code == 204
    choices = iter([[full]])
    allocations = env.runner._allocations
    choose = allocations._choose
    allocations._choose = lambda *found: next(choices, None) or choose(*found)  # type: ignore[method-assign]
    env.attach()
    env.settle()
    assert env.check() == "attached"
    assert env.placement.writes == 2


@pytest.mark.matrix
def test_lost_marker_is_replaced(env: Env) -> None:
    """Nova lists the newest actions only."""
    env.attach()
    env.settle()
    env.nova.add_action(env.instance, "start")
    env.nova.reboot_status = 409
    env.detach(reboot=True)
    env.runner.run_once()
    env.nova.add_action(env.instance, "start")
    del env.nova.actions[env.instance][1:]
    env.now += timedelta(minutes=1)
    env.runner.run_once()
    assert (env.step(), env.owned()) == ("guest", 2)
    env.nova.reboot_status = 202
    env.now += timedelta(minutes=1)
    env.settle()
    assert (env.check(), len(env.nova.reboots)) == ("detached", 1)


def test_sweeps_look_at_all_attachments_in_turn(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = Env(sqlite_engine, node, fake_nova, handles=16)
    monkeypatch.setattr(runner, "LOST_LIMIT", 2)
    for _ in range(5):
        env.attach(uuid=str(uuid4()))
    env.settle()
    assert [env.runner.sweep() for _ in range(4)] == [0, 0, 0, 0]
    env.arqs().delete(None, env.instance, None, True)
    env.finish_jobs()
    # Two at a time, from the third one on; the last page ends a round.
    assert [env.runner.sweep() for _ in range(3)] == [2, 1, 2]
    assert {row["state"] for row in env.rows()} == {"detaching"}

# SPDX-License-Identifier: Apache-2.0
"""Attach and detach, with a real Placement and a Nova over HTTP."""

from itertools import product
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Conflict, CyborgError, Invalid, NotFound, WrongState
from cyborg.db import schema
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import PROJECT, START, Crash, Env
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.tiers import pick_points, sample

__all__ = ["node", "placement_adapter"]

HOST_WORK = ("prepares", "sanitises")
UNKNOWN = "6f4fa6e9-3c5c-4a8b-9a35-3f4b0c3e1a11"


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Env:
    """Return a server whose devices need no host work."""
    return Env(sqlite_engine, node, fake_nova)


@pytest.fixture
def prepared_env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Env:
    """Return a server whose devices are prepared and cleaned by the host."""
    return Env(sqlite_engine, node, fake_nova, abilities=HOST_WORK)


def test_attach_extends_allocation_and_lists_the_arq_after_the_existing_ones(env: Env) -> None:
    (first,) = env.listed()
    row = env.attach()
    assert (row["state"], row["step"], row["arqs"]) == ("attaching", "allocate", [])
    env.settle()
    assert env.check() == "attached"
    listed = env.listed()
    assert [arq["uuid"] for arq in listed][:1] == [first["uuid"]]
    assert {arq["state"] for arq in listed} == {"Bound"}
    assert len({arq["attach_handle_uuid"] for arq in listed}) == 2
    assert env.nova.reboots == []


def test_detach_is_the_mirror(prepared_env: Env) -> None:
    env = prepared_env
    before = env.placement.consumer(env.instance)
    assert before is not None
    env.attach()
    env.settle()
    assert env.check() == "attached"
    env.detach()
    env.settle()
    assert env.check() == "detached"
    after = env.placement.consumer(env.instance)
    assert after is not None
    assert (after.amounts, after.project, after.user) == (
        before.amounts,
        before.project,
        before.user,
    )


@pytest.mark.parametrize(
    ("step", "is_attach"),
    sample(product(["plug", "fly"], [True, False]), ("plug", True), ("fly", False)),
)
def test_attachment_with_a_damaged_step_ends(prepared_env: Env, step: str, is_attach: bool) -> None:
    env = prepared_env
    env.attach()
    env.runner.run_once()
    if not is_attach:
        env.settle()
        env.detach()
    (row,) = env.rows()
    rows.update(env.engine, schema.attachments, row["id"], step=step)
    env.settle()
    assert env.check() == ("error" if is_attach else "detached")
    for found in env.rows():
        assert found["error"] == f"internal error: the mode next-boot has no step {step}"


def test_consumer_keeps_its_type(env: Env) -> None:
    env.attach()
    env.settle()
    answer = env.node.client.get(f"/allocations/{env.instance}").json()
    assert answer["consumer_type"] == "INSTANCE"


def test_nova_sees_no_arq_before_the_host_has_prepared_it(prepared_env: Env) -> None:
    env = prepared_env
    env.attach()
    env.runner.run_once()
    assert env.step() == "prepare"
    assert (env.allocated(), env.owned(), len(env.listed())) == (2, 2, 1)
    env.finish_jobs()
    env.settle()
    assert env.check() == "attached"


def test_reboot_is_requested_once_and_hard(env: Env) -> None:
    env.attach(reboot=True)
    env.settle()
    assert env.check() == "attached"
    assert env.nova.reboots == [(env.instance, "HARD")]
    env.settle()
    assert len(env.nova.reboots) == 1


def test_stopped_server_is_not_rebooted(env: Env) -> None:
    env.nova.servers[env.instance]["status"] = "SHUTOFF"
    env.attach(reboot=True)
    env.settle()
    assert env.check() == "attached"
    assert env.nova.reboots == []


def test_repeated_request_gets_the_same_attachment(env: Env) -> None:
    first = env.attach()
    assert env.attach() == first
    env.settle()
    again = env.attach()
    assert (again["uuid"], again["state"]) == (first["uuid"], "attached")
    assert len(env.rows()) == 1


def test_uuid_of_the_caller_identifies_the_request(env: Env) -> None:
    first = env.attach()
    uuid = str(uuid4())
    second = env.attach(uuid=uuid)
    assert second["uuid"] == uuid != first["uuid"]
    assert env.attach(uuid=uuid) == second
    with pytest.raises(Conflict, match="exists and differs in"):
        env.attach(uuid=uuid, instance_uuid=UNKNOWN)
    env.settle()
    assert [row["state"] for row in env.rows()] == ["attached", "attached"]
    assert (env.allocated(), len(env.listed())) == (3, 3)
    env.detach()
    env.settle()
    assert env.check() == "detached"


def test_detach_of_nothing_is_not_found(env: Env) -> None:
    with pytest.raises(NotFound, match="has no attachment"):
        env.detach()
    with pytest.raises(NotFound, match=f"no attachment {UNKNOWN}"):
        env.attachments.delete(UNKNOWN, None, None, False)


def test_other_project_finds_nothing(env: Env) -> None:
    with pytest.raises(NotFound, match="no server"):
        env.attach("project-2")
    env.attach(PROJECT)
    with pytest.raises(NotFound, match="no server"):
        env.attach("project-2")
    env.settle()
    with pytest.raises(NotFound, match="has no attachment"):
        env.detach("project-2")
    env.detach(PROJECT)
    env.settle()
    assert env.check() == "detached"


UNSUITABLE: list[tuple[dict[str, Any], type[CyborgError], str]] = [
    ({"status": "SHELVED_OFFLOADED"}, WrongState, "is SHELVED_OFFLOADED"),
    ({"status": "VERIFY_RESIZE"}, WrongState, "is VERIFY_RESIZE"),
    ({"OS-EXT-STS:task_state": "rebooting"}, WrongState, "busy .rebooting"),
    ({"locked": True}, WrongState, "is locked"),
    ({"OS-EXT-SRV-ATTR:host": None}, WrongState, "has no host"),
    ({"flavor": {"extra_specs": {}}}, Conflict, "has no extra spec accel:device_profile"),
    ({"flavor": {"original_name": "m1"}}, Conflict, "has no extra spec"),
]


def test_unsuitable_server_is_refused(env: Env) -> None:
    suitable = env.nova.servers[env.instance]
    for fields, error, text in UNSUITABLE:
        env.nova.servers[env.instance] = {**suitable, **fields}
        with pytest.raises(error, match=text) as found:
            env.attach()
        assert found.value.details["field"] == "instance_uuid", fields
        assert env.rows() == [], fields


BAD_INPUT: list[tuple[dict[str, Any], str]] = [
    ({"instance_uuid": "x"}, "instance_uuid"),
    ({"instance_uuid": None}, "instance_uuid"),
    ({"device_profile": ""}, "device_profile"),
    ({"device_profile": None}, "device_profile"),
    ({"device_profile": f"ctx-{UNKNOWN}"}, "device_profile"),
    ({"mode": "at-once"}, "mode"),
    ({"mode": "live", "reboot": True}, "reboot"),
    ({"reboot": "yes"}, "reboot"),
    ({"uuid": "x"}, "uuid"),
]


def test_bad_input_names_the_field(env: Env) -> None:
    for values, field in BAD_INPUT:
        with pytest.raises(Invalid) as found:
            env.attach(**values)
        assert found.value.details["field"] == field, values
        assert env.rows() == [], values


def test_unknown_profile_and_unknown_server(env: Env) -> None:
    with pytest.raises(NotFound, match="no device profile 'other'"):
        env.attach(device_profile="other")
    with pytest.raises(NotFound, match="no server"):
        env.attach(instance_uuid=UNKNOWN)
    assert rows.read(env.engine, schema.attachments) == []


def test_no_capacity_is_an_error_that_leaves_nothing(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = Env(sqlite_engine, node, fake_nova, handles=1)
    env.attach()
    env.settle()
    assert env.check() == "error"
    (row,) = env.rows()
    assert "has no free device for profile fpga" in row["error"]
    assert "group 0: " in row["error"]
    assert "handle is taken (1 devices)" in row["error"]
    env.attach()  # a failed attachment does not prevent the next one
    env.settle()
    assert [row["state"] for row in env.rows()] == ["error", "error"]
    env.detach()
    assert env.rows() == []


def test_handle_that_placement_does_not_know_is_undone(env: Env) -> None:
    """Placement offers units whose handles are all taken."""
    with env.engine.begin() as tx:
        table = schema.attach_handles
        tx.execute(sa.update(table).where(table.c.arq_id.is_(None)).values(draining=True))
    env.attach()
    env.settle()
    assert env.check() == "error"
    assert "no free attach handle" in env.rows()[0]["error"]


def test_host_that_cannot_prepare_is_undone(prepared_env: Env) -> None:
    env = prepared_env
    env.attach()
    env.settle(host_work="failed")
    assert env.check() == "error"
    assert "could not prepare" in env.rows()[0]["error"]


def test_conflict_of_the_consumer_generation_is_retried(env: Env) -> None:
    conflicts = iter([True, True, False])

    def write_concurrently() -> None:
        if next(conflicts, False):
            known = env.node.placement.consumer(env.instance)
            assert known is not None
            env.node.placement.set_consumer(env.instance, known.amounts, known)

    env.placement.before_write = write_concurrently
    env.attach()
    env.settle()
    assert env.check() == "attached"
    assert env.placement.writes == 3


def test_permanent_conflict_is_an_error(env: Env) -> None:
    def write_concurrently() -> None:
        known = env.node.placement.consumer(env.instance)
        assert known is not None
        env.node.placement.set_consumer(env.instance, known.amounts, known)

    env.placement.before_write = write_concurrently
    env.attach()
    env.runner.run_once()
    assert env.placement.writes >= 5
    env.placement.before_write = lambda: None
    env.settle()
    assert env.check() == "error"
    assert "cannot extend the allocation" in env.rows()[0]["error"]


def test_running_guest_with_the_device_keeps_it(prepared_env: Env) -> None:
    env = prepared_env
    env.attach(reboot=True)
    env.settle()
    with pytest.raises(WrongState, match="stop it, or detach with a reboot"):
        env.detach()
    assert env.check() == "attached"
    env.nova.servers[env.instance]["status"] = "SHUTOFF"
    env.detach()
    env.settle()
    assert env.check() == "detached"


def test_detach_with_reboot_frees_the_device_after_the_reboot(prepared_env: Env) -> None:
    env = prepared_env
    env.attach(reboot=True)
    env.settle()
    env.nova.task = "rebooting_hard"
    env.detach(reboot=True)
    env.runner.run_once()
    assert (env.step(), env.owned(), len(env.listed())) == ("guest", 2, 1)
    assert len(env.nova.reboots) == 2
    for _ in range(3):
        env.now = env.now.replace(minute=env.now.minute + 1)
        env.runner.run_once()
    assert (env.step(), env.owned(), len(env.nova.reboots)) == ("guest", 2, 2)
    env.nova.servers[env.instance]["OS-EXT-STS:task_state"] = None
    env.now = env.now.replace(minute=env.now.minute + 1)
    env.settle()
    assert env.check() == "detached"
    assert len(env.nova.reboots) == 2


def test_soft_reboot_of_the_user_does_not_free_the_device(prepared_env: Env) -> None:
    env = prepared_env
    env.nova_client.own_user = lambda: "cyborg"  # type: ignore[method-assign]
    env.attach()
    env.settle()
    env.nova.add_action(env.instance, "reboot", "user-1")
    env.nova.reboot_status = 409
    env.detach(reboot=True)
    env.runner.run_once()
    env.nova.add_action(env.instance, "reboot", "user-1")
    env.now = env.now.replace(minute=env.now.minute + 1)
    env.runner.run_once()
    assert (env.step(), env.owned()) == ("guest", 2)
    env.nova.add_action(env.instance, "reboot", "cyborg")
    env.now = env.now.replace(minute=env.now.minute + 2)
    env.settle()
    assert env.check() == "detached"


def test_reboot_that_nova_refuses_is_undone_in_time(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = Env(sqlite_engine, node, fake_nova, attachment_timeout=60.0)
    env.nova.reboot_status = 409
    env.attach(reboot=True)
    env.settle()
    assert env.check() == "error"
    assert "not complete after 60 seconds: Nova refused to reboot" in env.rows()[0]["error"]
    assert env.now > START


def test_guest_that_was_started_meanwhile_is_attached(env: Env) -> None:
    """The undo must not take a device that a running guest may have."""
    env.nova.reboot_status = 409
    env.attach(reboot=True)
    env.runner.run_once()
    assert env.step() == "reboot"
    env.nova.reboot_status = 403
    env.nova_client.own_user = lambda: "cyborg"  # type: ignore[method-assign]
    env.nova.add_action(env.instance, "reboot", "user-1")
    env.nova.servers[env.instance]["status"] = "PAUSED"
    env.now = env.now.replace(minute=env.now.minute + 1)
    env.runner.run_once()
    assert env.step() == "guest"
    env.nova.servers[env.instance]["status"] = "ACTIVE"
    env.now = env.now.replace(minute=env.now.minute + 1)
    env.settle()
    assert env.check() == "attached"
    (row,) = env.rows()
    assert "cannot reboot" in row["error"] or "Nova answered" in row["error"]
    assert env.attach()["uuid"] == row["uuid"]


def test_server_that_is_deleted_while_attaching(prepared_env: Env) -> None:
    env = prepared_env
    env.attach()
    env.runner.run_once()
    del env.nova.servers[env.instance]
    env.settle()
    assert env.check() == "error"
    assert "was deleted" in env.rows()[0]["error"]


def test_attachment_follows_a_deleted_server(prepared_env: Env) -> None:
    env = prepared_env
    env.attach()
    env.settle()
    del env.nova.servers[env.instance]
    env.arqs().delete(None, env.instance, None, True)
    env.finish_jobs()
    env.node.deallocate(env.instance)
    assert env.runner.sweep() == 1
    env.settle()
    assert env.rows() == []
    assert (env.owned(), rows.read(env.engine, schema.arqs)) == (0, [])


def test_nova_that_cannot_prove_the_deletion_releases_nothing(env: Env) -> None:
    env.attach()
    env.settle()
    env.nova.add_action(env.instance, "start")
    env.detach(reboot=True)
    env.nova.is_admin = False
    env.runner.run_once()
    assert (env.step(), env.owned()) == ("guest", 2)
    env.nova.is_admin = True
    env.now = env.now.replace(minute=env.now.minute + 1)
    env.settle()
    assert env.check() == "detached"


def test_completed_attachment_is_left_alone(env: Env) -> None:
    env.attach()
    env.settle()
    writes = env.placement.writes
    env.start_conductor()
    env.runner.run_once()
    assert (writes, env.placement.writes) == (1, 0)


def test_attach_and_detach_on_each_database(
    engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = Env(engine, node, fake_nova, abilities=HOST_WORK)
    env.attach(reboot=True)
    assert env.attach(reboot=True)["state"] == "attaching"
    env.settle()
    assert env.check() == "attached"
    env.detach(reboot=True)
    env.settle()
    assert env.check() == "detached"
    env.attach(uuid=UNKNOWN)
    env.settle()
    env.arqs().delete(None, env.instance, None, True)
    assert env.runner.sweep() == 1
    env.settle()
    assert (env.rows(), env.owned(), env.allocated()) == ([], 0, 1)


def test_conductors_that_work_on_one_server_at_the_same_time(
    engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = Env(engine, node, fake_nova, handles=16)
    uuids = [str(uuid4()) for _ in range(6)]
    for uuid in uuids:
        env.attach(uuid=uuid)
    env.settle_with_conductors(3)
    assert [row["state"] for row in env.rows()] == ["attached"] * len(uuids)
    assert (env.allocated(), env.owned(), len(env.listed())) == (7, 7, 7)
    env.detach()
    env.settle()
    assert env.check() == "detached"


def run_scenario(env: Env, scenario: str, crash_at: int | None) -> str:
    """Attach and detach; the conductor may crash at a point. Return the state of the end."""
    if scenario == "detach":
        env.attach(reboot=True)
        env.settle()
        env.nova.reboots.clear()
    env.start_conductor(crash_at)
    if scenario == "detach":
        env.detach(reboot=True)
    else:
        env.attach(reboot=scenario == "attach")
    try:
        env.settle(host_work="failed" if scenario == "undo" else "done")
    except Crash:
        env.recover_with("failed" if scenario == "undo" else "done")
    return env.check()


@pytest.mark.parametrize(
    ("scenario", "end", "reboots"),
    [
        ("attach", "attached", 1),
        pytest.param("undo", "error", 0, marks=pytest.mark.matrix),
        ("detach", "detached", 1),
    ],
)
def test_crash_between_any_two_effects_ends_finished_or_undone(
    sqlite_engine: sa.Engine,
    node: Node,
    fake_nova: FakeNova,
    scenario: str,
    end: str,
    reboots: int,
) -> None:
    env = Env(sqlite_engine, node, fake_nova, handles=200, abilities=HOST_WORK)
    assert run_scenario(env, scenario, None) == end
    total = len(env.points.passed)
    assert total > 10
    assert "allocation" in env.points.passed
    for crash_at in pick_points(total):
        env.forget_server()
        assert run_scenario(env, scenario, crash_at) == end, crash_at
        assert env.nova.reboots == [(env.instance, "HARD")] * reboots, crash_at

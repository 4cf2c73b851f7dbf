# SPDX-License-Identifier: Apache-2.0
"""Successors while devices, windows, servers and contexts change, with a real Placement."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.conductor.jobs.reboot import enqueue_restores
from cyborg.core.attachments.attachment import Step
from cyborg.core.errors import WrongState
from cyborg.db import schema
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import Crash
from cyborg.tests.fixtures.databases.maintenance_setup import MaintenanceEnv
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.tiers import pick_points

__all__ = ["node", "placement_adapter"]

pytestmark = pytest.mark.matrix

HOST_WORK = ("prepares", "sanitises")


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> MaintenanceEnv:
    """Return a server with a context."""
    return MaintenanceEnv(sqlite_engine, node, fake_nova, abilities=HOST_WORK)


@pytest.fixture
def full_env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> MaintenanceEnv:
    """Return a server with a context, on a host without another handle."""
    return MaintenanceEnv(sqlite_engine, node, fake_nova, spare_handles=0)


def spare_of(env: MaintenanceEnv) -> str:
    """Return the uuid of the other card."""
    return str(rows.read(env.engine, schema.devices, id=env.spare.device_id)[0]["uuid"])


def delete_server(env: MaintenanceEnv) -> None:
    """Delete the server as Nova does: first all ARQs of the instance, then the allocation."""
    env.arqs().delete(None, env.instance, None, True)
    env.node.deallocate(env.instance)
    env.nova.servers.pop(env.instance, None)
    env.finish_jobs()


def bind_again(env: MaintenanceEnv) -> None:
    """Unbind the context, and boot another server with it on the first card."""
    env.arqs().unbind([{"request": arq["uuid"]} for arq in env.listed()], None)
    env.finish_jobs()
    env.instance = env.add_context_server(env.context)


@pytest.mark.parametrize(
    "change",
    [{"status": "maintaining"}, {"health": "unhealthy"}, {"draining": True}, "handle"],
    ids=["disabled", "unhealthy", "removed", "handle removed"],
)
def test_exchange_to_a_device_that_was_closed_meanwhile_is_undone(
    env: MaintenanceEnv, change: Any
) -> None:
    env.begin()
    env.run_until("prepare")
    env.finish_jobs()
    table, values = schema.devices, change
    if change == "handle":
        table, values = schema.attach_handles, {"draining": True}
    column = table.c.id if table is schema.devices else table.c.deployable_id
    key = env.spare.device_id if table is schema.devices else env.spare.deployable_id
    with env.engine.begin() as tx:
        tx.execute(sa.update(table).where(column == key).values(**values))
    env.settle()
    (row,) = env.rows()
    assert row["state"] == "error"
    assert (
        "the new device was prepared, but is now disabled, under maintenance, unhealthy"
        in row["error"]
    )
    ((_, is_first),) = env.found_by_nova()
    assert is_first
    assert (env.amounts(), env.used()) == ((1, 0), (2, 0))


def test_window_that_ends_during_the_sweep_plans_no_successor(
    env: MaintenanceEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator ends the window after the sweep has found the context."""
    env.begin()
    with env.engine.begin() as tx:
        tx.execute(sa.delete(schema.attachments))
    plan = env.windows._plan_successors

    def end_first(tx: sa.Connection, *args: Any, **kwargs: Any) -> int:
        tx.execute(sa.delete(schema.device_maintenances))
        return plan(tx, *args, **kwargs)

    monkeypatch.setattr(env.windows, "_plan_successors", end_first)
    assert env.windows.sweep() == 0
    assert env.rows() == []


def test_window_that_ends_during_the_preparation_keeps_its_successor(env: MaintenanceEnv) -> None:
    env.begin()
    env.run_until("prepare")
    env.windows.end(env.device)
    assert env.shown()["status"] == "enabled"
    env.run_until("guest")
    ((_, is_first),) = env.found_by_nova()
    assert not is_first
    env.nova.add_action(env.instance, "start")
    env.now += timedelta(minutes=2)
    env.settle()
    assert (env.rows(), env.amounts(), env.used()) == ([], (0, 1), (1, 1))


def test_second_window_moves_the_context_on(env: MaintenanceEnv) -> None:
    """The guest has not left the first device when its other device gets a window too."""
    env.begin()
    env.run_until("guest")
    env.windows.end(env.device)
    until = (env.now + timedelta(hours=2)).isoformat()
    env.windows.begin({"uuid": spare_of(env), "until": until, "successor": "auto"})
    for _ in range(8):
        env.runner.run_once()
        env.finish_jobs()
        env.now += timedelta(seconds=30)
    assert [row["step"] for row in env.rows()] == ["guest", "guest"]
    assert (env.amounts(), env.used()) == ((2, 1), (3, 1))
    env.nova.servers[env.instance]["status"] = "SHUTOFF"
    env.now += timedelta(minutes=2)
    env.settle()
    ((_, is_first),) = env.found_by_nova()
    assert is_first
    assert (env.rows(), env.amounts(), env.used()) == ([], (1, 0), (2, 0))


def test_context_that_is_bound_again_gets_another_successor(env: MaintenanceEnv) -> None:
    """The successor for its former server still waits for this server."""
    env.begin()
    env.run_until("guest")
    former = env.instance
    env.windows.end(env.device)
    bind_again(env)
    env.begin()
    (row,) = env.rows()
    assert (row["state"], row["step"]) == ("attaching", "allocate")
    assert (env.context, "preparing") in env.owners()
    assert env.context_row()["successor"]["state"] == "preparing"
    for _ in range(4):
        env.runner.run_once()
        env.finish_jobs()
        env.now += timedelta(seconds=5)
    assert env.step() == "guest"
    (other,) = rows.read(env.engine, schema.attachments, instance_uuid=former)
    assert other["step"] == "guest"


def test_context_without_its_instance_shows_no_successor(env: MaintenanceEnv) -> None:
    env.begin()
    env.run_until("guest")
    assert env.context_row()["successor"]["state"] == "awaiting_restart"
    env.arqs().unbind([{"request": arq["uuid"]} for arq in env.listed()], None)
    env.finish_jobs()
    assert (env.context_state(), env.context_row()["successor"]) == ("unbound", None)


def test_changed_window_keeps_its_mode_until_none_is_given(full_env: MaintenanceEnv) -> None:
    env = full_env
    env.begin()
    env.settle()
    env.begin(4, successor=None)
    assert env.shown()["maintenance"]["successor"] == "auto"
    env.settle()
    assert env.rows()[0]["state"] == "error"
    env.begin(4, successor="none")
    assert env.shown()["maintenance"]["successor"] is None
    assert env.windows.sweep() == 1
    assert (env.rows(), env.context_row()["successor"]) == ([], None)
    env.now += timedelta(hours=1)
    assert env.windows.sweep() == 0


def test_sweep_reaches_each_device_and_reads_no_window_alone(
    env: MaintenanceEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The windows of more devices than a batch has end earlier."""
    monkeypatch.setattr("cyborg.conductor.maintenance.windows.BATCH", 2)
    env.begin(2)
    with env.engine.begin() as tx:
        tx.execute(sa.delete(schema.attachments))
    for number in range(3, 9):
        card = rows.insert_card(env.engine, env.node.name, f"0000:{number:02}:00.0")
        device = rows.read(env.engine, schema.devices, id=card.device_id)[0]["uuid"]
        until = (env.now + timedelta(hours=1)).isoformat()
        env.windows.begin({"uuid": device, "until": until, "successor": "auto"})
    assert env.windows.sweep() == 1
    assert len(env.rows()) == 1
    before = len(env.points.passed)
    assert env.windows.sweep() == 0
    assert len(env.points.passed) - before == 4, "the transactions do not rise with the windows"


@pytest.mark.parametrize("status", ["PAUSED", "SUSPENDED", "ERROR"])
def test_successor_waits_for_a_server_that_is_paused(env: MaintenanceEnv, status: str) -> None:
    env.nova.servers[env.instance]["status"] = status
    env.begin()
    env.runner.run_once()
    (row,) = env.rows()
    assert (row["state"], row["step"]) == ("attaching", "allocate")
    assert row["error"] == f"waiting for server {env.instance} in state {status}"
    assert env.owners().count((env.context, "preparing")) == 1
    env.nova.servers[env.instance]["status"] = "ACTIVE"
    env.now += timedelta(minutes=1)
    env.run_until("prepare")
    env.finish_jobs()
    env.nova.servers[env.instance]["status"] = status
    env.now += timedelta(seconds=5)
    env.runner.run_once()
    assert (env.step(), env.found_by_nova()[0][1]) == ("expose", True)
    env.nova.servers[env.instance]["status"] = "ACTIVE"
    env.now += timedelta(minutes=1)
    env.run_until("guest")


def test_successor_of_a_shelved_server_fails_with_its_own_text(env: MaintenanceEnv) -> None:
    env.nova.servers[env.instance]["status"] = "SHELVED_OFFLOADED"
    env.begin()
    env.settle()
    assert env.rows()[0]["error"] == (
        f"server {env.instance} is SHELVED_OFFLOADED: a successor needs a server in ACTIVE or "
        "SHUTOFF"
    )


def test_failed_successor_is_retried_ever_later_and_logged_once(
    full_env: MaintenanceEnv, caplog: pytest.LogCaptureFixture
) -> None:
    env = full_env
    env.begin()
    delays = []
    for _ in range(10):
        env.settle()
        failed = env.now
        while not env.windows.sweep():
            env.now += timedelta(seconds=20)
            assert env.now - failed < timedelta(hours=2)
        delays.append((env.now - failed).total_seconds())
        env.begin(24, successor=None) if len(delays) == 1 else None
    assert delays == sorted(delays)
    assert (delays[0], delays[-1]) == (60, 3600)
    assert 1.5 < delays[3] / delays[2] < 2.5
    warnings = [r for r in caplog.records if "Attach failed" in r.getMessage()]
    assert len([r for r in warnings if r.levelname == "WARNING"]) == 1

    # The operator does not wait.
    env.settle()
    assert env.rows()[0]["state"] == "error"
    env.begin()
    assert env.rows()[0]["state"] == "attaching"


def test_successor_that_is_undone_is_failed(env: MaintenanceEnv) -> None:
    env.begin()
    env.run_until("prepare")
    env.now += timedelta(seconds=env.conf.conductor.attachment_timeout)
    env.runner.run_once()
    assert (env.rows()[0]["state"], env.step()) == ("attaching", "clean")
    assert (env.context, "failed") in env.owners()


def test_second_successor_of_a_use_is_no_row(env: MaintenanceEnv) -> None:
    env.begin()
    (row,) = env.rows()
    copy = {name: value for name, value in row.items() if name not in ("id", "uuid")}
    with pytest.raises(db_exc.DBDuplicateEntry):
        rows.insert(env.engine, schema.attachments, uuid=spare_of(env), **copy)
    env.settle(host_work="failed")
    assert env.rows()[0]["state"] == "error"
    with pytest.raises(db_exc.DBDuplicateEntry):
        rows.insert(env.engine, schema.attachments, uuid=spare_of(env), **copy)


@pytest.mark.parametrize(("which", "step"), [("old", "expose"), ("new", "prepare")])
def test_exchange_waits_until_the_host_has_restored_the_devices(
    env: MaintenanceEnv, which: str, step: str
) -> None:
    """The new devices are waited for in the step that prepares them."""
    env.begin()
    env.run_until("prepare")
    env.finish_jobs()
    with env.engine.begin() as tx:
        enqueue_restores(tx, env.node.name, env.now)
        attached = schema.arqs.c.attachment_id
        other = attached.is_not(None) if which == "old" else attached.is_(None)
        tx.execute(sa.update(schema.arqs).where(other).values(job_id=None))
    env.now += timedelta(seconds=5)
    env.runner.run_once()
    (row,) = env.rows()
    assert (row["state"], row["step"]) == ("attaching", step)
    assert row["error"] == "waiting until the host has restored the devices"
    env.finish_jobs()
    env.now += timedelta(minutes=1)
    env.run_until("guest")


def test_delete_of_a_context_says_what_the_successor_does(env: MaintenanceEnv) -> None:
    env.begin()
    env.run_until("prepare")
    env.arqs().unbind([{"request": arq["uuid"]} for arq in env.listed()], None)
    with pytest.raises(WrongState, match="is being undone; retry soon"):
        env.contexts().delete(env.context, None)


def test_delete_of_a_context_during_the_release_says_so(env: MaintenanceEnv) -> None:
    env.begin()
    env.run_until("guest")
    env.arqs().unbind([{"request": arq["uuid"]} for arq in env.listed()], None)
    env.finish_jobs()
    with pytest.raises(WrongState, match="may still be in use by the guest; stop or delete"):
        env.contexts().delete(env.context, None)
    env.nova.servers[env.instance]["status"] = "SHUTOFF"
    env.now += timedelta(minutes=2)
    env.runner.run_once()
    assert env.step() == "clean"
    with pytest.raises(WrongState, match="is being released after its maintenance; retry soon"):
        env.contexts().delete(env.context, None)


def test_bind_wakes_jobs_and_messages(env: MaintenanceEnv) -> None:
    woken: list[str] = []
    env.runner._devices.wake_jobs = lambda: woken.append("jobs")
    env.runner._devices.wake_outbox = lambda: woken.append("outbox")
    env.begin()
    env.run_until("prepare")
    assert woken == ["jobs", "outbox"]


@pytest.mark.parametrize("step", ["allocate", "bind", "expose"])
def test_server_that_is_deleted_before_a_step_needs_no_successor(
    env: MaintenanceEnv, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, deleted = env.runner._successor_steps[Step(step)], list[str]()

    def delete_first(work: Any) -> Any:
        if not deleted:
            delete_server(env)
            deleted.append(step)
        return run(work)

    monkeypatch.setitem(env.runner._successor_steps, Step(step), delete_first)
    env.begin()
    for _ in range(10):
        env.runner.run_once()
        env.finish_jobs()
        env.now += timedelta(seconds=30)
    env.windows.sweep()
    assert deleted == [step]
    assert env.rows() == []
    assert (env.used(), env.context_state()) == ((1, 0), "unbound")
    assert env.node.client.get(f"/allocations/{env.instance}").json()["allocations"] == {}


UNDO_POINTS = 26  # more than the undo has


@pytest.mark.parametrize("crash_at", pick_points(UNDO_POINTS))
def test_crash_at_any_moment_of_the_undo_leaves_the_old_device(
    env: MaintenanceEnv, crash_at: int
) -> None:
    env.start_conductor(crash_at)
    try:
        env.begin()
        env.settle(host_work="failed")
    except Crash:
        assert env.amounts()[0] == 1
        assert env.found_by_nova()[0][1]
        env.recover_with("failed")
        env.begin()
        env.settle(host_work="failed")
    else:
        assert crash_at > 15
    (row,) = env.rows()
    assert (row["state"], row["allocation_key"], row["intent"]) == ("error", None, None)
    assert (env.amounts(), env.used()) == ((1, 0), (2, 0))
    assert len(rows.read(env.engine, schema.arqs, instance_uuid=env.instance)) == 1


def test_two_conductors_exchange_once(engine: sa.Engine, node: Node, fake_nova: FakeNova) -> None:
    env = MaintenanceEnv(engine, node, fake_nova, abilities=HOST_WORK)
    first, first_windows = env.runner, env.windows
    env.start_conductor()
    until = (env.now + timedelta(hours=2)).isoformat()
    request = {"uuid": env.device, "until": until, "successor": "auto"}

    def work(runner: Any, windows: Any) -> None:
        windows.begin(request)
        for _ in range(6):
            runner.run_once()
            windows.sweep()

    with ThreadPoolExecutor(2) as pool:
        for _ in range(4):
            conductors = ((first, first_windows), (env.runner, env.windows))
            for result in [pool.submit(work, *conductor) for conductor in conductors]:
                result.result(60)
            env.finish_jobs()
            env.now += timedelta(seconds=5)
    assert (env.step(), env.amounts(), env.used()) == ("guest", (1, 1), (2, 1))
    assert [is_first for _, is_first in env.found_by_nova()] == [False]

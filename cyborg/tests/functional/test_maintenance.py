# SPDX-License-Identifier: Apache-2.0
"""Maintenance windows with successors, with a real Placement and a Nova over HTTP."""

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.attachments.attachment import Step
from cyborg.core.errors import Conflict, NotFound, WrongState
from cyborg.db import schema
from cyborg.db.attachments import read as attachment_read
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import Crash
from cyborg.tests.fixtures.databases.maintenance_setup import MaintenanceEnv
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.tiers import pick_points, sample

__all__ = ["node", "placement_adapter"]

HOST_WORK = ("prepares", "sanitises")


@pytest.fixture
def env(engine: sa.Engine, node: Node, fake_nova: FakeNova) -> MaintenanceEnv:
    """Return a server with a context, on each database."""
    return MaintenanceEnv(engine, node, fake_nova, abilities=HOST_WORK)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> MaintenanceEnv:
    """Return a server with a context."""
    return MaintenanceEnv(sqlite_engine, node, fake_nova, abilities=HOST_WORK)


def test_window_gives_the_context_a_successor_and_ends(env: MaintenanceEnv) -> None:
    ((arq, _),) = env.found_by_nova()
    assert (env.amounts(), env.used()) == ((1, 0), (2, 0))
    env.begin()
    assert env.shown()["status"] == "maintaining"
    assert set(env.owners()) == {(None, None), (env.context, "preparing")}

    # The other device is allocated and prepared before Nova sees it.
    env.runner.run_once()
    assert env.step() == "prepare"
    assert (env.amounts(), env.used()) == ((1, 1), (2, 1))
    assert env.found_by_nova() == [(arq, True)]
    env.finish_jobs()
    env.now += timedelta(seconds=5)
    env.runner.run_once()

    # Nova finds the other device under the same ARQ; the guest still has the old one.
    assert env.step() == "guest"
    assert env.found_by_nova() == [(arq, False)]
    assert (env.amounts(), env.used(), env.context_state()) == ((1, 1), (2, 1), "bound")
    assert env.context_row()["successor"]["state"] == "awaiting_restart"
    assert set(env.owners()) == {(None, None), (env.context, "awaiting_restart")}
    env.nova.add_action(env.instance, "reboot")  # of another user: perhaps a soft one
    env.now += timedelta(minutes=2)
    env.runner.run_once()
    assert (env.step(), env.amounts(), env.used()) == ("guest", (1, 1), (2, 1))
    assert "until it is stopped" in env.rows()[0]["error"]

    # A start proves that the guest has the other device: the old one is cleaned and free.
    env.nova.add_action(env.instance, "start")
    env.now += timedelta(minutes=2)
    env.runner.run_once()
    assert env.step() == "clean"
    assert env.amounts() == (1, 1)
    env.settle()
    assert env.rows() == []
    assert env.found_by_nova() == [(arq, False)]
    assert (env.amounts(), env.used(), env.context_state()) == ((0, 1), (1, 1), "bound")
    assert env.owners() == [(None, None)]
    assert env.nova.reboots == []

    env.now += timedelta(hours=2)
    assert env.windows.sweep() == 1
    assert (env.shown()["status"], env.shown()["maintenance"]) == ("enabled", None)


def test_stopped_server_gets_its_successor_at_once(sqlite_env: MaintenanceEnv) -> None:
    env = sqlite_env
    env.nova.servers[env.instance]["status"] = "SHUTOFF"
    env.begin()
    env.settle()
    assert env.rows() == []
    assert (env.amounts(), env.used()) == ((0, 1), (1, 1))
    ((_, is_first),) = env.found_by_nova()
    assert not is_first


def test_start_that_began_before_the_exchange_frees_nothing(
    sqlite_env: MaintenanceEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nova may have read the old device for it."""
    env = sqlite_env
    env.begin()
    env.run_until("prepare")
    env.finish_jobs()
    exchange = env.runner._successor_steps[Step.EXPOSE]

    def start_first(work: Any) -> Any:
        result = exchange(work)
        env.nova.add_action(env.instance, "start")
        return result

    monkeypatch.setitem(env.runner._successor_steps, Step.EXPOSE, start_first)
    env.now += timedelta(seconds=5)
    for _ in range(4):
        env.runner.run_once()
        env.now += timedelta(minutes=2)
    assert (env.step(), env.used()) == ("guest", (2, 1))


@pytest.mark.matrix
def test_no_free_device_shows_why_and_is_retried(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = MaintenanceEnv(sqlite_engine, node, fake_nova, spare_handles=1)
    blocker = env.arqs().create("fpga", "project-2")["arqs"][0]["uuid"]
    other = env.node.allocate(env.spare.provider, "FPGA")
    item = {
        "request": blocker,
        "hostname": env.node.name,
        "device_rp_uuid": env.spare.provider,
        "instance_uuid": other,
    }
    env.arqs().bind([item], None)
    env.begin()
    env.settle()
    (row,) = env.rows()
    assert row["state"] == "error"
    assert "0000:02:00.0: handle is taken (1 of 1 handles)" in row["error"]
    assert (env.amounts(), env.used()) == ((1, 0), (2, 1))
    (owner,) = [o for o in env.shown()["maintenance"]["owners"] if o["device_context"]]
    assert (owner["successor"], owner["error"]) == ("failed", row["error"])
    assert env.context_row()["successor"] == {"state": "failed", "error": row["error"]}
    with env.engine.begin() as tx:
        tx.execute(sa.update(schema.attachments).values(updated_at=env.now))
    assert env.windows.sweep() == 0

    env.arqs().delete(None, other, None, True)
    env.node.deallocate(other)
    env.now += timedelta(minutes=2)
    assert env.windows.sweep() == 1
    env.run_until("guest")
    assert (env.amounts(), env.used()) == ((1, 1), (2, 1))


def test_failed_successor_is_forgotten_with_its_window(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = MaintenanceEnv(sqlite_engine, node, fake_nova, spare_handles=0)
    env.begin()
    env.settle()
    assert env.context_row()["successor"]["state"] == "failed"
    assert env.rows()[0]["error"] == (
        "no device of the host can be the successor: group 0: 0000:02:00.0: provider has too few "
        "handles: 0, group 0 requests 1"
    )
    env.now += timedelta(hours=3)
    assert env.windows.sweep() == 2
    assert (env.rows(), env.context_row()["successor"]) == ([], None)


def test_context_that_the_flavor_does_not_name_gets_no_successor(
    sqlite_env: MaintenanceEnv,
) -> None:
    """Nova may use it for a port, whose binding names the old device also after a reboot."""
    env = sqlite_env
    env.nova.servers[env.instance]["flavor"]["extra_specs"]["accel:device_profile"] = "other"
    env.begin()
    env.settle()
    (row,) = env.rows()
    assert row["state"] == "error"
    assert "may belong to a port" in row["error"]
    assert (env.amounts(), env.used()) == ((1, 0), (2, 0))


def test_window_without_successor_changes_no_binding(sqlite_env: MaintenanceEnv) -> None:
    env = sqlite_env
    env.begin(successor=None)
    assert env.windows.sweep() == 0
    assert env.rows() == []
    assert set(env.owners()) == {(None, None), (env.context, None)}


def test_context_of_a_deleted_server_needs_no_successor(sqlite_env: MaintenanceEnv) -> None:
    env = sqlite_env
    env.begin()
    env.run_until("guest")
    # What Nova does: it deletes all ARQs of the instance, and then the allocation.
    env.arqs().delete(None, env.instance, None, True)
    env.node.deallocate(env.instance)
    del env.nova.servers[env.instance]
    env.finish_jobs()
    env.now += timedelta(minutes=2)
    env.settle()
    assert env.rows() == []
    assert (env.used(), env.context_state()) == ((1, 0), "unbound")


@pytest.mark.parametrize("step", sample(["prepare", "guest"], "guest"))
def test_context_that_is_unbound_releases_both_devices(
    sqlite_env: MaintenanceEnv, step: str
) -> None:
    env = sqlite_env
    env.begin()
    env.run_until(step)
    uuids = [arq["uuid"] for arq in env.listed()]
    env.arqs().unbind([{"request": uuid} for uuid in uuids], None)
    env.finish_jobs()
    if step == "guest":
        with pytest.raises(WrongState, match="exchanged for maintenance"):
            env.contexts().delete(env.context, None)
        assert env.used() == (2, 0)  # the guest may still have the old device
        env.nova.servers[env.instance]["status"] = "SHUTOFF"
    env.now += timedelta(minutes=2)
    env.settle()
    assert (env.used(), env.amounts()[1]) == ((1, 0), 0 if step == "prepare" else 1)
    env.windows.sweep()
    assert env.rows() == []
    env.contexts().delete(env.context, None)


def test_successor_is_no_attachment_of_the_api(sqlite_env: MaintenanceEnv) -> None:
    env = sqlite_env
    env.begin()
    env.run_until("guest")
    (row,) = env.rows()
    with env.engine.connect() as connection:
        assert attachment_read.find(connection) == []
    with pytest.raises(NotFound):
        env.attachments.delete(None, env.instance, None, False)
    with pytest.raises(NotFound):
        env.attachments.delete(row["uuid"], None, None, False)


@pytest.mark.matrix
def test_group_of_several_units_moves_together(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = MaintenanceEnv(sqlite_engine, node, fake_nova, spare_handles=3, abilities=HOST_WORK)
    context = env.create_context(units=2)
    env.instance = env.add_context_server(context, units=2)
    env.begin()
    for _ in range(3):
        env.runner.run_once()
        env.finish_jobs()
        env.now += timedelta(seconds=5)
    assert env.amounts() == (2, 2)
    assert [is_first for _, is_first in env.found_by_nova()] == [False, False]
    env.nova.servers[env.instance]["status"] = "SHUTOFF"
    env.now += timedelta(minutes=2)
    env.runner.run_once()
    env.finish_jobs()
    env.now += timedelta(seconds=5)
    env.runner.run_once()
    assert (env.amounts(), len(env.rows())) == ((0, 2), 0)


def test_failed_preparation_leaves_the_old_device(sqlite_env: MaintenanceEnv) -> None:
    env = sqlite_env
    env.begin()
    env.settle(host_work="failed")
    (row,) = env.rows()
    assert (row["state"], env.amounts(), env.used()) == ("error", (1, 0), (2, 0))
    assert "could not prepare" in row["error"]
    ((_, is_first),) = env.found_by_nova()
    assert is_first


def test_successor_without_nova_is_refused(sqlite_env: MaintenanceEnv) -> None:
    env = sqlite_env
    env.windows.has_nova = False
    with pytest.raises(Conflict, match="needs Nova"):
        env.begin()
    env.begin(successor=None)


def count_points(env: MaintenanceEnv) -> int:
    """Return how many moments the whole flow has, by running it once."""
    env.begin()
    env.run_until("guest")
    env.nova.add_action(env.instance, "start")
    env.now += timedelta(minutes=2)
    env.settle()
    return len(env.points.passed)


POINTS = 48  # more than the flow has


@pytest.mark.parametrize("crash_at", pick_points(POINTS))
def test_crash_at_any_moment_ends_with_the_successor(
    sqlite_env: MaintenanceEnv, crash_at: int
) -> None:
    """The allocation, the handles and what Nova finds agree at the end, and never lack a device."""
    env = sqlite_env
    env.start_conductor(crash_at)
    crashed = False
    try:
        env.begin()
        env.run_until("guest")
        env.nova.add_action(env.instance, "start")
        env.now += timedelta(minutes=2)
        env.settle()
    except Crash:
        crashed = True
    if crashed:
        amounts, used = env.amounts(), env.used()
        found = env.found_by_nova()
        assert len(found) == 1, "Nova always finds one device"
        assert amounts[0 if found[0][1] else 1] == 1, "and its unit is allocated"
        assert used[0 if found[0][1] else 1] >= 1, "and owned"
        env.now += timedelta(minutes=10)
        env.start_conductor()
        env.begin(24)
        for _ in range(30):
            env.runner.run_once()
            env.finish_jobs()
            env.windows.sweep()
            if env.rows() and env.rows()[0]["step"] == "guest":
                env.nova.add_action(env.instance, "start")
            env.now += timedelta(minutes=2)
    assert env.rows() == []
    ((_, is_first),) = env.found_by_nova()
    assert not is_first
    assert (env.amounts(), env.used(), env.context_state()) == ((0, 1), (1, 1), "bound")
    assert len(rows.read(env.engine, schema.arqs, instance_uuid=env.instance)) == 1


def test_crash_points_cover_the_flow(sqlite_env: MaintenanceEnv) -> None:
    assert 15 < count_points(sqlite_env) <= POINTS

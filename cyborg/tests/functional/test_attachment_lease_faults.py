# SPDX-License-Identifier: Apache-2.0
"""Attach device contexts with a lease whose devices are closed or restored, and other faults."""

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding import binding
from cyborg.conductor.binding.limits import UnifiedLimits
from cyborg.conductor.jobs.reboot import enqueue_restores
from cyborg.core.errors import Unavailable
from cyborg.core.inventory.device import Health
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import PROJECT
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.functional.test_attachment_leases import HOST_WORK, LeaseEnv

__all__ = ["node", "placement_adapter"]


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> LeaseEnv:
    """Return a server and a context whose devices the host prepares and cleans."""
    env = LeaseEnv(sqlite_engine, node, fake_nova, abilities=HOST_WORK)
    env.add_context()
    return env


@pytest.mark.parametrize(
    ("closed", "opened"),
    [
        ({"status": "disabled"}, {"status": "enabled"}),
        pytest.param({"health": Health.UNHEALTHY}, {"health": Health.OK}, marks=pytest.mark.matrix),
        pytest.param({"cordoned": True}, {"cordoned": False}, marks=pytest.mark.matrix),
        pytest.param({"draining": True}, {"draining": False}, marks=pytest.mark.matrix),
    ],
)
def test_handle_that_no_claim_may_use_is_not_taken(
    env: LeaseEnv, closed: dict[str, Any], opened: dict[str, Any]
) -> None:
    """Placement does not know yet that the device is closed. The lease stays."""
    env.reserve()
    env.finish_jobs()
    (device,) = rows.read(env.engine, schema.devices)
    rows.update(env.engine, schema.devices, device["id"], **closed)
    handle, uuids = env.leased_handle(), {row["uuid"] for row in rows.read(env.engine, schema.arqs)}
    env.attach_context()
    env.settle()
    (row,) = env.rows()
    assert f"device context {env.context} has reserved can no longer be used" in row["error"]
    assert "attach the context again when the device can be used" in row["error"]
    assert (row["state"], env.state(), env.allocated(), env.owned()) == ("error", "reserved", 1, 2)
    assert env.leased_handle() == handle
    # The holder of the lease can still use its ARQ.
    assert {row["uuid"] for row in rows.read(env.engine, schema.arqs)} == uuids
    assert env.row()["lease_expires_at"] is not None
    rows.update(env.engine, schema.devices, device["id"], **opened)
    env.detach()
    env.attach_context()
    env.settle()
    assert (env.check_context(), env.leased_handle()) == (("attached", "bound"), handle)


def restore_after_reboot(env: LeaseEnv) -> list[dict[str, Any]]:
    """Reserve the context, and reboot its host; return the jobs that prepare the handles again."""
    env.reserve()
    env.finish_jobs()
    UnitOfWork(env.engine).run(lambda tx: enqueue_restores(tx, env.node.name, env.now))
    return rows.read(env.engine, schema.jobs, kind="restore")


def wait_for_restore(env: LeaseEnv) -> None:
    """Run the conductor, and assert that the attach waits for the host."""
    for _ in range(4):
        env.runner.run_once()
        env.now += timedelta(seconds=3)
    (row,) = env.rows()
    assert (row["step"], env.state()) == ("prepare", "bound")
    assert row["error"] == "waiting until the host has restored the devices"


def test_reboot_of_the_server_waits_until_the_handle_is_restored(env: LeaseEnv) -> None:
    """Otherwise Nova would start the guest with a device that the host has not prepared."""
    assert len(restore_after_reboot(env)) == 2
    env.attach_context(reboot=True)
    wait_for_restore(env)
    assert (env.nova.reboots, len(env.listed())) == ([], 1)
    env.finish_jobs()
    env.settle()
    assert env.check_context() == ("attached", "bound")
    assert [row["error"] for row in env.rows()] == [None]
    assert len(env.nova.reboots) == 1


def test_plug_waits_until_the_handle_is_restored(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = LeaseEnv(sqlite_engine, node, fake_nova, abilities=HOST_WORK, live=True)
    env.add_context()
    restore_after_reboot(env)
    env.attach_context(mode="live")
    wait_for_restore(env)
    assert rows.read(env.engine, schema.jobs, kind="plug") == []
    env.settle()
    assert (env.check_context(), env.hypervisor.count(env.instance)) == (("attached", "bound"), 1)


def test_handle_that_is_not_restored_in_time_is_released(env: LeaseEnv) -> None:
    restore_after_reboot(env)
    env.attach_context()
    wait_for_restore(env)
    env.now += timedelta(seconds=env.conf.conductor.attachment_timeout)
    env.settle()
    assert env.check_context() == ("error", "unbound")
    assert "waiting until the host has restored" in env.rows()[0]["error"]


@pytest.mark.parametrize("state", sample(["done", "failed", "cancelled"], "failed"))
def test_job_that_has_ended_does_not_delay_the_attach(env: LeaseEnv, state: str) -> None:
    """Such as in a database that was restored from a copy."""
    for job in restore_after_reboot(env):
        rows.update(env.engine, schema.jobs, job["id"], state=state)
    env.attach_context()
    env.runner.run_once()
    assert env.check_context() == ("attached", "bound")


class StoppedKeystone:
    """A keystone that does not answer."""

    def read(self, project: str) -> dict[str, int]:
        """Raise Unavailable."""
        raise Unavailable(f"keystone does not answer for {project}")


@pytest.mark.parametrize("leased", [True, False])
def test_lease_is_attached_without_the_limits_of_the_project(env: LeaseEnv, leased: bool) -> None:
    """Its units were counted when it began."""
    if leased:
        env.reserve()
        env.finish_jobs()
    source = UnifiedLimits(env.conf, StoppedKeystone(), {})
    env.limit_source = source
    env.start_conductor()
    env.attach_context()
    env.runner.run_once()
    if leased:
        assert env.check_context() == ("attached", "bound")
    else:
        (row,) = env.rows()
        assert (row["step"], row["error"]) == ("bind", f"keystone does not answer for {PROJECT}")


def test_slots_that_are_always_taken_leave_the_lease(
    env: LeaseEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other binds for the server commit before each attempt."""
    env.reserve()
    env.finish_jobs()
    monkeypatch.setattr(binding._Call, "first_slot", lambda _: 0)
    env.attach_context()
    env.settle()
    (row,) = env.rows()
    assert row["error"] == (
        f"other accelerator requests were bound to server {env.instance} concurrently, at each "
        "attempt: attach the device context again"
    )
    assert (row["state"], env.state(), env.allocated(), env.owned()) == ("error", "reserved", 1, 2)

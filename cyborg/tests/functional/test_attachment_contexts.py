# SPDX-License-Identifier: Apache-2.0
"""Attach device contexts, with a real Placement: states, owners and what may not end beside it."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.contexts.device_contexts import DeviceContexts
from cyborg.conductor.contexts.leases import ContextLeases
from cyborg.conductor.notifications.notifications import ArqEventRecorder, NotificationBuilder
from cyborg.core.errors import (
    Conflict,
    CyborgError,
    Invalid,
    NotFound,
    ServiceTokenRequired,
    WrongState,
)
from cyborg.db import schema
from cyborg.db.attachments.write import lock_arqs
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import PROFILE, PROJECT, Crash, Env
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.tiers import pick_points

__all__ = ["node", "placement_adapter"]

pytestmark = pytest.mark.matrix

HOST_WORK = ("prepares", "sanitises")


class ContextEnv(Env):
    """A server, and a device context of its project with one accelerator."""

    context = ""

    def add_context(self, project: str = PROJECT) -> str:
        """Create a context and make it that of the test; return its uuid."""
        groups = [{"resources:FPGA": "1", f"trait:{rows.TRAIT}": "required"}]
        body = {"groups": groups, "config_data": {"key1": "val1"}}
        self.context = str(self.contexts().create(body, project)["uuid"])
        return self.context

    def contexts(self) -> DeviceContexts:
        """Return the operations on contexts."""
        return DeviceContexts(self.conf, UnitOfWork(self.engine), now=self._now)

    def leases(self) -> ContextLeases:
        """Return the operations on contexts that claim and release handles."""
        recorder = ArqEventRecorder(self.conf, NotificationBuilder(self.conf, now=self._now))
        return ContextLeases(
            self.conf, UnitOfWork(self.engine), self.arqs(), recorder, now=self._now
        )

    def reserve(self) -> dict[str, Any]:
        """Reserve the context on the host of the card."""
        mapping = {"hostname": self.node.name, "mappings": {"0": [self.card.provider]}}
        return self.leases().pre_bind(self.context, mapping, None)

    def attach_context(self, scope: str | None = None, **values: Any) -> dict[str, Any]:
        """Request to attach the context."""
        return self.attach(scope, device_profile=None, device_context=self.context, **values)

    def state(self) -> str:
        """Return the state of the context."""
        (row,) = rows.read(self.engine, schema.device_contexts, uuid=self.context)
        assert row["instance_uuid"] in (None, self.instance)
        return str(row["state"])

    def check_context(self) -> tuple[str, str]:
        """Assert that each source agrees; return the states of the attachment and the context."""
        row = next(iter(self.rows()), None)
        assert len(self.rows()) <= 1
        attached = row is not None and row["state"] == "attached"
        count = 2 if attached else 1
        assert (self.allocated(), self.owned(), len(self.listed())) == (count, count, count)
        assert self.dirty() == 0
        (arq,) = [
            arq
            for arq in rows.read(self.engine, schema.arqs)
            if arq["device_profile_name"] == f"ctx-{self.context}"
        ]
        assert arq["attachment_id"] == (row["id"] if row is not None and attached else None)
        assert not arq["hidden"]
        assert (arq["instance_uuid"] == self.instance) is attached
        assert row is None or (row["step"], row["allocation_key"]) == (None, None)
        return "detached" if row is None else str(row["state"]), self.state()


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> ContextEnv:
    """Return a server and a context whose devices the host prepares and cleans."""
    env = ContextEnv(sqlite_engine, node, fake_nova, abilities=HOST_WORK)
    env.add_context()
    return env


def test_attached_context_is_bound_and_unbound_with_the_attachment(env: ContextEnv) -> None:
    row = env.attach_context(PROJECT)
    assert (row["device_context"], row["device_profile_name"]) == (
        env.context,
        f"ctx-{env.context}",
    )
    assert env.attach_context(PROJECT) == row
    env.runner.run_once()
    assert (env.step(), env.state(), len(env.listed())) == ("prepare", "binding", 1)
    env.settle()
    assert env.check_context() == ("attached", "bound")
    (job,) = [
        job
        for job in rows.read(env.engine, schema.jobs, kind="prepare")
        if job["arguments"]["items"][0]["accel"]
    ]
    assert job["arguments"]["items"][0]["accel"] == {"key1": "val1"}
    assert env.attach_context(PROJECT)["uuid"] == row["uuid"]
    env.detach(PROJECT)
    env.runner.run_once()
    assert (env.step(), env.state(), env.allocated()) == ("clean", "cleaning", 2)
    env.settle()
    assert env.check_context() == ("detached", "unbound")
    env.attach_context()
    env.settle()
    assert env.check_context() == ("attached", "bound")


@pytest.mark.parametrize("use", ["delete", "reserve"])
def test_allocation_stays_until_the_released_handle_is_clean(env: ContextEnv, use: str) -> None:
    """The context is free again before: it may be deleted, or used with another handle."""
    env.attach_context()
    env.settle()
    env.detach()
    env.runner.run_once()
    assert (env.step(), env.state()) == ("clean", "cleaning")
    if use == "delete":
        env.contexts().delete(env.context, None)
    else:
        env.reserve()
    for _ in range(3):
        env.now += timedelta(seconds=2)
        env.runner.run_once()
    assert (env.step(), env.allocated(), env.dirty()) == ("clean", 2, 1)
    env.settle()
    assert (env.rows(), env.allocated(), env.dirty()) == ([], 1, 0)


def test_host_that_does_not_clean_ends_the_wait(env: ContextEnv) -> None:
    env.attach_context()
    env.settle()
    env.detach()
    env.runner.run_once()
    env.contexts().delete(env.context, None)
    env.now += timedelta(seconds=env.conf.conductor.release_timeout + 1)
    env.settle(host_work=None)
    assert (env.rows(), env.allocated(), env.dirty()) == ([], 1, 1)


def test_running_guest_keeps_the_context(env: ContextEnv) -> None:
    env.attach_context(reboot=True)
    env.settle()
    with pytest.raises(WrongState, match="stop it, or detach with a reboot"):
        env.detach()
    assert env.check_context() == ("attached", "bound")


def test_host_that_cannot_prepare_leaves_the_context_in_error_until_it_is_undone(
    env: ContextEnv,
) -> None:
    env.attach_context()
    env.runner.run_once()
    env.finish_jobs("failed")
    assert env.state() == "error"
    with pytest.raises(WrongState, match="or this is undone: wait"):
        env.contexts().delete(env.context, None)
    env.settle(host_work="failed")
    assert env.check_context() == ("error", "unbound")
    assert "could not prepare" in env.rows()[0]["error"]


@pytest.mark.parametrize("state", ["prepare", "attached"])
def test_only_the_attachment_frees_an_attached_context(env: ContextEnv, state: str) -> None:
    env.attach_context()
    if state == "prepare":
        env.runner.run_once()
    else:
        env.settle()
    (arq,) = [
        arq
        for arq in rows.read(env.engine, schema.arqs)
        if arq["device_profile_name"] == f"ctx-{env.context}"
    ]
    use = {"instance_uuid": env.instance}
    uuids: list[str] = [arq["uuid"]]
    attached = "is being attached" if state == "prepare" else "detach it with detach-instance"
    busy = "binding" if state == "prepare" else "bound"
    calls: list[tuple[type[CyborgError], str, Callable[[], object]]] = [
        (WrongState, attached, lambda: env.contexts().delete(env.context, None)),
        (WrongState, attached, lambda: env.leases().unbind(env.context, use, None, True)),
        (WrongState, busy, env.reserve),
        (
            WrongState,
            "belongs to an attachment, which unbinds it",
            lambda: env.arqs().unbind([{"request": uuids[0]}], None),
        ),
        (
            ServiceTokenRequired,
            "requires a service token",
            lambda: env.arqs().delete(uuids, None, None, False),
        ),
        (WrongState, f"is {busy}", lambda: env.arqs().create(f"ctx-{env.context}", PROJECT)),
    ]
    for error, text, call in calls:
        with pytest.raises(error, match=text):
            call()
    assert env.owned() == 2
    env.settle()
    assert env.check_context() == ("attached", "bound")


def test_context_that_is_in_use_is_refused(env: ContextEnv) -> None:
    env.attach_context()
    env.settle()
    with pytest.raises(WrongState, match=f"is bound, instance {env.instance}; only") as found:
        env.attach_context(uuid=str(uuid4()))
    assert found.value.details["field"] == "device_context"
    assert env.check_context() == ("attached", "bound")


def test_context_of_another_project_is_not_found(env: ContextEnv) -> None:
    env.add_context("project-2")
    with pytest.raises(NotFound, match="no device context") as found:
        env.attach_context(PROJECT)
    assert found.value.details["field"] == "device_context"
    with pytest.raises(Conflict, match="belongs to project project-2"):
        env.attach_context()
    assert (env.rows(), env.state()) == ([], "unbound")


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"device_context": "x"}, "device_context"),
        ({"device_context": 7}, "device_context"),
        ({"device_context": str(uuid4()), "device_profile": PROFILE}, "device_context"),
        ({}, "device_profile"),
    ],
)
def test_bad_selector_names_the_field(env: ContextEnv, values: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as found:
        env.attach(**{"device_profile": None, **values})
    assert (found.value.details["field"], env.rows()) == (field, [])


def test_context_that_was_taken_meanwhile_ends_in_error(env: ContextEnv) -> None:
    """Both requests find the context unbound: the bind decides, under its lock."""
    env.attach_context()
    env.attach_context(uuid=str(uuid4()))
    env.settle()
    first, second = env.rows()
    assert sorted([first["state"], second["state"]]) == ["attached", "error"]
    failed = first if first["state"] == "error" else second
    assert "only a context that is" in failed["error"]
    assert (env.state(), env.allocated(), env.owned()) == ("bound", 2, 2)
    env.detach()
    env.settle()
    assert env.check_context() == ("detached", "unbound")


@pytest.mark.parametrize("reserved", [True, False])
def test_context_that_was_reserved_or_deleted_meanwhile_ends_in_error(
    env: ContextEnv, reserved: bool
) -> None:
    env.attach_context()
    if reserved:
        env.reserve()
    else:
        env.contexts().delete(env.context, None)
    env.settle()
    (row,) = env.rows()
    assert row["state"] == "error"
    assert ("is reserv" if reserved else f"device context {env.context} does not") in row["error"]
    assert "ctx-" not in row["error"]
    assert (env.allocated(), len(env.listed())) == (1, 1)
    assert env.owned() == (2 if reserved else 1)


def test_deleted_server_leaves_an_unbound_context(env: ContextEnv) -> None:
    env.attach_context()
    env.settle()
    env.arqs().delete(None, env.instance, None, True)
    env.finish_jobs()
    assert env.state() == "unbound"
    env.reserve()  # the next use of the context is not that of the attachment
    assert env.runner.sweep() == 1
    env.settle()
    assert (env.rows(), env.state(), env.owned()) == ([], "reserved", 1)


def boot_with_context(env: ContextEnv) -> None:
    """Replace the server by one that Nova has built with the context, on one accelerator."""
    env.arqs().delete(None, env.instance, None, True)
    env.finish_jobs()
    (arq,) = env.arqs().create(f"ctx-{env.context}", PROJECT)["arqs"]
    item = {
        "request": arq["uuid"],
        "hostname": env.node.name,
        "device_rp_uuid": env.card.provider,
        "instance_uuid": env.instance,
    }
    env.arqs().bind([item], None)
    env.finish_jobs()


def test_shrink_leaves_the_units_of_a_context_that_nova_bound(env: ContextEnv) -> None:
    boot_with_context(env)
    assert (env.state(), env.allocated(), env.owned()) == ("bound", 1, 1)
    env.attach()
    env.settle()
    assert (env.allocated(), env.owned()) == (2, 2)
    # Nova writes the allocation of the server anew, without what was added.
    found = env.node.client.get(f"/allocations/{env.instance}").json()
    for item in found["allocations"].values():
        del item["generation"]
    found["allocations"][env.card.provider]["resources"]["FPGA"] = 1
    assert env.node.client.put(f"/allocations/{env.instance}", json=found).status_code == 204
    env.detach()
    env.settle()
    assert (env.rows(), env.allocated(), env.owned(), env.state()) == ([], 1, 1, "bound")


@pytest.mark.parametrize("step", ["prepare", "expose"])
def test_partly_released_context_is_not_attached(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova, step: str
) -> None:
    env = ContextEnv(sqlite_engine, node, fake_nova, abilities=HOST_WORK)
    groups = [{"resources:FPGA": "2", f"trait:{rows.TRAIT}": "required"}]
    env.context = str(env.contexts().create({"groups": groups}, PROJECT)["uuid"])
    env.attach_context()
    if step == "expose":
        env.nova.servers[env.instance]["OS-EXT-STS:task_state"] = "rebooting"
    env.runner.run_once()
    env.finish_jobs()
    if step == "expose":
        env.now += timedelta(seconds=5)
        env.runner.run_once()
    assert (env.step(), env.state()) == (step, "bound")
    (row,) = env.rows()
    with env.engine.begin() as tx:
        env.arqs().release_arqs(tx, lock_arqs(tx, row["id"])[:1], keep=True)
    env.nova.servers[env.instance]["OS-EXT-STS:task_state"] = None
    env.settle()
    (row,) = env.rows()
    assert (row["state"], env.state()) == ("error", "unbound")
    assert "1 of the 2 accelerator requests" in row["error"]
    assert (env.allocated(), env.owned()) == (1, 1)


def run_scenario(env: ContextEnv, scenario: str, crash_at: int | None) -> tuple[str, str]:
    """Attach and detach a context; the conductor may crash at a point. Return the end states."""
    if scenario == "detach":
        env.attach_context(reboot=True)
        env.settle()
        env.nova.reboots.clear()
    env.start_conductor(crash_at)
    if scenario == "detach":
        env.detach(reboot=True)
    else:
        env.attach_context(reboot=scenario == "attach")
    host_work = "failed" if scenario == "undo" else "done"
    try:
        env.settle(host_work=host_work)
    except Crash:
        env.recover_with(host_work)
    return env.check_context()


@pytest.mark.parametrize(
    ("scenario", "end"),
    [
        ("attach", ("attached", "bound")),
        ("undo", ("error", "unbound")),
        ("detach", ("detached", "unbound")),
    ],
)
def test_crash_between_any_two_effects_ends_finished_or_undone(
    sqlite_engine: sa.Engine,
    node: Node,
    fake_nova: FakeNova,
    scenario: str,
    end: tuple[str, str],
) -> None:
    env = ContextEnv(sqlite_engine, node, fake_nova, handles=200, abilities=HOST_WORK)
    env.add_context()
    assert run_scenario(env, scenario, None) == end
    total = len(env.points.passed)
    assert total > 10
    for crash_at in pick_points(total):
        env.forget_server()
        assert env.state() == "unbound"
        assert run_scenario(env, scenario, crash_at) == end, crash_at


def test_context_on_each_database(engine: sa.Engine, node: Node, fake_nova: FakeNova) -> None:
    env = ContextEnv(engine, node, fake_nova, abilities=HOST_WORK)
    env.add_context()
    env.attach_context()
    env.settle()
    assert env.check_context() == ("attached", "bound")
    env.detach()
    env.settle()
    assert env.check_context() == ("detached", "unbound")
    env.now += timedelta(days=2)
    assert env.contexts().sweep() == 0


def test_running_guest_gets_and_loses_the_context(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = ContextEnv(sqlite_engine, node, fake_nova, abilities=HOST_WORK, live=True)
    env.add_context()
    env.attach_context(mode="live")
    env.settle()
    assert env.check_context() == ("attached", "bound")
    assert env.hypervisor.count(env.instance) == 1
    env.detach()
    env.settle()
    assert env.check_context() == ("detached", "unbound")
    assert env.hypervisor.count(env.instance) == 0


def test_conductors_that_attach_one_context_to_two_servers(
    engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = ContextEnv(engine, node, fake_nova, handles=8)
    env.add_context()
    servers = [env.instance, *(env.add_server() for _ in range(3))]
    for server in servers:
        env.attach_context(instance_uuid=server)
    env.settle_with_conductors(3)
    found = rows.read(env.engine, schema.attachments)
    assert sorted(row["state"] for row in found) == ["attached", "error", "error", "error"]
    (winner,) = [row["instance_uuid"] for row in found if row["state"] == "attached"]
    (context,) = rows.read(env.engine, schema.device_contexts)
    assert (context["state"], context["instance_uuid"]) == ("bound", winner)
    assert env.owned() == len(servers) + 1
    for env.instance in servers:
        assert env.allocated() == len(env.listed()) == (2 if env.instance == winner else 1)

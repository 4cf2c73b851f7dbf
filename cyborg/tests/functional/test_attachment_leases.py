# SPDX-License-Identifier: Apache-2.0
"""Attach device contexts with a lease: the server gets the handles of the lease, or nothing."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.clients.placement import Placement
from cyborg.core.errors import Conflict, WrongState
from cyborg.db import schema
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import PROJECT, Crash
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.tiers import pick_points
from cyborg.tests.functional.test_attachment_contexts import ContextEnv

__all__ = ["node", "placement_adapter"]

pytestmark = pytest.mark.matrix

HOST_WORK = ("prepares", "sanitises")


class LeaseEnv(ContextEnv):
    """A server, and a device context of its project with one accelerator."""

    def leased_handle(self) -> str:
        """Return the uuid of the handle that the ARQ of the context owns."""
        (arq,) = rows.read(self.engine, schema.arqs, device_profile_name=f"ctx-{self.context}")
        (handle,) = rows.read(self.engine, schema.attach_handles, arq_id=arq["id"])
        return str(handle["uuid"])

    def row(self) -> dict[str, Any]:
        """Return the context."""
        (row,) = rows.read(self.engine, schema.device_contexts, uuid=self.context)
        return row

    def release_lease(self) -> None:
        """Unbind the context, whose handle the host cleans."""
        self.leases().unbind(self.context, {}, None, True)
        self.finish_jobs()


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> LeaseEnv:
    """Return a server and a context whose devices the host prepares and cleans."""
    env = LeaseEnv(sqlite_engine, node, fake_nova, abilities=HOST_WORK)
    env.add_context()
    return env


@pytest.mark.parametrize("prepared", [True, False])
def test_attach_of_a_context_with_a_lease_takes_its_handle(env: LeaseEnv, prepared: bool) -> None:
    """The host may still prepare the device: the context is reserving."""
    env.reserve()
    if prepared:
        env.finish_jobs()
    assert env.state() == ("reserved" if prepared else "reserving")
    handle, jobs = env.leased_handle(), len(rows.read(env.engine, schema.jobs))
    uuids = {row["uuid"] for row in rows.read(env.engine, schema.arqs)}
    env.attach_context()
    env.settle()
    assert env.check_context() == ("attached", "bound")
    assert env.leased_handle() == handle
    assert len(rows.read(env.engine, schema.jobs)) == jobs
    # The holder of the lease cannot use its ARQ any more.
    assert len({row["uuid"] for row in rows.read(env.engine, schema.arqs)} & uuids) == 1
    with pytest.raises(WrongState, match="detach it with detach-instance"):
        env.leases().unbind(env.context, {"epoch": 1}, None)
    assert (env.row()["epoch"], env.row()["lease_expires_at"]) == (1, None)
    env.now += timedelta(days=1)
    assert env.leases().sweep() == 0
    env.detach()
    env.settle()
    assert env.check_context() == ("detached", "unbound")


def test_lease_for_another_host_is_refused(env: LeaseEnv) -> None:
    env.reserve()
    env.finish_jobs()
    other = Node(env.node.client)
    server = env.nova.servers[env.instance]
    for name in ("host", "hypervisor_hostname"):
        server[f"OS-EXT-SRV-ATTR:{name}"] = other.name
    with pytest.raises(Conflict) as found:
        env.attach_context()
    assert found.value.message == (
        f"device_context: device context {env.context} has a lease for host {env.node.name}, and "
        f"server {env.instance} is on host {other.name}: attach it to a server on the host of the "
        "lease, or unbind it first"
    )
    assert found.value.details["field"] == "device_context"
    assert (env.rows(), env.state()) == ([], "reserved")


def test_lease_is_refused_to_a_member(env: LeaseEnv) -> None:
    env.reserve()
    env.finish_jobs()
    with pytest.raises(WrongState, match="only an administrator can attach it"):
        env.attach_context(PROJECT)
    assert (env.rows(), env.state()) == ([], "reserved")


def test_repeated_request_gets_the_attachment_that_was_made_meanwhile(
    env: LeaseEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    env.reserve()
    env.finish_jobs()
    uuid, check = str(uuid4()), Placement.find
    first: list[dict[str, Any]] = []

    def find(self: Any, name: str) -> Any:
        """Answer after the first copy of the request has been processed."""
        monkeypatch.setattr(Placement, "find", check)
        first.append(env.attach_context(uuid=uuid))
        env.settle()
        return check(self, name)

    monkeypatch.setattr(Placement, "find", find)
    second = env.attach_context(uuid=uuid)
    assert (second["uuid"], second["state"]) == (first[0]["uuid"], "attached")
    assert env.check_context() == ("attached", "bound")


def test_lease_whose_server_moved_meanwhile_ends_in_error(env: LeaseEnv) -> None:
    env.reserve()
    env.finish_jobs()
    row = env.attach_context()
    (attachment,) = rows.read(env.engine, schema.attachments, uuid=row["uuid"])
    other = Node(env.node.client)
    rows.update(env.engine, schema.attachments, attachment["id"], hostname=other.name)
    env.settle()
    (row,) = env.rows()
    assert f"are not below compute node {other.name}" in row["error"]
    assert (row["state"], env.state(), env.allocated(), env.owned()) == ("error", "reserved", 1, 2)


def test_lease_that_has_ended_is_refused(env: LeaseEnv) -> None:
    env.reserve()
    env.finish_jobs()
    env.now += timedelta(hours=1)
    with pytest.raises(WrongState, match="has ended, and its handles are being released"):
        env.attach_context()
    assert (env.rows(), env.state()) == ([], "reserved")


def end_lease(env: LeaseEnv) -> None:
    """Let the lease end."""
    env.now += timedelta(hours=1)


def replace_lease(env: LeaseEnv) -> None:
    """Let another holder reserve the context."""
    env.release_lease()
    env.reserve()
    env.finish_jobs()


@pytest.mark.parametrize(
    ("change", "text", "state"),
    [
        (end_lease, "has ended, and its handles are being released", "reserved"),
        (LeaseEnv.release_lease, "has ended, and the context is unbound: attach it", "unbound"),
        (replace_lease, "has no lease with epoch 1; its epoch is 2", "reserved"),
    ],
)
@pytest.mark.parametrize("step", ["allocate", "bind"])
def test_lease_that_ends_before_the_bind_leaves_the_attachment_in_error(
    env: LeaseEnv, step: str, change: Callable[[LeaseEnv], None], text: str, state: str
) -> None:
    """The epoch of the request fences the work: a later lease is not taken."""
    env.reserve()
    env.finish_jobs()
    bind = env.devices.bind
    changed: list[str] = []

    def change_before(work: Any) -> None:
        if not changed:
            changed.append(step)
            change(env)
        bind(work)

    env.attach_context()
    if step == "bind":
        env.replace_bind(change_before)
    else:
        change(env)
    env.settle()
    (row,) = env.rows()
    assert (row["state"], env.state(), env.allocated()) == ("error", state, 1)
    assert text in row["error"]
    assert env.owned() == (1 if state == "unbound" else 2)
    assert len(env.listed()) == 1


def test_allocation_without_capacity_keeps_the_lease(env: LeaseEnv) -> None:
    """An allocation that was made for the lease, for another consumer, takes all units."""
    env.reserve()
    env.finish_jobs()
    consumer = env.node.allocate(env.card.provider, "FPGA", 3)
    env.attach_context()
    env.settle()
    (row,) = env.rows()
    assert "cannot extend the allocation" in row["error"]
    assert (row["state"], env.state(), env.allocated(), env.owned()) == ("error", "reserved", 1, 2)
    env.detach()
    env.node.deallocate(consumer)
    env.attach_context()
    env.settle()
    assert env.check_context() == ("attached", "bound")


@pytest.mark.parametrize("step", ["allocate", "bind"])
def test_lease_whose_host_work_fails_before_the_bind_leaves_the_error_of_the_context(
    env: LeaseEnv, step: str
) -> None:
    """The context stays in error after the undo, until it is unbound."""
    env.reserve()
    env.attach_context()
    bind = env.devices.bind

    def fail_before(work: Any) -> None:
        env.finish_jobs("failed")
        bind(work)

    if step == "bind":
        env.replace_bind(fail_before)
    else:
        env.finish_jobs("failed")
    env.settle()
    (row,) = env.rows()
    assert row["error"] == (
        f"device context {env.context} has no lease any more, it is in error: broken; unbind it, "
        "and attach it again"
    )
    assert (row["state"], env.state(), env.allocated(), env.owned()) == ("error", "error", 1, 1)
    env.release_lease()
    env.detach()
    env.replace_bind(bind)
    env.attach_context()
    env.settle()
    assert env.check_context() == ("attached", "bound")


def test_context_that_was_reserved_after_the_request_can_be_attached_again(env: LeaseEnv) -> None:
    env.attach_context()
    env.reserve()
    env.finish_jobs()
    handle = env.leased_handle()
    env.settle()
    (row,) = env.rows()
    assert row["error"] == (
        f"device context {env.context} is reserved: it was reserved after the request to attach "
        "it, attach it again"
    )
    assert (row["state"], env.state(), env.allocated(), env.owned()) == ("error", "reserved", 1, 2)
    env.detach()
    env.attach_context()
    env.settle()
    assert (env.check_context(), env.leased_handle()) == (("attached", "bound"), handle)


def test_host_that_cannot_prepare_ends_the_lease(env: LeaseEnv) -> None:
    env.reserve()
    env.attach_context()
    env.settle(host_work="failed")
    assert env.check_context() == ("error", "unbound")
    assert "could not prepare" in env.rows()[0]["error"]


@pytest.mark.parametrize("host_work", ["done", "failed"])
def test_crash_between_any_two_effects_ends_finished_or_undone(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova, host_work: str
) -> None:
    env = LeaseEnv(sqlite_engine, node, fake_nova, handles=200, abilities=HOST_WORK)
    env.add_context()
    end = ("attached", "bound") if host_work == "done" else ("error", "unbound")

    def run(crash_at: int | None) -> tuple[str, str]:
        env.reserve()
        env.start_conductor(crash_at)
        env.attach_context()
        try:
            env.settle(host_work=host_work)
        except Crash:
            env.recover_with(host_work)
        return env.check_context()

    assert run(None) == end
    total = len(env.points.passed)
    assert total >= 8
    for crash_at in pick_points(total):
        env.forget_server()
        assert env.state() == "unbound"
        assert run(crash_at) == end, crash_at


def test_running_guest_gets_the_accelerators_of_two_leases(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = LeaseEnv(sqlite_engine, node, fake_nova, abilities=HOST_WORK, live=True)
    handles = set()
    for _ in range(2):
        env.add_context()
        env.reserve()
        env.finish_jobs()
        handles.add(env.leased_handle())
        env.attach_context(mode="live")
    env.settle()
    assert [row["state"] for row in env.rows()] == ["attached", "attached"]
    assert (env.hypervisor.count(env.instance), env.allocated(), env.owned()) == (2, 3, 3)
    owned = {row["uuid"] for row in rows.read(env.engine, schema.attach_handles) if row["arq_id"]}
    assert handles < owned
    env.detach()
    env.settle()
    assert (env.hypervisor.count(env.instance), env.allocated(), env.owned()) == (0, 1, 1)


def test_lease_of_several_groups_on_two_cards(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = LeaseEnv(sqlite_engine, node, fake_nova, handles=8, abilities=HOST_WORK)
    card = rows.insert_card(
        env.engine, node.name, "0000:77:00.0", handles=4, abilities=sorted(HOST_WORK)
    )
    generation = node.placement.create(card.provider, f"{node.name}_card2", node.uuid)
    inventory = {"FPGA": {"total": 4}}
    generation = node.placement.set_inventories(card.provider, generation, inventory)
    node.placement.set_traits(card.provider, generation, [rows.TRAIT, "OWNER_CYBORG"])
    groups = [
        {"resources:FPGA": count, f"trait:{rows.TRAIT}": "required"} for count in ("2", "1", "1")
    ]
    env.context = str(env.contexts().create({"groups": groups}, PROJECT)["uuid"])
    providers = [card.provider, env.card.provider, card.provider]
    mappings = {str(number): [provider] for number, provider in enumerate(providers)}
    env.leases().pre_bind(env.context, {"hostname": node.name, "mappings": mappings}, None)

    def owners() -> dict[int, int]:
        found = rows.read(env.engine, schema.attach_handles)
        return {row["id"]: row["arq_id"] for row in found if row["arq_id"] is not None}

    def amounts() -> dict[str, int]:
        found = node.client.get(f"/allocations/{env.instance}").json()["allocations"]
        return {
            uuid: item["resources"]["FPGA"]
            for uuid, item in found.items()
            if "FPGA" in item["resources"]
        }

    before = owners()
    assert (len(before), amounts()) == (5, {env.card.provider: 1})
    env.attach_context()
    env.settle()
    assert ([row["state"] for row in env.rows()], env.state()) == (["attached"], "bound")
    assert owners() == before
    assert amounts() == {env.card.provider: 2, card.provider: 3}
    found = rows.read(env.engine, schema.arqs, instance_uuid=env.instance)
    assert sorted(row["instance_slot"] for row in found) == [0, 1, 2, 3, 4]
    assert {
        (row["device_profile_group_id"], row["device_rp_uuid"])
        for row in found
        if row["context_id"] is not None
    } == set(enumerate(providers))
    env.detach()
    env.settle()
    assert (env.rows(), env.state(), len(owners())) == ([], "unbound", 1)
    assert (amounts(), env.dirty()) == ({env.card.provider: 1}, 0)


def test_lease_on_each_database(engine: sa.Engine, node: Node, fake_nova: FakeNova) -> None:
    env = LeaseEnv(engine, node, fake_nova, abilities=HOST_WORK)
    env.add_context()
    env.reserve()
    env.finish_jobs()
    handle = env.leased_handle()
    env.attach_context()
    env.settle()
    assert (env.check_context(), env.leased_handle()) == (("attached", "bound"), handle)
    env.detach()
    env.settle()
    assert env.check_context() == ("detached", "unbound")


def test_conductors_that_attach_one_lease_to_two_servers(
    engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = LeaseEnv(engine, node, fake_nova, handles=8)
    env.add_context()
    env.reserve()
    handle = env.leased_handle()
    servers = [env.instance, *(env.add_server() for _ in range(3))]
    for server in servers:
        env.attach_context(instance_uuid=server)
    env.settle_with_conductors(3)
    found = rows.read(env.engine, schema.attachments)
    assert sorted(row["state"] for row in found) == ["attached", "error", "error", "error"]
    (winner,) = [row["instance_uuid"] for row in found if row["state"] == "attached"]
    errors = [row["error"] for row in found if row["state"] == "error"]
    assert all(f"is bound, bound to instance {winner}" in error for error in errors), errors
    assert (env.row()["instance_uuid"], env.leased_handle()) == (winner, handle)
    assert env.owned() == len(servers) + 1
    for env.instance in servers:
        assert env.allocated() == len(env.listed()) == (2 if env.instance == winner else 1)

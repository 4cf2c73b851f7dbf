# SPDX-License-Identifier: Apache-2.0
"""Attach one accelerator and detach by accelerator, with a real Placement."""

from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from keystoneauth1.adapter import Adapter
from keystoneauth1.session import Session

from cyborg.clients.placement import Placement
from cyborg.conductor.device_profiles import DeviceProfiles
from cyborg.core.errors import Conflict, Invalid, NotFound, WrongState
from cyborg.db import schema
from cyborg.db.profiles import read as profiles_read
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import PROJECT, Crash, Env
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.machine.tiers import pick_points, sample

__all__ = ["node", "placement_adapter"]

pytestmark = pytest.mark.matrix

HOST_WORK = ("prepares", "sanitises")
UNKNOWN = "6f4fa6e9-3c5c-4a8b-9a35-3f4b0c3e1a11"


class AcceleratorEnv(Env):
    """A server, and a host with free accelerators."""

    def free(self) -> list[str]:
        """Return the uuids of the free accelerators."""
        handles = rows.read(self.engine, schema.attach_handles)
        return [row["uuid"] for row in handles if row["arq_id"] is None]

    def attach_accelerator(self, accelerator: str, scope: str | None = None, **more: Any) -> Any:
        """Request to attach an accelerator; return the row of the attachment."""
        return self.attach(scope, device_profile=None, accelerator=accelerator, **more)

    def detach_accelerator(self, uuid: str) -> None:
        """Request to detach what holds an accelerator."""
        self.attachments.delete(None, self.instance, None, False, uuid)

    def owner(self, uuid: str) -> str | None:
        """Return the server that owns an accelerator, if any."""
        (handle,) = rows.read(self.engine, schema.attach_handles, uuid=uuid)
        if handle["arq_id"] is None:
            return None
        (arq,) = rows.read(self.engine, schema.arqs, id=handle["arq_id"])
        return str(arq["instance_uuid"])

    def add_host(self) -> tuple[Node, str]:
        """Add a host with one accelerator; return its compute node and the accelerator."""
        node = Node(self.node.client)
        card = rows.insert_card(self.engine, node.name, handles=1, address="0000:99:00.0")
        node.placement.create(card.provider, f"{node.name}_card", node.uuid)
        found = rows.read(self.engine, schema.attach_handles, deployable_id=card.deployable_id)
        return node, found[0]["uuid"]

    def hidden_profiles(self) -> list[dict[str, Any]]:
        """Return the hidden profiles of attachments."""
        found = rows.read(self.engine, schema.device_profiles)
        return [row for row in found if row["attachment_id"] is not None]


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> AcceleratorEnv:
    """Return a server on a host whose devices are prepared and cleaned."""
    return AcceleratorEnv(sqlite_engine, node, fake_nova, handles=8, abilities=HOST_WORK)


def test_attach_gives_the_server_exactly_the_chosen_accelerator(env: AcceleratorEnv) -> None:
    for chosen in env.free()[2:5]:
        row = env.attach_accelerator(chosen)
        assert (row["accelerator"], row["device_context"]) == (chosen, None)
        assert env.attach_accelerator(chosen) == row
        env.settle()
        assert env.check() == "attached"
        assert env.owner(chosen) == env.instance
        assert len(env.hidden_profiles()) == 1
        env.detach_accelerator(chosen)
        env.settle()
        assert env.check() == "detached"
        assert (env.owner(chosen), env.hidden_profiles()) == (None, [])


def test_hidden_profile_is_found_by_nobody(env: AcceleratorEnv) -> None:
    env.attach_accelerator(env.free()[0])
    env.settle()
    (profile,) = env.hidden_profiles()
    name, uuid = profile["name"], profile["uuid"]
    assert profile["groups"] == [{"resources:FPGA": "1"}]
    with env.engine.connect() as connection:
        for key in (name, uuid):
            assert profiles_read.get(connection, key) is None
        assert profiles_read.find(connection, names=[name], uuids=[uuid]) == []
        assert [row["name"] for row in profiles_read.find(connection)] == ["fpga"]
    profiles = build(DeviceProfiles, UnitOfWork(env.engine))
    with pytest.raises(NotFound):
        profiles.delete([name])
    with pytest.raises(NotFound):
        env.arqs().create(name, PROJECT)
    with pytest.raises(Invalid, match="is a hidden profile"):
        env.attach(device_profile=name)
    with pytest.raises(Invalid, match="reserved"):
        profiles.create({"name": f"ACC-{UNKNOWN}", "groups": [{"resources:FPGA": "1"}]})
    assert env.check() == "attached"


def test_host_that_nova_names_differently_gives_its_accelerator(
    env: AcceleratorEnv,
) -> None:
    """``[agent] resource_provider`` may name a compute node with any other name."""
    with env.engine.begin() as tx:
        for column in (schema.devices.c.host, schema.services.c.host):
            tx.execute(sa.update(column.table).values(host="rack-7-slot-3"))
    chosen = env.free()[3]
    env.attach_accelerator(chosen)
    env.settle()
    assert (env.check(), env.owner(chosen)) == ("attached", env.instance)


def test_accelerator_of_another_host_is_refused(env: AcceleratorEnv) -> None:
    node, other = env.add_host()
    with pytest.raises(Conflict) as found:
        env.attach_accelerator(other)
    assert found.value.message == (
        f"accelerator: accelerator {other} is on host {node.name}, and server {env.instance} on "
        f"host {env.node.name}: choose a free accelerator of the host of the server (cyborg "
        "accelerator-list --state free), or give a device_profile"
    )
    assert found.value.details == {
        "field": "accelerator",
        "host": node.name,
        "server_host": env.node.name,
    }
    # A member does not see the hosts.
    with pytest.raises(Conflict, match="is not on the host of server") as found:
        env.attach_accelerator(other, PROJECT)
    assert not {node.name, env.node.name} & {*found.value.message.split()}
    # Refused by its provider, also if the agent has the name of the host of the server.
    with env.engine.begin() as tx:
        tx.execute(sa.update(schema.devices).values(host=env.node.name))
    with pytest.raises(Conflict, match=f"accelerator {other} is on host"):
        env.attach_accelerator(other)
    assert (env.rows(), env.hidden_profiles()) == ([], [])
    # The server moves to the other host.
    env.nova.servers[env.instance]["OS-EXT-SRV-ATTR:hypervisor_hostname"] = node.name
    assert env.attach_accelerator(other)["state"] == "attaching"


def test_accelerator_whose_provider_moves_after_the_request_is_undone(
    env: AcceleratorEnv,
) -> None:
    node, other = env.add_host()
    (card,) = rows.read(env.engine, schema.deployables, address="0000:99:00.0")
    placement, name = env.node.placement, f"{node.name}_card"
    placement.delete(card["rp_uuid"])
    placement.create(card["rp_uuid"], name, env.node.uuid)
    env.attach_accelerator(other)
    placement.delete(card["rp_uuid"])
    placement.create(card["rp_uuid"], name, node.uuid)
    env.settle()
    assert env.check() == "error"
    assert f"is not below the compute node of host {env.node.name}" in env.rows()[0]["error"]


def test_placement_without_an_answer_does_not_refuse_an_accelerator(
    env: AcceleratorEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = env.free()[3]
    broken = Placement(Adapter(Session(), endpoint_override="http://127.0.0.1:9"), 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(env.attachments, "_placement", broken)
        env.attach_accelerator(chosen)
    env.settle()
    assert (env.check(), env.owner(chosen)) == ("attached", env.instance)


@pytest.mark.parametrize("host", ["compute-9", None])
def test_provider_that_is_not_below_the_compute_node_is_undone(
    env: AcceleratorEnv, host: str | None
) -> None:
    """The name of the host proves nothing."""
    host = host or env.node.name
    other = rows.insert_card(env.engine, host, handles=1, address="0000:99:00.0")
    (handle,) = rows.read(env.engine, schema.attach_handles, deployable_id=other.deployable_id)
    env.attach_accelerator(handle["uuid"])
    env.settle()
    assert env.check() == "error"
    assert f"is not below the compute node of host {env.node.name}" in env.rows()[0]["error"]
    env.detach_accelerator(handle["uuid"])
    assert (env.rows(), env.hidden_profiles()) == ([], [])


def test_accelerator_that_vanished_meanwhile_is_named(env: AcceleratorEnv) -> None:
    chosen = env.free()[3]
    env.attach_accelerator(chosen)
    # The provider is chosen; the accelerator vanishes before the bind.
    bind = env.devices.bind
    done: list[str] = []

    def vanish(work: Any) -> None:
        if not done:
            with env.engine.begin() as tx:
                handles = schema.attach_handles
                tx.execute(sa.delete(handles).where(handles.c.uuid == chosen))
            done.append(chosen)
        bind(work)

    env.replace_bind(vanish)
    env.settle()
    assert done == [chosen]
    text = f"accelerator {chosen} does not exist any more"
    assert (env.check(), env.rows()[0]["error"]) == ("error", text)


def test_accelerator_that_is_in_use_draining_or_unknown_is_refused(env: AcceleratorEnv) -> None:
    (taken,) = {row["uuid"] for row in rows.read(env.engine, schema.attach_handles)} - {*env.free()}
    with pytest.raises(WrongState, match=f"accelerator {taken} is bound, only a free"):
        env.attach_accelerator(taken)
    draining = env.free()[0]
    (row,) = rows.read(env.engine, schema.attach_handles, uuid=draining)
    rows.update(env.engine, schema.attach_handles, row["id"], draining=True)
    with pytest.raises(WrongState, match="is draining"):
        env.attach_accelerator(draining)
    # A member sees the accelerators of its own project only.
    other = env.add_server(tenant_id="project-2")
    with pytest.raises(NotFound, match=f"no accelerator {taken}"):
        env.attach_accelerator(taken, "project-2", instance_uuid=other)
    with pytest.raises(NotFound, match=f"no accelerator {UNKNOWN}"):
        env.attach_accelerator(UNKNOWN)
    for wrong in ("x", 7, ["a"]):
        with pytest.raises(Invalid) as found:
            env.attach(device_profile=None, accelerator=wrong)
        assert found.value.details["field"] == "accelerator"
    assert (env.rows(), env.hidden_profiles()) == ([], [])


def test_accelerator_that_was_taken_meanwhile_ends_in_error(env: AcceleratorEnv) -> None:
    """Both requests find it free: the bind claims this handle and no other of the provider."""
    chosen = env.free()[3]
    env.attach_accelerator(chosen)
    env.attach_accelerator(chosen, uuid=str(uuid4()))
    env.settle()
    by_state = {row["state"]: row for row in env.rows()}
    assert set(by_state) == {"attached", "error"}
    assert "handle is taken" in by_state["error"]["error"]
    assert (env.owned(), env.allocated(), env.owner(chosen)) == (2, 2, env.instance)
    env.detach_accelerator(chosen)
    env.settle()
    assert env.check() == "detached"


def test_detach_by_accelerator_leaves_the_other_attachments(env: AcceleratorEnv) -> None:
    first, second = env.free()[:2]
    env.attach_accelerator(first)
    env.attach_accelerator(second)
    env.settle()
    assert (env.owned(), env.allocated()) == (3, 3)
    env.detach_accelerator(first)
    env.settle()
    (row,) = env.rows()
    assert (row["accelerator"], row["state"]) == (second, "attached")
    assert (env.owner(first), env.owner(second)) == (None, env.instance)
    assert env.check() == "attached"


def test_detach_by_accelerator_finds_the_attachment_of_a_profile(env: AcceleratorEnv) -> None:
    free = set(env.free())
    env.attach()
    env.settle()
    (held,) = free - set(env.free())
    (flavor,) = {row["uuid"] for row in rows.read(env.engine, schema.attach_handles)} - free
    for other in (flavor, env.free()[0], UNKNOWN):
        with pytest.raises(NotFound, match=f"no attachment of server {env.instance} holds"):
            env.detach_accelerator(other)
    env.detach_accelerator(held)
    env.settle()
    assert env.check() == "detached"


def test_attachment_with_several_accelerators_is_not_split(env: AcceleratorEnv) -> None:
    groups = [{"resources:FPGA": "2", f"trait:{rows.TRAIT}": "required"}]
    build(DeviceProfiles, UnitOfWork(env.engine)).create({"name": "two", "groups": groups})
    free = set(env.free())
    env.attach(device_profile="two")
    env.settle()
    first, second = sorted(free - set(env.free()))
    with pytest.raises(Conflict, match=f"{first} and also {second}") as found:
        env.detach_accelerator(first)
    assert found.value.details["accelerators"] == [second]
    assert (env.owned(), env.rows()[0]["state"]) == (3, "attached")


def test_accelerator_without_an_instance_is_invalid(env: AcceleratorEnv) -> None:
    with pytest.raises(Invalid, match="give the instance or host too"):
        env.attachments.delete(UNKNOWN, None, None, False, UNKNOWN)
    with pytest.raises(Invalid) as found:
        env.attachments.delete(None, env.instance, None, False, "x")
    assert found.value.details["field"] == "accelerator"


@pytest.mark.parametrize(
    "scenario", sample(["attach", "undo", "detach"], "attach", mark=pytest.mark.long)
)
def test_crash_between_any_two_effects_ends_finished_or_undone(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova, scenario: str
) -> None:
    env = AcceleratorEnv(sqlite_engine, node, fake_nova, handles=100, abilities=HOST_WORK)
    host_work = "failed" if scenario == "undo" else "done"
    end = {"attach": "attached", "undo": "error", "detach": "detached"}[scenario]

    def run(crash_at: int | None) -> str:
        chosen = env.free()[5]
        if scenario == "detach":
            env.attach_accelerator(chosen)
            env.settle()
        env.start_conductor(crash_at)
        if scenario == "detach":
            env.detach_accelerator(chosen)
        else:
            env.attach_accelerator(chosen)
        try:
            env.settle(host_work=host_work)
        except Crash:
            env.recover_with(host_work)
        assert len(env.hidden_profiles()) == (scenario != "detach")
        assert env.owner(chosen) == (env.instance if scenario == "attach" else None)
        return env.check()

    assert run(None) == end
    total = len(env.points.passed)
    assert total >= 8
    for crash_at in pick_points(total):
        env.forget_server()
        assert run(crash_at) == end, crash_at


def test_accelerator_on_each_database(engine: sa.Engine, node: Node, fake_nova: FakeNova) -> None:
    env = AcceleratorEnv(engine, node, fake_nova, abilities=HOST_WORK)
    chosen = env.free()[1]
    env.attach_accelerator(chosen)
    env.settle()
    assert (env.check(), env.owner(chosen)) == ("attached", env.instance)
    env.detach_accelerator(chosen)
    env.settle()
    assert (env.check(), env.hidden_profiles()) == ("detached", [])


def test_conductors_that_attach_one_accelerator_to_two_servers(
    engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = AcceleratorEnv(engine, node, fake_nova, handles=8)
    servers = [env.instance, *(env.add_server() for _ in range(3))]
    chosen = env.free()[1]
    for server in servers:
        env.attach_accelerator(chosen, instance_uuid=server)
    env.settle_with_conductors(3)
    found = rows.read(env.engine, schema.attachments)
    assert sorted(row["state"] for row in found) == ["attached", "error", "error", "error"]
    (winner,) = [row["instance_uuid"] for row in found if row["state"] == "attached"]
    assert (env.owner(chosen), env.owned()) == (winner, len(servers) + 1)
    for env.instance in servers:
        assert env.allocated() == len(env.listed()) == (2 if env.instance == winner else 1)

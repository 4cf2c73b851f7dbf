# SPDX-License-Identifier: Apache-2.0
"""Attach accelerators to a host itself, with a real Placement: no server of Nova has them."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.clients.placement import ConsumerAllocation
from cyborg.conductor.attachments.allocations import HOST_USER
from cyborg.conductor.jobs.reboot import enqueue_restores
from cyborg.core.errors import Conflict, CyborgError, Invalid, NotFound, TimedOut, WrongState
from cyborg.db import schema
from cyborg.db.audits import read as audit_sources
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import PROFILE, PROJECT, Crash
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.tiers import pick_points
from cyborg.tests.functional.test_attachment_contexts import HOST_WORK, ContextEnv

__all__ = ["node", "placement_adapter"]

HOST_PROFILE = "fpga-of-the-host"
FOR_HOST = {"resources:FPGA": "1", "accel:attach_target": "host"}


class HostEnv(ContextEnv):
    """A host whose programs get accelerators, and a server there with one."""

    def add_host_context(self, project: str = PROJECT) -> str:
        """Create a context for the host; return its uuid."""
        body = {"resources": {"FPGA": 1}, "config_data": {"attach_target": "host"}}
        self.context = str(self.contexts().create(body, project)["uuid"])
        return self.context

    def attach_host(self, **values: Any) -> dict[str, Any]:
        """Request to attach something to the host, as an administrator."""
        request = {"hostname": self.node.name, "project_id": "operators"} | values
        return self.attachments.create(request, None)

    def detach_host(self, **values: Any) -> None:
        """Request to detach all from the host."""
        self.attachments.delete(None, None, None, False, hostname=self.node.name, **values)

    def found(self) -> list[dict[str, Any]]:
        """Return the attachments of the host."""
        return rows.read(self.engine, schema.attachments, mode="host")

    def units(self, consumer: str) -> int:
        """Return the accelerators that a consumer has in Placement."""
        answer = self.node.client.get(f"/allocations/{consumer}").json()
        amounts = answer["allocations"].get(self.card.provider, {"resources": {"FPGA": 0}})
        return int(amounts["resources"]["FPGA"])

    def check_host(self, consumer: str, units: int) -> None:
        """Assert that each source agrees on the accelerators of an attachment to the host."""
        assert (self.units(consumer), self.owned(), self.dirty()) == (units, units + 1, 0)
        # The server keeps its own.
        assert (self.allocated(), len(self.listed())) == (1, 1)
        owners = [arq for arq in rows.read(self.engine, schema.arqs) if arq["attachment_id"]]
        assert len(owners) == units
        for arq in owners:
            assert (arq["state"], arq["hostname"]) == ("Bound", self.node.name)
            assert (arq["instance_uuid"], arq["hidden"]) == (None, True)


@pytest.fixture(
    params=[
        pytest.param((), id="no host work", marks=pytest.mark.matrix),
        pytest.param(HOST_WORK, id="host work"),
    ]
)
def env(
    request: pytest.FixtureRequest, sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> HostEnv:
    env = HostEnv(sqlite_engine, node, fake_nova, abilities=request.param)
    rows.insert_profile(env.engine, HOST_PROFILE, groups=[FOR_HOST])
    env.add_host_context()
    return env


def test_context_is_bound_to_the_host_and_unbound(env: HostEnv) -> None:
    row = env.attach_host(device_context=env.context)
    assert (row["instance_uuid"], row["hostname"], row["mode"]) == (None, env.node.name, "host")
    assert row["project_id"] == PROJECT  # that of the context, not of the caller
    assert env.attach_host(device_context=env.context)["uuid"] == row["uuid"]
    env.settle()
    (found,) = env.found()
    assert (found["state"], found["step"], found["error"]) == ("attached", None, None)
    env.check_host(row["uuid"], 1)
    assert env.state() == "bound"
    (context,) = rows.read(env.engine, schema.device_contexts, uuid=env.context)
    assert (context["hostname"], context["instance_uuid"]) == (env.node.name, None)
    assert env.node.client.get(f"/allocations/{row['uuid']}").json()["project_id"] == PROJECT

    env.detach_host()
    env.settle()
    assert env.found() == []
    env.check_host(row["uuid"], 0)
    assert env.state() == "unbound"


def test_profile_and_accelerator_are_attached_to_the_host(env: HostEnv) -> None:
    first = env.attach_host(device_profile=HOST_PROFILE)
    env.settle()
    free = next(row for row in rows.read(env.engine, schema.attach_handles) if not row["arq_id"])
    second = env.attach_host(accelerator=free["uuid"])
    assert {first["project_id"], second["project_id"]} == {"operators"}
    env.settle()
    assert [row["state"] for row in env.found()] == ["attached", "attached"]
    assert (env.units(first["uuid"]), env.units(second["uuid"]), env.owned()) == (1, 1, 3)
    env.detach_host(accelerator=free["uuid"])
    env.settle()
    assert [row["uuid"] for row in env.found()] == [first["uuid"]]
    env.check_host(first["uuid"], 1)
    env.attachments.delete(first["uuid"], None, None, False)
    env.settle()
    env.check_host(first["uuid"], 0)
    assert len(rows.read(env.engine, schema.arqs)) == 2  # of the server and of the context


def test_devices_for_the_host_are_not_for_a_server(env: HostEnv) -> None:
    with pytest.raises(Conflict, match=r"is for the host itself.*attach-host"):
        env.attach_context()
    with pytest.raises(Conflict, match="is for the host itself"):
        env.attach(device_profile=HOST_PROFILE)
    with pytest.raises(Conflict, match="is for the host itself"):
        env.reserve()
    target = {
        "hostname": env.node.name,
        "instance_uuid": str(uuid4()),
        "mappings": {"0": [env.card.provider]},
    }
    with pytest.raises(Conflict, match="is for the host itself"):
        env.leases().bind(env.context, target, None)
    assert env.state() == "unbound"
    env.add_context()
    with pytest.raises(Conflict, match=r"is for a server.*attach_target=host"):
        env.attach_host(device_context=env.context)
    with pytest.raises(Conflict, match="is for a server"):
        env.attach_host(device_profile=PROFILE)
    assert (env.found(), env.owned()) == ([], 1)


BAD_REQUESTS: list[tuple[dict[str, Any], type[CyborgError], str]] = [
    ({"instance_uuid": str(uuid4())}, Invalid, "instance_uuid"),
    ({"hostname": None}, Invalid, "instance_uuid"),
    ({"hostname": ""}, Invalid, "hostname"),
    ({"hostname": "a\0"}, Invalid, "hostname"),
    ({"hostname": 1}, Invalid, "hostname"),
    ({"hostname": "no-such-host"}, NotFound, "hostname"),
    ({"mode": "live"}, Invalid, "mode"),
    ({"mode": []}, Invalid, "mode"),
    ({"reboot": True}, Invalid, "reboot"),
    ({"project_id": None}, Invalid, "project_id"),
    ({"device_profile": None}, Invalid, "device_profile"),
    ({"device_profile": "no-such-profile"}, NotFound, "device_profile"),
]


def test_bad_request_names_the_field(env: HostEnv) -> None:
    for values, kind, field in BAD_REQUESTS:
        with pytest.raises(kind) as raised:
            env.attach_host(**{"device_profile": HOST_PROFILE} | values)
        assert raised.value.details["field"] == field, values
        assert env.found() == [], values
    with pytest.raises(Invalid, match="mode"):
        env.attach(mode="host")
    assert env.found() == []


def test_attached_context_is_released_by_the_detach_only(env: HostEnv) -> None:
    row = env.attach_host(device_context=env.context)
    env.settle()
    with pytest.raises(NotFound):
        env.attachments.delete(row["uuid"], None, "another", False)
    with pytest.raises(Invalid, match="needs no reboot"):
        env.attachments.delete(row["uuid"], None, None, True)
    with pytest.raises(WrongState, match=f"attached to host {env.node.name}.*detach-host"):
        env.contexts().delete(env.context, None)
    for use in ({}, {"epoch": 7}, {"instance_uuid": str(uuid4())}):
        with pytest.raises(WrongState, match="attached to host"):
            env.leases().unbind(env.context, use, None)
    with pytest.raises(NotFound, match="host other has no attachment"):
        env.attachments.delete(None, None, None, False, hostname="other")
    env.check_host(row["uuid"], 1)


def test_cancelled_attach_leaves_the_context_unbound(env: HostEnv) -> None:
    row = env.attach_host(device_context=env.context)
    env.runner.run_once()
    env.detach_host()
    env.settle()
    assert env.found() == []
    env.check_host(row["uuid"], 0)
    (context,) = rows.read(env.engine, schema.device_contexts, uuid=env.context)
    assert context["state"] == "unbound"


def test_uuid_of_a_server_is_not_the_consumer_of_a_host(env: HostEnv) -> None:
    env.attach_host(device_profile=HOST_PROFILE, uuid=env.instance)
    env.settle()
    (found,) = env.found()
    assert found["state"] == "error"
    assert "already is a consumer in Placement" in found["error"]
    assert (env.allocated(), env.owned()) == (1, 1)


def test_server_created_after_a_request_keeps_its_allocation(env: HostEnv) -> None:
    """Nova allocates for a server with the uuid of the attachment, between two attempts."""
    server = str(uuid4())

    def lose() -> None:
        raise TimedOut("Placement did not answer in 30 s")

    env.placement.before_write = lose
    env.attach_host(device_profile=HOST_PROFILE, uuid=server)
    env.runner.run_once()
    env.placement.before_write = lambda: None
    amounts = {env.card.provider: {"FPGA": 1}}
    env.placement.set_consumer(server, amounts, ConsumerAllocation({}, None, PROJECT, "a user"))
    env.settle()
    (found,) = env.found()
    assert (found["state"], "already is a consumer" in found["error"]) == ("error", True)
    assert (env.units(server), env.owned()) == (1, 1)


def test_late_request_to_placement_leaves_no_allocation(env: HostEnv) -> None:
    """Placement executes it after the attach was given up."""

    def hang() -> None:
        raise TimedOut("Placement did not answer in 30 s")

    env.placement.before_write = hang
    row = env.attach_host(device_profile=HOST_PROFILE)
    env.runner.run_once()
    env.now += timedelta(seconds=env.conf.conductor.attachment_timeout)
    env.runner.run_once()
    (found,) = env.found()
    assert (found["step"], found["allocation_key"]) == ("shrink", row["uuid"])
    env.placement.before_write = lambda: None
    amounts = {env.card.provider: {"FPGA": 1}}
    env.placement.set_consumer(row["uuid"], amounts, ConsumerAllocation({}, None, "p", HOST_USER))
    assert env.units(row["uuid"]) == 1
    env.settle()
    (found,) = env.found()
    assert found["state"] == "error"
    env.check_host(row["uuid"], 0)


def test_partly_removed_allocation_is_removed_with_the_undo(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = HostEnv(sqlite_engine, node, fake_nova)
    groups = [FOR_HOST, FOR_HOST]
    rows.insert_profile(env.engine, "two", groups=groups)
    row = env.attach_host(device_profile="two")
    env.placement.before_write = env.runner.stop  # after the step allocate
    env.runner.run_once()
    assert (env.found()[0]["step"], env.units(row["uuid"])) == ("bind", 2)
    known = env.node.placement.consumer(row["uuid"])
    assert known is not None
    env.node.placement.set_consumer(row["uuid"], {env.card.provider: {"FPGA": 1}}, known)
    env.start_conductor()
    env.settle()
    (found,) = env.found()
    assert (found["state"], "was replaced" in found["error"]) == ("error", True)
    env.check_host(row["uuid"], 0)


def test_full_host_is_an_error_and_nothing_is_left(env: HostEnv) -> None:
    taken = [env.attach_host(device_profile=HOST_PROFILE, uuid=str(uuid4())) for _ in range(4)]
    env.settle()
    states = {row["uuid"]: row["state"] for row in env.found()}
    failed = [row["uuid"] for row in taken if states[row["uuid"]] == "error"]
    assert sorted(states.values()) == ["attached", "attached", "attached", "error"]
    (error,) = [row["error"] for row in env.found() if row["uuid"] == failed[0]]
    assert "has no free device" in error
    assert (env.units(failed[0]), env.owned()) == (0, 4)


def test_host_that_cannot_prepare_the_device_is_undone(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = HostEnv(sqlite_engine, node, fake_nova, abilities=HOST_WORK)
    env.add_host_context()
    row = env.attach_host(device_context=env.context)
    env.settle(host_work="failed")
    (found,) = env.found()
    assert (found["state"], found["allocation_key"]) == ("error", None)
    assert "could not prepare" in found["error"]
    env.check_host(row["uuid"], 0)


def test_no_allocation_is_left_if_the_host_is_unknown_to_placement(env: HostEnv) -> None:
    rows.insert_agent(env.engine, "lonely")
    env.attach_host(device_profile=HOST_PROFILE, hostname="lonely")
    env.settle()
    (found,) = env.found()
    assert found["state"] == "error"
    assert "no resource provider 'lonely'" in found["error"]
    assert env.owned() == 1


@pytest.mark.parametrize(
    "detach",
    [False, pytest.param(True, marks=pytest.mark.matrix)],
    ids=["attach", "detach"],
)
def test_conductor_killed_at_any_point_leaves_no_half_attachment(
    env: HostEnv, *, detach: bool
) -> None:
    """After the recovery the host has the accelerator, or nothing of it is left."""
    for point in pick_points(100):
        row = env.attach_host(device_context=env.context)
        if detach:
            env.settle()
            env.detach_host()
        env.start_conductor(crash_at=point)
        crashed = False
        try:
            env.settle()
        except Crash:
            crashed = True
        env.recover_with("done")
        left = env.found()
        assert [item["state"] for item in left] == ([] if detach else ["attached"])
        env.check_host(row["uuid"], len(left))
        assert env.state() == ("unbound" if detach else "bound")
        if not detach:
            env.start_conductor()
            env.detach_host()
            env.settle()
            env.check_host(row["uuid"], 0)
        if not crashed:
            assert point > 3
            return
    raise AssertionError("the work never ends")


def test_host_on_each_database(engine: sa.Engine, node: Node, fake_nova: FakeNova) -> None:
    env = HostEnv(engine, node, fake_nova, abilities=HOST_WORK)
    env.add_host_context()
    row = env.attach_host(device_context=env.context)
    env.settle()
    env.check_host(row["uuid"], 1)
    with engine.begin() as tx:
        (record,) = [
            arq for arq in audit_sources.read_snapshot(tx, node.name).arqs if not arq.instance
        ]
        assert record.consumer == row["uuid"]
        assert enqueue_restores(tx, node.name, env.now) == 2  # of the server, and of the host
    restored = rows.read(engine, schema.jobs, state="pending")
    assert {job["subject"] for job in restored} == {env.instance, row["uuid"]}
    assert env.leases().sweep() == 0
    assert env.runner.sweep() == 0
    env.finish_jobs()
    env.detach_host()
    env.settle()
    env.check_host(row["uuid"], 0)
    events = [entry["details"] for entry in rows.read(engine, schema.custody_records)]
    users = {(entry["instance"], entry.get("attach_target")) for entry in events if "arq" in entry}
    assert users == {(env.instance, None), (None, "host")}

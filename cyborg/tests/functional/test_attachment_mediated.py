# SPDX-License-Identifier: Apache-2.0
"""Attachments of mediated devices, which Nova gives to a guest again at its reboots and starts."""

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Conflict
from cyborg.db import schema
from cyborg.testing.fake_nova import OWN_USER, FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import Crash, Env
from cyborg.tests.fixtures.databases.maintenance_setup import MaintenanceEnv
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.tiers import sample

__all__ = ["node", "placement_adapter"]

pytestmark = pytest.mark.matrix

HOST_WORK = ("prepares", "sanitises")


def set_mediated(env: Env, **where: Any) -> None:
    """Change the handles of the host, or some of them, to mediated devices."""
    table = schema.attach_handles
    parent = {"domain": "0000", "bus": "01", "device": "00", "function": "0"}
    with env.engine.begin() as tx:
        query = sa.update(table).values(type="MDEV", info={**parent, "asked_type": "nvidia-222"})
        tx.execute(query.where(*(table.c[name] == value for name, value in where.items())))


def attach_as_before(env: Env, **values: Any) -> None:
    """Attach a mediated device in the mode next-boot, as earlier releases did."""
    env.attach(**values)
    env.settle()
    set_mediated(env)
    assert env.check() == "attached"


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Env:
    """Return a server whose devices are prepared and cleaned by the host."""
    return Env(sqlite_engine, node, fake_nova, abilities=HOST_WORK, live=True)


def test_attach_of_mediated_devices_in_next_boot_is_refused(env: Env) -> None:
    set_mediated(env)
    free = next(
        row["uuid"] for row in rows.read(env.engine, schema.attach_handles) if not row["arq_id"]
    )
    for values in ({}, {"device_profile": None, "accelerator": free}, {"reboot": True}):
        with pytest.raises(Conflict, match="use the mode live") as found:
            env.attach(**values)
        assert found.value.details["field"] == "mode"
    assert env.rows() == []
    assert (env.allocated(), env.owned()) == (1, 1)


def test_attach_of_mediated_devices_in_live_is_accepted(env: Env) -> None:
    set_mediated(env)
    env.attach(mode="live")
    env.settle()
    assert env.check() == "attached"
    env.detach()
    env.settle()
    assert env.check() == "detached"


def test_attach_that_finds_only_mediated_devices_is_undone(env: Env) -> None:
    """The request cannot know it: the agent has another name for the host than Nova."""
    env.attach()
    set_mediated(env)
    env.settle()
    assert env.check() == "error"
    assert "use the mode live" in env.rows()[0]["error"]


@pytest.mark.parametrize("step", ["bind", "expose"])
def test_attach_whose_device_turns_out_to_be_mediated_is_undone(
    env: Env, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A report changes the type, or an earlier release has bound the device."""
    env.attach()
    work = env.runner._steps
    do = next(function for name, function in work.items() if name == step)

    def change_first(*args: Any) -> Any:
        set_mediated(env)
        return do(*args)

    monkeypatch.setattr(
        env.runner, "_steps", {k: change_first if k == step else v for k, v in work.items()}
    )
    env.settle()
    assert env.check() == "error"
    assert "use the mode live" in env.rows()[0]["error"]


def test_attach_chooses_other_devices_of_the_host(
    engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = MaintenanceEnv(engine, node, fake_nova)
    env.instance = env.plain
    set_mediated(env, deployable_id=env.card.deployable_id)
    env.attach()
    env.settle()
    assert [row["state"] for row in env.rows()] == ["attached"]
    assert env.used() == (2, 1)


def test_detach_of_an_earlier_release_waits_for_a_rebuild(env: Env) -> None:
    attach_as_before(env, reboot=True)
    env.nova.reboots.clear()
    env.detach(reboot=True)

    def run(action: str | None = None, **server: Any) -> None:
        env.nova.servers[env.instance].update(server)
        if action is not None:
            env.nova.add_action(env.instance, action, OWN_USER)
        env.now += timedelta(minutes=2)
        env.runner.run_once()
        env.finish_jobs()
        assert (env.step(), env.owned(), len(env.listed())) == ("guest", 2, 1)
        assert env.rows()[0]["error"].endswith("rebuild, shelve or delete the server")

    run()
    run("reboot")
    run("stop", status="SHUTOFF")
    run("start", status="ACTIVE")
    assert env.nova.reboots == []
    env.nova.add_action(env.instance, "rebuild", result="Error")
    run()
    env.nova.add_action(env.instance, "rebuild")
    env.now += timedelta(minutes=2)
    env.settle()
    assert env.check() == "detached"


@pytest.mark.parametrize("end", ["shelve", "delete", "unused"])
def test_detach_of_an_earlier_release_ends_without_the_definition(env: Env, end: str) -> None:
    attach_as_before(env, reboot=end != "unused")
    env.detach()  # not refused: neither a stop nor a reboot would help
    if end != "unused":
        env.runner.run_once()
        assert (env.step(), env.owned()) == ("guest", 2)
    if end == "shelve":
        values = {"status": "SHELVED_OFFLOADED", "OS-EXT-SRV-ATTR:host": None}
        env.nova.servers[env.instance].update(values)
    elif end == "delete":
        del env.nova.servers[env.instance]
    env.now += timedelta(minutes=2)
    env.settle()
    assert env.check() == "detached"


def run_detach(env: Env, crash_at: int | None) -> None:
    """Detach a mediated device of an earlier release; the conductor may crash at a point."""
    attach_as_before(env, reboot=True)
    env.start_conductor(crash_at)
    env.detach(reboot=True)
    is_rebuilt = False
    for _ in range(30):
        try:
            env.runner.run_once()
        except Crash:
            env.now += timedelta(seconds=200)
            env.start_conductor()
        env.finish_jobs()
        if not env.working():
            break
        if not is_rebuilt:
            assert env.owned() == 2, crash_at
        if env.step() == "guest" and env.rows()[0]["error"]:
            env.nova.add_action(env.instance, "rebuild")
            is_rebuilt = True
        env.now += timedelta(minutes=2)
    assert is_rebuilt
    assert env.check() == "detached"


@pytest.mark.parametrize("first", sample(range(4), 0, mark=pytest.mark.long))
def test_crash_between_any_two_effects_frees_nothing_before_the_rebuild(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova, first: int
) -> None:
    """The four cases together have every point."""
    env = Env(sqlite_engine, node, fake_nova, handles=100, abilities=HOST_WORK)
    run_detach(env, None)
    total = len(env.points.passed)
    assert total > 8
    for crash_at in range(first, total, 4):
        with env.engine.begin() as tx:
            tx.execute(sa.update(schema.attach_handles).values(type="TEST_PCI"))
        env.forget_server()
        run_detach(env, crash_at)


@pytest.mark.parametrize("when", ["before", "prepare"])
def test_context_with_a_mediated_device_gets_no_successor(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova, when: str
) -> None:
    env = MaintenanceEnv(sqlite_engine, node, fake_nova, abilities=HOST_WORK)
    if when == "before":
        set_mediated(env)
    env.begin()
    if when == "prepare":
        env.run_until("prepare")
        set_mediated(env)
    env.settle()
    (row,) = env.rows()
    assert row["state"] == "error"
    assert "it gets no successor" in row["error"]
    ((_, is_first),) = env.found_by_nova()
    assert is_first
    assert (env.amounts(), env.used()) == ((1, 0), (2, 0))


def test_successor_of_an_earlier_release_keeps_the_old_device_until_a_rebuild(
    engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = MaintenanceEnv(engine, node, fake_nova, abilities=HOST_WORK)
    env.begin()
    env.run_until("guest")
    set_mediated(env)
    for action, status in (("reboot", "ACTIVE"), ("stop", "SHUTOFF"), ("start", "ACTIVE")):
        env.nova.add_action(env.instance, action, OWN_USER)
        env.nova.servers[env.instance]["status"] = status
        env.now += timedelta(minutes=2)
        env.runner.run_once()
        assert (env.step(), env.used()) == ("guest", (2, 1))
    env.nova.add_action(env.instance, "rebuild")
    env.now += timedelta(minutes=2)
    env.settle()
    assert (env.rows(), env.amounts(), env.used()) == ([], (0, 1), (1, 1))

# SPDX-License-Identifier: Apache-2.0
"""Reboots that a repeated request adds to an attachment."""

from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.attachments.attachment import can_get_reboot
from cyborg.core.errors import Invalid, NotFound, WrongState
from cyborg.testing.fake_nova import OWN_USER, FakeNova
from cyborg.tests.fixtures.databases.attachment_setup import PROJECT, Crash, Env
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter

__all__ = ["node", "placement_adapter"]

pytestmark = pytest.mark.matrix

HOST_WORK = ("prepares", "sanitises")


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Env:
    """Return a server whose devices are prepared and cleaned by the host."""
    return Env(sqlite_engine, node, fake_nova, abilities=HOST_WORK)


def test_repeated_request_during_the_attach_schedules_the_reboot(
    engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = Env(engine, node, fake_nova, abilities=HOST_WORK)
    first = env.attach()
    env.runner.run_once()
    again = env.attach(reboot=True)
    assert (again["uuid"], again["state"], again["reboot"]) == (first["uuid"], "attaching", True)
    assert env.attach(reboot=True)["reboot"] is True
    env.settle()
    assert env.check() == "attached"
    assert env.nova.reboots == [(env.instance, "HARD")]


def test_repeated_request_after_the_attach_schedules_the_reboot_once(
    engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = Env(engine, node, fake_nova)
    first = env.attach()
    env.settle()
    again = env.attach(reboot=True)
    assert (again["uuid"], again["state"]) == (first["uuid"], "attaching")
    assert (again["step"], again["reboot"]) == ("reboot", True)
    env.settle()
    assert env.check() == "attached"
    assert env.attach(reboot=True)["state"] == "attached"
    env.settle()
    assert env.nova.reboots == [(env.instance, "HARD")]


@pytest.mark.parametrize("action", ["start", "rebuild", "reboot"])
def test_repeated_request_after_a_start_of_the_guest_reboots_nothing(env: Env, action: str) -> None:
    env.attach()
    env.settle()
    env.nova.add_action(env.instance, action, OWN_USER)
    assert env.attach(reboot=True)["reboot"] is True
    env.settle()
    assert env.check() == "attached"
    assert env.nova.reboots == []


def test_request_for_a_reboot_at_the_end_of_the_attach_is_not_lost(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conductor has read that there is no reboot, and is about to end the attach."""
    env.attach()
    env.runner.run_once()
    env.finish_jobs()
    list_actions = env.nova_client.list_actions
    results: list[dict[str, Any]] = []

    def request_first(uuid: str) -> Any:
        if not results:
            results.append(env.attach(reboot=True))
        return list_actions(uuid)

    monkeypatch.setattr(env.nova_client, "list_actions", request_first)
    env.settle()
    assert [row["reboot"] for row in results] == [True]
    assert env.check() == "attached"
    assert env.nova.reboots == [(env.instance, "HARD")]


def test_reboot_of_an_unsuitable_server_is_refused(env: Env) -> None:
    env.attach()
    env.settle()
    env.nova.servers[env.instance]["locked"] = True
    with pytest.raises(WrongState, match="is locked"):
        env.attach(PROJECT, reboot=True)
    assert env.check() == "attached"
    assert env.attach(PROJECT)["reboot"] is False
    with pytest.raises(NotFound, match="no server"):
        env.attach("project-2", reboot=True)
    with pytest.raises(Invalid, match="needs no reboot"):
        env.attach(mode="live", reboot=True)


def test_later_reboot_that_fails_for_long_undoes_the_attach(env: Env) -> None:
    env.attach()
    env.settle()
    env.nova.reboot_status = 409
    env.attach(reboot=True)
    env.settle(400)
    assert env.check() == "error"
    assert "not complete after 900 seconds" in env.rows()[0]["error"]


def run_late_reboot(env: Env, crash_at: int | None) -> None:
    """Attach, and request a reboot later; the conductor may crash at a point after that."""
    env.attach()
    env.settle()
    env.start_conductor(crash_at)
    env.attach(reboot=True)
    try:
        env.settle()
    except Crash:
        env.recover_with("done")
    assert env.check() == "attached"
    assert env.nova.reboots == [(env.instance, "HARD")], crash_at


def test_crash_between_any_two_effects_reboots_once(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = Env(sqlite_engine, node, fake_nova, handles=40)
    run_late_reboot(env, None)
    total = len(env.points.passed)
    assert "reboot" in env.points.passed
    for crash_at in range(total):
        env.forget_server()
        run_late_reboot(env, crash_at)


@pytest.mark.parametrize(
    ("state", "failure", "reboot", "expected"),
    [
        ("attaching", None, False, True),
        ("attaching", "no device", False, False),
        ("attached", None, False, True),
        ("attached", None, True, False),
        ("detaching", None, False, False),
        ("error", "no device", False, False),
    ],
)
def test_only_an_attachment_that_is_kept_can_get_a_reboot(
    state: str, failure: str | None, reboot: bool, expected: bool
) -> None:
    assert can_get_reboot(state, failure, reboot=reboot) is expected

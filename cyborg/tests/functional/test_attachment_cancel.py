# SPDX-License-Identifier: Apache-2.0
"""An attach that is cancelled, and Nova that does not answer, at any step."""

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import TimedOut, Unavailable
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases.attachment_setup import Crash, Env
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.tiers import pick_points, sample

__all__ = ["node", "placement_adapter"]

HOST_WORK = ("prepares", "sanitises")


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Env:
    """Return a server whose devices need no host work."""
    return Env(sqlite_engine, node, fake_nova)


def test_detach_while_attaching_cancels_the_attach(env: Env) -> None:
    before = env.attach()
    env.detach()
    (row,) = env.rows()
    assert (row["state"], row["step"]) == ("detaching", "allocate")
    other = env.attach()
    assert other["uuid"] != before["uuid"], "a new attach does not wait for the undo"
    env.settle()
    assert [row["uuid"] for row in env.rows()] == [other["uuid"]]
    assert env.check() == "attached"


def test_cancel_of_an_attach_that_waits_for_its_host_is_undone(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = Env(sqlite_engine, node, fake_nova, abilities=HOST_WORK)
    env.attach()
    env.runner.run_once()
    assert env.step() == "prepare"
    env.detach()
    env.settle()
    assert env.check() == "detached"
    assert env.nova.reboots == []


def test_cancel_of_an_attach_whose_guest_has_the_devices_needs_a_reboot(env: Env) -> None:
    env.nova.reboot_status = 409
    env.attach(reboot=True)
    env.runner.run_once()
    assert env.step() == "reboot"
    env.nova.add_action(env.instance, "reboot", "user-1")
    env.nova.reboot_status = 202
    env.detach()
    env.runner.run_once()
    (row,) = env.rows()
    assert (row["state"], row["step"]) == ("detaching", "guest")
    assert "stop it, or detach with a reboot" in row["error"]
    assert (env.nova.reboots, env.owned()) == ([], 2)
    env.detach(reboot=True)
    env.settle()
    assert env.check() == "detached"
    assert env.nova.reboots == [(env.instance, "HARD")]


@pytest.mark.parametrize("mode", sample(["next-boot", "live"], "next-boot"))
def test_attach_that_is_cancelled_between_any_two_effects_leaves_nothing(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova, mode: str
) -> None:
    """The conductor that works on the attach stops at this point, too."""
    live = mode == "live"
    env = Env(sqlite_engine, node, fake_nova, handles=200, abilities=HOST_WORK, live=live)
    values: dict[str, Any] = {"mode": mode, "reboot": not live}
    env.start_conductor()
    env.attach(**values)
    env.settle()
    assert env.check() == "attached"
    total = len(env.points.passed)
    assert total > 8
    for crash_at in pick_points(total):
        env.forget_server()
        env.start_conductor(crash_at)
        env.attach(**values)
        with pytest.raises(Crash):
            env.settle()
        env.detach(reboot=not live)
        env.recover_with("done")
        assert env.check() == "detached", crash_at
        assert env.hypervisor.count(env.instance) == 0, crash_at


@pytest.mark.parametrize(
    ("status", "reason"),
    sample(
        [
            (503, "Nova answered 503: "),
            (None, "Nova cannot be reached: "),
            (0, "Nova did not answer"),
        ],
        (0, "Nova did not answer"),
    ),
)
def test_nova_away_refuses_or_delays_with_the_reason(
    env: Env, status: int | None, reason: str
) -> None:
    def stop(uuid: str) -> Any:
        raise TimedOut("Nova did not answer in 7.5 s")

    show, post = env.nova_client.get_attachable, env.nova_client.hard_reboot
    if status == 0:
        env.nova_client.get_attachable = stop  # type: ignore[method-assign]
    else:
        env.nova.status = status
    with pytest.raises(Unavailable, match=reason) as raised:
        env.attach()
    assert not isinstance(raised.value, TimedOut), "503: it is certain that nothing was changed"
    assert env.rows() == []
    env.nova.status, env.nova_client.get_attachable = 200, show  # type: ignore[method-assign]
    env.attach(reboot=True)
    if status == 0:
        env.nova_client.hard_reboot = stop  # type: ignore[method-assign]
    else:
        env.nova.status = status
    env.runner.run_once()
    (row,) = env.rows()
    assert row["state"] == "attaching"
    assert reason in row["error"]
    env.nova.status, env.nova_client.hard_reboot = 200, post  # type: ignore[method-assign]
    env.now += timedelta(seconds=60)
    env.settle()
    assert env.check() == "attached"

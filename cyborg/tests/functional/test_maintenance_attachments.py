# SPDX-License-Identifier: Apache-2.0
"""Successors next to attachments, with a real Placement and a Nova over HTTP."""

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases.maintenance_setup import MaintenanceEnv
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter

__all__ = ["node", "placement_adapter"]

pytestmark = pytest.mark.matrix


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> MaintenanceEnv:
    """Return a server with a context, on a host that attaches devices to running guests."""
    return MaintenanceEnv(
        sqlite_engine, node, fake_nova, abilities=("prepares", "sanitises"), live=True
    )


def attach(env: MaintenanceEnv, **values: Any) -> dict[str, Any]:
    """Attach a device of the first card to the server; return the row."""
    blocker = env.node.allocate(env.spare.provider, "FPGA", 2)
    row = env.attach(**values)
    env.settle()
    env.node.deallocate(blocker)
    return row


def drain(env: MaintenanceEnv) -> dict[str, tuple[str | None, str | None]]:
    """Return the successor and the error of each owner on the first card, by context."""
    owners = env.shown()["maintenance"]["owners"]
    return {o["device_context"]: (o["successor"], o["error"]) for o in owners}


def run(env: MaintenanceEnv, rounds: int = 6) -> None:
    """Run the conductor and the host for some time."""
    for _ in range(rounds):
        env.runner.run_once()
        env.finish_jobs()
        env.now += timedelta(seconds=30)


@pytest.mark.parametrize("mode", ["next-boot", "live"])
def test_attached_context_gets_no_successor_and_the_drain_says_why(
    env: MaintenanceEnv, mode: str
) -> None:
    env.hypervisor.start(env.instance)
    context = env.create_context()
    row = attach(env, device_profile=None, device_context=context, mode=mode)
    env.begin()
    run(env)
    assert env.windows.sweep() == 0
    successors = [r for r in env.rows() if r["maintained_device"]]
    assert [(r["successor_of"], r["step"]) for r in successors] == [(env.context, "guest")]
    found = drain(env)
    assert found[context] == (
        None,
        f"device context {context} is attached to server {env.instance} by attachment "
        f"{row['uuid']}, which gets no successor: detach it",
    )
    assert found[env.context][0] == "awaiting_restart"
    assert (env.amounts(), env.used()) == ((2, 1), (3, 1))


@pytest.mark.parametrize("detached_first", [True, False])
def test_live_attachment_and_successor_of_a_server_end_alone(
    env: MaintenanceEnv, detached_first: bool
) -> None:
    """Both change the allocation of the instance, on the same device."""
    env.hypervisor.start(env.instance)
    row = attach(env, mode="live")
    assert env.hypervisor.count(env.instance) == 1
    env.begin()
    run(env)
    assert (env.amounts(), env.used()) == ((2, 1), (3, 1))
    assert env.hypervisor.count(env.instance) == 1

    def detach() -> None:
        env.attachments.delete(row["uuid"], None, None, False)
        run(env)
        assert env.hypervisor.count(env.instance) == 0

    def restart() -> None:
        env.nova.add_action(env.instance, "start")
        env.now += timedelta(minutes=2)
        run(env)

    if detached_first:
        detach()
        assert (env.amounts(), env.used()) == ((1, 1), (2, 1))
        restart()
    else:
        restart()
        assert (env.amounts(), env.used()) == ((1, 1), (2, 1))
        detach()
    assert (env.rows(), env.amounts(), env.used()) == ([], (0, 1), (1, 1))
    assert [is_first for _, is_first in env.found_by_nova()] == [False]


def test_context_that_is_attached_during_the_preparation_is_not_exchanged(
    env: MaintenanceEnv,
) -> None:
    """Nova has unbound the context, and its owner attaches it to the same server."""
    env.begin()
    env.run_until("prepare")
    env.windows.end(env.device)
    env.arqs().unbind([{"request": arq["uuid"]} for arq in env.listed()], None)
    env.finish_jobs()
    # As Nova does: the allocation has no longer what the context had.
    known = env.placement.consumer(env.instance)
    assert known is not None
    amounts = {
        uuid: dict(units) for uuid, units in known.amounts.items() if uuid != env.card.provider
    }
    env.placement.set_consumer(env.instance, amounts, known)
    blocker = env.node.allocate(env.spare.provider, "FPGA", 1)
    env.attach(device_profile=None, device_context=env.context)
    run(env)
    env.node.deallocate(blocker)
    (row,) = (r for r in env.rows() if r["maintained_device"] is None)
    assert row["state"] == "attached"
    assert [is_first for _, is_first in env.found_by_nova()] == [True]
    env.windows.sweep()
    assert [r for r in env.rows() if r["maintained_device"]] == []
    assert (env.amounts(), env.used()) == ((1, 0), (2, 0))

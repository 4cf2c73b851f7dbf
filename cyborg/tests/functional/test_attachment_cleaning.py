# SPDX-License-Identifier: Apache-2.0
"""Attachments of devices that are being cleaned: they wait as a bind of Nova does."""

from datetime import timedelta

import pytest
import sqlalchemy as sa

from cyborg.conductor.attachments.devices import POLL_DELAY
from cyborg.conductor.binding.cleaning_wait import MAX_CLEANING_WAIT
from cyborg.db import schema
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import Env
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter

__all__ = ["node", "placement_adapter"]


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Env:
    """Return a host of two devices: one has a server, the host cleans the other one.

    Placement offers it: the server that had it was deleted a moment ago.
    """
    abilities = ("prepares", "sanitises")
    env = Env(sqlite_engine, node, fake_nova, handles=2, abilities=abilities)
    deleted = env.add_server()
    env.arqs().delete(None, deleted, None, True)
    env.node.deallocate(deleted)
    assert env.dirty() == 1
    return env


def run(env: Env) -> str | None:
    """Run the conductor as often as the attachment is due; return its error."""
    env.runner.run_once()
    env.now += timedelta(seconds=POLL_DELAY)
    (row,) = env.rows()
    return row["error"]  # type: ignore[no-any-return]


def test_attach_waits_for_the_cleaning_of_its_device(env: Env) -> None:
    env.attach()
    for _ in range(3):
        assert run(env) == "waiting until the host has cleaned the devices"
        assert env.step() == "bind"
    assert len(rows.read(env.engine, schema.arqs)) == 1, "a failed bind leaves no ARQ"
    env.finish_jobs()
    env.settle()
    assert env.check() == "attached"
    assert env.rows()[0]["error"] is None


def test_attach_ends_its_wait_with_the_reason(env: Env) -> None:
    env.attach()
    for _ in range(int(MAX_CLEANING_WAIT / POLL_DELAY)):
        assert run(env) == "waiting until the host has cleaned the devices"
    error = run(env)
    assert error is not None
    assert "handle is being cleaned" in error
    env.settle()
    assert env.check() == "error"


def test_attach_does_not_wait_for_a_cleaning_that_has_failed(env: Env) -> None:
    (job,) = rows.read(env.engine, schema.jobs, kind="release")
    rows.update(env.engine, schema.jobs, job["id"], error="the device is in use")
    env.attach()
    error = run(env)
    assert error is not None
    assert "handle is being cleaned" in error


def test_attach_that_waits_is_cancelled_at_once(env: Env) -> None:
    env.attach()
    run(env)
    env.detach()
    env.settle(host_work=None)
    assert env.rows() == []
    assert (env.allocated(), env.owned()) == (1, 1)

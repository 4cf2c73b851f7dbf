# SPDX-License-Identifier: Apache-2.0
"""The limit of attachments of a project."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.limits import StaticLimits
from cyborg.core.errors import NotFound, OverLimit
from cyborg.db import schema
from cyborg.db.attachments import write as records
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import PROJECT, Env
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter

__all__ = ["node", "placement_adapter"]

pytestmark = pytest.mark.matrix

THREADS = 16


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Env:
    return Env(sqlite_engine, node, fake_nova)


def limit(env: Env, number: int) -> None:
    env.conf.set_override("max_per_project", number, group="attachments")


def test_attach_over_the_limit_is_refused_and_writes_nothing(env: Env) -> None:
    limit(env, 1)
    first = env.attach()
    with pytest.raises(OverLimit, match=f"project {PROJECT} has 1 attachments and the limit is 1"):
        env.attach(uuid=str(uuid4()))
    assert len(env.rows()) == 1
    # A repeated request is none of a further attachment.
    assert env.attach() == first
    env.settle()
    assert env.check() == "attached"


def test_detach_gives_room_for_another_attachment(env: Env) -> None:
    limit(env, 1)
    env.attach()
    env.settle()
    env.detach()
    env.settle()
    assert env.attach(uuid=str(uuid4()))["state"] == "attaching"


def test_member_attaches_within_the_units_of_its_project_only(env: Env) -> None:
    """A caller with a scope, as a member whom the policy allows to attach."""
    env.conf.set_override("project_limits", [f"{PROJECT}:FPGA:2"], group="quota")
    env.limit_source = StaticLimits(env.conf)
    env.start_conductor()
    env.attach(PROJECT)
    env.settle()
    assert env.check() == "attached"
    env.attach(PROJECT, uuid=str(uuid4()))
    env.settle()
    first, second = env.rows()
    assert (first["state"], second["state"]) == ("attached", "error")
    assert f"project {PROJECT} uses 2 units of FPGA and the limit is 2" in second["error"]
    assert (env.allocated(), env.owned()) == (2, 2), "nothing is left of the second one"
    with pytest.raises(NotFound, match="no server"):
        env.attach("project-2")
    with pytest.raises(NotFound, match="has no attachment"):
        env.detach("project-2")
    env.detach(PROJECT)
    env.settle()
    assert env.check() == "detached"
    env.attach(PROJECT)
    env.settle()
    assert env.check() == "attached"


def test_limit_of_0_refuses_each_attachment(env: Env) -> None:
    limit(env, 0)
    with pytest.raises(OverLimit, match="the limit is 0"):
        env.attach()
    assert env.rows() == []


def test_error_after_the_limit_was_lowered_has_the_number_in_use(env: Env) -> None:
    for _ in range(3):
        env.attach(uuid=str(uuid4()))
    limit(env, 1)
    with pytest.raises(OverLimit, match="has 3 attachments and the limit is 1"):
        env.attach(uuid=str(uuid4()))


def test_no_limit_locks_no_project(env: Env) -> None:
    limit(env, -1)
    env.attach()
    assert rows.read(env.engine, schema.project_locks) == []


def test_attachments_of_other_projects_do_not_count(env: Env) -> None:
    limit(env, 1)
    env.attach()
    (row,) = env.rows()
    rows.update(env.engine, schema.attachments, row["id"], project_id="other")
    assert env.attach(uuid=str(uuid4()))["project_id"] == PROJECT


def test_same_request_at_the_limit_gets_the_same_attachment(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A concurrent transaction inserts the same request after this one has looked for it."""
    limit(env, 1)
    first = env.attach()
    find, calls = records.find_request, []

    def find_later(*args: Any) -> Any:
        calls.append(args)
        return find(*args) if len(calls) > 1 else None

    monkeypatch.setattr(records, "find_request", find_later)
    assert env.attach() == first
    assert len(env.rows()) == 1


def test_concurrent_attaches_reach_the_limit_exactly(
    engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = Env(engine, node, fake_nova)
    limit(env, 5)

    def attach(number: int) -> bool:
        try:
            env.attach(uuid=str(uuid4()))
        except OverLimit:
            return False
        return True

    with ThreadPoolExecutor(THREADS) as pool:
        assert sum(pool.map(attach, range(THREADS))) == 5
    assert len(env.rows()) == 5

# SPDX-License-Identifier: Apache-2.0
"""The deletion of device contexts in use, which services request, on each database."""

from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.contexts.device_contexts import DeviceContexts
from cyborg.core.errors import NotFound, WrongState
from cyborg.db import schema
from cyborg.db.contexts import write as store
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.context_work import PROJECT, ContextEnv


class Env(ContextEnv):
    """A card, and contexts that services can delete."""

    def __init__(self, engine: sa.Engine, *abilities: str) -> None:
        super().__init__(engine, *abilities)
        self.contexts = DeviceContexts(self.conf, self.uow, arqs=self.arqs, now=self.now)

    def jobs_left(self) -> list[str]:
        """Return the kinds of the jobs that have not ended."""
        found = rows.read(self.engine, schema.jobs)
        return [row["kind"] for row in found if row["state"] == "pending"]


@pytest.fixture
def env(engine: sa.Engine) -> Env:
    return Env(engine)


def test_bound_context_is_deleted_and_its_handles_are_free(env: Env) -> None:
    context = env.create()
    instance = env.boot(context)
    for allowed in (None, False):
        with pytest.raises(WrongState, match=instance):
            env.contexts.delete(context, None, allowed)
    assert env.state(context) == "bound"
    env.contexts.delete(context, None, True)
    assert (env.counts(), env.handles()) == ((0, 0, 0), {"free": 4})
    with pytest.raises(NotFound):
        env.contexts.delete(context, None, True)


def test_handles_of_a_deleted_context_are_cleaned_before_their_next_use(engine: sa.Engine) -> None:
    env = Env(engine, "sanitises")
    context = env.create()
    env.boot(context)
    env.contexts.delete(context, None, True)
    assert (env.counts(), env.handles()["dirty"]) == ((0, 0, 0), 2)
    assert env.jobs_left() == ["release"]
    env.jobs.run_once()
    assert env.handles() == {"free": 4}


def test_context_that_is_binding_or_unbinding_is_deleted(engine: sa.Engine) -> None:
    env = Env(engine, "prepares")
    context = env.create()
    env.boot(context)
    assert env.state(context) == "binding"
    env.contexts.delete(context, None, True)
    assert (env.counts(), env.jobs_left()) == ((0, 0, 0), ["release"])
    env.jobs.run_once()
    context = env.create()
    arqs = env.read_arqs(context)
    env.bind(env.card, *arqs)
    env.jobs.run_once()
    env.arqs.unbind([{"request": arqs[0]}], None)
    assert env.state(context) == "unbinding"
    env.contexts.delete(context, None, True)
    env.jobs.run_once()
    assert (env.counts(), env.handles()) == ((0, 0, 0), {"free": 4})


def test_context_with_a_lease_is_kept(env: Env) -> None:
    """The call has no epoch: it may be that of an earlier holder."""
    context = env.create()
    env.reserve(context)
    with pytest.raises(WrongState, match="it is reserved"):
        env.contexts.delete(context, None, True)
    env.bind_lease(context, str(uuid4()), epoch=1)
    env.contexts.delete(context, None, True)
    assert (env.counts(), env.handles()) == ((0, 0, 0), {"free": 4})


def test_context_of_another_project_is_not_found(env: Env) -> None:
    context = env.create()
    env.boot(context)
    with pytest.raises(NotFound):
        env.contexts.delete(context, "project-2", True)
    env.contexts.delete(context, PROJECT, True)
    assert env.counts() == (0, 0, 0)


@pytest.mark.parametrize("state", ["attaching", "attached", "detaching"])
def test_attached_context_is_kept(env: Env, state: str) -> None:
    context = env.create()
    instance = env.boot(context)
    attachment = rows.insert(
        env.engine,
        schema.attachments,
        project_id=PROJECT,
        instance_uuid=instance,
        hostname=env.card.host,
        device_profile_name=f"ctx-{context}",
        device_context=context,
        mode="next-boot",
        reboot=False,
        state=state,
        deadline=env.now(),
        next_try_at=env.now(),
    )
    with env.engine.begin() as tx:
        tx.execute(sa.update(schema.arqs).values(attachment_id=attachment))
    with pytest.raises(WrongState, match=r"attached to|detached from"):
        env.contexts.delete(context, None, True)
    assert (env.state(context), env.handles()["owned"]) == ("bound", 2)


def test_deletion_that_fails_unbinds_nothing(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conductor that is killed within the transaction leaves the context bound."""
    context = env.create()
    env.boot(context)

    def fail(*args: Any) -> int:
        raise RuntimeError("killed")

    monkeypatch.setattr(store, "delete", fail)
    with pytest.raises(RuntimeError):
        env.contexts.delete(context, None, True)
    assert (env.state(context), env.handles()) == ("bound", {"owned": 2, "free": 2})
    assert env.jobs_left() == []

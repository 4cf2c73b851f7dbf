# SPDX-License-Identifier: Apache-2.0
"""Leases of device contexts: expiry, the fences of unbind and bind, outages, and the sweep."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.binding.binder import InstanceAllocations
from cyborg.conductor.contexts import leases
from cyborg.core.binding.limits import Limits
from cyborg.core.errors import Conflict, Invalid, Unavailable, WrongState
from cyborg.core.text import to_iso
from cyborg.db import schema
from cyborg.rpc.notifications import GROUP, is_enabled
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.context_work import PROJECT, ContextEnv


@pytest.fixture
def env(engine: sa.Engine) -> ContextEnv:
    return ContextEnv(engine)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> ContextEnv:
    return ContextEnv(sqlite_engine)


@pytest.mark.parametrize("was_bound", [True, False])
def test_lease_keeps_the_expiry_of_its_context(env: ContextEnv, was_bound: bool) -> None:
    context = env.create()
    if was_bound:
        env.delete_server(env.boot(context))
    else:
        env.contexts.update(context, {"expires_at": None}, PROJECT)
    assert env.row(context)["expires_at"] is None
    assert env.reserve(context, lease_seconds=10)["expires_at"] is not None
    assert env.unbind_lease(context)["expires_at"] is None
    env.reserve(context, lease_seconds=10)
    env.advance(10)
    assert env.leases.sweep() == 1
    env.advance(10**7)
    assert (env.contexts.sweep(), env.state(context)) == (0, "unbound")


def test_later_expiry_survives_a_lease(sqlite_env: ContextEnv) -> None:
    env, context = sqlite_env, sqlite_env.create()
    later = env.now() + timedelta(days=30)
    changes = {"expires_at": to_iso(later)}
    env.contexts.update(context, changes, PROJECT)
    env.reserve(context)
    assert env.unbind_lease(context)["expires_at"] == changes["expires_at"]


def test_context_in_error_does_not_expire_when_it_is_unbound(engine: sa.Engine) -> None:
    env = ContextEnv(engine, "prepares")
    context = env.create()
    env.agents.answers["prepare"] = "failed"
    env.reserve(context)
    env.jobs.run_once()
    env.agents.answers["prepare"] = "done"
    env.advance(10**6)
    env.jobs.run_once()
    assert env.state(context) == "error"
    env.unbind_lease(context)
    assert env.row(context)["expires_at"] == env.now() + timedelta(seconds=86400)
    assert env.contexts.sweep() == 0


def test_unbind_ends_only_the_use_that_it_names(env: ContextEnv) -> None:
    context, instance = env.create(), str(uuid4())
    use: dict[str, Any]
    assert env.leases.unbind(context, {}, PROJECT)["state"] == "unbound"
    env.reserve(context)
    env.unbind_lease(context, epoch=1)
    env.reserve(context)
    for use, message in (
        ({"epoch": 1}, "not for epoch 1"),
        ({"instance_uuid": instance}, f"not for instance {instance}"),
    ):
        with pytest.raises(Conflict, match=message):
            env.leases.unbind(context, use, PROJECT)
    with pytest.raises(WrongState, match=r"epoch: missing.*epoch 2"):
        env.leases.unbind(context, {}, PROJECT)
    env.bind_lease(context, instance, epoch=2)
    for use, message in (
        ({"epoch": 1}, "not for epoch 1"),
        ({"instance_uuid": str(uuid4())}, "not for instance"),
        ({"instance_uuid": instance, "epoch": 3}, "not for epoch 3"),
    ):
        with pytest.raises(Conflict, match=message):
            env.leases.unbind(context, use, PROJECT, True)
    with pytest.raises(WrongState, match="instance_uuid: missing"):
        env.leases.unbind(context, {}, PROJECT)
    assert (env.state(context), env.handles()) == ("bound", {"owned": 2, "free": 2})
    env.unbind_lease(context, instance_uuid=instance)
    env.reserve(context)
    assert env.leases.unbind(context, {}, None, True)["state"] == "unbound"
    for wrong in ({"epoch": "1"}, {"instance_uuid": "x"}, {"colour": "red"}):
        with pytest.raises(Invalid):
            env.leases.unbind(context, wrong, PROJECT)


def test_each_bind_raises_the_epoch(env: ContextEnv) -> None:
    context, mappings = env.create(), {"0": [env.card.provider]}
    env.reserve(context)
    env.unbind_lease(context, epoch=1)
    instance = env.boot(context)
    assert env.row(context)["epoch"] == 2
    with pytest.raises(WrongState):
        env.bind_lease(context, instance, epoch=1)
    with pytest.raises(Conflict, match="not for epoch 1"):
        env.unbind_lease(context, epoch=1)
    env.delete_server(instance)
    assert env.bind_lease(context, instance, mappings=mappings)["epoch"] == 3
    assert env.bind_lease(context, instance, mappings=mappings, epoch=3)["epoch"] == 3
    env.unbind_lease(context, epoch=3)
    assert env.reserve(context)["epoch"] == 4
    first = env.bind_lease(context, instance, epoch=4)
    assert env.bind_lease(context, instance, epoch=4) == first


def test_lease_that_ends_during_a_query_is_not_bound(sqlite_env: ContextEnv) -> None:
    env = sqlite_env

    class Owners:
        def find_allocations(self, instance: str) -> InstanceAllocations:
            env.advance(60)
            return InstanceAllocations(PROJECT, {env.card.provider: 2})

    env.arqs = Arqs(env.conf, env.uow, owners=Owners(), now=env.now)
    env.leases = env.new_leases()
    context = env.create()
    env.reserve(context, lease_seconds=10)
    with pytest.raises(WrongState, match="has ended"):
        env.bind_lease(context, str(uuid4()), epoch=1)
    env.leases.sweep()
    env.reserve(context, lease_seconds=10)
    with pytest.raises(WrongState, match="has ended"):
        env.bind(env.card, *env.read_arqs(context))


class NoLimits:
    """A source of limits that is not available, like keystone during an outage."""

    def known(self, project: str) -> None:
        return None

    def find(self, project: str) -> Limits:
        raise Unavailable("keystone does not answer")


def test_only_a_new_lease_needs_the_limits(sqlite_env: ContextEnv) -> None:
    env, context = sqlite_env, sqlite_env.create()
    env.reserve(context)
    env.arqs = Arqs(env.conf, env.uow, limit_source=NoLimits(), now=env.now)
    env.leases = env.new_leases()
    assert env.reserve(context, epoch=1)["epoch"] == 1
    assert env.bind_lease(context, str(uuid4()), epoch=1)["state"] == "bound"
    env.unbind_lease(context)
    with pytest.raises(Unavailable, match="keystone"):
        env.reserve(context)
    with pytest.raises(Unavailable, match="keystone"):
        env.bind_lease(context, str(uuid4()), mappings={"0": [env.card.provider]})
    assert (env.state(context), env.handles()) == ("unbound", {"free": 4})


def test_sweep_repairs_leases_whose_arqs_own_nothing(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "BATCH", 1)
    env = ContextEnv(engine)
    wrong, failed, right = (env.create(resources={"FPGA": 1}) for _ in range(3))
    env.reserve(right, lease_seconds=10)
    ended = {"state": "reserved", "lease_expires_at": env.now()}
    failed_id = env.row(failed)["id"]
    with env.engine.begin() as tx:
        for context in (wrong, failed):
            guard = schema.device_contexts.c.uuid == context
            tx.execute(sa.update(schema.device_contexts).where(guard).values(**ended))
        of_failed = schema.arqs.c.context_id == failed_id
        tx.execute(sa.update(schema.arqs).where(of_failed).values(state="BindFailed"))
    env.advance(10)
    env.leases.sweep()
    assert [env.state(c) for c in (wrong, failed, right)] == ["unbound", "reserved", "unbound"]
    assert env.handles() == {"free": 4}


@pytest.mark.parametrize("abilities", [(), ("prepares",)])
def test_arqs_notify_of_the_bind_and_not_of_the_reservation(
    sqlite_engine: sa.Engine, abilities: tuple[str, ...]
) -> None:
    env = ContextEnv(sqlite_engine, *abilities)
    is_enabled(env.conf)
    env.conf.set_override("driver", ["log"], group=GROUP)
    env.arqs, env.jobs = Arqs(env.conf, env.uow, now=env.now), env.new_dispatcher()
    env.leases = env.new_leases()

    def binds() -> list[str]:
        found = [
            row["payload"]["event_type"]
            for row in rows.read(env.engine, schema.outbox)
            if "event_type" in row["payload"]
        ]
        return [event for event in found if event.startswith("accelerator_request.bind")]

    context = env.create()
    env.reserve(context)
    env.jobs.run_once()
    assert (env.state(context), binds()) == ("reserved", [])
    env.bind_lease(context, str(uuid4()), epoch=1)
    assert binds() == ["accelerator_request.bind.end"] * 2

# SPDX-License-Identifier: Apache-2.0
"""Device contexts: their expiry, their limits, and the loss of their servers."""

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.clients.nova import Nova
from cyborg.conductor.contexts.device_contexts import DeviceContexts
from cyborg.conductor.notifications.notifications import ArqEventRecorder, NotificationBuilder
from cyborg.conductor.orphans.collector import OrphanCollector
from cyborg.conductor.orphans.release import OrphanReleaser
from cyborg.core.errors import OverLimit
from cyborg.core.orphans.orphans import BoundArq
from cyborg.db import schema
from cyborg.db.orphans import write as orphans
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.context_work import PROJECT, ContextEnv
from cyborg.tests.fixtures.machine.options import make_conf


@pytest.fixture
def env(engine: sa.Engine) -> ContextEnv:
    return ContextEnv(engine)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> ContextEnv:
    return ContextEnv(sqlite_engine)


def test_unbound_contexts_expire(env: ContextEnv) -> None:
    old, bound, lasting = env.create(), env.create(), env.create()
    env.boot(bound)
    env.contexts.update(lasting, {"expires_at": None}, PROJECT)
    env.advance(86399)
    assert env.contexts.sweep() == 0
    env.advance(2)
    assert env.contexts.sweep() == 1
    left = {row["uuid"] for row in rows.read(env.engine, schema.device_contexts)}
    assert left == {bound, lasting}
    assert env.counts() == (2, 2, 4)
    assert old not in left


def test_context_that_was_bound_does_not_expire(env: ContextEnv) -> None:
    """Nova unbinds the context of a shelved server, whose flavor names it."""
    context = env.create()
    env.delete_server(env.boot(context))
    env.advance(10**7)
    assert (env.contexts.sweep(), env.row(context)["expires_at"]) == (0, None)
    env.boot(context)


def test_expiry_is_set_again_after_the_unbind(sqlite_env: ContextEnv) -> None:
    env, context = sqlite_env, sqlite_env.create()
    env.delete_server(env.boot(context))
    end = (env.now() + timedelta(seconds=100)).isoformat()
    env.contexts.update(context, {"expires_at": end}, PROJECT)
    env.advance(101)
    assert env.contexts.sweep() == 1


def test_context_does_not_expire_while_its_server_is_built(env: ContextEnv) -> None:
    """A call of Nova for its ARQs postpones the expiry."""
    context = env.create()
    env.advance(86399)
    updated_at = env.row(context)["updated_at"]
    arqs = env.read_arqs(context)
    assert env.row(context)["updated_at"] == updated_at
    env.advance(600)
    assert env.contexts.sweep() == 0
    env.bind(env.card, *arqs)
    assert env.row(context)["expires_at"] is None


def test_contexts_do_not_expire_without_a_time(sqlite_engine: sa.Engine) -> None:
    env = ContextEnv(sqlite_engine)
    conf = make_conf(device_contexts={"unbound_ttl": 0})
    env.contexts = DeviceContexts(conf, env.uow, now=env.now)
    context = env.create()
    env.advance(10**9)
    assert (env.contexts.sweep(), env.row(context)["expires_at"]) == (0, None)


def test_sweep_deletes_many_contexts(
    sqlite_env: ContextEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyborg.conductor.contexts.device_contexts.BATCH", 2)
    for _ in range(5):
        sqlite_env.create()
    sqlite_env.advance(90000)
    assert (sqlite_env.contexts.sweep(), sqlite_env.counts()) == (5, (0, 0, 0))


def test_arqs_of_contexts_do_not_expire_alone(sqlite_engine: sa.Engine) -> None:
    """The ARQ sweep of the orphan collector leaves them, but undoes a failed bind."""
    env = ContextEnv(sqlite_engine, "prepares")
    failed = env.create()
    env.agents.answers["prepare"] = "failed"
    env.boot(failed)
    env.jobs.run_once()
    env.create()
    conf = make_conf(conductor={"unbound_ttl": 1})
    env.set_arqs_changed(env.now())
    env.advance(10**6)
    collector = OrphanCollector(conf, env.uow, None, now=env.now)  # type: ignore[arg-type]
    stats = collector.run_once()
    assert stats is not None
    assert (stats.expired, stats.released, env.counts()) == (0, 2, (2, 2, 4))
    env.jobs.run_once()
    assert env.state(failed) == "unbound"


@pytest.mark.parametrize("nova", ["away", "there"])
def test_context_in_error_is_healed_only_without_its_instance(
    engine: sa.Engine, fake_nova: FakeNova, nova: str
) -> None:
    """The deletion of the ARQs by Nova was lost."""
    env = ContextEnv(engine, "prepares")
    lost, existing = env.create(), env.create()
    env.agents.answers["prepare"] = "failed"
    env.boot(lost)
    env.jobs.run_once()
    env.jobs.run_once()
    fake_nova.add_server(env.boot(existing), env.card.host, "ERROR")
    env.jobs.run_once()
    env.jobs.run_once()
    assert {env.state(lost), env.state(existing)} == {"error"}
    if nova == "away":
        fake_nova.status = 503
    env.set_arqs_changed(env.now())
    env.advance(2 * env.conf.conductor.unbound_ttl)
    client = Nova(fake_nova.adapter())
    collector = OrphanCollector(env.conf, env.uow, None, nova=client, now=env.now)  # type: ignore[arg-type]
    collector.run_once()
    env.jobs.run_once()
    assert env.state(lost) == ("error" if nova == "away" else "unbound")
    assert env.state(existing) == "error"
    assert env.counts() == (2, 2, 4)


def test_orphaned_arqs_of_a_context_are_unbound(env: ContextEnv) -> None:
    """The orphan collector deletes the ARQs of an instance that no longer exists."""
    context = env.create()
    env.boot(context)
    recorder = ArqEventRecorder(env.conf, NotificationBuilder(env.conf, now=env.now))
    releaser = OrphanReleaser(env.uow, recorder, lambda: None, env.now)
    found = env.uow.run(lambda tx: orphans.next_bound(tx, "", 0, 5))
    released = releaser.release([BoundArq.from_row(row) for row in found], keep=False)
    assert len(released) == 2
    assert (env.state(context), env.handles()) == ("unbound", {"free": 4})
    assert len(env.read_arqs(context)) == 2


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"device_contexts": {"max_per_project": 2}}, 2),
        ({"conductor": {"max_project_arqs": 5}}, 5),
    ],
)
def test_limits_of_a_project(env: ContextEnv, options: Any, limit: int) -> None:
    env.contexts = DeviceContexts(make_conf(**options), env.uow, now=env.now)
    first = env.create()
    env.create()
    with pytest.raises(OverLimit) as raised:
        env.create()
    assert raised.value.details["limit"] == limit
    assert env.counts() == (2, 2, 4)
    env.create("other")
    env.contexts.delete(first, PROJECT)
    env.create()

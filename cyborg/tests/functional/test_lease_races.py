# SPDX-License-Identifier: Apache-2.0
"""Races of leases of device contexts, on each database."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Conflict, CyborgError
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.interleave import Race
from cyborg.tests.fixtures.hosts.context_work import ContextEnv

THREADS = 32
BIND_POINTS = (
    "FROM arqs WHERE arqs.context_id IN",
    "UPDATE device_contexts SET",
    "UPDATE arqs SET",
    "COMMIT",
)
at_bind = pytest.mark.parametrize("at", BIND_POINTS)


@pytest.fixture
def env(engine: sa.Engine) -> ContextEnv:
    return ContextEnv(engine)


def run_all(calls: Sequence[Callable[[], object]]) -> list[str]:
    """Run calls at the same time; return the code of the error of each, or "done"."""
    outcomes: list[str] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
            outcomes.append("done")
        except CyborgError as exc:
            outcomes.append(exc.code)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return outcomes


def test_one_of_many_contexts_gets_the_last_handles(env: ContextEnv) -> None:
    env.reserve(env.create())
    contexts = [env.create() for _ in range(THREADS)]
    outcomes = run_all([partial(env.reserve, context) for context in contexts])
    assert (outcomes.count("done"), outcomes.count("no_handle")) == (1, THREADS - 1)
    states = [env.row(context) for context in contexts]
    assert sorted(row["epoch"] for row in states) == [0] * (THREADS - 1) + [1]
    assert env.handles() == {"owned": 4}


def test_one_of_two_binds_with_one_epoch_wins(env: ContextEnv) -> None:
    context = env.create()
    env.reserve(context)
    instances = [str(uuid4()) for _ in range(8)]
    outcomes = run_all([partial(env.bind_lease, context, i, epoch=1) for i in instances])
    assert (outcomes.count("done"), len(outcomes)) == (1, 8)
    assert env.row(context)["instance_uuid"] in instances
    assert (env.state(context), env.handles()) == ("bound", {"owned": 2, "free": 2})


@at_bind
def test_expiry_concurrent_with_bind(env: ContextEnv, at: str) -> None:
    """A bind that begins before the end of the lease and the sweep after it: one wins."""
    context, instance = env.create(), str(uuid4())
    env.reserve(context, lease_seconds=10)

    def expire() -> None:
        env.advance(10)
        env.leases.sweep()

    race = Race(env.engine, lambda: env.bind_lease(context, instance, epoch=1), at, expire)
    assert (race.reached, race.second) == (True, None)
    if race.first is None:
        assert (env.state(context), env.handles()) == ("bound", {"owned": 2, "free": 2})
    else:
        assert isinstance(race.first, Conflict)
        assert (env.state(context), env.handles()) == ("unbound", {"free": 4})
    assert len(rows.read(env.engine, schema.arqs)) == 2


@pytest.mark.parametrize("at", ["FROM arqs WHERE arqs.uuid IN", *BIND_POINTS[1:]])
def test_expiry_concurrent_with_bind_of_nova(env: ContextEnv, at: str) -> None:
    context = env.create()
    env.reserve(context, lease_seconds=10)
    arqs = env.read_arqs(context)

    def expire() -> None:
        env.advance(10)
        env.leases.sweep()

    race = Race(env.engine, lambda: env.bind(env.card, *arqs), at, expire)
    assert (race.reached, race.second) == (True, None)
    # An ARQ that the sweep has released is bound without the lease.
    assert race.first is None or isinstance(race.first, Conflict)
    bound = race.first is None
    assert env.state(context) == ("bound" if bound else "unbound")
    assert env.handles()["owned"] == (2 if bound else 0)


@at_bind
def test_two_leases_of_one_context(env: ContextEnv, at: str) -> None:
    context = env.create()
    race = Race(env.engine, lambda: env.reserve(context), at, lambda: env.reserve(context))
    assert race.reached
    assert len([error for error in (race.first, race.second) if error is not None]) == 1
    assert (env.row(context)["epoch"], env.handles()) == (1, {"owned": 2, "free": 2})

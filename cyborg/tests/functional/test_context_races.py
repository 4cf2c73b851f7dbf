# SPDX-License-Identifier: Apache-2.0
"""Races of device contexts, on each database, at each kind of statement of the first call."""

import threading

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Conflict, CyborgError, NotFound, WrongState
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.interleave import Race
from cyborg.tests.fixtures.hosts.context_work import PROJECT, ContextEnv

BIND_POINTS = (
    "FROM arqs WHERE arqs.uuid IN",
    "UPDATE device_contexts SET",
    "UPDATE arqs SET",
    "UPDATE attach_handles SET",
    "COMMIT",
)
RENEW_POINTS = (
    "FROM arqs WHERE arqs.context_id IN",
    "FROM device_contexts",
    "DELETE FROM arqs",
    "INSERT INTO arqs",
    "COMMIT",
)
RELEASE_POINTS = ("FROM arqs WHERE arqs.instance_uuid", "FROM device_contexts", "COMMIT")
at_bind = pytest.mark.parametrize("at", BIND_POINTS)
at_renewal = pytest.mark.parametrize("at", RENEW_POINTS)
at_release = pytest.mark.parametrize("at", RELEASE_POINTS)


@pytest.fixture
def env(engine: sa.Engine) -> ContextEnv:
    return ContextEnv(engine)


def assert_consistent(env: ContextEnv) -> None:
    """Check that a context is bound if and only if each of its ARQs owns a handle."""
    owners = {row["arq_id"] for row in rows.read(env.engine, schema.attach_handles)} - {None}
    for context in rows.read(env.engine, schema.device_contexts):
        arqs = rows.read(env.engine, schema.arqs, context_id=context["id"])
        assert len(arqs) == 2
        owning = [arq for arq in arqs if arq["id"] in owners]
        assert len(owning) == (2 if context["state"] == "bound" else 0), context["state"]
    assert len(owners) == len(rows.read(env.engine, schema.arqs, state="Bound"))


@at_bind
def test_bind_concurrent_with_bind(env: ContextEnv, at: str) -> None:
    context = env.create()
    arqs = env.read_arqs(context)
    race = Race(
        env.engine, lambda: env.bind(env.card, *arqs), at, lambda: env.bind(env.card, *arqs)
    )
    assert race.reached
    failed = [error for error in (race.first, race.second) if error is not None]
    assert len(failed) == 1
    assert isinstance(failed[0], Conflict)
    assert_consistent(env)
    assert (env.state(context), env.handles()) == ("bound", {"owned": 2, "free": 2})


@at_bind
def test_delete_concurrent_with_bind(env: ContextEnv, at: str) -> None:
    context = env.create()
    arqs = env.read_arqs(context)
    race = Race(
        env.engine,
        lambda: env.bind(env.card, *arqs),
        at,
        lambda: env.contexts.delete(context, PROJECT),
    )
    assert race.reached
    assert_consistent(env)
    if race.second is None:
        assert isinstance(race.first, NotFound)
        assert (env.counts(), env.handles()) == ((0, 0, 0), {"free": 4})
    else:
        assert race.first is None
        assert isinstance(race.second, WrongState)
        assert env.state(context) == "bound"


@at_bind
def test_expiry_concurrent_with_bind(env: ContextEnv, at: str) -> None:
    """The sweep of a conductor never frees a context that is being bound."""
    context = env.create()
    arqs = env.read_arqs(context)
    env.advance(90000)
    race = Race(env.engine, lambda: env.bind(env.card, *arqs), at, env.contexts.sweep)
    assert (race.reached, race.second) == (True, None)
    assert_consistent(env)
    if race.first is None:
        assert env.state(context) == "bound"
    else:
        assert isinstance(race.first, NotFound)
        assert env.counts() == (0, 0, 0)


@at_bind
def test_change_concurrent_with_bind(env: ContextEnv, at: str) -> None:
    context = env.create()
    arqs = env.read_arqs(context)
    race = Race(
        env.engine,
        lambda: env.bind(env.card, *arqs),
        at,
        lambda: env.contexts.update(context, {"config_data": {"key1": "late"}}, PROJECT),
    )
    assert (race.reached, race.first) == (True, None)
    values = {row["group"]["accel:key1"] for row in rows.read(env.engine, schema.arqs)}
    changed = race.second is None
    assert values == ({"late"} if changed else {"val1"})
    assert changed or isinstance(race.second, WrongState)
    assert_consistent(env)


@at_renewal
def test_two_callers_get_different_arqs(env: ContextEnv, at: str) -> None:
    context = env.create()
    found: list[list[str]] = []
    race = Race(
        env.engine,
        lambda: found.append(env.read_arqs(context)),
        at,
        lambda: found.append(env.read_arqs(context)),
    )
    assert (race.reached, race.first, race.second) == (True, None, None)
    assert_consistent(env)
    left = {row["uuid"] for row in rows.read(env.engine, schema.arqs)}
    assert [set(arqs) == left for arqs in found].count(True) == 1
    assert not set(found[0]) & set(found[1])


@at_renewal
def test_bind_concurrent_with_renewal(env: ContextEnv, at: str) -> None:
    context = env.create()
    arqs = env.read_arqs(context)
    race = Race(env.engine, lambda: env.read_arqs(context), at, lambda: env.bind(env.card, *arqs))
    assert race.reached
    assert_consistent(env)
    if race.second is None:
        assert isinstance(race.first, WrongState)
        assert env.state(context) == "bound"
    else:
        assert isinstance(race.second, NotFound)
        assert (race.first, env.state(context)) == (None, "unbound")


@at_renewal
def test_delete_concurrent_with_renewal(env: ContextEnv, at: str) -> None:
    context = env.create()
    race = Race(
        env.engine,
        lambda: env.read_arqs(context),
        at,
        lambda: env.contexts.delete(context, PROJECT),
    )
    assert (race.reached, race.second) == (True, None)
    assert race.first is None or isinstance(race.first, NotFound)
    assert env.counts() == (0, 0, 0)


@at_renewal
def test_expiry_concurrent_with_renewal(env: ContextEnv, at: str) -> None:
    context = env.create()
    env.advance(90000)
    race = Race(env.engine, lambda: env.read_arqs(context), at, env.contexts.sweep)
    assert (race.reached, race.second) == (True, None)
    assert env.counts() == ((1, 1, 2) if race.first is None else (0, 0, 0))


@at_release
def test_change_concurrent_with_release(env: ContextEnv, at: str) -> None:
    context = env.create()
    instance = env.boot(context)
    race = Race(
        env.engine,
        lambda: env.delete_server(instance),
        at,
        lambda: env.contexts.update(context, {"name": "n"}, PROJECT),
    )
    assert (race.reached, race.first) == (True, None)
    assert race.second is None or isinstance(race.second, WrongState)
    assert_consistent(env)
    assert env.state(context) == "unbound"


@pytest.mark.parametrize("at", ["UPDATE arqs SET", "FROM device_contexts", "COMMIT"])
def test_two_halves_are_unbound_at_the_same_time(env: ContextEnv, at: str) -> None:
    """The last of two transactions that release different ARQs sees both."""
    context = env.create()
    arqs = env.read_arqs(context)
    env.bind(env.card, *arqs)
    race = Race(
        env.engine,
        lambda: env.arqs.unbind([{"request": arqs[0]}], None),
        at,
        lambda: env.arqs.unbind([{"request": arqs[1]}], None),
    )
    assert (race.reached, race.first, race.second) == (True, None, None)
    assert (env.state(context), env.handles()) == ("unbound", {"free": 4})


def test_one_of_many_servers_gets_the_context(env: ContextEnv) -> None:
    context = env.create()
    arqs = env.read_arqs(context)
    outcomes: list[str] = []

    def boot() -> None:
        try:
            outcomes.append(env.bind(env.card, *arqs))
        except CyborgError as exc:
            outcomes.append(exc.code)

    threads = [threading.Thread(target=boot) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    row = env.row(context)
    assert (row["state"], outcomes.count(row["instance_uuid"])) == ("bound", 1)
    assert len([code for code in outcomes if code in ("wrong_state", "conflict")]) == 7
    assert_consistent(env)

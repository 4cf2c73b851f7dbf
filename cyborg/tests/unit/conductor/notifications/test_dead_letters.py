# SPDX-License-Identifier: Apache-2.0
"""Operations on dead letters: retry, delete and sweep."""

from datetime import timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.notifications.outbox import DeadLetters
from cyborg.core.errors import Invalid, NotFound, WrongState
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.outbox import START, Env, env, sqlite_env

__all__ = ["env", "sqlite_env"]


def make_dead_letters(env: Env) -> tuple[DeadLetters, list[None]]:
    woken: list[None] = []
    wake = lambda: woken.append(None)  # noqa: E731
    return DeadLetters(env.conf, env.uow, wake, now=env.clock.now), woken


def test_retry_delivers_dead_letter(env: Env) -> None:
    row = env.add_dead_letter()
    dead_letters, woken = make_dead_letters(env)
    assert env.outbox.run_once() == 0
    env.nova.calls.clear()
    dead_letters.retry(row["uuid"].upper())
    assert woken == [None]
    (retried,) = env.rows()
    assert (retried["state"], retried["attempts"]) == ("pending", 0)
    assert retried["next_try_at"] == env.clock.now()
    assert env.outbox.run_once() == 1
    assert env.nova.tags == ["a"]
    with pytest.raises(NotFound):
        dead_letters.retry(row["uuid"])
    assert len(woken) == 1


def test_delete_removes_dead_letter(env: Env) -> None:
    row = env.add_dead_letter()
    dead_letters, woken = make_dead_letters(env)
    dead_letters.delete(row["uuid"])
    assert env.rows() == []
    assert woken == []
    with pytest.raises(NotFound):
        dead_letters.delete(row["uuid"])


def test_retry_and_delete_reject_pending_message(env: Env) -> None:
    env.add_events("a")
    (row,) = env.rows()
    dead_letters, woken = make_dead_letters(env)
    for change in (dead_letters.retry, dead_letters.delete):
        with pytest.raises(WrongState, match="is pending, only a dead letter") as raised:
            change(row["uuid"])
        assert raised.value.details == {"uuid": row["uuid"], "state": "pending"}
        with pytest.raises(NotFound):
            change(str(uuid4()))
        with pytest.raises(Invalid):
            change("no uuid")
    assert env.rows() == [row]
    assert woken == []


def test_sweep_deletes_old_dead_letters_only(env: Env) -> None:
    old, new = env.add_dead_letter("old"), env.add_dead_letter("new")
    env.add_events("pending")
    dead_letters, _ = make_dead_letters(env)
    env.conf.set_override("dead_letter_ttl", 1000.0, group="conductor")
    for row, seconds in ((old, 0.0), (new, 500.0)):
        moment = START + timedelta(seconds=seconds)
        rows.update(env.engine, schema.outbox, row["id"], next_try_at=moment, updated_at=moment)
    with env.engine.begin() as tx:
        pending = schema.outbox.c.state == "pending"
        tx.execute(sa.update(schema.outbox).where(pending).values(updated_at=START))
    env.clock.seconds = 1000
    assert dead_letters.sweep() == 0
    env.clock.seconds = 1001
    assert dead_letters.sweep() == 1
    assert [row["payload"]["tag"] for row in env.rows()] == ["new", "pending"]

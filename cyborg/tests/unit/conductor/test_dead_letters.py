# SPDX-License-Identifier: Apache-2.0
"""What operators do about messages that nobody took."""

from datetime import timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.outbox import DeadLetters
from cyborg.core.errors import Invalid, NotFound, WrongState
from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.outbox import START, Bed, bed, light

__all__ = ["bed", "light"]


def letters(bed: Bed) -> tuple[DeadLetters, list[None]]:
    woken: list[None] = []
    wake = lambda: woken.append(None)  # noqa: E731
    return DeadLetters(bed.conf, bed.uow, wake, now=bed.clock.now), woken


def test_a_dead_message_is_delivered_when_the_operator_says_so(bed: Bed) -> None:
    row = bed.dead()
    desk, woken = letters(bed)
    assert bed.outbox.run_once() == 0
    bed.nova.calls.clear()
    desk.retry(row["uuid"].upper())
    assert woken == [None]
    (again,) = bed.rows()
    assert (again["state"], again["attempts"]) == ("pending", 0)
    assert again["next_try_at"] == bed.clock.now()
    assert bed.outbox.run_once() == 1
    assert bed.nova.tags == ["a"]
    with pytest.raises(NotFound):
        desk.retry(row["uuid"])
    assert len(woken) == 1


def test_a_dead_message_is_forgotten_when_the_operator_says_so(bed: Bed) -> None:
    row = bed.dead()
    desk, woken = letters(bed)
    desk.delete(row["uuid"])
    assert bed.rows() == []
    assert woken == []
    with pytest.raises(NotFound):
        desk.delete(row["uuid"])


def test_what_is_not_dead_is_left_alone(bed: Bed) -> None:
    bed.promise("a")
    (row,) = bed.rows()
    desk, woken = letters(bed)
    for change in (desk.retry, desk.delete):
        with pytest.raises(WrongState, match="is pending: only a dead one") as raised:
            change(row["uuid"])
        assert raised.value.details == {"uuid": row["uuid"], "state": "pending"}
        with pytest.raises(NotFound):
            change(str(uuid4()))
        with pytest.raises(Invalid):
            change("no uuid")
    assert bed.rows() == [row]
    assert woken == []


def test_dead_messages_are_kept_for_a_time(bed: Bed) -> None:
    old, new = bed.dead("old"), bed.dead("new")
    bed.promise("pending")
    desk, _ = letters(bed)
    bed.conf.set_override("outbox_keep", 1000.0, group="conductor")
    for row, seconds in ((old, 0.0), (new, 500.0)):
        rows.change(
            bed.engine, schema.outbox, row["id"], updated_at=START + timedelta(seconds=seconds)
        )
    with bed.engine.begin() as tx:
        pending = schema.outbox.c.state == "pending"
        tx.execute(sa.update(schema.outbox).where(pending).values(updated_at=START))
    bed.clock.seconds = 1000
    assert desk.sweep() == 0
    bed.clock.seconds = 1001
    assert desk.sweep() == 1
    assert [row["payload"]["tag"] for row in bed.rows()] == ["new", "pending"]

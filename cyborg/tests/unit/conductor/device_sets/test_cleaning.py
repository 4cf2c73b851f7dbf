# SPDX-License-Identifier: Apache-2.0
"""Binds to devices that are being cleaned: they wait, as long as their caller does."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from itertools import chain, pairwise

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.binding import cleaning_wait
from cyborg.core.errors import NoHandle, Unavailable
from cyborg.core.inventory.device import Ability
from cyborg.core.inventory.device_set import SetKind
from cyborg.db import schema
from cyborg.db.deadline import call_deadline
from cyborg.rpc import envelope
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.device_sets.host import SetHost
from cyborg.tests.fixtures.device_sets.saved import make_set_host
from cyborg.tests.fixtures.machine.processes import ends_within
from cyborg.tests.unit.conductor.device_sets.test_changes import (
    bind_gpu,
    finish_cleaning,
    turn_off,
)

__all__ = ["node", "placement_adapter"]


def set_pause(host: SetHost, pause: Callable[[float], bool]) -> None:
    """Let binds call a function instead of a wait."""
    binder = host.arqs.binder
    host.arqs.binder = replace(binder, waits=replace(binder.waits, pause=pause))


class Env:
    """A host whose pair of GPUs is being cleaned. A wait of a bind lasts no time.

    ``during`` is called in each wait, with its number.
    """

    def __init__(self, engine: sa.Engine, node: Node, during: Callable[[int], None]) -> None:
        self.host = make_set_host(engine, node, wanted={"2": 4})
        self.engine, self.during = engine, during
        self.host.delete(self.host.bind("3"))
        self.waits: list[float] = []
        set_pause(self.host, self.sleep)

    def sleep(self, seconds: float) -> bool:
        assert self.engine.pool.checkedout() == 0, "no connection is held"  # type: ignore[attr-defined]
        self.waits.append(seconds)
        self.during(len(self.waits))
        return False

    def bind(self, name: str = "3", *, seconds: float | None = 30.0) -> str:
        """Bind to a set, in a call whose caller waits so many seconds."""
        end = None if seconds is None else time.monotonic() + seconds
        with call_deadline(end):
            return self.host.bind(name)


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node) -> Env:
    """Return an environment whose cleaning takes longer than any wait."""
    return Env(sqlite_engine, node, lambda _: None)


def test_bind_waits_for_the_cleaning_of_its_set(engine: sa.Engine, node: Node) -> None:
    env = Env(engine, node, lambda _: None)
    env.during = lambda number: finish_cleaning(env.host) if number == 2 else None
    instance = env.bind()
    assert env.waits == [cleaning_wait.CLEANING_INTERVAL] * 2
    assert env.host.owners() == dict.fromkeys(env.host.family["3"], instance)


def test_bind_waits_for_the_cleaning_of_a_single_device(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    host = make_set_host(sqlite_engine, node, kind=SetKind.PCIE)
    cleaned = frozenset({Ability.SANITISES})
    host.gpus = {unit: replace(gpu, abilities=cleaned) for unit, gpu in host.gpus.items()}
    turn_off(host)
    first = bind_gpu(host, "01")
    host.delete(first)
    host.node.deallocate(first)

    def pause(_: float) -> bool:
        finish_cleaning(host)
        return False

    set_pause(host, pause)
    with call_deadline(time.monotonic() + 30.0):
        instance = bind_gpu(host, "01")
    assert host.owners() == {"01": instance}


def test_bind_without_a_deadline_does_not_wait(env: Env) -> None:
    with pytest.raises(NoHandle, match="handle is being cleaned"):
        env.bind(seconds=None)
    assert env.waits == []


def test_bind_leaves_time_for_its_last_attempt(env: Env) -> None:
    with pytest.raises(NoHandle, match="handle is being cleaned"):
        env.bind(seconds=cleaning_wait.ATTEMPT_SECONDS)
    assert env.waits == []


def test_bind_ends_its_wait_with_the_reason(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning_wait, "MAX_CLEANING_WAIT", 0.2)
    with pytest.raises(NoHandle, match="handle is being cleaned") as caught:
        env.bind()
    assert env.waits
    assert max(env.waits) <= 0.2
    reasons = chain.from_iterable(caught.value.details["reasons"].values())
    assert {reason["code"] for reason in reasons} == {"cleaning"}
    assert caught.value.code == "no_handle"


def test_bind_does_not_wait_for_a_taken_device(env: Env) -> None:
    """Of the four GPUs, two are being cleaned and one has another server."""
    env.host.bind("8")
    with pytest.raises(NoHandle, match="handle is taken"):
        env.bind("1")
    assert env.waits == []


@pytest.mark.parametrize("change", ["failed", "overdue", "lost", "down"])
def test_bind_does_not_wait_for_a_cleaning_that_may_not_end(env: Env, change: str) -> None:
    (job,) = env.host.jobs("release")
    (agent,) = rows.read(env.engine, schema.services, host=env.host.node.name)
    now = timeutils.utcnow()
    match change:
        case "failed":
            rows.update(env.engine, schema.jobs, job["id"], error="the device is in use")
        case "overdue":
            rows.update(env.engine, schema.jobs, job["id"], deadline=now - timedelta(seconds=1))
        case "lost":
            for handle in rows.read(env.engine, schema.attach_handles, job_id=job["id"]):
                rows.update(env.engine, schema.attach_handles, handle["id"], job_id=None)
        case "down":
            rows.update(env.engine, schema.services, agent["id"], down_since=now)
    with pytest.raises(NoHandle, match="handle is being cleaned"):
        env.bind()
    assert env.waits == []


def test_bind_ends_its_wait_when_the_cleaning_fails(env: Env) -> None:
    def fail(_: int) -> None:
        (job,) = env.host.jobs("release")
        rows.update(env.engine, schema.jobs, job["id"], error="the device is in use")

    env.during = fail
    with pytest.raises(NoHandle, match="handle is being cleaned"):
        env.bind()
    assert len(env.waits) == 1


def test_waiting_bind_reads_only_whether_a_handle_is_clean(env: Env) -> None:
    statements: list[str] = []
    counts: list[int] = []

    def end(number: int) -> None:
        counts.append(len(statements))
        if number == 4:
            finish_cleaning(env.host)

    env.during = end
    sa.event.listen(env.engine, "before_cursor_execute", lambda *e: statements.append(e[2]))
    env.bind()
    counts = [sum("SELECT" in text for text in statements[:count]) for count in counts]
    assert [after - before for before, after in pairwise(counts)] == [1, 1, 1]


def test_stopping_conductor_ends_the_waits(sqlite_engine: sa.Engine, node: Node) -> None:
    """Another conductor can bind: the device is not refused."""
    host = make_set_host(sqlite_engine, node, wanted={"2": 4})
    host.delete(host.bind("3"))
    host.arqs.stop()
    with (
        ends_within(cleaning_wait.MAX_CLEANING_WAIT / 2),
        pytest.raises(Unavailable) as caught,
        call_deadline(time.monotonic() + 30.0),
    ):
        host.bind("3")
    assert caught.value.message.startswith("the conductor stops: ")
    assert envelope.is_stopping(envelope.wrap_error(caught.value))
    arqs = rows.read(sqlite_engine, schema.arqs)
    assert {row["state"] for row in arqs} == {"Initial"}, "all ARQs can be bound elsewhere"


@pytest.mark.parametrize(("threads", "slots"), [(64, 16), (8, 2), (1, 1)])
def test_a_part_of_the_threads_may_wait(threads: int, slots: int) -> None:
    found = cleaning_wait.make_slots(threads)
    taken = [found.acquire(blocking=False) for _ in range(slots + 1)]
    assert taken == [*[True] * slots, False]


def test_only_some_binds_wait_at_the_same_time(env: Env) -> None:
    slots = env.host.arqs.binder.waits.slots
    with ExitStack() as stack:
        while slots.acquire(blocking=False):
            stack.callback(slots.release)
        with pytest.raises(NoHandle, match="handle is being cleaned"):
            env.bind()
    assert env.waits == []
    env.during = lambda _: finish_cleaning(env.host)
    env.bind()
    assert len(env.waits) == 1

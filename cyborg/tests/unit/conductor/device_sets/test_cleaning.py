# SPDX-License-Identifier: Apache-2.0
"""Binds to devices that are being cleaned: they wait, as long as their caller does."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding import binder
from cyborg.core.errors import NoHandle
from cyborg.core.inventory.device import Ability
from cyborg.core.inventory.device_set import SetKind
from cyborg.db import schema
from cyborg.db.deadline import call_deadline
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.device_sets.host import SetHost
from cyborg.tests.unit.conductor.device_sets.test_changes import (
    bind_gpu,
    finish_cleaning,
    turn_off,
)

__all__ = ["node", "placement_adapter"]


class Env:
    """A host whose pair of GPUs is being cleaned. A wait of a bind lasts no time.

    ``during`` is called in each wait, with its number.
    """

    def __init__(self, engine: sa.Engine, node: Node, during: Callable[[int], None]) -> None:
        self.host = SetHost(engine, node, wanted={"2": 4})
        self.engine, self.during = engine, during
        self.host.delete(self.host.bind("3"))
        self.waits: list[float] = []
        self.host.arqs.binder = replace(self.host.arqs.binder, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        assert self.engine.pool.checkedout() == 0, "no connection is held"  # type: ignore[attr-defined]
        self.waits.append(seconds)
        self.during(len(self.waits))

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
    assert env.waits == [binder.CLEANING_INTERVAL] * 2
    assert env.host.owners() == dict.fromkeys(env.host.family["3"], instance)


def test_bind_waits_for_the_cleaning_of_a_single_device(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    host = SetHost(sqlite_engine, node, kind=SetKind.PCIE)
    cleaned = frozenset({Ability.SANITISES})
    host.gpus = {unit: replace(gpu, abilities=cleaned) for unit, gpu in host.gpus.items()}
    turn_off(host)
    first = bind_gpu(host, "01")
    host.delete(first)
    host.node.deallocate(first)
    host.arqs.binder = replace(host.arqs.binder, sleep=lambda _: finish_cleaning(host))
    with call_deadline(time.monotonic() + 30.0):
        instance = bind_gpu(host, "01")
    assert host.owners() == {"01": instance}


def test_bind_without_a_deadline_does_not_wait(env: Env) -> None:
    with pytest.raises(NoHandle, match="handle is being cleaned"):
        env.bind(seconds=None)
    assert env.waits == []


def test_bind_leaves_time_for_its_last_attempt(env: Env) -> None:
    with pytest.raises(NoHandle, match="handle is being cleaned"):
        env.bind(seconds=binder.ATTEMPT_SECONDS)
    assert env.waits == []


def test_bind_ends_its_wait_with_the_reason(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binder, "MAX_CLEANING_WAIT", 0.2)
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


def test_bind_does_not_wait_for_a_failed_cleaning(env: Env) -> None:
    (job,) = env.host.jobs("release")
    rows.update(env.engine, schema.jobs, job["id"], error="the device is in use")
    with pytest.raises(NoHandle, match="handle is being cleaned"):
        env.bind()
    assert env.waits == []


def test_only_some_binds_wait_at_the_same_time(env: Env) -> None:
    waiting = env.host.arqs.binder._waiting
    with ExitStack() as stack:
        for _ in range(binder.MAX_WAITING_BINDS):
            stack.enter_context(waiting)
        with pytest.raises(NoHandle, match="handle is being cleaned"):
            env.bind()
    assert env.waits == []
    env.during = lambda _: finish_cleaning(env.host)
    env.bind()
    assert len(env.waits) == 1

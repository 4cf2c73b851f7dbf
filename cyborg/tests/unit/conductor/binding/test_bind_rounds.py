# SPDX-License-Identifier: Apache-2.0
"""The loop around the transaction of a bind: orphans, waits for cleanings, and attempts."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.binding.binder import MAX_ATTEMPTS, Binder
from cyborg.conductor.binding.claim_plan import BindContext
from cyborg.conductor.binding.claims import BeingCleaned, Retry
from cyborg.core.errors import NoHandle
from cyborg.db.deadline import call_deadline
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.telemetry.recorder import BIND_SECONDS, MetricRecorder
from cyborg.telemetry.server import MemoryValues
from cyborg.tests.fixtures.machine.options import make_conf

TAKEN = {
    "arq": [{"provider": "provider", "code": "taken"}, {"provider": "provider", "code": "cleaning"}]
}
# A handle that does not exist is not being cleaned: each wait ends at its first query.
CLEANED = BeingCleaned("one is taken, one is being cleaned", [1], reasons=TAKEN)
RETRY = Retry("claimed by another bind")


class Bind:
    """A bind whose transaction fails with one error after the other, and then succeeds.

    ``steps`` has what happens: "orphans" is a check for orphans, "wait" a wait.
    """

    def __init__(self, engine: sa.Engine, errors: Sequence[Exception], threads: int = 4) -> None:
        self.metrics = MetricRecorder()
        self.steps: list[str] = []
        self.slots: list[bool] = []  # whether another bind could wait, at each attempt
        self.during: Callable[[], bool] = lambda: False
        conf, uow = make_conf(), UnitOfWork(engine)
        arqs = Arqs(conf, uow, orphans=self, metrics=self.metrics, call_threads=threads)
        waits = replace(arqs.binder.waits, pause=self.pause)
        self.binder: Binder = replace(arqs.binder, waits=waits)
        self.errors: Iterator[Exception] = iter(errors)

    def release_at(self, providers: Sequence[str]) -> bool:
        self.steps.append("orphans")
        return bool(providers)

    def pause(self, _: float) -> bool:
        self.steps.append("wait")
        return self.during()

    def run(self) -> str:
        with call_deadline(time.monotonic() + 30.0):
            return self.binder.run([], self.binder.make_context(), self.work)

    def work(self, _tx: sa.Connection, _context: BindContext, wait: bool) -> str:
        self.steps.append("locks" if wait else "skips")
        if free := self.binder.waits.slots.acquire(blocking=False):
            self.binder.waits.slots.release()
        self.slots.append(free)
        for error in self.errors:
            raise error
        return "bound"


def test_bind_releases_orphans_before_it_waits(sqlite_engine: sa.Engine) -> None:
    bind = Bind(sqlite_engine, [CLEANED])
    assert bind.run() == "bound"
    assert bind.steps == ["skips", "orphans", "skips"]


def test_bind_checks_orphans_once(sqlite_engine: sa.Engine) -> None:
    bind = Bind(sqlite_engine, [CLEANED] * 3)
    assert bind.run() == "bound"
    assert bind.steps == ["skips", "orphans", "skips", "wait", "skips", "wait", "skips"]


def test_bind_keeps_its_slot_until_its_end(sqlite_engine: sa.Engine) -> None:
    bind = Bind(sqlite_engine, [CLEANED] * 3)
    bind.run()
    assert bind.slots == [True, True, False, False]
    assert bind.binder.waits.slots.acquire(blocking=False), "the slot is free after the bind"


def test_bind_gives_its_slot_back_after_an_error(sqlite_engine: sa.Engine) -> None:
    bind = Bind(sqlite_engine, [CLEANED, CLEANED, NoHandle("taken", reasons={})])
    with pytest.raises(NoHandle, match="taken"):
        bind.run()
    assert bind.slots[-1] is False
    assert bind.binder.waits.slots.acquire(blocking=False)


def test_each_round_of_a_waiting_bind_has_its_own_attempts(sqlite_engine: sa.Engine) -> None:
    rounds = [*[RETRY] * (MAX_ATTEMPTS - 2), CLEANED]
    bind = Bind(sqlite_engine, [CLEANED, RETRY, *rounds * 5])
    assert bind.run() == "bound"
    assert set(bind.steps[3:]) == {"locks", "wait"}, "later attempts wait for locks"
    endless = Bind(sqlite_engine, [CLEANED, CLEANED, *[RETRY] * 99])
    with pytest.raises(NoHandle, match="claimed concurrently"):
        endless.run()


def test_wait_is_a_stage_of_its_own(sqlite_engine: sa.Engine) -> None:
    bind = Bind(sqlite_engine, [CLEANED, CLEANED])
    values = MemoryValues()
    bind.metrics.open(values)
    bind.during = lambda: threading.Event().wait(0.3)
    bind.run()
    samples = values.read().samples
    # The last value of a histogram is the sum of the observations.
    assert samples[BIND_SECONDS.name, "wait"][-1] >= 0.3 > samples[BIND_SECONDS.name, "claim"][-1]

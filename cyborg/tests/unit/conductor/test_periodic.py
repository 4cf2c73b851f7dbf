# SPDX-License-Identifier: Apache-2.0
import logging
import queue
import threading
import time

import pytest

from cyborg.conductor.periodic import Complaints, Loop
from cyborg.core.errors import Unavailable


def test_a_failure_is_told_once_a_minute_and_its_end_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    complaints = Complaints(lambda: now[0])
    with caplog.at_level(logging.INFO):
        complaints.right("it")
        told = []
        for now[0] in (0.0, 1.0, 59.0, 60.0, 61.0):
            told.append(complaints.wrong("it is away"))
        complaints.right("it")
        complaints.right("it")
    assert told == [True, False, False, True, False]
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING", "INFO"]


def test_a_loop_survives_what_its_work_raises(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[Exception] = [Unavailable("away"), ValueError("odd")]

    def work() -> None:
        if failures:
            raise failures.pop(0)

    loop = Loop("test", 100.0, work)
    for _ in range(3):
        loop.round()
    assert [record.levelname for record in caplog.records][:2] == ["WARNING", "ERROR"]


def test_a_loop_runs_at_once_when_woken_and_ends_when_stopped() -> None:
    rounds = threading.Semaphore(0)
    loop = Loop("test", 1000.0, rounds.release)
    loop.start()
    assert rounds.acquire(timeout=10)
    loop.wake()
    assert rounds.acquire(timeout=10)
    loop.stop()
    assert loop.join(10)


def test_a_wake_during_a_round_is_not_lost() -> None:
    began, gate = threading.Semaphore(0), threading.Semaphore(0)

    def work() -> None:
        began.release()
        gate.acquire(timeout=10)

    loop = Loop("test", 1000.0, work)
    loop.start()
    assert began.acquire(timeout=10)
    loop.wake()
    gate.release()
    assert began.acquire(timeout=10)
    loop.stop()
    gate.release()
    assert loop.join(10)


def test_a_loop_that_never_started_stops() -> None:
    loop = Loop("test", 1.0, lambda: None)
    loop.stop()
    assert loop.join(0.1)


def test_a_loop_that_lingers_begins_later_and_once() -> None:
    began: queue.SimpleQueue[float] = queue.SimpleQueue()
    loop = Loop("test", 1000.0, lambda: began.put(time.monotonic()), linger=0.3)
    loop.start()
    began.get(timeout=10)
    woken = time.monotonic()
    loop.wake()
    threading.Timer(0.1, loop.wake).start()
    assert began.get(timeout=10) - woken >= 0.3
    with pytest.raises(queue.Empty):
        began.get(timeout=0.5)
    loop.stop()
    assert loop.join(10)

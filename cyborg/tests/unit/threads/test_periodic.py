# SPDX-License-Identifier: Apache-2.0
import logging
import queue
import threading
import time

import pytest

from cyborg.core.errors import CyborgError, Invalid, Unavailable
from cyborg.threads.failures import RateLimitedLogger
from cyborg.threads.periodic import PeriodicTask


def test_failure_is_logged_once_a_minute_and_recovery_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    failure_log = RateLimitedLogger(lambda: now[0])
    with caplog.at_level(logging.INFO):
        failure_log.recovered("it")
        logged = []
        for now[0] in (0.0, 1.0, 59.0, 60.0, 61.0):
            logged.append(failure_log.warn("it is away"))
        failure_log.recovered("it")
        failure_log.recovered("it")
    assert logged == [True, False, False, True, False]
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING", "INFO"]


def test_task_survives_exceptions_of_its_work(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[Exception] = [Unavailable("away"), ValueError("odd")]

    def work() -> None:
        if failures:
            raise failures.pop(0)

    task = PeriodicTask("test", 100.0, work)
    for _ in range(3):
        task.run_once()
    assert [record.levelname for record in caplog.records][:2] == ["WARNING", "ERROR"]


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [
        (Unavailable("away"), False),
        (Invalid("Placement answered 400 to GET /x: no"), False),
        (CyborgError("internal error: see the log"), True),
        (KeyError("a bug"), True),
    ],
)
def test_only_unexpected_failure_has_a_traceback(
    caplog: pytest.LogCaptureFixture, error: Exception, has_traceback: bool
) -> None:
    def fail() -> None:
        raise error

    PeriodicTask("test", 100.0, fail).run_once()
    (record,) = caplog.records
    assert bool(record.exc_info) is has_traceback


def test_task_runs_when_woken_and_ends_when_stopped() -> None:
    runs = threading.Semaphore(0)
    task = PeriodicTask("test", 1000.0, runs.release)
    task.start()
    assert runs.acquire(timeout=10)
    task.wake()
    assert runs.acquire(timeout=10)
    task.stop()
    assert task.join(120)


def test_wake_during_run_is_not_lost() -> None:
    started, may_end = threading.Semaphore(0), threading.Semaphore(0)

    def work() -> None:
        started.release()
        may_end.acquire(timeout=10)

    task = PeriodicTask("test", 1000.0, work)
    task.start()
    assert started.acquire(timeout=10)
    task.wake()
    may_end.release()
    assert started.acquire(timeout=10)
    task.stop()
    may_end.release()
    assert task.join(120)


def test_stop_of_task_that_never_started() -> None:
    task = PeriodicTask("test", 1.0, lambda: None)
    task.stop()
    assert task.join(0.1)


@pytest.mark.slow
def test_batch_delay_combines_wake_ups() -> None:
    started: queue.SimpleQueue[float] = queue.SimpleQueue()
    task = PeriodicTask("test", 1000.0, lambda: started.put(time.monotonic()), batch_delay=1.0)
    task.start()
    started.get(timeout=120)
    woken = time.monotonic()
    task.wake()
    # Long before the end of the delay, also on a busy machine.
    threading.Timer(0.05, task.wake).start()
    assert started.get(timeout=120) - woken >= 1.0
    with pytest.raises(queue.Empty):
        started.get(timeout=0.5)
    task.stop()
    assert task.join(120)

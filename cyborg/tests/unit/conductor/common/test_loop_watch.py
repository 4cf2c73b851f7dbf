# SPDX-License-Identifier: Apache-2.0
"""A task that no longer runs is logged, counted and reported with the heartbeat."""

import logging
import threading
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.common.sweeps import LoopWatch
from cyborg.conductor.hosts.heartbeats import Hosts
from cyborg.core.errors import Invalid
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.threads.periodic import OVERDUE_SECONDS, PeriodicTask


def test_hanging_task_is_overdue_until_it_runs_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    started, may_end = threading.Semaphore(0), threading.Semaphore(0)

    def work() -> None:
        started.release()
        assert may_end.acquire(timeout=10)

    def clock() -> float:
        return now[0]

    task, watch = PeriodicTask("publisher", 1000.0, work, clock=clock), LoopWatch(clock)
    watch.add([task])
    task.start()
    assert started.acquire(timeout=10)
    with caplog.at_level(logging.INFO):
        statuses = []
        for now[0] in (2999.0, 3001.0, 3002.0, 3062.0):
            statuses.append(str(watch.status()))
        assert watch.overdue() == {"publisher": 3062.0}
        task.wake()
        may_end.release()
        assert started.acquire(timeout=10)
        assert (watch.status(), watch.overdue()) == ("READY", {"publisher": 0.0})
    assert statuses == ["READY", "DEGRADED", "DEGRADED", "DEGRADED"]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "INFO"]
    now[0] = 99999.0
    task.stop()
    may_end.release()
    assert task.join(120)
    assert task.overdue() == 0.0, "a stopped task is not overdue"


def test_task_with_short_interval_is_overdue_after_minimum() -> None:
    now = [0.0]
    task = PeriodicTask("jobs", 1.0, lambda: None, clock=lambda: now[0])
    assert task.overdue() == 0.0, "a task that is not started is not overdue"
    task.run_once()
    now[0] = OVERDUE_SECONDS - 1
    assert task.overdue() == 0.0
    now[0] = OVERDUE_SECONDS + 1
    assert task.overdue() == OVERDUE_SECONDS + 1


def test_heartbeat_records_degraded_status(sqlite_engine: sa.Engine) -> None:
    hosts, epoch = build(Hosts, make_conf(), UnitOfWork(sqlite_engine)), str(uuid4())

    def status(reported: Any) -> str:
        hosts.service_heartbeat("cyborg-conductor", "c1", epoch, {}, reported)
        (row,) = rows.read(sqlite_engine, schema.services)
        return str(row["status"])

    assert [status(reported) for reported in (None, "DEGRADED", "READY")] == [
        "READY",
        "DEGRADED",
        "READY",
    ]
    with pytest.raises(Invalid, match="status"):
        status("odd")

# SPDX-License-Identifier: Apache-2.0
"""The objects of a conductor, as its options call for them."""

from collections.abc import Callable
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor import wiring
from cyborg.conductor.jobs.completion import JobResult
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.conductor.wiring import Conductor, build_conductor
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.threads.periodic import PeriodicTask

NO_CALLS: Any = None


def build(engine: sa.Engine, notifier: Any = None, **conductor: Any) -> Conductor:
    conf = make_conf(nova={"send_events": False}, conductor=conductor)
    return build_conductor(conf, UnitOfWork(engine), NO_CALLS, NO_CALLS, NO_CALLS, notifier)


def test_all_objects_have_one_notification_builder(
    sqlite_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders: list[NotificationBuilder] = []

    def make(conf: cfg.ConfigOpts, now: Callable[[], datetime]) -> NotificationBuilder:
        builders.append(NotificationBuilder(conf, now=now))
        return builders[-1]

    monkeypatch.setattr(wiring, "NotificationBuilder", make)
    build(sqlite_engine)
    assert len(builders) == 1


def test_options_decide_which_tasks_run(sqlite_engine: sa.Engine) -> None:
    least = build(sqlite_engine, orphan_scan_interval=0, compute_node_interval=0)
    names = [task.name for task in least.tasks]
    assert names == [
        "publisher",
        "verification",
        "outbox",
        "jobs",
        "sweep",
        "audits",
        "rollouts",
        "attachments",
        "clock",
        "custody",
        "counts",
    ]
    assert least.instance_watcher is None
    assert len(least.outbox_workers) == 1
    notifier = SimpleNamespace(send=None, timeout=1.0)
    most = build(sqlite_engine, notifier, orphan_scan_interval=60, compute_node_interval=10)
    assert {task.name for task in most.tasks} - set(names) == {
        "orphan scan",
        "compute nodes",
        "notifications",
    }
    assert len(most.outbox_workers) == 2


def test_end_of_a_job_wakes_tasks_with_new_work(sqlite_engine: sa.Engine) -> None:
    woken: list[str] = []

    class Task(PeriodicTask):
        def wake(self) -> None:
            woken.append(self.name)

    tasks = [Task(name, 60.0, list) for name in ("jobs", "outbox", "publisher")]
    wiring.wake_tasks(JobResult(jobs=0, events=2, providers=1), *tasks)
    assert woken == ["outbox", "publisher"]


@pytest.mark.parametrize(
    ("nova", "grace", "watches"),
    [
        ({"notifications": True}, None, True),
        ({"notifications": True}, 0.0, False),
        ({"notifications": True, "send_events": False}, None, False),
        ({}, None, True),
        ({}, 0.0, False),
    ],
)
def test_instances_are_watched_if_orphans_are_released(
    sqlite_engine: sa.Engine, nova: dict[str, Any], grace: float | None, watches: bool
) -> None:
    conf = make_conf(nova=nova, conductor={"orphan_grace": grace})
    client: Any = SimpleNamespace(with_timeout=lambda seconds: None)
    conductor = build_conductor(conf, UnitOfWork(sqlite_engine), NO_CALLS, client, client)
    assert (conductor.instance_watcher is not None) is watches
    names = {task.name for task in conductor.tasks}
    assert names & {"instances", "deletion scan"} == (
        {"instances", "deletion scan"} if watches else set()
    )
    conductor.stop()

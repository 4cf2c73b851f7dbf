# SPDX-License-Identifier: Apache-2.0
"""The sweep of a conductor: every failure is raised or logged."""

import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.manager import Conductor
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.errors import Unavailable
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.machine.options import make_conf


@pytest.fixture
def conductor(sqlite_engine: sa.Engine) -> Conductor:
    unused: Any = None
    return Conductor(
        make_conf(nova={"send_events": False}), UnitOfWork(sqlite_engine), unused, unused, unused
    )


def failing(error: Exception) -> Callable[[], int]:
    def sweep() -> int:
        raise error

    return sweep


def test_sweep_raises_the_first_failure_and_logs_each_other(
    conductor: Conductor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(conductor.discoveries, "sweep", failing(Unavailable("one")))
    monkeypatch.setattr(conductor.tombstones, "sweep", failing(ZeroDivisionError("two")))
    monkeypatch.setattr(conductor.audits, "sweep", failing(KeyError("three")))
    with pytest.raises(Unavailable, match="one"):
        conductor.sweep()
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in errors] == [
        "Sweep of tombstones failed",
        "Sweep of audits failed",
    ]
    assert [record.exc_info and record.exc_info[0] for record in errors] == [
        ZeroDivisionError,
        KeyError,
    ]


def test_sweep_logs_an_outage_behind_another_failure(
    conductor: Conductor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(conductor.discoveries, "sweep", failing(ZeroDivisionError("one")))
    monkeypatch.setattr(conductor.jobs, "sweep", failing(Unavailable("the database is away")))
    with pytest.raises(ZeroDivisionError):
        conductor.sweep()
    assert "Sweep of jobs failed, retrying: the database is away" in caplog.text


def test_sweep_raises_an_outage_of_the_database_once(
    conductor: Conductor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for service in (conductor.discoveries, conductor.hosts, conductor.jobs, conductor.audits):
        monkeypatch.setattr(service, "sweep", failing(Unavailable("the database is away")))
    with pytest.raises(Unavailable):
        conductor.sweep()
    assert caplog.records == []


def test_conductor_has_one_notification_builder_for_all_services(
    sqlite_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders: list[NotificationBuilder] = []

    def build(conf: cfg.ConfigOpts, now: Callable[[], datetime]) -> NotificationBuilder:
        builders.append(NotificationBuilder(conf, now=now))
        return builders[-1]

    monkeypatch.setattr("cyborg.conductor.manager.NotificationBuilder", build)
    unused: Any = None
    conductor = Conductor(
        make_conf(nova={"send_events": False}), UnitOfWork(sqlite_engine), unused, unused, unused
    )
    assert builders == [conductor.notices]

# SPDX-License-Identifier: Apache-2.0
"""The sweeps of a conductor: every failure is raised or logged."""

import logging
from collections.abc import Callable

import pytest

from cyborg.conductor.common import sweeps
from cyborg.core.errors import Unavailable


def failing(error: Exception) -> Callable[[], int]:
    def sweep() -> int:
        raise error

    return sweep


def test_run_all_raises_the_first_failure_and_logs_each_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(Unavailable, match="one"):
        sweeps.run_all(
            {
                "discoveries": failing(Unavailable("one")),
                "tombstones": failing(ZeroDivisionError("two")),
                "audits": failing(KeyError("three")),
            }
        )
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in errors] == [
        "Periodic sweep of tombstones failed",
        "Periodic sweep of audits failed",
    ]
    assert [record.exc_info and record.exc_info[0] for record in errors] == [
        ZeroDivisionError,
        KeyError,
    ]


def test_run_all_logs_an_outage_behind_another_failure(caplog: pytest.LogCaptureFixture) -> None:
    outage = failing(Unavailable("the database is away"))
    with pytest.raises(ZeroDivisionError):
        sweeps.run_all({"discoveries": failing(ZeroDivisionError("one")), "jobs": outage})
    assert "Periodic sweep of jobs failed, retrying: the database is away" in caplog.text


def test_run_all_raises_an_outage_of_the_database_once(caplog: pytest.LogCaptureFixture) -> None:
    outage, run = failing(Unavailable("the database is away")), []
    with pytest.raises(Unavailable):
        sweeps.run_all({"hosts": outage, "jobs": outage, "audits": lambda: run.append(1)})
    assert run == [1]
    assert caplog.records == []

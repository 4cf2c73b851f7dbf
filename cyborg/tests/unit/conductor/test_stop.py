# SPDX-License-Identifier: Apache-2.0
"""A stop of the conductor has one deadline for everything that is running."""

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.conductor import service as services
from cyborg.conductor.service import ConductorService
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import ends_within
from cyborg.threads.periodic import PeriodicTask


class Hanging:
    """Stub whose methods hang until ``gate`` is set."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def hang(self) -> None:
        self.gate.wait(60)

    stop = wait = cleanup = dispose = hang


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    hanging = Hanging()
    yield hanging
    hanging.gate.set()


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [(ConnectionResetError("reset by peer"), False), (AttributeError("a bug"), True)],
)
def test_error_of_close_has_a_traceback_only_if_unexpected(
    caplog: pytest.LogCaptureFixture, error: Exception, has_traceback: bool
) -> None:
    def fail() -> None:
        raise error

    services._close_in_thread("transport", fail).join(120)
    (record,) = caplog.records
    assert "transport" in record.getMessage()
    assert bool(record.exc_info) is has_traceback


@pytest.mark.slow
def test_stop_with_everything_hanging_ends_at_one_deadline(
    hanging: Hanging,
    sqlite_engine: sa.Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(services, "STOP_TIMEOUT", 0.6)
    monkeypatch.setattr(services, "CONNECTION_CLOSE_TIME", 0.3)
    stub: Any = hanging
    service = ConductorService(make_conf())
    service._loops = [PeriodicTask(f"loop-{n}", 60, hanging.hang) for n in range(12)]
    for loop in service._loops:
        loop.start()
    service._server = service._metrics = service._notifier = stub
    service._engine = service._transport = stub
    service._starter = threading.Thread(target=hanging.hang, daemon=True)
    service._starter.start()
    with ends_within(5):  # not the sum of the timeouts
        service.stop()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    for name in ("RPC server", "metrics", "notifier", "transport", "database", "loop-0", "loop-11"):
        assert any(name in line for line in warnings), name
    hanging.gate.set()
    for loop in service._loops:
        assert loop.join(120)

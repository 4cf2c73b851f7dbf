# SPDX-License-Identifier: Apache-2.0
"""Heartbeats and reports of an agent, also with an unreachable conductor."""

import inspect
import logging
import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from cyborg.agent.backends.backend import Backend
from cyborg.agent.report.heartbeat import INITIAL_PAUSE, MAX_PAUSE, HeartbeatSchedule, Reporter
from cyborg.core.drivers.desired_state import BackendOutcome
from cyborg.core.drivers.registry import DriverEntry
from cyborg.core.errors import CyborgError, Invalid, NotFound, Stale, Unavailable
from cyborg.core.hosts import Identity
from cyborg.core.inventory import report as report_module
from cyborg.core.inventory.report import BackendState, BackendStatus, Report
from cyborg.rpc.contract import ConductorAPI
from cyborg.tests.fixtures.bus.broker import Bus
from cyborg.tests.fixtures.hosts.scripted_driver import LONG, CallRecorder, ScriptedDriver, card

READY = BackendState("b0", "puppet", BackendStatus.READY)


class Conductor:
    """A conductor that keeps the last reported digest, as the real one does."""

    def __init__(self) -> None:
        self.recorded: list[tuple[str, Any]] = []
        self.errors: list[Exception] = []
        self.interval = 7.5
        self.digest: str | None = None
        self.desired_generation: int | None = None
        self.calls = CallRecorder()

    def hello(self, *_: Any, **fields: Any) -> dict[str, Any]:
        self._note("hello", fields)
        needs_report = fields["digest"] is not None and fields["digest"] != self.digest
        answer = {"interval": self.interval, "report": needs_report}
        return (
            answer
            if self.desired_generation is None
            else {**answer, "desired_generation": self.desired_generation}
        )

    def report(self, *_: Any, **fields: Any) -> dict[str, Any]:
        self._note("report", Report.load(fields["report"]))
        self.digest = fields["report"]["digest"]
        return {"accepted": True}

    def discovery_done(self, *_: Any, **fields: Any) -> None:
        self._note("discovery_done", fields)

    def job_done(self, *_: Any, **fields: Any) -> None:
        self._note("job_done", fields)

    def report_backend_outcomes(self, *_: Any, **fields: Any) -> None:
        self._note("report_backend_outcomes", fields)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def names(self) -> list[str]:
        return [name for name, _ in self.recorded]

    def _note(self, name: str, fields: Any) -> None:
        self.recorded.append((name, fields))
        if self.errors:
            raise self.errors.pop(0)
        self.calls(name)


class Direct(Conductor):
    """The same without a bus between."""

    def report(self, *arguments: Any, **fields: Any) -> dict[str, Any]:
        return super().report(**self._named("report", arguments), **fields)

    def discovery_done(self, *arguments: Any, **fields: Any) -> None:
        super().discovery_done(**self._named("discovery_done", arguments), **fields)

    def job_done(self, *arguments: Any, **fields: Any) -> None:
        super().job_done(**self._named("job_done", arguments), **fields)

    @staticmethod
    def _named(method: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """Return positional arguments by the names of the agent's protocol."""
        _, *names = inspect.signature(getattr(ConductorAPI, method)).parameters
        return dict(zip(names, arguments, strict=False))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def conductor() -> Direct:
    return Direct()


@pytest.fixture
def driver() -> ScriptedDriver:
    return ScriptedDriver(devices=[card()])


@pytest.fixture
def backend(driver: ScriptedDriver) -> Iterator[Backend]:
    """Return a backend that has discovered one card."""
    changed = CallRecorder()
    backend = Backend(driver, 3600, 3600, changed)
    backend.start()
    changed.wait_for()
    yield backend
    backend.stop()
    driver.unblock()
    assert backend.join(LONG)


@pytest.fixture
def reporter(conductor: Direct, backend: Backend, clock: Clock) -> Reporter:
    schedule = HeartbeatSchedule(random_share=lambda: 1.0)
    return Reporter("h", "cyborg.agent.h", conductor, [backend], clock, schedule=schedule)


def rediscover(backend: Backend) -> None:
    done = CallRecorder()
    backend.rediscover(done)
    done.wait_for()


def test_run_once_first_round_sends_heartbeat_then_report(
    reporter: Reporter, conductor: Direct
) -> None:
    assert reporter.run_once() == 7.5
    assert conductor.names() == ["hello", "report"]
    hello, report = conductor.recorded[0][1], conductor.recorded[1][1]
    digest = report_module.digest([card()], [READY])
    assert hello == {
        "host": "h",
        "epoch": reporter.epoch,
        "endpoint": "cyborg.agent.h",
        "status": "READY",
        "drivers": [READY.without_details().to_dict()],
        "digest": digest,
        "versions": {
            "rpc": "1.0",
            "drivers": {"puppet": "7"},
            "live_attach": False,
            "result_epochs": True,
        },
        "observed_generation": None,
        "boot_id": None,
    }
    uuid.UUID(reporter.epoch)
    assert (report.host, report.epoch, report.generation) == ("h", reporter.epoch, 1)
    assert (report.digest, report.devices, report.backends) == (digest, (card(),), (READY,))


def test_run_once_unchanged_inventory_sends_only_heartbeats(
    reporter: Reporter, conductor: Direct
) -> None:
    for _ in range(3):
        reporter.run_once()
    assert conductor.names() == ["hello", "report", "hello", "hello"]


def test_run_once_changed_inventory_is_reported(
    reporter: Reporter, conductor: Direct, driver: ScriptedDriver, backend: Backend
) -> None:
    reporter.run_once()
    driver.devices = []
    rediscover(backend)
    reporter.run_once()
    assert conductor.names() == ["hello", "report", "report"]
    assert (conductor.recorded[2][1].generation, conductor.recorded[2][1].devices) == (2, ())


def test_run_once_stale_early_report_is_repeated_after_heartbeat(
    reporter: Reporter, conductor: Direct, driver: ScriptedDriver, backend: Backend
) -> None:
    reporter.run_once()
    driver.devices = []
    rediscover(backend)
    conductor.errors = [Stale("too late")]
    reporter.run_once()
    assert conductor.names() == ["hello", "report", "report", "hello", "report"]


def test_run_once_lost_early_report_is_repeated_after_heartbeat(
    reporter: Reporter, conductor: Direct, driver: ScriptedDriver, backend: Backend
) -> None:
    reporter.run_once()
    driver.devices = []
    rediscover(backend)
    conductor.errors = [Unavailable("no answer")]
    reporter.run_once()
    reporter.run_once()
    assert conductor.names() == ["hello", "report", "report", "hello", "report"]


def test_run_once_changed_host_identity_is_reported(conductor: Direct, backend: Backend) -> None:
    identities = [Identity(names=("h",)), Identity("nova", names=("h",))]
    reporter = Reporter("h", "e", conductor, [backend], identity=lambda: identities[0])
    for _ in range(2):
        reporter.run_once()
    identities.pop(0)
    reporter.run_once()
    assert conductor.names() == ["hello", "report", "hello", "report"]
    reports = [body for name, body in conductor.recorded if name == "report"]
    assert [report.identity.provider for report in reports] == [None, "nova"]


def test_run_once_report_requested_again_is_sent(reporter: Reporter, conductor: Direct) -> None:
    reporter.run_once()
    reporter.on_requested_report = lambda: conductor.recorded.append(("on_requested", None))
    conductor.digest = None
    reporter.run_once()
    assert conductor.names() == ["hello", "report", "hello", "report", "on_requested"]


def test_run_once_before_first_discovery_sends_no_report(conductor: Direct) -> None:
    backend = Backend(ScriptedDriver(), 3600, 3600)
    Reporter("h", "e", conductor, [backend]).run_once()
    assert conductor.names() == ["hello"]
    assert conductor.recorded[0][1]["digest"] is None
    assert conductor.recorded[0][1]["drivers"][0]["status"] == "DISCOVERING"


def test_run_once_without_backends_sends_heartbeat(conductor: Direct) -> None:
    Reporter("h", "e", conductor, []).run_once()
    assert conductor.names() == ["hello", "report"]
    assert conductor.recorded[1][1].devices == ()


def test_add_discovery_outcome_is_sent_after_report(reporter: Reporter, conductor: Direct) -> None:
    reporter.add_discovery_outcome("d1", READY)
    reporter.run_once()
    assert conductor.names() == ["hello", "report", "discovery_done"]
    assert conductor.recorded[2][1] == {
        "discovery_id": "d1",
        "host": "h",
        "drivers": [READY.without_details().to_dict()],
        "epoch": reporter.epoch,
    }
    reporter.run_once()
    assert conductor.names()[3:] == ["hello"]


def test_add_discovery_outcome_conductor_unreachable_is_kept(
    reporter: Reporter, conductor: Direct
) -> None:
    reporter.add_discovery_outcome("d1", READY)
    conductor.errors = [Unavailable("away")]
    assert INITIAL_PAUSE / 2 <= reporter.run_once() <= INITIAL_PAUSE
    reporter.run_once()
    assert conductor.names()[-1] == "discovery_done"


def test_add_job_outcome_is_retried_until_accepted(reporter: Reporter, conductor: Direct) -> None:
    reporter.run_once()
    reporter.add_job_outcome("j1", "done", None)
    reporter.add_job_outcome("j2", "failed", "no air")
    real, errors = conductor.job_done, [Unavailable("away")]

    def fail_once(*_: Any, **fields: Any) -> None:
        if errors:
            raise errors.pop()
        real(**fields)

    conductor.job_done = fail_once  # type: ignore[method-assign]
    assert INITIAL_PAUSE / 2 <= reporter.run_once() <= INITIAL_PAUSE
    assert reporter.run_once() == 7.5
    assert conductor.names()[-2:] == ["job_done", "job_done"]
    common = {"host": "h", "epoch": reporter.epoch}
    assert [body for _, body in conductor.recorded[-2:]] == [
        {"job": "j1", "state": "done", "error": None, **common},
        {"job": "j2", "state": "failed", "error": "no air", **common},
    ]
    reporter.run_once()
    assert conductor.names()[-1] == "hello"


@pytest.mark.parametrize("refusal", [NotFound("no such job"), Invalid("what?")])
def test_add_job_outcome_unknown_job_does_not_block_others(
    reporter: Reporter, conductor: Direct, refusal: CyborgError
) -> None:
    reporter.run_once()
    reporter.add_job_outcome("j1", "done", None)
    reporter.add_discovery_outcome("d1", READY)
    real = conductor.job_done

    def refuse(*_: Any, **fields: Any) -> None:
        real(**fields)
        raise refusal

    conductor.job_done = refuse  # type: ignore[method-assign]
    assert reporter.run_once() == 7.5
    reporter.run_once()
    assert conductor.names()[2:] == ["hello", "job_done", "discovery_done", "hello"]


def test_run_once_stale_report_is_repeated_after_heartbeat(
    reporter: Reporter, conductor: Direct
) -> None:
    reporter.run_once()
    conductor.digest = "of another agent"
    real, refusals = conductor.report, [Stale("too late")]

    def refuse_once(*arguments: Any, **fields: Any) -> dict[str, Any]:
        if refusals:
            conductor.recorded.append(("refused", None))
            raise refusals.pop()
        return real(*arguments, **fields)

    conductor.report = refuse_once  # type: ignore[method-assign]
    assert reporter.run_once() == 7.5
    assert conductor.names()[2:] == ["hello", "refused", "hello", "report"]
    assert conductor.recorded[-1][1].generation == 3


@pytest.mark.parametrize(
    "error", [Unavailable("away"), CyborgError("internal error"), KeyError("interval")]
)
def test_run_once_failures_increase_pause(
    reporter: Reporter, conductor: Direct, error: Exception
) -> None:
    conductor.errors = [error] * 8
    pauses = [reporter.run_once() for _ in range(8)]
    longest = [INITIAL_PAUSE, 2 * INITIAL_PAUSE, 4 * INITIAL_PAUSE, *pauses[3:7], MAX_PAUSE]
    assert all(end / 2 <= pause <= end for pause, end in zip(pauses, longest, strict=True))
    assert reporter.run_once() == 7.5
    conductor.errors = [error]
    assert INITIAL_PAUSE / 2 <= reporter.run_once() <= INITIAL_PAUSE


@pytest.mark.parametrize(
    ("error", "has_traceback"), [(Unavailable("the broker is away"), False), (KeyError("x"), True)]
)
def test_run_once_failure_has_traceback_only_if_unexpected(
    reporter: Reporter,
    conductor: Direct,
    error: Exception,
    has_traceback: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    conductor.errors = [error]
    reporter.run_once()
    (record,) = [r for r in caplog.records if "Call to the conductor" in r.getMessage()]
    assert bool(record.exc_info) is has_traceback


def test_run_once_failures_warn_once_per_interval(
    reporter: Reporter, conductor: Direct, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    conductor.errors = [Unavailable("the broker is away")] * 7
    for _ in range(7):
        reporter.run_once()
        clock.now += 20
    reporter.run_once()
    lines = [r.getMessage() for r in caplog.records if "conductor" in r.getMessage()]
    texts = [re.sub(r"[0-9.]+ s", "N s", line) for line in lines]
    failed = "Heartbeat to conductor failed, retrying in N s: the broker is away"
    assert texts == [failed, failed, failed, "Connection to conductor restored"]


@pytest.mark.slow
def test_reporter_over_bus_woken_reports_at_once(
    memory_bus: Bus, driver: ScriptedDriver, backend: Backend
) -> None:
    conductor = Conductor()
    conductor.interval = 3600
    reporter = Reporter("h", "e", memory_bus.conductor(), [backend])
    with memory_bus.serving("conductor", conductor):
        reporter.start()
        conductor.calls.wait_for(2)
        driver.devices = []
        rediscover(backend)
        reporter.wake()
        calls = conductor.calls.wait_for(3)
        reporter.stop()
        assert reporter.join(LONG)
    assert calls == [("hello",), ("report",), ("report",)]
    assert conductor.recorded[1][1].devices == (card(),)


class FakeReconciler:
    """Records the calls of the reporter."""

    def __init__(self) -> None:
        self.reported_generation = 4
        self.requests: list[int] = []
        self.acknowledged: list[tuple[int, bool]] = []

    def request(self, generation: int) -> int:
        self.requests.append(generation)
        return self.reported_generation

    def acknowledge(self, generation: int, accepted: bool) -> None:
        self.acknowledged.append((generation, accepted))


@pytest.fixture
def reconciler(reporter: Reporter) -> FakeReconciler:
    reporter.desired_state = reconciler = FakeReconciler()
    return reconciler


APPLIED = [BackendOutcome("b0", 5, "no smoke")]


def test_heartbeat_carries_reported_and_desired_generation(
    reporter: Reporter, conductor: Direct, reconciler: FakeReconciler
) -> None:
    reporter.run_once()
    assert (conductor.recorded[0][1]["observed_generation"], reconciler.requests) == (4, [])
    conductor.desired_generation = 5
    reporter.run_once()
    assert reconciler.requests == [5]


def test_add_backend_outcomes_are_sent_after_report(
    reporter: Reporter,
    conductor: Direct,
    reconciler: FakeReconciler,
    backend: Backend,
    driver: ScriptedDriver,
) -> None:
    reporter.run_once()
    driver.devices.append(card("0000:02:00.0"))
    rediscover(backend)
    reporter.add_backend_outcomes(5, APPLIED)
    reporter.run_once()
    assert conductor.names() == ["hello", "report", "report", "report_backend_outcomes"]
    outcome = {"backend": "b0", "generation": 5, "error": "no smoke"}
    expected = {"host": "h", "epoch": reporter.epoch, "generation": 5, "outcomes": [outcome]}
    assert conductor.recorded[-1][1] == expected
    assert reconciler.acknowledged == [(5, True)]
    reporter.run_once()
    assert conductor.names().count("report_backend_outcomes") == 1


def test_add_backend_outcomes_conductor_unreachable_sends_latest(
    reporter: Reporter, conductor: Direct, reconciler: FakeReconciler
) -> None:
    reporter.run_once()
    reporter.add_backend_outcomes(5, APPLIED)
    for _ in range(2):
        conductor.errors.append(Unavailable("away"))
        reporter.run_once()
    assert reconciler.acknowledged == []
    reporter.add_backend_outcomes(6, APPLIED)
    reporter.run_once()
    assert reconciler.acknowledged == [(6, True)], "the newest takes the place of the others"


@pytest.mark.parametrize("error", [Stale("another life"), Invalid("no such backend")])
def test_add_backend_outcomes_rejected_are_dropped_with_warning(
    reporter: Reporter,
    conductor: Direct,
    reconciler: FakeReconciler,
    error: CyborgError,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_arguments: Any, **_fields: Any) -> None:
        raise error

    conductor.report_backend_outcomes = refuse  # type: ignore[method-assign]
    reporter.run_once()
    reporter.add_backend_outcomes(5, APPLIED)
    assert reporter.run_once() == 7.5
    assert reconciler.acknowledged == [(5, False)]
    assert "Conductor rejected the outcomes of generation 5" in caplog.text


def test_run_once_changed_drivers_are_reported(
    conductor: Direct, backend: Backend, clock: Clock
) -> None:
    drivers = [DriverEntry("fake", "1.0")]
    reporter = Reporter("h", "e", conductor, [backend], clock, drivers=lambda: drivers)
    reporter.run_once()
    assert conductor.recorded[-1][1].drivers == (DriverEntry("fake", "1.0"),)
    reporter.run_once()
    assert conductor.names() == ["hello", "report", "hello"], "no news"
    drivers.append(DriverEntry("broken", error="ImportError: no"))
    reporter.run_once()
    assert conductor.names()[3:] == ["report"]

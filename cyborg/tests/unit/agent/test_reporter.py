# SPDX-License-Identifier: Apache-2.0
"""What the conductor hears of an agent, and what the agent does when it hears nothing back."""

import logging
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from cyborg.agent.backend import Backend
from cyborg.agent.reporter import FIRST_PAUSE, LONGEST_PAUSE, Reporter
from cyborg.core import wire
from cyborg.core.catalogue import Entry
from cyborg.core.errors import CyborgError, Invalid, NotFound, Stale, Unavailable
from cyborg.core.identity import Identity
from cyborg.core.report import BackendState, BackendStatus
from cyborg.core.wanted import Applied
from cyborg.fixtures.broker import Bus
from cyborg.fixtures.drivers import LONG, Puppet, Told, card

READY = BackendState("b0", "puppet", BackendStatus.READY)


class Conductor:
    """Keeps the digest that it was last reported, as the real one does."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []
        self.errors: list[Exception] = []
        self.interval = 7.5
        self.digest: str | None = None
        self.wanted: int | None = None
        self.heard = Told()

    def hello(self, ctxt: Any = None, **said: Any) -> dict[str, Any]:
        self._note("hello", said)
        wanted = said["digest"] is not None and said["digest"] != self.digest
        answer = {"interval": self.interval, "report": wanted}
        return answer if self.wanted is None else {**answer, "wanted": self.wanted}

    def report(self, ctxt: Any = None, *, report: Any) -> dict[str, Any]:
        self._note("report", wire.load_report(report))
        self.digest = report["digest"]
        return {"accepted": True}

    def discovery_done(self, ctxt: Any = None, **said: Any) -> None:
        self._note("discovery_done", said)

    def job_done(self, ctxt: Any = None, **said: Any) -> None:
        self._note("job_done", said)

    def backends_applied(self, ctxt: Any = None, **said: Any) -> None:
        self._note("backends_applied", said)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def names(self) -> list[str]:
        return [name for name, _ in self.said]

    def _note(self, name: str, said: Any) -> None:
        self.said.append((name, said))
        if self.errors:
            raise self.errors.pop(0)
        self.heard(name)


class Direct(Conductor):
    """The same without a bus between."""

    def report(self, report: Any) -> dict[str, Any]:
        return super().report(report=report)

    def discovery_done(self, discovery_id: str, host: str, drivers: Any) -> None:
        super().discovery_done(discovery_id=discovery_id, host=host, drivers=drivers)

    def job_done(self, job: str, host: str, state: str, error: str | None) -> None:
        super().job_done(job=job, host=host, state=state, error=error)


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
def driver() -> Puppet:
    return Puppet(devices=[card()])


@pytest.fixture
def backend(driver: Puppet) -> Iterator[Backend]:
    """One backend that has found its card."""
    changed = Told()
    backend = Backend(driver, 3600, 3600, changed)
    backend.start()
    changed.wait_for()
    yield backend
    backend.stop()
    driver.free()
    assert backend.join(LONG)


@pytest.fixture
def reporter(conductor: Direct, backend: Backend, clock: Clock) -> Reporter:
    return Reporter("h", "cyborg.agent.h", conductor, [backend], clock)


def look_again(backend: Backend) -> None:
    done = Told()
    backend.rediscover(done)
    done.wait_for()


def test_a_hello_then_the_report_that_is_asked_for(reporter: Reporter, conductor: Direct) -> None:
    assert reporter.round() == 7.5
    assert conductor.names() == ["hello", "report"]
    hello, report = conductor.said[0][1], conductor.said[1][1]
    digest = wire.digest([card()], [READY])
    assert hello == {
        "host": "h",
        "epoch": reporter.epoch,
        "endpoint": "cyborg.agent.h",
        "status": "READY",
        "drivers": [wire.dump_backend(READY)],
        "digest": digest,
        "versions": {"rpc": "1.0", "drivers": {"puppet": "7"}},
        "wanted": None,
    }
    uuid.UUID(reporter.epoch)
    assert (report.host, report.epoch, report.generation) == ("h", reporter.epoch, 1)
    assert (report.digest, report.devices, report.backends) == (digest, (card(),), (READY,))


def test_while_nothing_changes_there_are_hellos_alone(
    reporter: Reporter, conductor: Direct
) -> None:
    for _ in range(3):
        reporter.round()
    assert conductor.names() == ["hello", "report", "hello", "hello"]


def test_what_changes_is_reported_with_the_next_generation(
    reporter: Reporter, conductor: Direct, driver: Puppet, backend: Backend
) -> None:
    reporter.round()
    driver.devices = []
    look_again(backend)
    reporter.round()
    assert conductor.names() == ["hello", "report", "report"]
    assert (conductor.said[2][1].generation, conductor.said[2][1].devices) == (2, ())


def test_news_that_are_refused_are_told_after_a_hello(
    reporter: Reporter, conductor: Direct, driver: Puppet, backend: Backend
) -> None:
    reporter.round()
    driver.devices = []
    look_again(backend)
    conductor.errors = [Stale("too late")]
    reporter.round()
    assert conductor.names() == ["hello", "report", "report", "hello", "report"]


def test_news_that_got_lost_are_told_after_a_hello(
    reporter: Reporter, conductor: Direct, driver: Puppet, backend: Backend
) -> None:
    reporter.round()
    driver.devices = []
    look_again(backend)
    conductor.errors = [Unavailable("no answer")]
    reporter.round()
    reporter.round()
    assert conductor.names() == ["hello", "report", "report", "hello", "report"]


def test_the_names_of_the_host_are_reported_and_so_is_a_change_of_them(
    conductor: Direct, backend: Backend
) -> None:
    known = [Identity(names=("h",)), Identity("nova", names=("h",))]
    reporter = Reporter("h", "e", conductor, [backend], identity=lambda: known[0])
    for _ in range(2):
        reporter.round()
    known.pop(0)
    reporter.round()
    assert conductor.names() == ["hello", "report", "hello", "report"]
    reports = [said for name, said in conductor.said if name == "report"]
    assert [report.identity.provider for report in reports] == [None, "nova"]


def test_a_conductor_that_forgot_asks_again(reporter: Reporter, conductor: Direct) -> None:
    reporter.round()
    conductor.digest = None
    reporter.round()
    assert conductor.names() == ["hello", "report", "hello", "report"]


def test_while_nothing_is_known_nothing_is_reported(conductor: Direct) -> None:
    backend = Backend(Puppet(), 3600, 3600)
    Reporter("h", "e", conductor, [backend]).round()
    assert conductor.names() == ["hello"]
    assert conductor.said[0][1]["digest"] is None
    assert conductor.said[0][1]["drivers"][0]["status"] == "DISCOVERING"


def test_without_backends_there_is_still_a_hello(conductor: Direct) -> None:
    Reporter("h", "e", conductor, []).round()
    assert conductor.names() == ["hello", "report"]
    assert conductor.said[1][1].devices == ()


def test_an_outcome_is_told_after_the_devices(reporter: Reporter, conductor: Direct) -> None:
    reporter.discovered("d1", READY)
    reporter.round()
    assert conductor.names() == ["hello", "report", "discovery_done"]
    assert conductor.said[2][1] == {
        "discovery_id": "d1",
        "host": "h",
        "drivers": [wire.dump_backend(READY)],
    }
    reporter.round()
    assert conductor.names()[3:] == ["hello"]


def test_an_outcome_survives_a_conductor_that_is_away(
    reporter: Reporter, conductor: Direct
) -> None:
    reporter.discovered("d1", READY)
    conductor.errors = [Unavailable("away")]
    assert reporter.round() == FIRST_PAUSE
    reporter.round()
    assert conductor.names()[-1] == "discovery_done"


def test_the_end_of_a_job_is_told_until_it_is_heard(reporter: Reporter, conductor: Direct) -> None:
    reporter.round()
    reporter.job_done("j1", "done", None)
    reporter.job_done("j2", "failed", "no air")
    real, away = conductor.job_done, [Unavailable("away")]

    def be_away_once(**said: Any) -> None:
        if away:
            raise away.pop()
        real(**said)

    conductor.job_done = be_away_once  # type: ignore[method-assign, assignment]
    assert reporter.round() == FIRST_PAUSE
    assert reporter.round() == 7.5
    assert conductor.names()[-2:] == ["job_done", "job_done"]
    assert [said for _, said in conductor.said[-2:]] == [
        {"job": "j1", "host": "h", "state": "done", "error": None},
        {"job": "j2", "host": "h", "state": "failed", "error": "no air"},
    ]
    reporter.round()
    assert conductor.names()[-1] == "hello"


@pytest.mark.parametrize("refusal", [NotFound("no such job"), Invalid("what?")])
def test_a_job_that_the_conductor_does_not_know_holds_nothing_up(
    reporter: Reporter, conductor: Direct, refusal: CyborgError
) -> None:
    reporter.round()
    reporter.job_done("j1", "done", None)
    reporter.discovered("d1", READY)
    real = conductor.job_done

    def refuse(**said: Any) -> None:
        real(**said)
        raise refusal

    conductor.job_done = refuse  # type: ignore[method-assign, assignment]
    assert reporter.round() == 7.5
    reporter.round()
    assert conductor.names()[2:] == ["hello", "job_done", "discovery_done", "hello"]


def test_a_stale_report_is_preceded_by_a_hello(reporter: Reporter, conductor: Direct) -> None:
    reporter.round()
    conductor.digest = "of another agent"
    real, refusals = conductor.report, [Stale("too late")]

    def refuse_once(report: Any) -> dict[str, Any]:
        if refusals:
            conductor.said.append(("refused", None))
            raise refusals.pop()
        return real(report)

    conductor.report = refuse_once  # type: ignore[method-assign]
    assert reporter.round() == 7.5
    assert conductor.names()[2:] == ["hello", "refused", "hello", "report"]
    assert conductor.said[-1][1].generation == 3


@pytest.mark.parametrize(
    "error", [Unavailable("away"), CyborgError("internal error"), KeyError("interval")]
)
def test_it_tries_again_ever_more_slowly(
    reporter: Reporter, conductor: Direct, error: Exception
) -> None:
    conductor.errors = [error] * 8
    pauses = [reporter.round() for _ in range(8)]
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    assert reporter.round() == 7.5
    conductor.errors = [error]
    assert reporter.round() == FIRST_PAUSE


def test_trouble_is_said_once_a_minute(
    reporter: Reporter, conductor: Direct, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    conductor.errors = [Unavailable("the broker is away")] * 7
    for _ in range(7):
        reporter.round()
        clock.now += 20
    reporter.round()
    lines = [r.getMessage() for r in caplog.records if "conductor" in r.getMessage()]
    assert lines == [
        "The conductor does not take our word, trying again: the broker is away",
        "The conductor does not take our word, trying again: the broker is away",
        "The conductor does not take our word, trying again: the broker is away",
        "The conductor answers again",
    ]


def test_over_a_bus_it_speaks_by_itself_and_at_once_when_woken(
    memory_bus: Bus, driver: Puppet, backend: Backend
) -> None:
    conductor = Conductor()
    conductor.interval = 3600
    reporter = Reporter("h", "e", memory_bus.conductor(), [backend])
    with memory_bus.serving("conductor", conductor):
        reporter.start()
        conductor.heard.wait_for(2)
        driver.devices = []
        look_again(backend)
        reporter.wake()
        heard = conductor.heard.wait_for(3)
        reporter.stop()
        assert reporter.join(LONG)
    assert heard == [("hello",), ("report",), ("report",)]
    assert conductor.said[1][1].devices == (card(),)


class Wishing:
    """What the reporter says to whoever brings the host to what is wanted."""

    def __init__(self) -> None:
        self.revision = 4
        self.nudges: list[int] = []
        self.words: list[tuple[int, bool]] = []

    def nudge(self, revision: int) -> int:
        self.nudges.append(revision)
        return self.revision

    def told(self, revision: int, taken: bool) -> None:
        self.words.append((revision, taken))


@pytest.fixture
def wishing(reporter: Reporter) -> Wishing:
    reporter.wishes = wishing = Wishing()
    return wishing


APPLIED = [Applied("b0", 5, "no smoke")]


def test_a_hello_says_what_the_host_has_come_to_and_hears_what_is_wanted(
    reporter: Reporter, conductor: Direct, wishing: Wishing
) -> None:
    reporter.round()
    assert (conductor.said[0][1]["wanted"], wishing.nudges) == (4, [])
    conductor.wanted = 5
    reporter.round()
    assert wishing.nudges == [5]


def test_what_was_applied_is_told_after_the_devices_that_it_led_to(
    reporter: Reporter, conductor: Direct, wishing: Wishing, backend: Backend, driver: Puppet
) -> None:
    reporter.round()
    driver.devices.append(card("0000:02:00.0"))
    look_again(backend)
    reporter.applied(5, APPLIED)
    reporter.round()
    assert conductor.names() == ["hello", "report", "report", "backends_applied"]
    outcome = {"backend": "b0", "revision": 5, "error": "no smoke"}
    said = {"host": "h", "epoch": reporter.epoch, "revision": 5, "outcomes": [outcome]}
    assert conductor.said[-1][1] == said
    assert wishing.words == [(5, True)]
    reporter.round()
    assert conductor.names().count("backends_applied") == 1


def test_a_word_waits_for_a_conductor_that_is_away(
    reporter: Reporter, conductor: Direct, wishing: Wishing
) -> None:
    reporter.round()
    reporter.applied(5, APPLIED)
    for _ in range(2):
        conductor.errors.append(Unavailable("away"))
        reporter.round()
    assert wishing.words == []
    reporter.applied(6, APPLIED)
    reporter.round()
    assert wishing.words == [(6, True)], "the newest takes the place of the others"


@pytest.mark.parametrize("error", [Stale("another life"), Invalid("no such backend")])
def test_a_word_that_is_refused_is_dropped_and_said_to_be(
    reporter: Reporter,
    conductor: Direct,
    wishing: Wishing,
    error: CyborgError,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(**_: Any) -> None:
        raise error

    conductor.backends_applied = refuse  # type: ignore[method-assign]
    reporter.round()
    reporter.applied(5, APPLIED)
    assert reporter.round() == 7.5
    assert wishing.words == [(5, False)]
    assert "wants no word of revision 5" in caplog.text


def test_the_drivers_that_are_installed_are_part_of_what_is_reported(
    conductor: Direct, backend: Backend, clock: Clock
) -> None:
    drivers = [Entry("fake", "1.0")]
    reporter = Reporter("h", "e", conductor, [backend], clock, drivers=lambda: drivers)
    reporter.round()
    assert conductor.said[-1][1].drivers == (Entry("fake", "1.0"),)
    reporter.round()
    assert conductor.names() == ["hello", "report", "hello"], "no news"
    drivers.append(Entry("broken", error="ImportError: no"))
    reporter.round()
    assert conductor.names()[3:] == ["report"]

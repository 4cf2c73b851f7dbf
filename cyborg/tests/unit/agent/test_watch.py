# SPDX-License-Identifier: Apache-2.0
"""From what the kernel says to discoveries, by a clock that only the ear moves."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from cyborg.agent.backend import Backend
from cyborg.agent.uevents import Lost
from cyborg.agent.watch import FIRST_PAUSE, LONGEST_PAUSE, Watch
from cyborg.core.burst import LONGEST, QUIET
from cyborg.fixtures.drivers import LONG, Puppet, Told

DEAF = OSError(9, "Bad file descriptor")
Sound = tuple[float, str | Exception]


class Listener(Backend):
    """Counts what it is asked for, and discovers nothing."""

    def __init__(self, *subsystems: str) -> None:
        driver = Puppet()
        driver.WATCHES = frozenset(subsystems)
        super().__init__(driver, 3600, 3600)
        self.asked = 0

    def rediscover(self, done: Any = None) -> None:
        """Count."""
        self.asked += 1


class Kernel:
    """Makes ears that hear these sounds, each at its time, and move the clock as they wait."""

    def __init__(self, *sounds: Sound) -> None:
        self.now = 0.0
        self.sounds = list(sounds)
        self.opened: list[frozenset[str]] = []
        self.closed = 0
        self.refuses: Exception | None = None

    def clock(self) -> float:
        return self.now

    def listen(self, subsystems: frozenset[str]) -> "Kernel":
        if self.refuses is not None:
            raise self.refuses
        self.opened.append(subsystems)
        return self

    def hear(self, seconds: float | None) -> list[str]:
        due = self.now + (LONG if seconds is None else seconds)
        if not self.sounds or self.sounds[0][0] > due:
            self.now = due
            return []
        at, sound = self.sounds.pop(0)
        self.now = max(self.now, at)
        if isinstance(sound, Exception):
            raise sound
        return [sound]

    def wake(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        self.closed += 1


def watch(kernel: Kernel, backends: Sequence[Backend]) -> Watch:
    return Watch(backends, kernel.listen, kernel.clock)


def turns(it: Watch, kernel: Kernel, until: float) -> list[float]:
    """Let it hear until that time; return the pauses that it made."""
    pauses = []
    while kernel.now < until:
        pause = it.turn()
        kernel.now += pause
        if pause:
            pauses.append(pause)
    return pauses


def looks(kernel: Kernel, listener: Listener, until: float = 3.0) -> list[float]:
    """Return when it was asked to look, after the look that makes good the opening."""
    it = watch(kernel, [listener])
    assert it.open()
    times = []
    while kernel.now < until:
        before = listener.asked
        it.turn()
        times += [kernel.now] * (listener.asked - before)
    return times


def test_a_burst_is_one_look() -> None:
    kernel = Kernel((1.0, "pci"), (1.05, "pci"), (1.12, "pci"), (2.0, "pci"))
    assert looks(kernel, Listener("pci")) == pytest.approx([1.12 + QUIET, 2.0 + QUIET])


def test_a_storm_is_a_look_now_and_then() -> None:
    storm = [(1.0 + n * QUIET / 2, "pci") for n in range(21)]  # a second long
    times = looks(Kernel(*storm), Listener("pci"))
    assert times[0] == pytest.approx(1.0 + LONGEST)
    assert len(times) in (2, 3)
    assert times[-1] > storm[-1][0]


def test_only_those_look_whom_it_concerns() -> None:
    cards, wires, deaf = Listener("pci"), Listener("net", "pci"), Listener()
    kernel = Kernel((1.0, "net"), (2.0, "pci"))
    it = watch(kernel, [cards, wires, deaf])
    it.open()
    turns(it, kernel, 3.0)
    assert kernel.opened == [{"net", "pci"}]
    assert (cards.asked, wires.asked, deaf.asked) == (1, 2, 0)


def test_what_was_lost_is_made_good_by_all() -> None:
    cards, wires, deaf = Listener("pci"), Listener("net"), Listener()
    kernel = Kernel((1.0, "pci"), (1.01, Lost()), (1.02, Lost()))
    it = watch(kernel, [cards, wires, deaf])
    it.open()
    assert turns(it, kernel, 3.0) == []
    assert (cards.asked, wires.asked, deaf.asked) == (1, 1, 0)
    assert (len(kernel.opened), kernel.closed) == (1, 0)


def test_an_ear_that_dies_is_opened_anew_and_all_look(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener("net")
    kernel = Kernel((1.0, DEAF))
    it = watch(kernel, [listener])
    it.open()
    assert turns(it, kernel, 5.0) == [FIRST_PAUSE]
    assert (len(kernel.opened), kernel.closed, listener.asked) == (2, 1, 1)
    (said,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "Uevents cannot be heard" in said.getMessage()
    assert "Bad file descriptor" in said.getMessage()


def test_what_was_heard_before_it_died_is_looked_at_now() -> None:
    listener = Listener("pci")
    kernel = Kernel((1.0, "pci"), (1.01, DEAF))
    it = watch(kernel, [listener])
    it.open()
    while not listener.asked:
        it.turn()
    assert kernel.now == 1.01


def test_one_that_keeps_dying_is_tried_ever_more_rarely_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel = Kernel(*((0.0, DEAF) for _ in range(50)))
    it = watch(kernel, [Listener("pci")])
    it.open()
    pauses = turns(it, kernel, 500.0)
    assert pauses[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_PAUSE]
    assert set(pauses[7:]) == {LONGEST_PAUSE}
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_one_that_lived_for_a_while_is_told_of_again(caplog: pytest.LogCaptureFixture) -> None:
    kernel = Kernel((1.0, DEAF), (200.0, DEAF))
    it = watch(kernel, [Listener("pci")])
    it.open()
    assert turns(it, kernel, 300.0) == [FIRST_PAUSE, FIRST_PAUSE]
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 2


@pytest.mark.parametrize("why", [ImportError("No library named udev"), DEAF])
def test_a_host_that_cannot_hear_goes_on_by_its_interval(
    why: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener("pci")
    kernel = Kernel()
    kernel.refuses = why
    it = watch(kernel, [listener])
    it.open()
    assert turns(it, kernel, 10.0) == [1.0, 2.0, 4.0, 8.0]
    assert (listener.asked, kernel.opened) == (0, [])
    (said,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "[agent] discovery_interval" in said.getMessage()
    kernel.refuses = None
    turns(it, kernel, 40.0)
    assert listener.asked == 1, "what came meanwhile is found"


class Silence:
    """An ear that hears nothing and can be woken."""

    def __init__(self) -> None:
        self.waits = Told()
        self.closed = Told()
        self._woken = threading.Event()

    def hear(self, seconds: float | None) -> list[str]:
        self.waits(seconds)
        assert self._woken.wait(LONG)
        return []

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self.closed()


@contextmanager
def started(it: Watch) -> Iterator[None]:
    it.start()
    yield
    it.stop()
    assert it.join(LONG)


def test_a_stop_wakes_it() -> None:
    ear = Silence()
    with started(Watch([Listener("pci")], lambda _: ear)):
        assert ear.waits.wait_for() == [(None,)]
    assert ear.closed.calls == [()]


def test_nothing_is_opened_for_drivers_that_watch_nothing() -> None:
    opened = Told()
    with started(Watch([Listener(), Listener()], opened)):
        pass
    assert opened.calls == []


def test_a_backend_that_comes_is_heard_for_and_all_look() -> None:
    first, second = Listener("pci"), Listener("net")
    backends, kernel = [first], Kernel((1.0, "net"))
    it = watch(kernel, backends)
    it.open()
    it.refresh()
    assert kernel.opened == [{"pci"}], "nothing is new"
    backends.append(second)
    it.refresh()
    turns(it, kernel, 3.0)
    assert (kernel.opened, kernel.closed) == ([{"pci"}, {"net", "pci"}], 1)
    assert (first.asked, second.asked) == (1, 2)
    backends.remove(first)
    it.refresh()
    turns(it, kernel, 6.0)
    assert len(kernel.opened) == 2
    assert first.asked == 1


def test_the_first_that_watches_opens_the_ear() -> None:
    ear, backends = Silence(), [Listener()]
    opened = Told()

    def listen(subsystems: frozenset[str]) -> Silence:
        opened(subsystems)
        return ear

    it = Watch(backends, listen)
    with started(it):
        it.refresh()
        assert opened.calls == []
        backends.append(Listener("pci"))
        it.refresh()
        ear.waits.wait_for()
        assert opened.calls == [(frozenset({"pci"}),)]


def test_a_running_ear_is_woken_for_a_new_one() -> None:
    ears, backends = [Silence(), Silence()], [Listener("pci")]
    waiting = list(ears)
    it = Watch(backends, lambda _: waiting.pop(0))
    with started(it):
        ears[0].waits.wait_for()
        backends.append(Listener("net"))
        it.refresh()
        ears[1].waits.wait_for()
        assert ears[0].closed.calls == [()]
    it.refresh()

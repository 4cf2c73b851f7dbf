# SPDX-License-Identifier: Apache-2.0
"""Looking at the hardware when the kernel says that it changed, not only at the next interval.

One ear hears for all backends whose drivers watch something. What it may have missed, because the
kernel had too much to tell or the ear had to be opened anew, is made good by a look of all of
them; and each looks every ``[agent] discovery_interval`` in any case.
"""

import threading
import time
from collections.abc import Callable, Sequence

from oslo_log import log

from cyborg.agent.backend import Backend
from cyborg.agent.uevents import Ear, KernelEar, Lost
from cyborg.core import burst
from cyborg.core.burst import Burst

LOG = log.getLogger(__name__)

FIRST_PAUSE = 1.0  # seconds before the ear is opened anew
LONGEST_PAUSE = 60.0


class Watch:
    """A thread that hears the kernel and has the backends concerned discover."""

    def __init__(
        self,
        backends: Sequence[Backend],
        listen: Callable[[frozenset[str]], Ear] = KernelEar,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``listen`` opens an ear for some subsystems; ``clock`` counts seconds upwards."""
        self._all = backends
        self._subsystems: frozenset[str] = frozenset()  # that the ear was opened for last
        self._listen = listen
        self._clock = clock
        self._ear: Ear | None = None
        self._lock = threading.Lock()  # of the ear: a stop wakes it while it may be replaced
        self._burst: Burst | None = None
        self._begun = False  # an ear was asked for
        self._stale = False  # there are backends that the ear does not hear for
        self._pause = FIRST_PAUSE
        self._complained = False
        self._opened = 0.0  # when, by the clock
        self._events = self._looks = 0  # of this life, for the log
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Hear from now on: what changes after this returns is not missed, if there is an ear."""
        if self._wanted():
            self.open()
            self._thread.start()

    def refresh(self) -> None:
        """Hear for the backends that there are by now: call it after one has come.

        What changed between its discovery and this is found by a look of all. Not beside ``start``,
        nor beside itself.
        """
        if self._wanted() <= self._subsystems or self._stopped.is_set():
            return
        if not self._begun:
            self._burst = burst.missed(None, self._clock())
            self.start()
            return
        self._stale = True
        with self._lock:
            if self._ear is not None:
                self._ear.wake()

    def stop(self) -> None:
        """Hear no more."""
        self._stopped.set()
        with self._lock:
            if self._ear is not None:
                self._ear.wake()

    def join(self, seconds: float) -> bool:
        """Wait for the thread to end; tell whether it did."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def turn(self) -> float:
        """Hear once and look if it is time; return the seconds to wait before the next turn."""
        if self._stale:
            self._close()
        if self._ear is None:
            if not self.open():
                return self._give_up()
            # What happened without an ear was not heard.
            self._burst = burst.missed(self._burst, self._clock())
        if not self._hear():
            return self._give_up()
        if self._burst is not None and self._clock() >= self._burst.due:
            self._look(self._burst)
        return 0.0

    def _run(self) -> None:
        while not self._stopped.is_set():
            if pause := self.turn():
                self._stopped.wait(pause)
        self._close()

    def _hear(self) -> bool:
        """Take what the ear heard into the burst; tell whether the ear still works."""
        ear, due = self._ear, self._burst.due if self._burst else None
        if ear is None:
            return False
        try:
            told = ear.hear(None if due is None else max(0.0, due - self._clock()))
        except Lost:
            LOG.info("The kernel had more uevents than could wait: everything is looked at")
            self._burst = burst.missed(self._burst, self._clock())
        except Exception as bad:
            LOG.debug("The ear for uevents fails", exc_info=True)
            self._close()
            if self._clock() - self._opened >= LONGEST_PAUSE:
                self._pause, self._complained = FIRST_PAUSE, False
            self._complain(bad)
            return False
        else:
            now = self._clock()
            for subsystem in told:
                self._burst = burst.heard(self._burst, now, subsystem)
        return True

    def _give_up(self) -> float:
        """Look for what was heard so far; return the pause before the ear is opened anew."""
        if self._burst is not None:
            self._look(self._burst)
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return pause

    def _look(self, over: Burst) -> None:
        self._burst = None
        concerned = [b for b in self._all if burst.concerns(over, b.driver.WATCHES)]
        self._events += over.events
        self._looks += bool(concerned)
        LOG.debug(
            "%d uevents of %s in %.2f s%s: %s discover; %d uevents and %d looks so far",
            over.events,
            ", ".join(sorted(over.subsystems)) or "nothing",
            over.last - over.first,
            ", some lost" if over.lost else "",
            ", ".join(b.name for b in concerned) or "none",
            self._events,
            self._looks,
        )
        for backend in concerned:
            backend.rediscover()

    def open(self) -> bool:
        """Open an ear; tell whether there is one."""
        # In this order: a backend that comes meanwhile is found the next time.
        self._begun, self._stale = True, False
        self._subsystems = self._wanted()
        try:
            ear = self._listen(self._subsystems)
        except Exception as bad:
            LOG.debug("No ear for uevents can be opened", exc_info=True)
            self._complain(bad)
            return False
        with self._lock:
            self._ear = ear
        self._opened = self._clock()
        if self._stopped.is_set():
            ear.wake()
        LOG.info("Watching uevents of %s", ", ".join(sorted(self._subsystems)))
        return True

    def _wanted(self) -> frozenset[str]:
        """Return the subsystems that the backends of now watch."""
        return frozenset[str]().union(*(backend.driver.WATCHES for backend in self._all))

    def _close(self) -> None:
        with self._lock:
            ear, self._ear = self._ear, None
        if ear is not None:
            ear.close()

    def _complain(self, bad: Exception) -> None:
        """Say it once, until an ear has worked for a while."""
        LOG.log(
            log.DEBUG if self._complained else log.WARNING,
            "Uevents cannot be heard, trying again; devices that come and go are seen "
            "every [agent] discovery_interval: %s: %s",
            type(bad).__name__,
            bad,
        )
        self._complained = True

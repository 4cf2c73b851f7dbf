# SPDX-License-Identifier: Apache-2.0
"""Bringing this host's backends to what is wanted of them, while all of them go on.

Make before break: what is new is built, set up and discovers while the old one still serves, and
takes its place only when it is READY. What cannot be done leaves the backend as it was, and the
conductor is told why. Whatever is lost on the way is made good by the next hello, whose answer says
which revision is wanted.
"""

import threading
from collections.abc import Callable, Sequence

from oslo_log import log

from cyborg.agent.backend import Backend, words
from cyborg.agent.backends import Builder
from cyborg.agent.fleet import Fleet
from cyborg.agent.held import HeldFile
from cyborg.agent.reporter import Conductor
from cyborg.core.convergence import Act, Held, Move, after, difference
from cyborg.core.errors import DriverFailed
from cyborg.core.report import BackendState, BackendStatus
from cyborg.core.wanted import MAX_ERROR, Applied, load_host
from cyborg.drivers.base import Driver

LOG = log.getLogger(__name__)

BUILDS = frozenset({Act.START, Act.REPLACE})
Tell = Callable[[int, Sequence[Applied]], None]


class Halted(Exception):
    """The agent is stopping."""


class Converger:
    """A thread that asks what is wanted, does it and has it told."""

    def __init__(
        self,
        host: str,
        epoch: str,
        conductor: Conductor,
        fleet: Fleet,
        held: HeldFile,
        builder: Builder,
        make: Callable[[Driver], Backend],
        tell: Tell,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """``make`` makes a backend that sets its driver up before it discovers.

        ``tell`` has the conductor told what became of a revision, and ``told`` called when it was;
        ``changed`` is called after the fleet has changed.
        """
        self._host = host
        self._epoch = epoch
        self._conductor = conductor
        self._fleet = fleet
        self._held = held
        self._builder = builder
        self._make = make
        self._tell = tell
        self._changed = changed
        self._lock = threading.Lock()
        # What is held may be more than the conductor heard of, so that it is told in each life.
        self._told = 0
        # The revision that was come to, or is being: a nudge for it is no news.
        self._known: int | None = None if held.revision or held.backends else 0
        self._wake = threading.Event()
        self._ended = threading.Event()  # what is tried has come to an end, or all has
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="convergence", daemon=True)

    @property
    def revision(self) -> int:
        """Return the revision that the conductor was told the host has come to, 0 for none."""
        return self._told

    def nudge(self, revision: int, *, again: bool = False) -> int:
        """Come to a revision, unless that has been done; return ``revision`` as it is now.

        One that has been told is told ``again``: whoever asks for it may not have heard that.
        """
        with self._lock:
            if revision != self._known or (again and revision == self._told):
                self._wake.set()
        return self._told

    def told(self, revision: int, taken: bool) -> None:
        """Hear that the conductor took the word of a revision, or wants none of it."""
        with self._lock:
            if taken:
                self._told = revision
            elif self._known == revision:
                self._known = None

    def start(self) -> None:
        """Wait for nudges from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Change nothing more."""
        with self._lock:
            self._stopped = True
        self._ended.set()
        self._wake.set()

    def join(self, seconds: float) -> bool:
        """Wait for what is in progress; tell whether it ended in time."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            # Cleared before the round: a nudge during it leads to another.
            self._wake.clear()
            if self._stopped:
                return
            try:
                self.round()
            except Halted:
                return
            except Exception as bad:
                # Whatever it was, the answer to the next hello brings us back.
                with self._lock:
                    self._known = None
                LOG.debug("What is wanted of this host cannot be done", exc_info=True)
                LOG.warning("What is wanted of this host is not known: %s", words(bad))

    def round(self) -> None:
        """Ask what is wanted, bring the host there and have it told.

        Raises what the conductor's answer raises, and Halted.
        """
        wanted = load_host(self._conductor.backends_wanted(self._host, self._epoch))
        with self._lock:
            self._known = wanted.revision
        held = dict(self._held.backends)
        moves = difference(held, wanted, self._builder.configured)
        if any(move.act in BUILDS for move in moves):
            self._builder.look_again()
        for move in moves:
            left = after(move, held.pop(move.backend, None), self._do(move))
            if left is not None:
                held[move.backend] = left
            if move.act is not Act.KEEP:
                # At once: an agent that is killed during the next begins with what was done.
                self._remember(self._held.revision, held)
        if again := self._held.booted and all(backend.is_set_up for backend in self._fleet):
            self._held.set_up()
        self._remember(wanted.revision, held, even_so=again)
        outcomes = [
            Applied(one.backend, one.revision, held[one.backend].error) for one in wanted.backends
        ]
        self._tell(wanted.revision, outcomes)

    def _remember(self, revision: int, held: dict[str, Held], *, even_so: bool = False) -> None:
        """Write it if it is new, or ``even_so``."""
        if not even_so and (revision, held) == (self._held.revision, self._held.backends):
            return
        try:
            self._held.write(revision, held)
        except OSError as bad:
            LOG.warning(
                "What is wanted of this host cannot be kept, and is asked for again after the "
                "agent's end: %s",
                bad,
            )

    def _do(self, move: Move) -> str | None:
        """Make a move; return why it could not be made, and then nothing has changed."""
        if self._stopped:
            raise Halted
        if move.act is Act.STOP:
            old = self._fleet.remove(move.backend)
            if old is not None:
                old.stop()
                self._tell_others()
            LOG.info("Backend %s is given up", move.backend)
        if move.act not in BUILDS:
            return None
        try:
            if move.wanted is None:
                driver = self._builder.make(move.backend)
            else:
                driver = self._builder.build(move.wanted)
            self._take_in(self._tried(driver))
        except Halted:
            raise
        except BaseException as bad:  # a driver may end with sys.exit()
            LOG.debug("Backend %s cannot %s", move.backend, move.act, exc_info=True)
            error = words(bad)[:MAX_ERROR] or "no message"
            LOG.warning("Backend %s stays as it was: %s: %s", move.backend, move.act, error)
            return error
        LOG.info("Backend %s: %s, driver %s", move.backend, move.act, driver.name)
        return None

    def _tried(self, driver: Driver) -> Backend:
        """Return a backend that has discovered well. Raises DriverFailed and Halted."""
        backend, states = self._make(driver), list[BackendState]()
        before = self._fleet.get(backend.name)
        if before is not None:
            backend.inherit(before)

        def done(state: BackendState) -> None:
            states.append(state)
            self._ended.set()

        self._ended.clear()
        backend.rediscover(done)
        backend.start()
        # It tells by itself when that takes too long.
        while not states and not self._stopped:
            self._ended.wait()
        if states and states[0].status is BackendStatus.READY:
            return backend
        backend.stop()
        if not states:
            raise Halted
        raise DriverFailed(states[0].error or f"backend {backend.name} is {states[0].status}")

    def _take_in(self, backend: Backend) -> None:
        """Have a backend serve, in the place of the old one. Raises Halted."""
        with self._lock:
            stopped = self._stopped
            old = None if stopped else self._fleet.put(backend)
        if stopped:
            backend.stop()
            raise Halted
        if old is not None:
            old.stop()
        self._tell_others()

    def _tell_others(self) -> None:
        try:
            self._changed()
        except Exception:
            # What was done is done, whoever cannot go along.
            LOG.exception("The change of the backends is not seen everywhere")

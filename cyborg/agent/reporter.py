# SPDX-License-Identifier: Apache-2.0
"""Telling the conductor: a hello at the pace that it sets, and a full report when it asks."""

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from oslo_log import log

from cyborg.agent.backend import Backend
from cyborg.agent.inventory import Inventory, collect
from cyborg.core import wire
from cyborg.core.catalogue import Entry
from cyborg.core.errors import CyborgError, Stale, Unavailable
from cyborg.core.identity import Identity
from cyborg.core.report import BackendState, Report
from cyborg.core.wanted import Applied
from cyborg.rpc.contract import AGENT

LOG = log.getLogger(__name__)

FIRST_PAUSE = 0.5  # seconds before the second try when the conductor is away
LONGEST_PAUSE = 10.0
QUIET = 60.0  # seconds between two lines of the log about the same trouble
MAX_WAITING = 1024  # outcomes of discoveries, and of jobs, that wait for the conductor


class Conductor(Protocol):
    """What an agent asks of ``cyborg.rpc.conductor.ConductorClient``."""

    def hello(
        self,
        host: str,
        epoch: str,
        endpoint: str | None,
        status: str,
        drivers: Sequence[Mapping[str, Any]],
        digest: str | None,
        versions: Mapping[str, Any] | None,
        wanted: int | None = None,
    ) -> Mapping[str, Any]:
        """Say that the agent is alive."""

    def report(self, report: Mapping[str, Any]) -> Mapping[str, Any]:
        """Tell all that the host has."""

    def discovery_done(
        self, discovery_id: str, host: str, drivers: Sequence[Mapping[str, Any]]
    ) -> None:
        """Tell how a discovery ended."""

    def job_done(self, job: str, host: str, state: str, error: str | None) -> None:
        """Tell how a job ended."""

    def backends_wanted(self, host: str, epoch: str) -> Mapping[str, Any]:
        """Return what is wanted of the host."""

    def backends_applied(
        self, host: str, epoch: str, revision: int, outcomes: Sequence[Mapping[str, Any]]
    ) -> None:
        """Tell what became of it."""


class Wishes(Protocol):
    """Whoever brings the host to what is wanted of it."""

    @property
    def revision(self) -> int:
        """The one that the conductor was told the host has come to."""

    def nudge(self, revision: int) -> int:
        """Hear which revision is wanted; return ``revision``."""

    def told(self, revision: int, taken: bool) -> None:
        """Hear that the conductor took the word of a revision, or wants none of it."""


class Reporter:
    """One life of the agent, as far as the conductor hears of it."""

    def __init__(
        self,
        host: str,
        endpoint: str,
        conductor: Conductor,
        backends: Sequence[Backend],
        clock: Callable[[], float] = time.monotonic,
        identity: Callable[[], Identity] = lambda: wire.NOBODY,
        drivers: Callable[[], Sequence[Entry] | None] = lambda: None,
    ) -> None:
        """``clock`` counts seconds upwards; it decides only how often trouble is logged.

        ``identity`` is asked before each hello by which names the host is known, ``drivers`` which
        are installed. Whoever brings the host to what is wanted of it may be put into ``wishes``.
        """
        self.wishes: Wishes | None = None
        self.epoch = str(uuid.uuid4())
        self._host = host
        self._endpoint = endpoint
        self._conductor = conductor
        self._backends = backends
        self._clock = clock
        self._identity = identity
        self._drivers = drivers
        self._generation = 0
        self._told: str | None = None  # the digest that this life reported last
        self._interval = 0.0  # between two hellos, as the conductor said
        self._outcomes: deque[tuple[str, BackendState]] = deque(maxlen=MAX_WAITING)
        self._ended: deque[tuple[str, str, str | None]] = deque(maxlen=MAX_WAITING)
        self._applied: tuple[int, Sequence[Applied]] | None = None
        self._lock = threading.Lock()  # of what was applied last
        self._pause = FIRST_PAUSE
        self._complained: float | None = None
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def start(self) -> None:
        """Begin, with a hello at once."""
        self._thread.start()

    def wake(self) -> None:
        """Say hello now: something has changed."""
        self._wake.set()

    def stop(self) -> None:
        """Say nothing more."""
        self._stopped.set()
        self._wake.set()

    def join(self, seconds: float) -> bool:
        """Wait for the call in progress; tell whether it ended in time."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def discovered(self, discovery_id: str, state: BackendState) -> None:
        """Have the conductor told of a discovery's outcome, after the devices that it found."""
        self._outcomes.append((discovery_id, state))
        self.wake()

    def job_done(self, job: str, state: str, error: str | None) -> None:
        """Have the conductor told how a job ended; it asks if that gets lost."""
        self._ended.append((job, state, error))
        self.wake()

    def applied(self, revision: int, outcomes: Sequence[Applied]) -> None:
        """Have the conductor told what became of what was wanted, after the devices that it led to.

        A newer word takes the place of one that was not told yet.
        """
        with self._lock:
            self._applied = (revision, outcomes)
        self.wake()

    def round(self) -> float:
        """Say hello and what follows from the answer; return the seconds until the next time."""
        try:
            interval = self._talk()
        except CyborgError as bad:
            return self._trouble(bad.message)
        except Exception as bad:
            LOG.debug("Talking to the conductor failed", exc_info=True)
            return self._trouble(f"{type(bad).__name__}: {bad}")
        if self._complained is not None:
            LOG.info("The conductor answers again")
        self._complained = None
        self._pause = FIRST_PAUSE
        return interval

    def _talk(self) -> float:
        # Before the devices are collected: what was applied must not be told before them.
        applied = self._applied
        views = [backend.view for backend in self._backends]
        inventory = collect(views, self._identity(), self._drivers())
        if not self._report_news(inventory):
            answer = self._hello(inventory)
            self._interval = float(answer["interval"])
            if answer["report"] and inventory.digest is not None:
                try:
                    self._report(inventory, inventory.digest)
                except Stale:
                    # Somebody spoke for this host meanwhile; a hello makes this life the valid one.
                    self._hello(inventory)
                    self._report(inventory, inventory.digest)
        if applied is not None:
            self._tell_of_wishes(applied)
        self._tell_of_jobs()
        while self._outcomes:
            discovery_id, state = self._outcomes[0]
            try:
                self._conductor.discovery_done(discovery_id, self._host, [wire.dump_backend(state)])
            except Unavailable:
                raise
            except CyborgError as bad:
                LOG.warning("The conductor wants no word of %s: %s", discovery_id, bad.message)
            self._outcomes.popleft()
        return self._interval

    def _report_news(self, inventory: Inventory) -> bool:
        """Report at once what a hello would only ask for; tell whether the conductor took it.

        It is as good a heartbeat as a hello. Who speaks for the first time says hello first, and so
        does whose report is refused or lost: the conductor may know another life.
        """
        news = inventory.digest
        if self._told is None or news is None or news == self._told:
            return False
        try:
            self._report(inventory, news)
        except Stale:
            return False
        return True

    def _tell_of_wishes(self, word: tuple[int, Sequence[Applied]]) -> None:
        revision, outcomes = word
        plain = [one.to_dict() for one in outcomes]
        taken = True
        try:
            self._conductor.backends_applied(
                host=self._host, epoch=self.epoch, revision=revision, outcomes=plain
            )
        except Unavailable:
            raise
        except CyborgError as bad:
            # The answer to the next hello has it asked for and told again.
            LOG.warning("The conductor wants no word of revision %d: %s", revision, bad.message)
            taken = False
        with self._lock:
            self._applied = None if self._applied is word else self._applied
        if self.wishes is not None:
            self.wishes.told(revision, taken)

    def _tell_of_jobs(self) -> None:
        while self._ended:
            job, state, error = self._ended[0]
            try:
                self._conductor.job_done(job=job, host=self._host, state=state, error=error)
            except Unavailable:
                raise
            except CyborgError as bad:
                # Whatever it is, others wait behind it; the conductor asks again by itself.
                LOG.warning("The conductor wants no word of job %s: %s", job, bad.message)
            self._ended.popleft()

    def _hello(self, inventory: Inventory) -> Mapping[str, Any]:
        drivers = {b.driver.name: b.driver.version for b in self._backends}
        answer = self._conductor.hello(
            host=self._host,
            epoch=self.epoch,
            endpoint=self._endpoint,
            status="READY",
            drivers=[wire.dump_backend(state) for state in inventory.states],
            digest=inventory.digest,
            versions={"rpc": AGENT.version, "drivers": drivers},
            wanted=None if self.wishes is None else self.wishes.revision,
        )
        wanted = answer.get("wanted")
        if wanted is not None and self.wishes is not None:
            self.wishes.nudge(wanted)
        return answer

    def _report(self, inventory: Inventory, digest: str) -> None:
        self._generation += 1
        self._told = None
        LOG.info("Report %d: %d devices", self._generation, len(inventory.devices))
        report = Report(
            host=self._host,
            epoch=self.epoch,
            generation=self._generation,
            digest=digest,
            backends=inventory.states,
            devices=inventory.devices,
            identity=inventory.identity,
            drivers=inventory.drivers,
        )
        self._conductor.report(wire.dump_report(report))
        self._told = digest

    def _trouble(self, message: str) -> float:
        now = self._clock()
        if self._complained is None or now - self._complained >= QUIET:
            self._complained = now
            LOG.warning("The conductor does not take our word, trying again: %s", message)
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return pause

    def _run(self) -> None:
        while not self._stopped.is_set():
            # Cleared before the round: a wake during it is not lost.
            self._wake.clear()
            if self._stopped.is_set():
                return
            self._wake.wait(self.round())

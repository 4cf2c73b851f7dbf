# SPDX-License-Identifier: Apache-2.0
"""Seeing to it that host work ends: each open job has one conductor that asks its agent about it.

A conductor leases the jobs that are due, asks each one's agent, and records what follows; the agent
also calls when a job ends, so that asking again is only for what was lost. Everything here may
happen twice or be cut off anywhere: the row is the truth, and a lease that runs out passes on.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log
from oslo_utils import timeutils

from cyborg.conductor import limits, outcomes
from cyborg.conductor.events import Telling
from cyborg.conductor.notices import Notices
from cyborg.conductor.outcomes import Settled
from cyborg.conductor.surrender import surrender
from cyborg.core.deed import Deed
from cyborg.core.errors import CyborgError, Invalid, NotFound, Unavailable
from cyborg.core.job import MAX_ERROR, Heard, JobKind, Verdict, decide
from cyborg.core.request import parse_uuid
from cyborg.core.text import clean
from cyborg.db.store import deeds
from cyborg.db.store import jobs as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

AT_ONCE = 64  # hosts whose agents are asked
BATCH = 64  # jobs that are leased together
PATIENCE = 2.0  # seconds that a round waits for answers
POLL = 15.0  # seconds after which an agent that is at work is asked again
LONGEST_DELAY = 600.0  # seconds between two tries of a release
KEEP = timedelta(days=1)  # how long jobs that have ended can be looked up
PURGED = 1000  # of them at a time


class Agents(Protocol):
    """What asks agents: ``cyborg.rpc.agent.AgentClient``."""

    def job(
        self, host: str, job: str, kind: str, arguments: Mapping[str, Any], seconds: float
    ) -> Any:
        """Have the agent of a host do a job, or tell how far it is."""


class Jobs:
    """What is done about jobs; several conductors may each have one."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        agents: Agents,
        settled: Callable[[Settled], None] = lambda _: None,
        notices: Notices | None = None,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
        at_once: int = AT_ONCE,
    ) -> None:
        """``settled`` is told, after the commit, what each outcome calls for.

        ``at_once`` is how many hosts' agents are asked at the same time.
        """
        self._conf = conf
        self._uow = uow
        self._agents = agents
        self._settled = settled
        self._telling = Telling(conf, notices or Notices(conf))
        self._now = now
        self._at_once = at_once
        self._me = str(uuid4())
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._queues: dict[str, deque[sa.RowMapping]] = {}

    def run_once(self) -> int:
        """Begin to see to every job that is due; return how many that were.

        What its agent answers at once has been recorded then. An agent that does not answer holds
        up its own host's work alone: each host has a thread, which nobody waits for longer than
        PATIENCE.
        """
        seen = 0
        while not self._stopped.is_set() and (room := self._room()):
            rows = self._lease(room)
            if not rows:
                break
            seen += len(rows)
            begun = [thread for row in rows if (thread := self._begin(row)) is not None]
            end = time.monotonic() + PATIENCE
            for thread in begun:
                thread.join(max(0.0, end - time.monotonic()))
        return seen

    def done(self, job: str, host: str, state: str, error: str | None) -> None:
        """Take an agent's word on how a job ended; of one that has ended already, nothing.

        Raises Invalid, and NotFound when the host has no such job.
        """
        uuid, host = parse_uuid(job, "job"), limits.text("host", host)
        heard = _heard(state)
        told = _said(error)
        row = self._uow.run(lambda tx: store.get(tx, uuid))
        if row is None or row["host"] != host:
            raise NotFound(f"host {host} has no job {uuid}", job=uuid)
        if heard is not Heard.RUNNING:
            self._record(row, heard, told)

    def sweep(self) -> int:
        """Finish or undo what nobody else would; return how many things that were."""
        now = self._now()
        settled = self._uow.run(lambda tx: outcomes.sweep(tx, now, telling=self._telling))
        if settled.jobs or settled.events:
            self._settled(settled)
        purged = self._uow.run(lambda tx: store.purge(tx, now - KEEP, PURGED))
        return settled.count + purged

    def stop(self) -> None:
        """Begin no more calls; the leases of what was not asked run out."""
        self._stopped.set()

    def _room(self) -> int:
        with self._lock:
            return BATCH if len(self._queues) < self._at_once else 0

    def _lease(self, limit: int) -> Sequence[sa.RowMapping]:
        now = self._now()
        until = now + timedelta(seconds=self._conf.conductor.lease)

        def take(tx: sa.Connection) -> Sequence[sa.RowMapping]:
            rows = store.lease(tx, owner=self._me, now=now, until=until, limit=limit)
            others = [row for row in rows if row["owner"] not in (None, self._me)]
            deeds.add(tx, Deed.JOBS_TAKEN_OVER, len(others), now)
            for row in others:
                LOG.info("Job %s of host %s is taken over", row["uuid"], row["host"])
            return rows

        return self._uow.run(take)

    def _begin(self, row: sa.RowMapping) -> threading.Thread | None:
        """See to a job, in its host's thread unless there is to be only one."""
        if self._at_once == 1:
            self._try(row)
            return None
        host = str(row["host"])
        with self._lock:
            if (queue := self._queues.get(host)) is not None:
                queue.append(row)
                return None
            self._queues[host] = deque([row])
        thread = threading.Thread(target=self._work, args=(host,), name="job", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: the lease runs out, and somebody tries again
            with self._lock:
                del self._queues[host]
            raise
        return thread

    def _work(self, host: str) -> None:
        """See to a host's jobs one after another; when it cannot be asked, put the others off."""
        silent: str | None = None
        while True:
            with self._lock:
                queue = self._queues[host]
                if not queue or self._stopped.is_set():
                    del self._queues[host]
                    return
                row = queue.popleft()
            silent = self._try(row, silent) or silent

    def _try(self, row: sa.RowMapping, silent: str | None = None) -> str | None:
        """Ask about a job, unless its host is ``silent``, for that reason; return why it is now."""
        try:
            heard, error = (None, silent) if silent is not None else self._ask(row)
            self._record(row, heard, error)
        except Unavailable as bad:
            LOG.warning("Job %s waits: %s", row["uuid"], bad.message)
        except Exception:
            LOG.exception("Job %s failed for a reason nobody foresaw", row["uuid"])
        else:
            return error if heard is None else None
        return None

    def _ask(self, row: sa.RowMapping) -> tuple[Heard | None, str | None]:
        """Ask the agent; None is that it cannot be asked."""
        seconds = self._conf.conductor.prepare_timeout
        if row["deadline"] is not None:
            # A job that has no time left is still asked about: it may have ended well.
            seconds = max(1.0, (row["deadline"] - self._now()).total_seconds())
        try:
            answer = self._agents.job(
                row["host"], row["uuid"], row["kind"], row["arguments"], seconds
            )
            if not isinstance(answer, Mapping):
                return Heard.FAILED, "the agent's answer is no object"
            return _heard(answer.get("state")), _said(answer.get("error"))
        except Unavailable as bad:
            return None, _said(bad.message)
        except CyborgError as bad:
            return Heard.FAILED, _said(bad.message)

    def _record(self, row: sa.RowMapping, heard: Heard | None, error: str | None) -> None:
        now, kind = self._now(), JobKind(row["kind"])
        overdue = row["deadline"] is not None and now >= row["deadline"]
        verdict = decide(kind, heard, overdue=overdue)
        if verdict is Verdict.FINISH or verdict is Verdict.UNDO:
            good = verdict is Verdict.FINISH
            why = error or ("not done in time" if not good else None)
            settled = self._uow.run(
                lambda tx: outcomes.settle(tx, row, good, why, now, telling=self._telling)
            )
            if settled.count:
                level = log.INFO if good else log.WARNING
                LOG.log(level, "Job %s (%s) on %s: %s", row["uuid"], kind, row["host"], why or "ok")
            self._settled(settled)
            return
        pause = POLL if verdict is Verdict.WAIT else _delay(kind, row["attempts"])
        until = now + timedelta(seconds=pause)
        if row["deadline"] is not None and not overdue:
            until = min(until, row["deadline"])

        def write(tx: sa.Connection) -> tuple[Settled, list[str]]:
            if kind is JobKind.RELEASE and verdict is Verdict.RETRY:
                remember, notices = self._conf.conductor.remember > 0, self._telling.notices
                over, told = surrender(tx, row, error, now, notices, remember=remember)
                if over.count:
                    return over, told
                if row["error"] is None:
                    outcomes.stuck(tx, row["id"], now)
            said = row["error"] if verdict is Verdict.WAIT else error
            store.wait(tx, row["id"], self._me, until=until, error=said)
            return Settled(), []

        over, lines = self._uow.run(write)
        for line in lines:
            LOG.warning("Host %s: %s", row["host"], line)
        if over.count:
            self._settled(over)
        elif verdict is Verdict.RETRY:
            LOG.warning(
                "Job %s (%s) on %s is tried again in %.0f s: %s",
                row["uuid"],
                kind,
                row["host"],
                pause,
                error,
            )


def _said(error: Any) -> str | None:
    """Return somebody else's words as every database takes them: they must not keep a job open."""
    return None if error is None else clean(str(error), MAX_ERROR)


def _heard(state: Any) -> Heard:
    try:
        return Heard(state)
    except ValueError:
        raise Invalid(f"{str(state)[:40]!r} is no state of a job", field="state") from None


def _delay(kind: JobKind, attempts: int) -> float:
    """Return the seconds until the next try; work with a deadline is tried every few seconds."""
    longest = LONGEST_DELAY if kind is JobKind.RELEASE else 10.0
    return min(longest, 1.0 * 2.0 ** min(attempts, 12)) * random.uniform(0.5, 1.0)  # noqa: S311

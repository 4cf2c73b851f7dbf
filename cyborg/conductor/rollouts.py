# SPDX-License-Identifier: Apache-2.0
"""Carrying out the jobs that are about drivers: whose turn it is, and what agents made of it.

Each look at a job is one transaction: it reads how far the steps are, lets ``core.rollout`` decide,
writes what is wanted of the hosts whose turn has come, and the end if it has come. Agents are
nudged after the commit; one that misses that asks by itself after its next hello. So whoever dies
anywhere leaves nothing that the next look does not go on with.

Locks are taken in one order: jobs, agents, steps, and then what a report writes.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log
from oslo_utils import timeutils

from cyborg.conductor import limits
from cyborg.conductor.notices import Notices
from cyborg.conductor.nudges import Agents, Nudge, Nudger
from cyborg.conductor.rollout_turns import Turns, agents_of
from cyborg.core import rollout, wanted
from cyborg.core.errors import NotFound, Stale, Unavailable, WrongState
from cyborg.core.job import JobState
from cyborg.core.request import parse_uuid
from cyborg.core.rollout import PENDING, Kind, Step, StepState
from cyborg.db.store import rollouts as store
from cyborg.db.store import wanted as wishes
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

BATCH = 16  # jobs that are leased together
POLL = 5.0  # seconds after which a job whose steps are under way is looked at again
MOST = 64  # steps that one look finds overdue
MAX_NAMED = 8  # hosts whose error the job's own tells

CANCELLED = "an operator cancelled it"


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at a job calls for after its commit: nudges, the publisher, another look."""

    nudges: Sequence[Nudge] = ()
    publish: bool = False
    again: bool = False


class Rollouts:
    """What is done about these jobs; several conductors may each have one."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        agents: Agents,
        wake: Callable[[], None] = lambda: None,
        wake_publisher: Callable[[], None] = lambda: None,
        notices: Notices | None = None,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
    ) -> None:
        """``wake`` is called when an agent's word may have made the next turn come."""
        self._conf = conf
        self._uow = uow
        self._nudger = Nudger(agents)
        self._wake = wake
        self._wake_publisher = wake_publisher
        self._turns = Turns(conf, notices or Notices(conf, now=now), now)
        self._now = now
        self._me = str(uuid4())
        self._stopped = threading.Event()

    def run_once(self) -> int:
        """Look at every job that is due, and nudge the agents whose turn it is."""
        seen = 0
        while not self._stopped.is_set():
            now = self._now()
            until = now + timedelta(seconds=self._conf.conductor.lease)
            rows = self._uow.run(
                lambda tx, now=now, until=until: store.lease(  # type: ignore[misc]
                    tx, owner=self._me, now=now, until=until, limit=BATCH
                )
            )
            again = False
            for row in rows:
                again |= self._look(row)
            seen += len(rows)
            if len(rows) < BATCH and not again:
                break
        return seen

    def _look(self, row: sa.RowMapping) -> bool:
        """Look at one job; tell whether it is to be looked at again at once. Raises Unavailable.

        One that nobody can read keeps no other from its turn.
        """
        try:
            look = self._uow.run(lambda tx: self._advance(tx, row["id"]))
        except Unavailable:
            raise
        except Exception:
            LOG.exception("Job %s failed for a reason nobody foresaw", row["uuid"])
            return False
        self._nudger.nudge(look.nudges)
        if look.publish:
            self._wake_publisher()
        return look.again

    def stop(self) -> None:
        """Look at no more jobs, nudge no more agents."""
        self._stopped.set()
        self._nudger.stop()

    def cancel(self, uuid: str) -> None:
        """Have a job begin nothing more, and open again what it had only closed.

        What is under way comes to its end, and the job with it. Raises Invalid, NotFound, and
        WrongState for one that has ended or is about no driver.
        """
        wanted_uuid = parse_uuid(uuid, "uuid")

        def write(tx: sa.Connection) -> bool:
            job = store.lock(tx, wanted_uuid)
            if job is None:
                raise NotFound(f"no job {wanted_uuid}", job=wanted_uuid)
            if job["exclusive"] is None:
                raise WrongState(
                    f"job {wanted_uuid} is {job['state']} ({job['kind']}): only an open one about "
                    "a driver can be cancelled",
                    job=wanted_uuid,
                )
            steps = store.of_job(tx, job["id"])
            left = [step for step in steps if step["state"] in PENDING]
            opened = job["kind"] == Kind.UNINSTALL and self._turns.open_again(tx, left)
            store.change_all(tx, {step["id"]: StepState.UNTOUCHED for step in left})
            if any(step["state"] == StepState.ROLLING for step in steps):
                store.ask(tx, job["id"], {**job["arguments"], "cancelled": True}, self._now())
            else:
                store.end(tx, job["id"], JobState.CANCELLED, CANCELLED)
            return opened

        if self._uow.run(write):
            self._wake_publisher()
        LOG.info("Job %s is cancelled", wanted_uuid)

    def wanted(self, host: str, epoch: str) -> dict[str, Any]:
        """Return what is wanted of a host. Raises Invalid, and Stale for another life's agent."""
        host, epoch = limits.text("host", host), parse_uuid(epoch, "epoch")
        found = self._uow.run(lambda tx: wishes.of_host(tx, host, epoch))
        if found is None:
            raise _stale(host, epoch)
        return found.to_dict()

    def applied(self, host: str, epoch: str, revision: int, outcomes: Any) -> None:
        """Take an agent's word on what became of what was wanted. Raises Invalid, Stale."""
        host, epoch = limits.text("host", host), parse_uuid(epoch, "epoch")
        limits.revision("revision", revision)
        told = wanted.load_applied(outcomes)

        def write(tx: sa.Connection) -> tuple[list[int], list[Nudge], bool]:
            waiting = store.lock_waiting(tx, host)
            row = wishes.lock(tx, host, epoch)
            if row is None:
                raise _stale(host, epoch)
            wishes.applied(tx, row["id"], told)
            jobs, failed = [], list[tuple[Any, str]]()
            by_backend = {one.backend: one for one in told}
            for step in store.waited_for(tx, host, waiting) if waiting else ():
                outcome = by_backend.get(step["backend"])
                if outcome is None or outcome.revision < step["revision"]:
                    continue
                jobs.append(step["job_id"])
                error = outcome.error
                if outcome.revision > step["revision"]:
                    # Another driver has taken the name: what was given up is gone all the same.
                    gone = step["kind"] == Kind.UNINSTALL
                    error = None if gone else f"backend {step['backend']} is another's by now"
                if error is None:
                    store.change(tx, step["id"], StepState.DONE, error=None, deadline=None)
                else:
                    failed.append(({**step, "host": host, "service_id": row["id"]}, error))
            back = self._turns.back(tx, failed, {row["id"]: row})
            nudges = [(host, row["wanted"] + 1)] if failed else []
            if jobs:
                store.hurry(tx, jobs, self._now())
            return jobs, nudges, back

        jobs, nudges, back = self._uow.run(write)
        self._nudger.nudge(nudges)
        for one in told:
            if one.error is not None:
                LOG.warning("Host %s, backend %s: %s", host, one.backend, one.error)
        if jobs:
            self._wake()
        if back:
            self._wake_publisher()

    def _advance(self, tx: sa.Connection, job_id: int) -> Look:
        """Take a job as far as it can go now."""
        # Read again: it may have been asked for more since it was leased.
        row = store.hold(tx, job_id, self._me)
        if row is None:
            return Look()
        now, kind, arguments = self._now(), Kind(row["kind"]), row["arguments"]
        rows = store.of_job(tx, row["id"])
        rolling = [step for step in rows if step["state"] == StepState.ROLLING]
        if overdue := [step for step in rolling if _late(step, now)][:MOST]:
            seconds = self._conf.conductor.driver_timeout
            error = f"the agent did not say within {seconds:g} s what became of it"
            agents = wishes.lock_all(tx, agents_of(overdue))
            changed = self._turns.back(
                tx, [({**step, "kind": kind}, error) for step in overdue], agents
            )
            store.again(tx, row["id"], now)
            told = [
                (s["host"], agents[s["service_id"]]["wanted"] + 1)
                for s in overdue
                if s["service_id"] in agents
            ]
            return Look(told, changed, again=True)
        # Only who is to give something up waits for its release.
        asked = [(s["host"], s["backend"]) for s in rows if s["state"] in PENDING]
        held = store.held(tx, asked) if kind is Kind.UNINSTALL else {}
        forced = _forced(arguments)
        steps = [
            Step(
                s["host"],
                s["backend"],
                StepState(s["state"]),
                held.get((s["host"], s["backend"]), 0),
                bool(s["down"]),
                forced is None or (s["host"], s["backend"]) in forced,
            )
            for s in rows
        ]
        plan = rollout.plan(kind, steps)
        by_key = {(s["host"], s["backend"]): s for s in rows}
        store.change_all(tx, {by_key[k]["id"]: state for k, state in (plan.become or {}).items()})
        begun = {key: step for key, step in by_key.items() if key in set(plan.begin)}
        given_up = {key for key in begun if forced is None or key in forced}
        nudges, changed = self._turns.begin(tx, row, list(begun.values()), given_up)
        if plan.over is not None:
            self._end(tx, row, plan.over)
            return Look(publish=changed)
        again = len(nudges) < len(begun)
        # Whose word has not come by now may have missed the nudge, or the word was lost.
        nudges += [(step["host"], step["revision"]) for step in rolling if not step["down"]]
        store.again(tx, row["id"], now if again else now + timedelta(seconds=POLL))
        return Look(nudges, changed, again)

    def _end(self, tx: sa.Connection, job: Any, good: bool) -> None:
        rows = store.of_job(tx, job["id"])
        told = rollout.summary([StepState(row["state"]) for row in rows])
        wrong = [
            f"{row['host']} ({row['backend']}): {row['error']}" for row in rows if row["error"]
        ]
        state = JobState.DONE if good else JobState.FAILED
        error = None if good else f"{told}; {'; '.join(wrong[:MAX_NAMED])}"
        if job["arguments"].get("cancelled"):
            state, error = JobState.CANCELLED, f"{CANCELLED}: {error or told}"
        store.end(tx, job["id"], state, error)
        LOG.log(
            log.INFO if good else log.WARNING,
            "Job %s: %s driver %s: %s",
            job["uuid"],
            job["kind"],
            job["subject"],
            told or "nothing to do",
        )


def _late(step: Any, now: datetime) -> bool:
    return bool((step["deadline"] or now) < now)


def _forced(arguments: Mapping[str, Any]) -> set[tuple[str, str]] | None:
    """Return which backends are given up whatever is bound; None is all of them."""
    if arguments.get("force"):
        return None
    return {(host, backend) for host, backend in arguments.get("forced", ())}


def _stale(host: str, epoch: str) -> Stale:
    return Stale(
        f"epoch {epoch} is not the life of host {host}'s agent: say hello first", host=host
    )

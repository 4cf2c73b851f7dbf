# SPDX-License-Identifier: Apache-2.0
"""Carrying out the jobs that are about drivers: whose turn it is, and what agents made of it.

Each look at a job is one transaction: it reads how far the steps are, lets ``core.rollout`` decide,
writes what is wanted of the hosts whose turn has come, and the end if it has come. Agents are
nudged after the commit; one that misses that asks by itself after its next hello. So whoever dies
anywhere leaves nothing that the next look does not go on with.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Protocol
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log
from oslo_utils import timeutils

from cyborg.conductor import limits, reports
from cyborg.conductor.notices import Notices
from cyborg.core import rollout, wanted
from cyborg.core.errors import CyborgError, NotFound, Stale, WrongState
from cyborg.core.job import JobState
from cyborg.core.request import parse_uuid
from cyborg.core.rollout import Kind, Step, StepState
from cyborg.db.store import providers
from cyborg.db.store import rollouts as store
from cyborg.db.store import wanted as wishes
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

BATCH = 16  # jobs that are leased together
CALLS_AT_ONCE = 8
POLL = 5.0  # seconds after which a job whose steps are under way is looked at again
MAX_NAMED = 8  # hosts whose error the job's own tells

Nudge = tuple[str, int]


class Agents(Protocol):
    """What asks agents: ``cyborg.rpc.agent.AgentClient``."""

    def wanted(self, host: str, revision: int) -> Mapping[str, Any]:
        """Have a host be brought to what is wanted of it."""


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
        self._agents = agents
        self._wake = wake
        self._wake_publisher = wake_publisher
        self._notices = notices or Notices(conf, now=now)
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
            for row in rows:
                nudges, closed = self._uow.run(lambda tx, row=row: self._advance(tx, row))  # type: ignore[misc]
                self._nudge(nudges)
                if closed:
                    self._wake_publisher()
            seen += len(rows)
            if len(rows) < BATCH:
                break
        return seen

    def stop(self) -> None:
        """Look at no more jobs, nudge no more agents."""
        self._stopped.set()

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
            left = [step for step in steps if _pending(step)]
            store.change_all(tx, {step["id"]: StepState.UNTOUCHED for step in left})
            opened = False
            if job["kind"] == Kind.UNINSTALL:
                wishes.restore(tx, [(s["service_id"], s["backend"], s["before"]) for s in left])
                hosts = sorted({step["host"] for step in left})
                if opened := wishes.withdraw(tx, hosts) > 0:
                    providers.mark_hosts(tx, hosts, self._now())
            if all(step["state"] != StepState.ROLLING for step in steps):
                store.end(tx, job["id"], JobState.CANCELLED, "an operator cancelled it")
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

        def write(tx: sa.Connection) -> tuple[list[int], bool]:
            row = wishes.lock(tx, host, epoch)
            if row is None:
                raise _stale(host, epoch)
            wishes.applied(tx, row["id"], told)
            jobs, back = [], False
            by_backend = {(one.backend, one.revision): one for one in told}
            for step in store.waited_for(tx, host):
                outcome = by_backend.get((step["backend"], step["revision"]))
                if outcome is None:
                    continue
                jobs.append(step["job_id"])
                if outcome.error is None:
                    store.change(tx, step["id"], StepState.DONE, error=None, deadline=None)
                else:
                    back |= self._back(tx, step, host, row["id"], outcome.error)
            if jobs:
                store.hurry(tx, jobs, self._now())
            return jobs, back

        jobs, back = self._uow.run(write)
        for one in told:
            if one.error is not None:
                LOG.warning("Host %s, backend %s: %s", host, one.backend, one.error)
        if jobs:
            self._wake()
        if back:
            self._wake_publisher()

    def _advance(self, tx: sa.Connection, row: sa.RowMapping) -> tuple[list[Nudge], bool]:
        """Take a job as far as it can go now; return whom to nudge and whether devices changed."""
        if not store.hold(tx, row["id"], self._me):
            return [], False
        now, kind, arguments = self._now(), Kind(row["kind"]), row["arguments"]
        rows = store.of_job(tx, row["id"])
        changed = False
        for step in rows:
            if step["state"] == StepState.ROLLING and (step["deadline"] or now) < now:
                seconds = self._conf.conductor.driver_timeout
                error = f"the agent did not say within {seconds:g} s what became of it"
                changed |= self._back(
                    tx, {**step, "kind": kind}, step["host"], step["service_id"], error
                )
        if changed:
            rows = store.of_job(tx, row["id"])
        # Only who is to give something up waits for its release.
        asked = [(s["host"], s["backend"]) for s in rows if _pending(s)]
        held = store.held(tx, asked) if kind is Kind.UNINSTALL else {}
        steps = [
            Step(
                s["host"],
                s["backend"],
                StepState(s["state"]),
                held.get((s["host"], s["backend"]), 0),
                bool(s["down"]),
            )
            for s in rows
        ]
        plan = rollout.plan(kind, steps, force=bool(arguments.get("force")))
        by_key = {(s["host"], s["backend"]): s for s in rows}
        store.change_all(tx, {by_key[k]["id"]: state for k, state in (plan.become or {}).items()})
        nudges: list[Nudge] = []
        for key in plan.begin:
            nudge, closed = self._begin(tx, kind, row, by_key[key], now)
            nudges += nudge
            changed |= closed
        if plan.over is None and not (plan.begin and not nudges):
            store.again(tx, row["id"], now + timedelta(seconds=POLL))
        elif plan.over is None:
            store.again(tx, row["id"], now)
        else:
            self._end(tx, row, plan.over)
        return nudges, changed

    def _begin(
        self, tx: sa.Connection, kind: Kind, job: Any, step: Any, now: datetime
    ) -> tuple[list[Nudge], bool]:
        """Write what is wanted of a host whose turn has come."""
        agent, host, backend = step["service_id"], step["host"], step["backend"]
        if agent is None:
            store.change(tx, step["id"], StepState.FAILED, error="its agent is not known any more")
            return [], False
        revision = wishes.raise_(tx, agent)
        before = None if step["before"] is None else wanted.load(step["before"])
        wishes.write(
            tx,
            agent,
            rollout.wish(kind, job["subject"], job["arguments"], backend, before, revision),
        )
        closed = wishes.withdraw(tx, [host]) > 0
        if closed:
            providers.mark_hosts(tx, [host], now)
        if step["down"]:
            if kind is Kind.UNINSTALL and job["arguments"].get("force"):
                remember = self._conf.conductor.remember > 0
                lost = reports.forget(tx, host, backend, now, self._notices, remember=remember)
                closed |= lost.providers > 0
                for line in lost.remarks:
                    LOG.warning("Host %s: %s", host, line)
            store.change(tx, step["id"], StepState.AWAY, revision=revision)
            return [], closed
        deadline = now + timedelta(seconds=self._conf.conductor.driver_timeout)
        store.change(tx, step["id"], StepState.ROLLING, revision=revision, deadline=deadline)
        return [(host, revision)], closed

    def _back(self, tx: sa.Connection, step: Any, host: str, agent: int | None, error: str) -> bool:
        """Have a host go back to what it had; tell whether that opens or closes devices."""
        install = step["kind"] == Kind.INSTALL
        state = StepState.FAILED if install else StepState.ROLLED_BACK
        store.change(tx, step["id"], state, error=error, deadline=None)
        if agent is None:
            return False
        revision = wishes.raise_(tx, agent)
        if step["before"] is None:
            wishes.forget(tx, agent, step["backend"])
        else:
            before = replace(wanted.load(step["before"]), revision=revision)
            wishes.write(tx, agent, before)
        if not wishes.withdraw(tx, [host]):
            return False
        providers.mark_hosts(tx, [host], self._now())
        return True

    def _end(self, tx: sa.Connection, job: Any, good: bool) -> None:
        rows = store.of_job(tx, job["id"])
        told = rollout.summary([StepState(row["state"]) for row in rows])
        wrong = [
            f"{row['host']} ({row['backend']}): {row['error']}" for row in rows if row["error"]
        ]
        error = None if good else f"{told}; {'; '.join(wrong[:MAX_NAMED])}"
        store.end(tx, job["id"], JobState.DONE if good else JobState.FAILED, error)
        LOG.log(
            log.INFO if good else log.WARNING,
            "Job %s: %s driver %s: %s",
            job["uuid"],
            job["kind"],
            job["subject"],
            told or "nothing to do",
        )

    def _nudge(self, nudges: Sequence[Nudge]) -> None:
        todo = deque(nudges)
        # Daemon threads, not a pool: a call to a dead agent must not keep the process from ending.
        for _ in range(min(CALLS_AT_ONCE, len(todo))):
            threading.Thread(target=self._call, args=(todo,), name="nudge", daemon=True).start()

    def _call(self, todo: deque[Nudge]) -> None:
        while not self._stopped.is_set():
            try:
                host, revision = todo.popleft()
            except IndexError:
                return
            try:
                self._agents.wanted(host=host, revision=revision)
            except CyborgError as bad:
                LOG.info("Host %s asks what is wanted of it with a hello: %s", host, bad.message)
            except Exception:
                LOG.exception("Nudging %s failed for a reason nobody foresaw", host)


def _pending(step: Any) -> bool:
    return step["state"] in (StepState.WAITING, StepState.DRAINING)


def _stale(host: str, epoch: str) -> Stale:
    return Stale(
        f"epoch {epoch} is not the life of host {host}'s agent: say hello first", host=host
    )

# SPDX-License-Identifier: Apache-2.0
"""Controller of driver rollouts: advance the steps of driver jobs and record their outcomes.

Each iteration of a job is one transaction: it reads the states of the steps, calls
``core.drivers.rollout`` for the plan, writes the desired state of the hosts to change, and ends the
job if it is complete.
Agents are notified after the commit; an agent that misses the notification syncs with its next
heartbeat. A crash at any point is recovered by the next iteration.

Locks are taken in one order: jobs, agents, steps, and then the rows that a report writes.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.common.calls import make_stale_error
from cyborg.conductor.common.work_lease import Leasing, new_owner
from cyborg.conductor.drivers import rollout_steps
from cyborg.conductor.drivers.rollout_steps import ForcedBackends
from cyborg.conductor.jobs import cancellation
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.drivers import desired_state, rollout
from cyborg.core.drivers.rollout import Kind, StepKey, StepState
from cyborg.core.errors import NotFound, Unavailable, WrongState
from cyborg.core.jobs.job import JobState
from cyborg.core.log import get_logger, log_fields
from cyborg.core.text import join_limited
from cyborg.core.validation import check_integer, check_text, parse_uuid
from cyborg.db.backends import desired as desired_backends
from cyborg.db.drivers import rollouts as store
from cyborg.db.jobs import write as job_store
from cyborg.db.services import write as services
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.agent_api import AgentAPI

LOG = get_logger(__name__)

# Jobs that are leased together.
BATCH_SIZE = 16
# Seconds between two iterations of a job with steps in progress. The outcome of an agent wakes the
# controller. Polling finds released handles, deadlines and notifications that were lost.
POLL_INTERVAL = 5.0
# Overdue steps that one iteration rolls back. Each rollback locks the row of an agent, so that one
# transaction must not take hundreds.
MAX_OVERDUE = 64
# Hosts whose errors the job's error names.
MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class RolloutUpdate:
    """Actions after the commit of an iteration: notify hosts, wake the publisher, requeue a job."""

    host_generations: Sequence[rollout_steps.HostGeneration] = ()
    publish: bool = False
    requeue: bool = False


@dataclass(eq=False)
class RolloutController:
    """Controller of driver jobs; safe to run in several conductors.

    ``wake`` is called when an outcome of an agent may allow the next step.
    """

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    agents: AgentAPI
    notifications: NotificationBuilder
    wake: Callable[[], None] = lambda: None
    wake_publisher: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._notifier = rollout_steps.GenerationNotifier(self.agents)
        self._step_executor = rollout_steps.StepExecutor(self.conf, self.uow, self.notifications)
        # One owner for all rounds: a job that it had before is no job taken over from another.
        self._owner = new_owner(self.conf.host)
        self._leasing = Leasing(self.conf, "driver rollouts", now=self.uow.clock)
        self._stopped = threading.Event()

    def run_once(self) -> int:
        """Process every job that is due; return their number."""
        count = 0
        while not self._stopped.is_set():
            jobs = self.uow.run(self._lease)
            requeue = False
            for job in jobs:
                requeue |= self._process(job)
            count += len(jobs)
            # A full batch may leave due jobs behind; a requeued job is due at once.
            if len(jobs) < BATCH_SIZE and not requeue:
                break
        return count

    def _lease(self, tx: sa.Connection) -> Sequence[job_store.JobRow]:
        lease = self._leasing.begin(owner=self._owner)
        jobs = store.lease(
            tx, owner=lease.owner, now=lease.start, until=lease.until, limit=BATCH_SIZE
        )
        if jobs:
            lease.taken(len(jobs))
        return jobs

    def _process(self, job: job_store.JobRow) -> bool:
        """Run one iteration of a job; return whether to requeue it. Raise Unavailable.

        An unreadable job is logged and does not block other jobs.
        """
        try:
            with log_fields(job=job["uuid"]):
                update = self.uow.run(lambda tx: self._advance(tx, job["id"]))
        except Unavailable:
            raise  # the database is away: the next jobs would fail too
        except Exception:
            LOG.exception("Unexpected error while processing a driver job", job=job["uuid"])
            return False
        # After the commit: an agent that is notified fetches the desired state at once.
        self._notifier.notify(update.host_generations)
        if update.publish:
            self.wake_publisher()
        return update.requeue

    def stop(self) -> None:
        """Process no more jobs, notify no more agents."""
        self._stopped.set()
        self._notifier.stop()

    def cancel(self, uuid: str) -> None:
        """Cancel a driver job: start no more steps and uncordon the backends of pending steps.

        Steps in progress continue, and the job ends when they have ended. Also cancel a job that
        drains a device, or that is retried after a reboot. Raise Invalid, NotFound, and WrongState
        if the job has ended or is of another kind.
        """
        job_uuid = parse_uuid(uuid, "uuid")

        def write(tx: sa.Connection) -> bool:
            # Jobs of devices and of drivers have one list and one command.
            if cancellation.cancel(tx, job_uuid, self.uow.clock()):
                return True  # its device may have been uncordoned
            job = job_store.lock(tx, job_uuid)
            if job is None:
                raise NotFound(f"no job {job_uuid}", job=job_uuid)
            # Only an open driver job has this key.
            if job["mutex_key"] is None:
                raise WrongState(
                    f"job {job_uuid} is {job['state']} ({job['kind']}): only an open driver "
                    "job, or a job that drains a device, can be cancelled",
                    job=job_uuid,
                )
            steps = store.steps_of_job(tx, job["id"])
            pending = [step for step in steps if step["state"] in rollout.PENDING_STATES]
            # Only an uninstallation has cordoned its backends, with the request.
            uncordoned = job["kind"] == Kind.UNINSTALL and self._step_executor.uncordon(tx, pending)
            store.update_steps(tx, {step["id"]: StepState.SKIPPED for step in pending})
            if any(step["state"] == StepState.IN_PROGRESS for step in steps):
                store.update_arguments(
                    tx, job["id"], {**job["arguments"], "cancelled": True}, self.uow.clock()
                )
            else:
                store.end(tx, job["id"], JobState.CANCELLED, cancellation.BY_OPERATOR)
            return uncordoned

        if self.uow.run_once(write):
            self.wake_publisher()
        LOG.info("Cancelled job", job=job_uuid)

    def get_desired_state(self, host: str, epoch: str) -> dict[str, Any]:
        """Return the desired state of a host. Raise Invalid, and Stale if the epoch is unknown."""
        host, epoch = check_text("host", host), parse_uuid(epoch, "epoch")
        state = self.uow.run(lambda tx: desired_backends.of_host(tx, host, epoch))
        if state is None:
            raise make_stale_error(host, epoch)
        return state.to_dict()

    def record_outcomes(self, host: str, epoch: str, generation: int, outcomes: Any) -> None:
        """Record the outcome of each backend that an agent reports. Raise Invalid, Stale.

        ``generation`` is only validated: each of the ``outcomes`` has its own.
        """
        host, epoch = check_text("host", host), parse_uuid(epoch, "epoch")
        check_integer("generation", generation)
        reported = desired_state.load_outcomes(outcomes)

        def write(tx: sa.Connection) -> tuple[list[int], rollout_steps.DesiredChange]:
            # Jobs before agents, as in ``_advance``.
            job_ids = store.lock_waiting(tx, host)
            agent = desired_backends.lock(tx, host, epoch)
            if agent is None:
                raise make_stale_error(host, epoch)
            desired_backends.record_outcomes(tx, agent["id"], reported)
            steps = store.pending_steps(tx, host, job_ids) if job_ids else []
            judged = _judge(steps, reported)
            failed = [item for item in judged if item.result.state in rollout.FAILED_STATES]
            reverts = [
                rollout_steps.StepRevert(item.step, host, agent["id"], item.result)
                for item in failed
            ]
            change = self._step_executor.roll_back(tx, reverts, {agent["id"]: agent})
            if any(item.step["kind"] == Kind.UNINSTALL for item in failed):
                # The devices of a host that was down were removed with the request, and are added
                # again: the backend stays.
                services.request_report(tx, host)
            for step, result in judged:
                if result.error is None:  # the rollback has written the failed steps
                    store.finish_step(tx, step["id"], step["generation"], result.state)
            jobs = sorted({item.step["job_id"] for item in judged})
            if jobs:
                store.expedite(tx, jobs, self.uow.clock())
            # A job may have ended without this host, whose agent was down: its end is recorded
            # again, with the failure.
            for job in store.ended_jobs(tx, {item.step["job_id"] for item in failed}):
                self._end(tx, job, cancelled=job["state"] == JobState.CANCELLED)
            return jobs, change

        jobs, change = self.uow.run(write)
        self._notifier.notify(change.hosts)
        for outcome in reported:
            if outcome.error is not None:
                LOG.warning(
                    "Agent could not apply the desired state of a backend: %s",
                    outcome.error,
                    host=host,
                    backend=outcome.backend,
                )
        if jobs:
            self.wake()
        if change.devices_changed:
            self.wake_publisher()

    def _advance(self, tx: sa.Connection, job_id: int) -> RolloutUpdate:
        """Advance a job as far as possible now; return the actions that follow the commit.

        Do nothing if the job has ended, or if another conductor has taken it over.
        """
        # Read the job again: its arguments may have changed since it was leased.
        # The lock of the job comes first, so that one conductor at a time plans its steps.
        job = store.lock_leased(tx, job_id, self._owner)
        if job is None:
            return RolloutUpdate()
        steps = store.steps_of_job(tx, job["id"])
        in_progress = [step for step in steps if step["state"] == StepState.IN_PROGRESS]
        # One kind of change an iteration, since each makes the steps that the next one reads
        # outdated: hosts that are lost, steps that are overdue, then the plan.
        return (
            self._leave_lost(tx, job, in_progress)
            or self._roll_back_overdue(tx, job, in_progress)
            or self._follow_plan(tx, job, steps)
        )

    def _leave_lost(
        self, tx: sa.Connection, job: job_store.JobRow, in_progress: Sequence[store.StepRow]
    ) -> RolloutUpdate | None:
        """Make steps whose agents are down wait for their return; return None if there are none."""
        kind = Kind(job["kind"])
        # An update waits for its deadline instead: a change that stops its host must not go on.
        lost = [step for step in in_progress if step["down"] and kind is not Kind.UPDATE]
        if not lost:
            return None
        changed = self._step_executor.leave(tx, kind, lost, ForcedBackends.of_job(job))
        if changed is None:  # none of these agents is down any more
            return None
        store.reschedule(tx, job["id"], self.uow.clock())
        return RolloutUpdate(publish=changed, requeue=True)

    def _roll_back_overdue(
        self, tx: sa.Connection, job: job_store.JobRow, in_progress: Sequence[store.StepRow]
    ) -> RolloutUpdate | None:
        """Roll back steps without an outcome at their deadline; return None if there are none."""
        now = self.uow.clock()
        overdue = [step for step in in_progress if _is_overdue(step, now)][:MAX_OVERDUE]
        if not overdue:
            return None
        seconds = self.conf.conductor.driver_timeout
        error = f"the agent did not report an outcome within {seconds:g} s"
        agents = desired_backends.lock_agents(tx, rollout_steps.agent_ids(overdue))
        result = rollout.failure(Kind(job["kind"]), error)
        change = self._step_executor.roll_back(
            tx,
            [rollout_steps.StepRevert(s, s["host"], s["service_id"], result) for s in overdue],
            agents,
        )
        store.reschedule(tx, job["id"], now)
        return RolloutUpdate(change.hosts, change.devices_changed, requeue=True)

    def _follow_plan(
        self, tx: sa.Connection, job: job_store.JobRow, steps: Sequence[store.StepRow]
    ) -> RolloutUpdate:
        """Plan the steps of a job, and write what the plan says; end the job if it is complete."""
        now = self.uow.clock()
        by_key = {StepKey(step["host"], step["backend"]): step for step in steps}
        forced = ForcedBackends.of_job(job)
        # A pure function of the states: a conductor that was killed left nothing in memory.
        plan = rollout.plan(Kind(job["kind"]), self._make_steps(tx, job, by_key, forced))
        reverted = self._revert(tx, [by_key[key] for key in plan.revert])
        store.update_steps(
            tx, {by_key[k]["id"]: state for k, state in (plan.transitions or {}).items()}
        )
        starting = [by_key[key] for key in plan.start]
        started = self._step_executor.start(tx, job, starting, forced)
        publish = started.devices_changed or reverted.devices_changed
        # If all steps have ended, none was started now: only reverted hosts are notified.
        if plan.succeeded is not None:
            self._end(tx, job, cancelled=bool(job["arguments"].get("cancelled")))
            return RolloutUpdate(reverted.hosts, publish)
        # Some steps have already ended, because their agents are down or were deleted: the steps
        # after them need not wait.
        requeue = len(started.hosts) < len(starting) or bool(plan.revert)
        # Resend the notification of running steps: it, or the agent's reply, may have been lost.
        running = [
            rollout_steps.HostGeneration(step["host"], generation)
            for step in steps
            if step["state"] == StepState.IN_PROGRESS
            and not step["down"]
            and (generation := step["generation"]) is not None
        ]
        store.reschedule(tx, job["id"], now if requeue else now + timedelta(seconds=POLL_INTERVAL))
        return RolloutUpdate([*reverted.hosts, *started.hosts, *running], publish, requeue)

    def _make_steps(
        self,
        tx: sa.Connection,
        job: job_store.JobRow,
        by_key: Mapping[StepKey, store.StepRow],
        forced: ForcedBackends,
    ) -> list[rollout.Step]:
        """Return the steps of a job as the plan needs them."""
        # Only an uninstallation waits for the release of bound handles.
        waits = job["kind"] == Kind.UNINSTALL
        pending = [k for k, step in by_key.items() if step["state"] in rollout.PENDING_STATES]
        bound = store.count_handles_in_use(tx, pending) if waits else {}
        return [
            rollout.Step(
                key.host,
                key.backend,
                StepState(step["state"]),
                bound_handles=bound.get(key, 0),
                agent_down=bool(step["down"]),
                forced=key in forced,
            )
            for key, step in by_key.items()
        ]

    def _revert(
        self, tx: sa.Connection, steps: Sequence[store.StepRow]
    ) -> rollout_steps.DesiredChange:
        """Restore the previous desired state of hosts whose agents are or just were down."""
        agents = desired_backends.lock_agents(tx, rollout_steps.agent_ids(steps))
        result = rollout.StepResult(StepState.SKIPPED)
        reverts = [
            rollout_steps.StepRevert(step, step["host"], step["service_id"], result)
            for step in steps
        ]
        return self._step_executor.roll_back(tx, reverts, agents)

    def _end(self, tx: sa.Connection, job: job_store.JobRow, *, cancelled: bool) -> None:
        """Record the outcome of a job whose steps have ended, or of an ended job anew."""
        # Steps are counted, not read: many hosts that return may fail one after another, and each
        # time all steps would be read.
        counts = store.count_steps(tx, job["id"])
        states = {StepState(row["state"]): row["steps"] for row in counts}
        succeeded = not rollout.FAILED_STATES.intersection(states)
        summary = rollout.summarize(states)
        errors = [
            f"{row['host']} ({row['backend']}): {row['error']}"
            for row in store.find_errors(tx, job["id"], MAX_NAMED)
        ]
        state = JobState.DONE if succeeded else JobState.FAILED
        num_errors = sum(row["errors"] for row in counts)
        named = join_limited(errors, MAX_NAMED, num_errors, separator="; ")
        error = None if succeeded else f"{summary}; {named}"
        if cancelled:
            state, error = JobState.CANCELLED, f"{cancellation.BY_OPERATOR}: {error or summary}"
        store.end(tx, job["id"], state, error)
        LOG.log(
            logging.INFO if succeeded else logging.WARNING,
            "Driver job (%s) ended: %s",
            job["kind"],
            summary or "nothing to do",
            job=job["uuid"],
            driver=job["subject"],
        )


class _JudgedStep(NamedTuple):
    """A step that waited for the outcome of its host's agent, and the result that it has now."""

    step: store.PendingStepRow
    result: rollout.StepResult


def _judge(
    steps: Sequence[store.PendingStepRow], reported: Sequence[desired_state.BackendOutcome]
) -> list[_JudgedStep]:
    """Return the steps that have a result with these outcomes."""
    outcomes = {outcome.backend: outcome for outcome in reported}
    judged: list[_JudgedStep] = []
    for step in steps:
        outcome = outcomes.get(step["backend"])
        if outcome is None:
            continue
        kind, state = Kind(step["kind"]), StepState(step["state"])
        result = rollout.judge_outcome(kind, state, step["generation"], outcome)
        if result is not None:
            judged.append(_JudgedStep(step, result))
    return judged


def _is_overdue(step: store.StepRow, now: datetime) -> bool:
    return bool((step["deadline"] or now) < now)

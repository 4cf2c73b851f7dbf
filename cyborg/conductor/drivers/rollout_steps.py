# SPDX-License-Identifier: Apache-2.0
"""Start and roll back the steps of driver jobs, and notify the agents of new generations.

The caller of a step holds a lock on the job. Where possible, one statement serves all hosts. A
notification may be lost: an agent also learns the generation from the answer to its heartbeat.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import NamedTuple, Self

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.inventory.report_handler import ReportHandler
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.drivers import rollout
from cyborg.core.drivers.desired_state import DesiredBackend
from cyborg.core.drivers.rollout import Kind, StepKey, StepResult, StepState
from cyborg.core.errors import CyborgError
from cyborg.core.log import get_logger
from cyborg.db.backends import desired as desired_backends
from cyborg.db.drivers import rollouts as store
from cyborg.db.jobs.write import JobRow
from cyborg.db.providers import write as providers
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.agent_api import AgentAPI
from cyborg.threads.calls import FanOut

LOG = get_logger(__name__)


class HostGeneration(NamedTuple):
    """A host and the generation of its desired state."""

    host: str
    generation: int


class DesiredChange(NamedTuple):
    """Result of a change of desired states: the hosts to notify, and whether devices changed."""

    hosts: Sequence[HostGeneration] = ()
    devices_changed: bool = False


@dataclass(eq=False)
class GenerationNotifier:
    """Sender of generations to agents, in its own threads."""

    agents: AgentAPI

    def __post_init__(self) -> None:
        self._calls = FanOut("nudge")
        self._lock = threading.Lock()
        # One generation a host: the queue for agents that do not answer must not grow.
        self._pending: dict[str, int] = {}

    def notify(self, host_generations: Sequence[HostGeneration]) -> None:
        """Start to notify hosts of generations; do not wait."""
        with self._lock:
            new = (item.host for item in host_generations if item.host not in self._pending)
            hosts = list(dict.fromkeys(new))
            self._pending |= {item.host: item.generation for item in host_generations}
        self._calls.submit(self._notify_host, hosts)

    def stop(self) -> None:
        """Start no more calls."""
        self._calls.stop()

    # Called in a thread of its own for each host: an agent that does not answer delays no other.
    def _notify_host(self, host: str) -> None:
        with self._lock:
            # The newest generation: one that came while the call waited has replaced the older.
            generation = self._pending.pop(host)
        try:
            self.agents.sync_backends(host=host, generation=generation)
        except CyborgError as exc:
            LOG.info(
                "Cannot notify agent, it will sync with its next heartbeat: %s",
                exc.message,
                host=host,
            )
        except Exception:
            # The thread notifies further hosts.
            LOG.exception("Unexpected error while notifying an agent", host=host)


@dataclass(frozen=True, slots=True)
class ForcedBackends:
    """The backends of a job whose removal waits neither for bound handles nor for its agent.

    ``keys`` is None for all backends of the job.
    """

    keys: frozenset[StepKey] | None

    @classmethod
    def of_job(cls, job: JobRow) -> Self:
        """Return the backends that the arguments of a job name."""
        # A later request may force single backends of an open job, which the list then names.
        pairs = job["arguments"].get("forced", ())
        is_all = job["arguments"].get("force")
        return cls(None if is_all else frozenset(StepKey(*pair) for pair in pairs))

    def __contains__(self, key: StepKey) -> bool:
        """Return whether a backend is forced."""
        return self.keys is None or key in self.keys


@dataclass(frozen=True, slots=True)
class StepRevert:
    """A step to roll back, with its result, its host and the row id of the host's agent."""

    step: store.StepRow | store.PendingStepRow
    host: str
    service_id: int | None
    result: StepResult


@dataclass(frozen=True)
class StepExecutor:
    """Writer of the desired state of hosts for the steps of a job."""

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    notifications: NotificationBuilder

    def start(
        self,
        tx: sa.Connection,
        job: JobRow,
        steps: Sequence[store.StepRow],
        forced: ForcedBackends,
    ) -> DesiredChange:
        """Write the desired state of the hosts of steps; return what follows from it.

        The step of a host whose agent is down waits for its return. If its backend is ``forced`` to
        be uninstalled, the devices are removed at once.
        """
        if not steps:
            return DesiredChange()
        now = self.uow.clock()
        agents = desired_backends.lock_agents(tx, agent_ids(steps))
        desired_backends.bump_generation(tx, agents)
        deadline = now + timedelta(seconds=self.conf.conductor.driver_timeout)
        hosts: set[str] = set()
        notified: list[HostGeneration] = []
        removed: list[StepKey] = []
        for step in steps:
            # Without a row id the agent was deleted; no row has the id 0.
            agent = agents.get(step["service_id"] or 0)
            error = _write_desired(tx, job, step, agent)
            if agent is None or error is not None:
                store.update_step(tx, step["id"], StepState.FAILED, error=error)
                continue
            key, generation = StepKey(step["host"], step["backend"]), _next_generation(agent)
            hosts.add(key.host)
            if agent["down_since"] is None:
                values = {"generation": generation, "deadline": deadline}
                store.update_step(tx, step["id"], StepState.IN_PROGRESS, **values)
                notified.append(HostGeneration(key.host, generation))
                continue
            store.update_step(tx, step["id"], StepState.PENDING_AGENT, generation=generation)
            if job["kind"] == Kind.UNINSTALL and key in forced:
                removed.append(key)
        devices_changed = self._apply_cordon(tx, hosts)
        for key in removed:
            devices_changed |= self._remove_backend(tx, key, now)
        return DesiredChange(notified, devices_changed)

    def leave(
        self,
        tx: sa.Connection,
        kind: Kind,
        steps: Sequence[store.StepRow],
        forced: ForcedBackends,
    ) -> bool | None:
        """Make steps in progress whose agents were marked down wait for the return of the agents.

        Return whether devices have changed, None if no agent is down.
        """
        agents = desired_backends.lock_agents(tx, agent_ids(steps))
        # Read again, locked: an agent may have returned since the caller read the steps.
        down = {id_ for id_, agent in agents.items() if agent["down_since"] is not None}
        lost = [step for step in steps if step["service_id"] in down]
        changed = False
        for step in lost:
            store.update_step(tx, step["id"], StepState.PENDING_AGENT, deadline=None)
            key = StepKey(step["host"], step["backend"])
            if kind is Kind.UNINSTALL and key in forced:
                changed |= self._remove_backend(tx, key, self.uow.clock())
        return changed if lost else None

    def _remove_backend(self, tx: sa.Connection, key: StepKey, now: datetime) -> bool:
        """Remove the devices of a backend; return whether there were any in Placement."""
        outcome = ReportHandler(self.conf, self.notifications).remove_backend(
            tx, key.host, key.backend, now
        )
        for remark in outcome.remarks:
            LOG.warning("%s", remark.text, host=key.host, **remark.fields)
        return outcome.stale_providers > 0

    def roll_back(
        self,
        tx: sa.Connection,
        reverts: Sequence[StepRevert],
        agents: Mapping[int, desired_backends.AgentRow],
    ) -> DesiredChange:
        """Restore the previous desired state of hosts, unless a later job has changed it.

        ``agents`` has the locked rows of the agents of the steps.
        """
        if not reverts:
            return DesiredChange()
        desired_backends.bump_generation(tx, agents)
        hosts: set[str] = set()
        generations: dict[str, int] = {}  # by host, which may have several steps
        for item in reverts:
            step, result = item.step, item.result
            store.update_step(tx, step["id"], result.state, error=result.error, deadline=None)
            # A deleted agent has no desired state that could be restored.
            if item.service_id is None or (agent := agents.get(item.service_id)) is None:
                continue
            generation = _next_generation(agent)
            previous = _previous_state(step)
            # To restore is a change of the desired state, too: the host gets a new generation.
            restored = None if previous is None else replace(previous, generation=generation)
            reverted = desired_backends.revert(
                tx, agent["id"], step["backend"], step["generation"], restored
            )
            if reverted and previous is not None:
                # The step that wrote this state is complete with the outcome of its new generation.
                store.follow_revert(tx, item.host, step["backend"], previous.generation, generation)
            hosts.add(item.host)
            # An agent that is down learns the generation from the answer to its heartbeat.
            if agent["down_since"] is None:
                generations[item.host] = generation
        notified = [HostGeneration(host, number) for host, number in generations.items()]
        return DesiredChange(notified, self._apply_cordon(tx, hosts))

    def uncordon(self, tx: sa.Connection, steps: Sequence[store.StepRow]) -> bool:
        """Uncordon the backends of these steps; return whether this changed any device."""
        # Agents are locked before the devices that they cordon, as in a report.
        desired_backends.lock_agents(tx, agent_ids(steps))
        previous = [
            desired_backends.PreviousState(step["service_id"], step["backend"], step["previous"])
            for step in steps
        ]
        desired_backends.uncordon(tx, previous)
        return self._apply_cordon(tx, {step["host"] for step in steps})

    def _apply_cordon(self, tx: sa.Connection, hosts: Collection[str]) -> bool:
        """Apply the cordons of backends to the devices of hosts; return whether any changed."""
        if not hosts or not desired_backends.sync_cordon(tx, hosts, self.uow.clock()):
            return False
        providers.mark_stale_of_hosts(tx, sorted(hosts), self.uow.clock())
        return True


def _previous_state(step: store.StepRow | store.PendingStepRow) -> DesiredBackend | None:
    """Return the desired state of the backend of a step before the job, None if it had none."""
    body = step["previous"]
    return None if body is None else DesiredBackend.from_dict(body)


def _next_generation(agent: desired_backends.AgentRow) -> int:
    """Return the generation of an agent's host, which was raised after the row was read."""
    return agent["desired_generation"] + 1


def _write_desired(
    tx: sa.Connection, job: JobRow, step: store.StepRow, agent: desired_backends.AgentRow | None
) -> str | None:
    """Write the desired state of the backend of a step; return why not, None if it was written."""
    if agent is None:
        return "its agent was deleted"
    kind, backend = Kind(job["kind"]), step["backend"]
    previous, generation = _previous_state(step), _next_generation(agent)
    desired = rollout.desired_backend(
        kind,
        driver=job["subject"],
        arguments=job["arguments"],
        backend=backend,
        previous=previous,
        generation=generation,
    )
    # A name has one driver on a host; a job of another driver may have taken it since the request.
    if not desired_backends.write(tx, agent["id"], desired):
        return f"backend {backend} now has another driver; choose another name"
    return None


def agent_ids(steps: Sequence[store.StepRow]) -> list[int]:
    """Return the row ids of the agents of steps; leave out agents that were deleted."""
    return [step["service_id"] for step in steps if step["service_id"] is not None]

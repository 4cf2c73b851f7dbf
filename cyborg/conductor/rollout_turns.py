# SPDX-License-Identifier: Apache-2.0
"""What is written when the turn of a host has come, and when that failed: parts of transactions.

The caller holds the job. Statements are for all hosts of a turn where that can be.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log

from cyborg.conductor import reports
from cyborg.conductor.notices import Notices
from cyborg.conductor.nudges import Nudge
from cyborg.core import rollout, wanted
from cyborg.core.rollout import Kind, StepState
from cyborg.db.store import providers
from cyborg.db.store import rollouts as store
from cyborg.db.store import wanted as wishes

LOG = log.getLogger(__name__)


class Turns:
    """How what is wanted of hosts is changed, and taken back."""

    def __init__(self, conf: cfg.ConfigOpts, notices: Notices, now: Callable[[], datetime]) -> None:
        self._conf = conf
        self._notices = notices
        self._now = now

    def begin(
        self,
        tx: sa.Connection,
        job: Any,
        steps: Sequence[Any],
        given_up: Collection[tuple[str, str]],
    ) -> tuple[list[Nudge], bool]:
        """Write what is wanted of hosts whose turn has come; tell whether that changes devices.

        What is ``given_up`` does not wait for its agent.
        """
        if not steps:
            return [], False
        kind, asked, now = Kind(job["kind"]), job["arguments"], self._now()
        agents = wishes.lock_all(tx, agents_of(steps))
        wishes.raise_(tx, agents)
        deadline = now + timedelta(seconds=self._conf.conductor.driver_timeout)
        rolling: dict[str, int] = {}
        nudges: list[Nudge] = []
        gone: list[tuple[str, str]] = []
        for step in steps:
            agent, host, backend = agents.get(step["service_id"]), step["host"], step["backend"]
            if agent is None:
                error = "its agent is not known any more"
                store.change(tx, step["id"], StepState.FAILED, error=error)
                continue
            revision = agent["wanted"] + 1
            before = None if step["before"] is None else wanted.load(step["before"])
            wish = rollout.wish(kind, job["subject"], asked, backend, before, revision)
            if not wishes.write(tx, agent["id"], wish):
                error = f"backend {backend} is another driver's by now: name another"
                store.change(tx, step["id"], StepState.FAILED, error=error)
                continue
            rolling[host] = revision
            if agent["down_since"] is None:
                values = {"revision": revision, "deadline": deadline}
                store.change(tx, step["id"], StepState.ROLLING, **values)
                nudges.append((host, revision))
                continue
            store.change(tx, step["id"], StepState.AWAY, revision=revision)
            if kind is Kind.UNINSTALL and (host, backend) in given_up:
                gone.append((host, backend))
        changed = self._closed(tx, rolling)
        for host, backend in gone:
            changed |= self._forget(tx, host, backend, now)
        return nudges, changed

    def _forget(self, tx: sa.Connection, host: str, backend: str, now: datetime) -> bool:
        remember = self._conf.conductor.remember > 0
        lost = reports.forget(tx, host, backend, now, self._notices, remember=remember)
        for line in lost.remarks:
            LOG.warning("Host %s: %s", host, line)
        return lost.providers > 0

    def back(
        self,
        tx: sa.Connection,
        failed: Sequence[tuple[Any, str]],
        agents: Mapping[int, sa.RowMapping],
    ) -> bool:
        """Have hosts go back to what they had; tell whether that opens or closes devices.

        ``failed`` are steps with what was wrong of each, ``agents`` those of them that are locked.
        """
        if not failed:
            return False
        wishes.raise_(tx, agents)
        hosts = set()
        for step, error in failed:
            install = step["kind"] == Kind.INSTALL
            state = StepState.FAILED if install else StepState.ROLLED_BACK
            store.change(tx, step["id"], state, error=error, deadline=None)
            if (agent := agents.get(step["service_id"])) is None:
                continue
            before = None
            if step["before"] is not None:
                before = replace(wanted.load(step["before"]), revision=agent["wanted"] + 1)
            wishes.take_back(tx, agent["id"], step["backend"], step["revision"], before)
            hosts.add(step["host"])
        return self._closed(tx, hosts)

    def open_again(self, tx: sa.Connection, steps: Sequence[sa.RowMapping]) -> bool:
        """Take back that backends were closed; tell whether that opens devices."""
        wishes.lock_all(tx, agents_of(steps))
        wishes.restore(tx, [(s["service_id"], s["backend"], s["before"]) for s in steps])
        return self._closed(tx, {step["host"] for step in steps})

    def _closed(self, tx: sa.Connection, hosts: Collection[str]) -> bool:
        """Have devices of hosts open or closed as is wanted; tell whether that changes any."""
        if not hosts or not wishes.withdraw(tx, hosts):
            return False
        providers.mark_hosts(tx, sorted(hosts), self._now())
        return True


def agents_of(steps: Sequence[Any]) -> list[int]:
    """Return the row ids of the agents that are known of steps."""
    return [step["service_id"] for step in steps if step["service_id"] is not None]

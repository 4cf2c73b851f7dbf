# SPDX-License-Identifier: Apache-2.0
"""Failure detector of agents: cordon the hosts of agents that stop sending heartbeats.

A host is uncordoned when its agent sends heartbeats again. Before it marks an agent down, a
conductor verifies that it can receive its own heartbeats over the bus. They take the same path as
the heartbeats of agents: through the broker, to any conductor, into the database. Each heartbeat
sets the deadlines of the next one, which follow from the interval of heartbeats.

"Down" has two meanings. A daemon *is down* when its deadline ``down_at`` has passed: lists show
that, and it needs no writer. An agent *is marked down* by ``down_since``, which only this detector
sets for an agent that runs: that cordons its host, and any decision about a host takes the mark.
After an outage of the conductors or the broker, the deadlines of all agents have passed, and none
is marked. An agent that never sent a heartbeat is inserted with the mark when its host is removed
(``db.services.write.insert_absent_agent``).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core import hosts as core
from cyborg.core.log import get_logger
from cyborg.core.notification import Event
from cyborg.core.text import join_limited, to_iso
from cyborg.db.outbox import write as outbox
from cyborg.db.providers import write as providers
from cyborg.db.services import write as services
from cyborg.db.services.write import HeartbeatTimes
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.threads.failures import RateLimitedLogger

LOG = get_logger(__name__)

# Seconds for which the number of agents is used. A new count costs a query. The interval may lag:
# the deadlines of a heartbeat are those of the interval that its agent was given.
MAX_COUNT_AGE = 30.0

# Agents that one transaction marks down.
BATCH_SIZE = 1000
# Hosts that one log line names.
MAX_NAMED = 20


@dataclass(eq=False)
class HeartbeatInterval:
    """Interval that this conductor gives to agents. It follows the numbers of the daemons.

    ``clock`` returns monotonic seconds; ``seconds`` is the time between two heartbeats of an agent.
    """

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._options = self.conf.conductor
        self._counted_at = float("-inf")
        self.seconds: float = self._options.hello_interval

    def sweep(self) -> int:
        """Count the daemons if the last count is old; return 1 if the interval has changed."""
        if self.clock() - self._counted_at < MAX_COUNT_AGE:
            return 0
        now, options = self.uow.clock(), self._options
        daemons = self.uow.run(lambda tx: services.count_up(tx, now))
        self._counted_at = self.clock()
        # The workers of one host share one service; all hosts are expected to run as many.
        processes = daemons["conductors"] * options.workers
        minimum, maximum = options.hello_interval, options.max_hello_interval
        previous = self.seconds
        self.seconds = core.choose_interval(daemons["agents"], processes, minimum, maximum)
        if self.seconds == previous:
            return 0
        LOG.info(
            "Heartbeat interval of the agents is %.1f s instead of %.1f s: %d agents, %d conductor "
            "processes",
            self.seconds,
            previous,
            daemons["agents"],
            processes,
        )
        return 1

    def agent_times(self, now: datetime) -> HeartbeatTimes:
        """Return the time of an agent's heartbeat, with the deadlines of the interval."""
        return self._times(now, self.seconds)

    def service_times(self, now: datetime) -> HeartbeatTimes:
        """Return the time of another daemon's heartbeat, with its deadlines."""
        return self._times(now, self._options.hello_interval)

    def _times(self, now: datetime, interval: float) -> HeartbeatTimes:
        options = self._options
        late_at = now + core.heartbeat_timeout(interval, options.late_heartbeats)
        down_at = now + core.heartbeat_timeout(interval, options.down_heartbeats)
        return {"last_seen_at": now, "late_at": late_at, "down_at": down_at}


@dataclass(eq=False)
class FailureDetector:
    """Failure detector of one conductor, with the check of its own heartbeats.

    ``clock`` returns monotonic seconds.
    """

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    notifications: NotificationBuilder
    wake_publisher: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        options = self.conf.conductor
        # Seconds without an own heartbeat, and by which a clock may step: after more of either
        # nothing is concluded from the heartbeats before.
        self._gap = core.heartbeat_timeout(
            options.hello_interval, options.late_heartbeats
        ).total_seconds()
        self._step = max(1.0, options.hello_interval)
        self._grace = timedelta(seconds=options.broker_reconnect_grace)
        # Written by the thread of the heartbeats, read by that of the sweeps: a value that does not
        # change, so that to read it once needs no lock.
        self._self_check: core.SelfCheck | None = None
        self._rate_limited_log = RateLimitedLogger(self.clock, LOG)

    def self_heartbeat(self, send: Callable[[], Mapping[str, Any]]) -> None:
        """Send this conductor's own heartbeat over the bus and record whether it arrived.

        ``send`` returns the answer, whose ``now`` is the time of the conductor that received the
        heartbeat. Raise any exception of ``send``.
        """
        sent_at = self.uow.clock()
        try:
            answer = send()
        except BaseException:
            # Also for the end of the process: a heartbeat that did not arrive proves nothing about
            # the bus.
            self._self_check = None
            raise
        received_at, monotonic_now = self.uow.clock(), self.clock()
        # That conductor receives heartbeats of agents too. If its clock differs from this one,
        # agents that are up would look unreachable.
        skew = _clock_skew(answer.get("now"), sent_at, received_at)
        if skew > self._step:
            self._self_check = None
            self._rate_limited_log.warn(
                f"The clock of another conductor differs by {skew:.0f} s, more than one heartbeat "
                "interval: no agent is marked down; check the time synchronisation of the database "
                "servers"
            )
            return
        self._rate_limited_log.recovered("Clock synchronisation of the conductors")
        self._self_check = core.record(
            self._self_check, monotonic_now, received_at, self._gap, self._step
        )

    def sweep(self) -> int:
        """Mark unreachable agents down and return their number.

        Executes one statement if there are no such agents, else a fixed number for each BATCH_SIZE
        agents.
        """
        now, monotonic_now = self.uow.clock(), self.clock()
        # Each agent has the deadline of the interval that it was given. It is marked down only if
        # this conductor could have received its heartbeats for as long.
        observed = core.observed_seconds(
            self._self_check, monotonic_now, now, self._gap, self._step
        )
        # The longest deadline of an agent whose silence can be judged.
        max_timeout = timedelta(seconds=observed) - self._grace
        # Nothing can be concluded yet: this conductor has just started, or was cut off from the
        # broker.
        if max_timeout <= timedelta():
            return 0
        marked: list[services.DaemonRow] = []
        # In batches: after an outage of the broker thousands of agents may be down, and one
        # transaction would lock all of their devices.
        try:
            while batch := self.uow.run(lambda tx: self._mark_down(tx, now, max_timeout)):
                marked += batch
        finally:
            # Also if a later batch fails: the next sweep sees these agents as marked.
            self._announce(marked, now)
        return len(marked)

    def _announce(self, marked: Sequence[services.DaemonRow], now: datetime) -> None:
        """Log the agents that were marked down, and wake the publisher."""
        if marked:
            hosts = sorted(row["host"] for row in marked)
            LOG.warning(
                "%d agents marked down (no heartbeat for %.0f s at least), devices cordoned on: %s",
                len(marked),
                min((now - row["last_seen_at"]).total_seconds() for row in marked),
                join_limited(hosts, MAX_NAMED),
                host=hosts,
            )
            self.wake_publisher()

    def _mark_down(
        self, tx: sa.Connection, now: datetime, max_timeout: timedelta
    ) -> Sequence[services.DaemonRow]:
        """Mark a batch of unreachable agents down, with their providers; return their rows."""
        marked = services.mark_down(tx, now, max_timeout, BATCH_SIZE)
        if marked:
            providers.mark_stale_of_hosts(tx, [row["host"] for row in marked], now)
            payloads = [_payload(row, row["last_seen_at"]) for row in marked]
            outbox.add_all(tx, self.notifications.build_messages(Event.SERVICE_DOWN, payloads))
        return marked


def mark_up(
    tx: sa.Connection, row: services.DaemonRow, notices: NotificationBuilder, now: datetime
) -> None:
    """Mark an agent up that was marked down, and record the notification.

    The caller has locked the agent's row, marks the providers of the host stale and wakes
    the publisher.
    """
    # In the transaction of the heartbeat, so that no heartbeat leaves its host cordoned.
    services.mark_up(tx, row["id"])
    outbox.add_all(tx, notices.build_messages(Event.SERVICE_UP, [_payload(row, now)]))


def _payload(row: services.DaemonRow, last_seen_at: datetime) -> dict[str, Any]:
    """Return the payload of the notification that an agent is down or up; its times are UTC."""
    timestamps = {
        name: to_iso(time_)
        for name, time_ in (("last_seen_at", last_seen_at), ("down_since", row["down_since"]))
        if time_ is not None
    }
    return {"uuid": row["uuid"], "binary": row["binary"], "hostname": row["host"], **timestamps}


def _clock_skew(timestamp: Any, sent_at: datetime, received_at: datetime) -> float:
    """Return by how many seconds a timestamp is outside of an interval.

    Return 0 if the timestamp is missing or malformed.
    """
    try:
        time_ = datetime.fromisoformat(timestamp)
        return max((sent_at - time_).total_seconds(), (time_ - received_at).total_seconds(), 0.0)
    except (TypeError, ValueError):
        # A conductor of the previous release sends no time.
        return 0.0

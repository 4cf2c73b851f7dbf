# SPDX-License-Identifier: Apache-2.0
"""Agents that fall silent: what their hosts have is closed, and opened when they speak again.

A conductor holds nobody for down before it knows that the silence is not of its own making. Its own
hello goes the way of every agent's, by the broker to whichever conductor takes it and into the
database; only when these have come back for longer than an agent may be silent, is it the agent.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log
from oslo_utils import timeutils

from cyborg.conductor.notices import Notices
from cyborg.conductor.periodic import Complaints
from cyborg.core import liveness
from cyborg.core.notification import Event
from cyborg.db.store import outbox, providers
from cyborg.db.store import services as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

AT_ONCE = 1000  # agents that one transaction holds for down
MAX_NAMED = 20  # hosts that one line of the log names


class Watch:
    """One conductor's ear: what it hears of itself, and what it may conclude of others."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        wake_publisher: Callable[[], None] = lambda: None,
        notices: Notices | None = None,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``now`` is the database's kind of time, naive UTC; ``clock`` counts seconds upwards."""
        ours = conf.conductor
        self._uow = uow
        self._wake_publisher = wake_publisher
        self._notices = notices or Notices(conf, now=now)
        self._now = now
        self._clock = clock
        self._limit = liveness.limit(ours.hello_interval, ours.down_after)
        self._gap = liveness.limit(ours.hello_interval, ours.late_after).total_seconds()
        self._step = max(1.0, ours.hello_interval)
        self._window = self._limit.total_seconds() + ours.reconnect_grace
        self._lock = threading.Lock()
        self._hearing: liveness.Hearing | None = None
        self._complaints = Complaints(clock)

    def hello(self, say: Callable[[], Mapping[str, Any]]) -> None:
        """Say our own hello by way of the bus and note how that went. Raises what it raises.

        The answer's ``now`` is the time where it was heard: agents are heard there too, and two
        clocks that differ would make living agents look silent.
        """
        before = self._now()
        try:
            answer = say()
        except BaseException:
            self._note(None)
            raise
        after, clock = self._now(), self._clock()
        apart = _apart(answer.get("now"), before, after)
        if apart > self._step:
            self._note(None)
            self._complaints.wrong(
                f"A conductor's clock is {apart:.0f} s from this one's: no agent is held for down "
                "while the conductors' clocks differ by more than a hello; are they synchronised?"
            )
            return
        self._complaints.right("The agreement of the conductors' clocks")
        with self._lock:
            self._hearing = liveness.heard(self._hearing, clock, after, self._gap, self._step)

    def sweep(self) -> int:
        """Hold for down the agents that are silent for too long; return how many those are.

        One statement while there are none, and a fixed number for each AT_ONCE of them.
        """
        now, clock = self._now(), self._clock()
        with self._lock:
            hearing = self._hearing
        if not liveness.may_judge(hearing, clock, now, self._gap, self._step, self._window):
            return 0
        fallen: list[Any] = []
        while some := self._uow.run(lambda tx: self._fell(tx, now)):
            fallen += some
        if fallen:
            LOG.warning(
                "%s agents are down, silent for more than %g s, and what their hosts have is "
                "closed: %s",
                len(fallen),
                self._limit.total_seconds(),
                _named([row["host"] for row in fallen]),
            )
            self._wake_publisher()
        return len(fallen)

    def _note(self, hearing: liveness.Hearing | None) -> None:
        with self._lock:
            self._hearing = hearing

    def _fell(self, tx: sa.Connection, now: datetime) -> Sequence[sa.RowMapping]:
        fallen = store.fall(tx, now - self._limit, now, AT_ONCE)
        if fallen:
            providers.mark_hosts(tx, [row["host"] for row in fallen], now)
            told = self._notices.rows(Event.SERVICE_DOWN, [_told(row) for row in fallen])
            outbox.add_all(tx, told)
        return fallen


def returned(tx: sa.Connection, row: Mapping[Any, Any], notices: Notices, now: datetime) -> None:
    """Let an agent that was held for down count again; its row is locked.

    The caller marks the host's providers and tells the publisher.
    """
    store.rise(tx, row["id"])
    outbox.add_all(tx, notices.rows(Event.SERVICE_UP, [_told({**row, "last_seen_at": now})]))


def _told(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an agent's row as its notification has it; its moments are UTC."""
    moments = {
        name: row[name].replace(tzinfo=UTC).isoformat() for name in ("last_seen_at", "down_since")
    }
    return {"uuid": row["uuid"], "binary": row["binary"], "hostname": row["host"], **moments}


def _apart(theirs: Any, before: datetime, after: datetime) -> float:
    """Return how many seconds a moment lies outside of two others; 0 for none that can be read."""
    try:
        moment = datetime.fromisoformat(theirs)
        return max((before - moment).total_seconds(), (moment - after).total_seconds(), 0.0)
    except (TypeError, ValueError):
        # A conductor of the release before says no time.
        return 0.0


def _named(hosts: Sequence[str]) -> str:
    more = [f"{len(hosts) - MAX_NAMED} more"] if len(hosts) > MAX_NAMED else []
    return ", ".join([*sorted(hosts)[:MAX_NAMED], *more])

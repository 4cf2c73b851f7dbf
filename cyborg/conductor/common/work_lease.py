# SPDX-License-Identifier: Apache-2.0
"""Leases of database rows: which conductor works on a row, for which purpose, and until when.

Jobs, driver rollouts, messages, providers, attachments and audits are done by any conductor. Each
worker takes its rows in one transaction, which writes ``owner`` and ``lease_until``, works outside
of a transaction, and writes the result only where it still is the owner::

    begin     owner and end for the rows; the worker's transaction takes those that are due
    taken     logged with the number of rows, and how long they have waited
    has_time  before each request of the work: no request may run when the lease has ended
    renew     where the work may take longer than the lease
    ended     logged with how long the rows were held

A lease that is not renewed expires, so a conductor that is killed needs no cleanup: another one
takes the rows. Alternative not taken: a lock in etcd or Redis, which could be lost while the row
says otherwise, and which every installation would have to run.

An owner is ``<host>:<process id>:<random>:<number>``, so that a row names the process that works on
it. The random part differs for each process, since hosts reuse process ids.
"""

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import uuid4

from oslo_config import cfg

from cyborg.core.log import get_logger

LOG = get_logger(__name__)

MAX_HOST = 200  # characters of a host; the column has 255
RENEW_SHARE = 1 / 3  # of a lease, after which it is renewed: two renewals may fail


class LeaseLost(Exception):
    """Another conductor has taken over the work, or this conductor is stopping. Not an error."""


@dataclass(slots=True)
class WorkLease:
    """A lease of rows. ``purpose`` names the work in each log line.

    ``start`` and ``until`` are in the database's time, and are written to the rows; the monotonic
    clock limits the work. ``begun`` is its reading before ``start``, ``end`` when the lease ends on
    that clock.
    """

    purpose: str
    owner: str
    seconds: float
    request_timeout: float
    start: datetime
    now: Callable[[], datetime]
    clock: Callable[[], float]
    begun: float
    renewed: float = field(init=False)

    def __post_init__(self) -> None:
        self.renewed = self.begun

    @property
    def until(self) -> datetime:
        """Return the end of the lease before any renewal."""
        return self.start + timedelta(seconds=self.seconds)

    @property
    def end(self) -> float:
        """Return the end of the lease on the monotonic clock."""
        return self.renewed + self.seconds

    def has_time(self) -> bool:
        """Return whether a request that starts now, and times out, ends within the lease."""
        return self.clock() + self.request_timeout <= self.end

    def needs_renewal(self) -> bool:
        """Return whether so much of the lease is over that the rows need a later end."""
        return self.clock() - self.renewed >= RENEW_SHARE * self.seconds

    def renew(self, write: Callable[[datetime], bool]) -> None:
        """Write a later end with ``write``, which returns False for another owner's row.

        Raise LeaseLost.
        """
        # Measured before the write: the lease must not seem longer here than in the row.
        renewed = self.clock()
        if not write(self.now() + timedelta(seconds=self.seconds)):
            held = self.clock() - self.begun
            LOG.info("Lease of %s lost after %.1f s, another conductor goes on", self.purpose, held)
            raise LeaseLost
        self.renewed = renewed

    def taken(self, rows: int, due: datetime | None = None) -> None:
        """Log that the worker has taken rows, of which the oldest has been due since ``due``."""
        awaited = 0.0 if due is None else max(0.0, (self.start - due).total_seconds())
        LOG.debug("Lease of %s: took %d row(s) after %.1f s", self.purpose, rows, awaited)

    def ended(self) -> None:
        """Log that the worker has written its results."""
        held = self.clock() - self.begun
        LOG.debug("Lease of %s ended, held for %.1f s", self.purpose, held)


class Leasing:
    """The leases of one worker."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        purpose: str,
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float] = time.monotonic,
        requests: int = 0,
    ) -> None:
        """A lease lasts ``[conductor] lease_timeout``, or ``requests`` that time out if longer.

        ``now`` returns the database's time (naive UTC), ``clock`` monotonic seconds.
        """
        self._conf = conf
        self._purpose = purpose
        self._now = now
        self._clock = clock
        self._requests = requests

    def begin(self, *, owner: str | None = None, request_timeout: float = 0.0) -> WorkLease:
        """Return a lease that begins now, of a new owner unless one is given.

        ``request_timeout`` limits one request of the work, in seconds.
        """
        # The option can change while the service runs.
        seconds = max(self._conf.conductor.lease_timeout, self._requests * request_timeout)
        # Read before the database's time: the lease must not seem longer here than in the row.
        begun = self._clock()
        return WorkLease(
            purpose=self._purpose,
            owner=owner or new_owner(self._conf.host),
            seconds=seconds,
            request_timeout=request_timeout,
            start=self._now(),
            now=self._now,
            clock=self._clock,
            begun=begun,
        )


class _Process:
    """The identity of this process, and the number of its next lease owner."""

    def __init__(self) -> None:
        self.id = f"{os.getpid()}:{uuid4().hex[:12]}"
        self.numbers = itertools.count(1)


_process = _Process()


def process_owner(host: str) -> str:
    """Return the common prefix of all lease owners of this process."""
    return f"{host[:MAX_HOST]}:{_process.id}"


def new_owner(host: str) -> str:
    """Return a unique lease owner: no other call in any process returns the same. Thread-safe."""
    return f"{process_owner(host)}:{next(_process.numbers)}"


def _replace_after_fork() -> None:
    global _process  # noqa: PLW0603  a worker must not use the owners of its parent
    _process = _Process()


os.register_at_fork(after_in_child=_replace_after_fork)

# SPDX-License-Identifier: Apache-2.0
"""Rows that nothing needs any more some time after their end, and their deletion in batches.

The sweeps of the conductors and ``cyborg-dbsync purge`` delete them. Custody records have chains
and a retention of their own: ``conductor.custody.sealer``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from cyborg.core.audit.sources import OPEN as OPEN_AUDITS
from cyborg.core.drivers.rollout import StepState
from cyborg.core.hosts import AGENT
from cyborg.core.jobs.job import JobState
from cyborg.db import schema
from cyborg.db.discoveries import write as discoveries
from cyborg.db.drivers import rollouts
from cyborg.db.unit_of_work import UnitOfWork

# State of a message of the outbox that is no longer sent.
DEAD = "dead"

# As a list, not as "not open", for which an index on the state is of no use.
_ENDED_JOBS = sorted(state for state in JobState if state is not JobState.OPEN)


@dataclass(frozen=True)
class OldRows:
    """Old rows of a table: those for which ``condition`` of a time is true.

    Without a condition they are those that were created before. Such rows never change, so that the
    oldest have the lowest ids, and only these are read. ``after_purge`` changes the rows of other
    tables that depended on deleted rows.
    """

    table: sa.Table
    condition: Callable[[datetime], sa.ColumnElement[bool]] | None = None
    after_purge: Callable[[sa.Connection], None] | None = None

    def is_old(self, cutoff: datetime) -> sa.ColumnElement[bool]:
        """Return the condition that a row is older than ``cutoff``."""
        if self.condition is None:
            return self.table.c.created_at < cutoff
        return self.condition(cutoff)

    def purge(self, tx: sa.Connection, cutoff: datetime, limit: int) -> int:
        """Delete up to ``limit`` rows that are older than ``cutoff``; return their number."""
        c, is_old = self.table.c, self.is_old(cutoff)
        old_ids = sa.select(c.id).where(is_old).limit(limit)
        # Only the rows with the lowest ids are read: see the class.
        if self.condition is None:
            oldest = sa.select(c.id, c.created_at).order_by(c.id).limit(limit).subquery()
            old_ids = sa.select(oldest.c.id).where(oldest.c.created_at < cutoff)
        ids = tx.scalars(old_ids).all()
        # The condition again: a message may be retried, and a daemon may return, meanwhile.
        query = sa.delete(self.table).where(c.id.in_(sorted(ids)), is_old)
        deleted = tx.execute(query).rowcount if ids else 0
        if deleted and self.after_purge is not None:
            self.after_purge(tx)
        return deleted

    def purge_batches(self, uow: UnitOfWork, cutoff: datetime, size: int, max_batches: int) -> int:
        """Delete old rows in up to ``max_batches`` transactions of ``size`` rows.

        Return their number. This is for a kind whose rows may be added faster than one transaction
        of each sweep deletes them.
        """
        deleted = 0
        for _ in range(max_batches):
            batch = uow.run(lambda tx: self.purge(tx, cutoff, size))
            deleted += batch
            if batch < size:
                break
        return deleted

    def count(self, tx: sa.Connection, cutoff: datetime) -> int:
        """Return the number of rows that are older than ``cutoff``."""
        query = sa.select(sa.func.count()).select_from(self.table).where(self.is_old(cutoff))
        return tx.scalar(query) or 0


def _skip_steps_without_agent(tx: sa.Connection) -> None:
    """Set the steps that wait for the return of deleted agents to SKIPPED."""
    # By the host, not by the deleted rows: the host may have got a new agent meanwhile.
    has_agent = sa.exists().where(
        schema.services.c.host == schema.job_steps.c.host, schema.services.c.binary == AGENT
    )
    waiting = schema.job_steps.c.state == str(StepState.PENDING_AGENT)
    hosts = tx.scalars(
        sa.select(schema.job_steps.c.host).distinct().where(waiting, ~has_agent)
    ).all()
    rollouts.skip_pending_agent(tx, hosts)


# A job for which an ARQ or a deployable waits is not deleted: arqs.job_id has RESTRICT, and a
# deployable without its job would be offered before it was reported again. Nor is one with a step
# that waits for the return of an agent: a change that fails then is rolled back by the step.
JOBS = OldRows(
    schema.jobs,
    lambda cutoff: sa.and_(
        schema.jobs.c.state.in_(_ENDED_JOBS),
        schema.jobs.c.next_try_at < cutoff,
        ~sa.exists().where(schema.arqs.c.job_id == schema.jobs.c.id),
        ~sa.exists().where(schema.deployables.c.job_id == schema.jobs.c.id),
        ~sa.exists().where(
            schema.job_steps.c.job_id == schema.jobs.c.id,
            schema.job_steps.c.state == str(StepState.PENDING_AGENT),
            schema.services.c.host == schema.job_steps.c.host,
            schema.services.c.binary == AGENT,
        ),
    ),
)
AUDITS = OldRows(
    schema.audits,
    lambda cutoff: sa.and_(
        schema.audits.c.state.not_in(sorted(OPEN_AUDITS)), schema.audits.c.updated_at < cutoff
    ),
)
DISCOVERIES = OldRows(
    # Not the discoveries: one of a large cloud has too many backends for one transaction.
    schema.discovery_backends,
    after_purge=discoveries.delete_without_backends,
)
DEAD_LETTERS = OldRows(
    schema.outbox,
    # The last attempt is not later than the last change, and an index has its time: without it all
    # dead letters would be read to find the old ones.
    lambda cutoff: sa.and_(
        schema.outbox.c.state == DEAD,
        schema.outbox.c.next_try_at < cutoff,
        schema.outbox.c.updated_at < cutoff,
    ),
)
CALL_RECORDS = OldRows(schema.idempotency_keys)
TOMBSTONES = OldRows(schema.device_tombstones)
# Only an operator deletes the inventory of a host.
SERVICES = OldRows(
    schema.services,
    lambda cutoff: sa.and_(
        schema.services.c.last_seen_at < cutoff,
        sa.or_(
            schema.services.c.binary != AGENT,
            ~sa.exists().where(schema.devices.c.host == schema.services.c.host),
        ),
    ),
    _skip_steps_without_agent,
)

# The kinds of old rows by their name.
KINDS: Mapping[str, OldRows] = {
    "jobs": JOBS,
    "audits": AUDITS,
    "discoveries": DISCOVERIES,
    "dead-letters": DEAD_LETTERS,
    "call-records": CALL_RECORDS,
    "tombstones": TOMBSTONES,
    "services": SERVICES,
}

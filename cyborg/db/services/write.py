# SPDX-License-Identifier: Apache-2.0
"""Write the services: the last heartbeat, epoch and report of each daemon.

The row of a host's agent is also the lock of the host's inventory: a report first raises the row's
generation, so that reports of one host are serialized.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NotRequired, TypedDict, cast
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core.hosts import AGENT, CONDUCTOR
from cyborg.core.inventory.report import BackendStatus
from cyborg.core.jobs.job import JobKind, JobState
from cyborg.db import bulk, joins, old_rows
from cyborg.db.rows import StoredRow, equal, fetch_all, fetch_first
from cyborg.db.schema import arqs, attach_handles, backends, deployables, devices, jobs, services
from cyborg.db.schema import job_steps as steps
from cyborg.db.services.read import ServiceColumns


class HeartbeatFields(TypedDict):
    """The columns that a heartbeat writes, except epoch and digest.

    Only an agent has ``endpoint``, ``has_digest`` and ``boot_id``.
    """

    endpoint: NotRequired[str | None]
    has_digest: NotRequired[bool]
    boot_id: NotRequired[str]
    status: str
    versions: dict[str, Any]


class HeartbeatTimes(TypedDict):
    """The time of a heartbeat, and the deadlines that it sets."""

    last_seen_at: datetime
    late_at: datetime
    down_at: datetime


class DaemonRow(StoredRow, ServiceColumns):
    """All columns of a daemon.

    One type for all lookups: a heartbeat, a removal and an audit read single rows, in which a few
    columns more cost nothing.
    """

    epoch: str
    endpoint: str | None
    digest: str | None
    has_digest: bool
    generation: int
    versions: dict[str, Any]
    started_at: datetime
    identity: dict[str, Any]
    drivers_digest: str | None
    boot_id: str | None
    desired_generation: int


class UpCountRow(TypedDict):
    """Numbers of daemons that are up."""

    agents: int
    conductors: int


def heartbeat_if_unchanged(
    tx: sa.Connection,
    binary: str,
    host: str,
    epoch: str,
    digest: str,
    times: HeartbeatTimes,
    fields: HeartbeatFields,
    desired_generation: int | None = None,
) -> bool:
    """Record a heartbeat if it has the stored epoch and digest; return whether it was recorded.

    ``fields`` has the other columns of a heartbeat. Also return False if the service is marked
    down, if its last heartbeat had no digest, or if its generation is not ``desired_generation``
    (None skips this check).
    """
    # One UPDATE, which reads nothing first: nearly every heartbeat of a cloud ends here.
    change = sa.update(services).where(
        services.c.binary == binary,
        services.c.host == host,
        services.c.epoch == epoch,
        services.c.digest == digest,
        services.c.has_digest.is_(True),
        services.c.down_since.is_(None),
        *equal({services.c.desired_generation: desired_generation}),
    )
    return bool(tx.execute(change.values(**times, **fields)).rowcount)


def find_agent(tx: sa.Connection, host: str) -> DaemonRow | None:
    """Return a host's agent, None if it never sent a heartbeat."""
    return fetch_first(DaemonRow, tx.execute(sa.select(services).where(joins.agent_of(host))))


def previous_incarnation(tx: sa.Connection, binary: str, host: str, epoch: str) -> DaemonRow | None:
    """Return a daemon's row if it has another epoch, else None."""
    query = sa.select(services).where(
        services.c.binary == binary, services.c.host == host, services.c.epoch != epoch
    )
    return fetch_first(DaemonRow, tx.execute(query))


def restart(
    tx: sa.Connection,
    previous: DaemonRow,
    epoch: str,
    times: HeartbeatTimes,
    fields: HeartbeatFields,
) -> DaemonRow | None:
    """Record the first heartbeat of a new process of a daemon; return its row, locked.

    Return None if another transaction has changed the row of the previous process meanwhile; then
    ``upsert_heartbeat`` must record it. The generation of reports restarts at 0.
    """
    # UPDATE services SET epoch = ..., generation = 0, started_at = ..., last_seen_at = ...
    #  WHERE id = ... AND epoch, generation, digest, down_since, desired_generation are as read
    # The guards replace a SELECT of the row, which this lock allows only after the UPDATE: all
    # agents of a cloud may restart at once. What they leave out changes with the generation, or is
    # overwritten here.
    s = services.c
    values: dict[str, Any] = {**times, **fields, **_first_of(epoch, times)}
    change = sa.update(services).where(
        s.id == previous["id"],
        s.epoch == previous["epoch"],
        s.generation == previous["generation"],
        s.digest == previous["digest"],
        s.down_since == previous["down_since"],
        s.desired_generation == previous["desired_generation"],
    )
    if not tx.execute(change.values(**values)).rowcount:
        return None
    return cast(DaemonRow, {**previous, **values})


def _first_of(epoch: str, times: HeartbeatTimes) -> dict[str, Any]:
    """Return the values that only the first heartbeat of a process writes."""
    return {"epoch": epoch, "generation": 0, "started_at": times["last_seen_at"]}


def upsert_heartbeat(
    tx: sa.Connection,
    binary: str,
    host: str,
    epoch: str,
    times: HeartbeatTimes,
    fields: HeartbeatFields,
) -> DaemonRow:
    """Record a heartbeat, insert the daemon if it is new; return its row, locked.

    A new epoch restarts the generation of reports at 0. The stored inventory remains valid until
    the next report, so the digest does not change. Raise oslo.db's DBDuplicateEntry if a concurrent
    transaction inserts the same daemon; the caller must retry.
    """
    same_daemon = sa.and_(services.c.binary == binary, services.c.host == host)
    values: dict[str, Any] = {**times, **fields}
    # UPDATE, UPDATE, INSERT, the most frequent first; each runs only if the one before changed no
    # row. Not an upsert of the dialects: the second one must reset the generation.
    same_epoch = sa.update(services).where(same_daemon, services.c.epoch == epoch)
    if not tx.execute(same_epoch.values(**values)).rowcount:
        values |= _first_of(epoch, times)
        if not tx.execute(sa.update(services).where(same_daemon).values(**values)).rowcount:
            values |= {"uuid": str(uuid4()), "binary": binary, "host": host}
            tx.execute(sa.insert(services).values(**values))
    return fetch_all(DaemonRow, tx.execute(sa.select(services).where(same_daemon)))[0]


def delete(tx: sa.Connection, uuid: str, now: datetime) -> bool:
    """Delete a daemon that is down; return whether it was deleted.

    This also deletes its backends, their desired state and its drivers.
    """
    # In the guard of the DELETE: the daemon may send a heartbeat meanwhile.
    down = sa.and_(services.c.uuid == uuid, _is_down(now))
    return bool(tx.execute(sa.delete(services).where(down)).rowcount)


def _is_down(now: datetime) -> sa.ColumnElement[bool]:
    """Return the condition that a daemon is down: an agent is marked, another one has a deadline.

    The deadline of an agent does not decide: after an outage of the conductors the deadlines of all
    agents have passed, and the desired state of one that runs must not be deleted. ``_is_down`` of
    ``cyborg/conductor/hosts/services.py`` is the same rule for a row that was read.
    """
    # No other daemon is ever marked, because no host is cordoned for it.
    return sa.or_(
        services.c.down_since.is_not(None),
        sa.and_(services.c.binary != AGENT, services.c.down_at <= now),
    )


def purge(tx: sa.Connection, cutoff: datetime, limit: int) -> list[DaemonRow]:
    """Delete daemons last seen before ``cutoff``, at most ``limit``, and return them.

    An agent is deleted only if its host has no devices. With a daemon, its backends, their desired
    state and its drivers are deleted.
    """
    # The condition leaves out the agents of hosts with devices; foreign keys delete the rest.
    old = old_rows.SERVICES.is_old(cutoff)
    # FOR UPDATE: a daemon that sends a heartbeat now is not among the rows, or waits for the end of
    # this transaction.
    query = sa.select(services).where(old).order_by(services.c.last_seen_at).limit(limit)
    rows = fetch_all(DaemonRow, tx.execute(query.with_for_update(of=services)))
    bulk.delete(tx, services, [row["id"] for row in rows])
    return rows


def find(tx: sa.Connection, uuid: str) -> DaemonRow | None:
    """Return a daemon, or None."""
    return fetch_first(DaemonRow, tx.execute(sa.select(services).where(services.c.uuid == uuid)))


def lock_of_host(tx: sa.Connection, host: str) -> list[DaemonRow]:
    """Return the daemons of a host, locked."""
    query = sa.select(services).where(services.c.host == host).order_by(services.c.id)
    return fetch_all(DaemonRow, tx.execute(query.with_for_update()))


def insert_absent_agent(tx: sa.Connection, host: str, now: datetime) -> int:
    """Insert the row of an agent that never sent a heartbeat; return the row's id.

    Until the end of the transaction, the row keeps an agent of the host from registering. Raise
    oslo.db's DBDuplicateEntry if an agent has just done that.
    """
    times = dict.fromkeys(("started_at", "last_seen_at", "late_at", "down_at", "down_since"), now)
    values = {"binary": AGENT, "host": host, "epoch": "", "status": "", **times}
    tx.execute(sa.insert(services).values(uuid=str(uuid4()), **values))
    return int(tx.execute(sa.select(services.c.id).where(joins.agent_of(host))).scalar_one())


def delete_of_host(tx: sa.Connection, ids: Collection[int], now: datetime) -> int:
    """Delete those of these daemons, by row id, that are down; return their number.

    This also deletes their backends, the desired state of these, and their drivers.
    """
    down = sa.and_(services.c.id.in_(sorted(ids)), _is_down(now))
    return tx.execute(sa.delete(services).where(down)).rowcount if ids else 0


def open_jobs(tx: sa.Connection, host: str, *, programs: bool = True) -> Sequence[str]:
    """Return the uuids of open jobs that have a step, or program a device, on a host.

    Jobs of the host without a deadline do not count: they end with the removal of the host. Without
    ``programs``, count only the jobs that have a step.
    """
    has_step = sa.exists().where(steps.c.job_id == jobs.c.id, steps.c.host == host)
    of_device = sa.and_(
        jobs.c.host == host, jobs.c.kind == str(JobKind.PROGRAM), jobs.c.deadline.is_not(None)
    )
    query = sa.select(jobs.c.uuid).where(
        jobs.c.state == str(JobState.OPEN), sa.or_(has_step, of_device) if programs else has_step
    )
    return tx.scalars(query).all()


def holders(tx: sa.Connection, host: str) -> Sequence[str]:
    """Return the uuids of the ARQs that own handles of a host."""
    query = (
        sa.select(arqs.c.uuid)
        .select_from(joins.OWNED_HANDLES)
        .where(devices.c.host == host)
        .order_by(arqs.c.id)
    )
    return tx.scalars(query).all()


def mark_down(
    tx: sa.Connection, now: datetime, max_timeout: timedelta, max_agents: int
) -> list[DaemonRow]:
    """Mark agents as down, at most ``max_agents``, and return those that this call marked.

    These are agents whose deadline has passed. An agent with a deadline of more than
    ``max_timeout`` after its last heartbeat is left out, and so is an agent that another conductor
    marked, or that sent a heartbeat meanwhile.
    """
    s = services.c
    unreachable = sa.and_(s.binary == AGENT, s.down_since.is_(None), s.down_at <= now)
    # A SELECT first: on MariaDB an UPDATE without a match still locks the rows that it scans.
    candidates = tx.execute(
        sa.select(s.id, s.last_seen_at, s.down_at)
        .where(unreachable)
        .order_by(s.down_at)
        .limit(max_agents)
    )
    # The databases have no common arithmetic of times. If agents that are left out fill the limit,
    # others wait for them, but not longer than the longest deadline.
    ids = [row.id for row in candidates if row.down_at - row.last_seen_at <= max_timeout]
    if not ids:
        return []
    selected = services.c.id.in_(sorted(ids))
    mark = sa.update(services).where(selected, unreachable).values(down_since=now)
    if not tx.execute(mark).rowcount:
        return []
    # Only those with this time: another conductor may have marked some of these agents before.
    marked = sa.select(services).where(selected, s.down_since == now)
    return fetch_all(DaemonRow, tx.execute(marked.order_by(s.host)))


def mark_up(tx: sa.Connection, id_: int) -> None:
    """Mark an agent up. The caller must hold a lock on its row."""
    tx.execute(sa.update(services).where(services.c.id == id_).values(down_since=None))


def accept_report(
    tx: sa.Connection, host: str, epoch: str, generation: int, digest: str, times: HeartbeatTimes
) -> bool:
    """Accept a report and lock the agent's row; return whether the report must be recorded.

    Return False for a report with another epoch, for a report that is not newer than the last
    accepted report, and for a report of an agent marked down, which must send a heartbeat first.
    """
    # UPDATE services SET generation = :generation, digest = ..., last_seen_at = ...
    #  WHERE binary = 'cyborg-agent' AND host = :host AND epoch = :epoch
    #    AND generation < :generation AND down_since IS NULL
    # The first statement of each report: its row lock serializes the reports of a host.
    is_new = services.c.generation < generation
    result = tx.execute(
        sa.update(services)
        .where(joins.agent_of(host, epoch), is_new, services.c.down_since.is_(None))
        .values(generation=generation, digest=digest, **times)
    )
    return bool(result.rowcount)


def set_identity(tx: sa.Connection, host: str, identity: Mapping[str, Any]) -> None:
    """Write the compute node names of a host.

    The caller must hold a lock on the agent's row.
    """
    tx.execute(sa.update(services).where(joins.agent_of(host)).values(identity=dict(identity)))


def identities(tx: sa.Connection, hosts: Collection[str]) -> dict[str, object]:
    """Return the compute node names that the agents of these hosts reported, by host, unparsed."""
    query = sa.select(services.c.host, services.c.identity).where(
        services.c.binary == AGENT, services.c.host.in_(sorted(hosts))
    )
    return {row.host: row.identity for row in tx.execute(query)}


def existing_hosts(tx: sa.Connection, names: Collection[str]) -> set[str]:
    """Return those of ``names`` that are names of hosts with an agent."""
    query = sa.select(services.c.host).where(
        services.c.binary == AGENT, services.c.host.in_(sorted(names))
    )
    return set(tx.scalars(query))


def has_agent(tx: sa.Connection, host: str) -> bool:
    """Return whether a host has an agent that is not marked down.

    The deadline does not decide: after an outage of the conductors the deadlines of all agents have
    passed. Then Placement still offers the devices, and calls for them must not be rejected until
    the next heartbeat of each agent.
    """
    running = sa.select(services.c.id).where(joins.agent_of(host), services.c.down_since.is_(None))
    return tx.scalar(running) is not None


def count_up(tx: sa.Connection, now: datetime) -> UpCountRow:
    """Count the agents that are not marked down, and the conductors whose deadline has not passed.

    After an outage of the conductors all deadlines of agents have passed, and all agents return.
    """
    s = services.c
    agents = sa.select(sa.func.count()).where(s.binary == AGENT, s.down_since.is_(None))
    conductors = sa.select(sa.func.count()).where(s.binary == CONDUCTOR, s.down_at > now)
    counts = sa.select(agents.scalar_subquery(), conductors.scalar_subquery())
    num_agents, num_conductors = tx.execute(counts).one()
    return {"agents": num_agents, "conductors": num_conductors}


def request_report(tx: sa.Connection, host: str) -> None:
    """Make a host send a new report, even if its inventory has not changed."""
    # Without a digest the next heartbeat does not match, and the conductor asks for a report.
    tx.execute(sa.update(services).where(joins.agent_of(host)).values(digest=None))


def request_stale_reports(tx: sa.Connection) -> int:
    """Request a new report from hosts with draining handles or sets that have no owner any more.

    A report deletes the handles that are not in it, but an unchanged host sends none by itself.
    Return the number of these hosts.
    """
    # Not while the backend fails: after a restart its agent does not know the devices, so that no
    # report deletes anything of them, and each sweep would request one. The report of the end of
    # the failure deletes it. A backend without a row was removed: a report deletes what it had.
    is_deleting = sa.or_(backends.c.id.is_(None), backends.c.status == str(BackendStatus.READY))
    stale_hosts = (
        sa.select(services.c.id)
        .distinct()
        .join(devices, devices.c.host == services.c.host)
        .join(deployables, deployables.c.device_id == devices.c.id)
        .join(attach_handles, attach_handles.c.deployable_id == deployables.c.id)
        .outerjoin(backends, joins.BACKEND_OF_DEVICE)
        .where(
            is_deleting,
            services.c.binary == AGENT,
            # Without a digest a report is requested already.
            services.c.digest.is_not(None),
            attach_handles.c.draining,
            attach_handles.c.arq_id.is_(None),
            sa.not_(attach_handles.c.needs_cleaning),
        )
    )
    members = sa.select(attach_handles.c.id).where(attach_handles.c.set_id == deployables.c.id)
    hosts_with_sets = (
        sa.select(services.c.id)
        .distinct()
        .join(deployables, deployables.c.host == services.c.host)
        .join(devices, devices.c.id == deployables.c.device_id)
        .outerjoin(backends, joins.BACKEND_OF_DEVICE)
        .where(
            is_deleting,
            services.c.binary == AGENT,
            services.c.digest.is_not(None),
            deployables.c.set_size.is_not(None),
            deployables.c.draining,
            sa.not_(sa.exists(members)),
        )
    )
    ids = tx.scalars(stale_hosts.union(hosts_with_sets)).all()
    if not ids:
        return 0
    return tx.execute(
        sa.update(services).where(services.c.id.in_(ids)).values(digest=None)
    ).rowcount

# SPDX-License-Identifier: Apache-2.0
"""Write audits that operators requested. If a conductor stops, another conductor continues.

The lease guards every write of a conductor: a conductor that has lost the lease changes nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core.audit.sources import OPEN, Source, State
from cyborg.core.hosts import AGENT
from cyborg.db.audits.read import AuditRow
from cyborg.db.rows import fetch_first
from cyborg.db.schema import audits, custody_heads, custody_records, devices, providers, services


class LeasedAuditRow(AuditRow):
    """All columns of an audit."""

    id: int
    last_host: str | None
    owner: str | None
    lease_until: datetime | None


# Hosts that one statement counts.
COUNT_PAGE = 500

# Hosts with an agent, and hosts of which only devices or providers are left.
_INVENTORY = (
    sa.select(services.c.host).where(services.c.binary == AGENT),
    sa.select(devices.c.host),
    sa.select(providers.c.host),
)
# Hosts of which only custody logs are left.
_LOGS = (sa.select(custody_heads.c.host), sa.select(custody_records.c.host))


def next_hosts(tx: sa.Connection, after: str, limit: int) -> Sequence[str]:
    """Return the names of up to ``limit`` hosts after ``after``, in the order of the database.

    The names come from several tables. Each is read in the order of an index on its host column.
    """
    # The last one reads the custody records, of which a host has many.
    *queries, records = [*_INVENTORY, *_LOGS]
    pages: list[sa.FromClause] = [_distinct_hosts(query, after, limit) for query in queries]
    # With an index MySQL and MariaDB read one entry of each host for DISTINCT, but all entries for
    # the correlated subquery of the other query. The other databases do the opposite.
    if tx.dialect.name in ("mysql", "mariadb"):
        pages.append(_distinct_hosts(records, after, limit))
    else:
        pages.append(_recorded_hosts(after, limit))
    # The query of recorded hosts may return a row with None.
    hosts = sa.union(
        *(sa.select(page.c.host).where(page.c.host.is_not(None)) for page in pages)
    ).subquery("hosts")
    return tx.scalars(sa.select(hosts.c.host).order_by(hosts.c.host).limit(limit)).all()


def host_exists(tx: sa.Connection, host: str) -> bool:
    """Return whether the database has an agent, a device, a provider or a custody log of a host."""
    return _is_in(tx, host, [*_INVENTORY, *_LOGS])


def has_inventory(tx: sa.Connection, host: str) -> bool:
    """Return whether the database has an agent, a device or a provider of a host."""
    return _is_in(tx, host, _INVENTORY)


def count_hosts(tx: sa.Connection) -> int:
    """Return the number of hosts; one statement for each COUNT_PAGE hosts."""
    count, page = 0, next_hosts(tx, "", COUNT_PAGE)
    while len(page) == COUNT_PAGE:
        count += len(page)
        page = next_hosts(tx, page[-1], COUNT_PAGE)
    return count + len(page)


def _distinct_hosts(query: sa.Select[tuple[str]], after: str, limit: int) -> sa.Subquery:
    """Return a query of the next hosts of a table."""
    host = query.selected_columns[0]
    return query.where(host > after).distinct().order_by(host).limit(limit).subquery()


def _recorded_hosts(after: str, limit: int) -> sa.CTE:
    """Return a query of the next hosts with custody records; the row after the last host is None.

    Each step of the recursive query finds one host by the index.
    """
    records = custody_records
    first = sa.select(sa.func.min(records.c.host).label("host"), sa.literal(1).label("step"))
    hosts = first.where(records.c.host > after).cte("recorded_hosts", recursive=True)
    next_host = sa.select(sa.func.min(records.c.host)).where(records.c.host > hosts.c.host)
    return hosts.union_all(
        sa.select(next_host.scalar_subquery(), hosts.c.step + 1).where(
            hosts.c.host.is_not(None), hosts.c.step < limit
        )
    )


def _is_in(tx: sa.Connection, host: str, queries: Sequence[sa.Select[tuple[str]]]) -> bool:
    # One statement instead of one for each table.
    conditions = [query.where(query.selected_columns[0] == host).exists() for query in queries]
    return bool(tx.scalar(sa.select(sa.or_(*conditions))))


def count_open(tx: sa.Connection) -> int:
    """Return the number of audits that have not ended."""
    query = sa.select(sa.func.count()).select_from(audits).where(audits.c.state.in_(OPEN))
    return int(tx.scalar(query) or 0)


def add(tx: sa.Connection, host: str | None, repair: bool, sources: Collection[Source]) -> str:
    """Enqueue an audit and return its uuid."""
    uuid = str(uuid4())
    tx.execute(
        sa.insert(audits).values(
            uuid=uuid,
            host=host,
            repair=repair,
            state=State.PENDING,
            sources=[str(source) for source in sources],
            hosts_total=1 if host is not None else count_hosts(tx),
        )
    )
    return uuid


def lease(
    tx: sa.Connection, *, owner: str, now: datetime, until: datetime
) -> LeasedAuditRow | None:
    """Lease the oldest open audit that is not leased; return its row before the lease, or None.

    ``owner`` must be unique to each call.
    """
    # SELECT * FROM audits WHERE state IN (open) AND (lease_until IS NULL OR < :now)
    #  ORDER BY id LIMIT 1
    # UPDATE audits SET owner = ..., lease_until = ... WHERE id = ... AND (the same condition)
    # There are few audits: the loser of two conductors tries again at its next turn.
    due = sa.and_(
        audits.c.state.in_(OPEN),
        sa.or_(audits.c.lease_until.is_(None), audits.c.lease_until < now),
    )
    oldest = sa.select(audits).where(due).order_by(audits.c.id).limit(1)
    row = fetch_first(LeasedAuditRow, tx.execute(oldest))
    if row is None:
        return None
    query = sa.update(audits).where(audits.c.id == row["id"], due)
    values = {"state": State.RUNNING, "owner": owner, "lease_until": until}
    return row if tx.execute(query.values(**values)).rowcount else None


def renew(tx: sa.Connection, uuid: str, owner: str, until: datetime) -> bool:
    """Extend a lease; return whether ``owner`` still had it."""
    return _write(tx, uuid, owner, {"lease_until": until})


def record_progress(
    tx: sa.Connection,
    uuid: str,
    owner: str,
    *,
    host: str,
    hosts_done: int,
    num_findings: int,
    findings: Sequence[Mapping[str, Any]] | None,
    until: datetime,
) -> bool:
    """Record that a host was audited and extend the lease; return whether ``owner`` had it.

    ``findings`` has all findings so far, None if there are no new findings.
    """
    values = {
        "last_host": host,
        "hosts_done": hosts_done,
        "num_findings": num_findings,
        "lease_until": until,
    }
    if findings is not None:
        values["findings"] = list(findings)
    return _write(tx, uuid, owner, values)


def end(tx: sa.Connection, uuid: str, owner: str, state: State, error: str | None = None) -> bool:
    """Record the result of an audit; return whether ``owner`` still had the lease."""
    values = {"state": state, "error": error, "owner": None, "lease_until": None}
    return _write(tx, uuid, owner, values)


def release(tx: sa.Connection, uuid: str, owner: str) -> bool:
    """End a lease early, so that any conductor can continue the audit."""
    return _write(tx, uuid, owner, {"owner": None, "lease_until": None})


def _write(tx: sa.Connection, uuid: str, owner: str, values: Mapping[str, Any]) -> bool:
    leased = sa.and_(audits.c.uuid == uuid, audits.c.owner == owner)
    return bool(tx.execute(sa.update(audits).where(leased).values(**values)).rowcount)

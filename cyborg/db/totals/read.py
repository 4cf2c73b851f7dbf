# SPDX-License-Identifier: Apache-2.0
"""Total counts for metrics and operators, in a fixed number of statements.

Indexes find what ``read`` returns: pending and failing work. ``count`` reads whole tables or
indexes: its cost grows with the cloud.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, NamedTuple, TypedDict

import sqlalchemy as sa

from cyborg.core.audit.sources import State
from cyborg.core.binding.states import ArqState
from cyborg.core.inventory.device import Health
from cyborg.core.jobs.job import JobState
from cyborg.core.maintenance import successor_state
from cyborg.db import joins, schema
from cyborg.db.binding import accelerators
from cyborg.db.deployables.device_sets import OFFER
from cyborg.db.handles import usage as handles
from cyborg.db.handles.usage import count_if
from cyborg.db.paging import Row
from cyborg.db.rows import fetch_all, row_columns


class SelfHealRow(TypedDict):
    """The count of one kind of corrective action."""

    kind: str
    count: int
    last_at: datetime


def find_self_heal(connection: sa.Connection) -> list[SelfHealRow]:
    """Return all self-heal counters, ordered by kind."""
    query = sa.select(*row_columns(SelfHealRow, schema.self_heal_counters))
    return fetch_all(
        SelfHealRow, connection.execute(query.order_by(schema.self_heal_counters.c.kind))
    )


UNDELIVERABLE = "undeliverable"
# Maximum number of unhealthy devices in the list; those unhealthy for longest come first.
MAX_UNHEALTHY = 1000


class UnhealthyRow(TypedDict):
    """An unhealthy device."""

    host: str
    address: str
    health_since: datetime


class OutboxCountRow(TypedDict):
    """The number of messages of one kind and state, and the creation time of the oldest message."""

    kind: str
    state: str
    count: int
    oldest: datetime


class JobCountRow(TypedDict):
    """The number of open jobs of one kind, and the creation time of the oldest job.

    ``overdue`` is the number of jobs past their deadline.
    """

    kind: str
    count: int
    overdue: int
    oldest: datetime


class HandleUse(NamedTuple):
    """What handles are counted by: a resource class and one of its uses."""

    resource_class: str
    use: str


class SetKey(NamedTuple):
    """What device sets are counted by: SetKind, the number of members, OfferState."""

    kind: str
    size: int
    offer: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of objects, by state or status.

    ``handles`` counts by resource class and by ``owned`` and, without an owner, by ``draining``,
    ``dirty`` (not cleaned yet), ``cordoned`` (the device is not schedulable) and ``free``. Of these
    the first that applies counts. Those of the ``cordoned`` ones whose devices cannot be attached
    to an instance are in ``handles_undeliverable``, by resource class. ``devices`` counts by status
    and health, and ``devices_undeliverable`` those with deployables that cannot be attached.
    ``attachments`` does not include successors; ``successors`` counts them by
    ``core.maintenance.SuccessorState``.
    """

    arqs: dict[str, int]
    orphans_suspected: int
    owners_unverified: int
    device_contexts: dict[str, int]
    attachments: dict[str, int]
    successors: dict[str, int]
    handles: dict[HandleUse, int]
    handles_undeliverable: dict[str, int]
    devices: dict[tuple[str, str], int]
    devices_undeliverable: int
    device_sets: dict[SetKey, int]
    providers: int

    def count_handles(self, use: str) -> int:
        """Return the number of handles of all resource classes in a use."""
        return sum(count for key, count in self.handles.items() if key.use == use)


class StoredCounts(NamedTuple):
    """Numbers of objects that a conductor has counted.

    ``counted_at`` is the time of the database before, ``seconds`` the time that counting took.
    """

    counts: Counts
    counted_at: datetime
    seconds: float


# The only row of the table.
COUNTS_NAME = "all"


def find_stored(connection: sa.Connection) -> StoredCounts | None:
    """Return the counts that a conductor has stored last, or None."""
    c = schema.object_counts.c
    query = sa.select(c.counts, c.counted_at, c.seconds).where(c.name == COUNTS_NAME)
    row = connection.execute(query).first()
    counts = None if row is None else _load_counts(row.counts)
    if row is None or counts is None:
        return None
    return StoredCounts(counts, row.counted_at, row.seconds)


# The fields of Counts whose keys are not texts: in JSON, a list of a key and a number for each.
_KEYS: Mapping[str, Callable[..., Any]] = {
    "handles": HandleUse,
    "devices": lambda *key: key,
    "device_sets": SetKey,
}


def dump_counts(counts: Counts) -> dict[str, object]:
    """Return counts as JSON values."""
    values = {field.name: getattr(counts, field.name) for field in fields(counts)}
    return {
        name: [[list(key), number] for key, number in value.items()] if name in _KEYS else value
        for name, value in values.items()
    }


def _load_counts(body: dict[str, Any]) -> Counts | None:
    """Return the counts of ``dump_counts``, None if another release has dumped them."""
    if body.keys() != {field.name for field in fields(Counts)}:
        return None
    try:
        keyed = {
            name: {make(*key): number for key, number in body[name]} for name, make in _KEYS.items()
        }
    except TypeError:
        return None  # a key has more or fewer fields
    return Counts(**{**body, **keyed})


@dataclass(frozen=True, slots=True)
class Totals:
    """Pending and failing work. Fields such as the oldest message are times, not ages.

    ``guest_devices_missing`` counts the ARQs whose devices running guests lack (``attach_error``).
    ``unhealthy`` has those that are unhealthy for longest. A provider that is only due for
    verification is not stale. ``audit_findings`` are those of the last audit that is done, None
    without one.
    """

    maintenance_windows: int
    devices_failing: int
    guest_devices_missing: int
    audit_findings: int | None
    oldest_bind_started: datetime | None
    unhealthy: list[UnhealthyRow]
    services: dict[tuple[str, str], int]
    hosts_cordoned: int
    outbox: list[OutboxCountRow]
    jobs: list[JobCountRow]
    providers_stale: int
    providers_failing: int
    oldest_stale: datetime | None
    oldest_verified: datetime | None
    self_heal_actions: list[SelfHealRow]


def count(connection: sa.Connection) -> Counts:
    """Return the numbers of objects, in eight statements."""
    r = schema.arqs.c
    arqs_by_state = _all(
        connection,
        sa.select(
            r.state,
            sa.func.count().label("count"),
            sa.func.count(r.orphan_since).label("suspected"),
            count_if(sa.not_(r.owner_verified)).label("unverified"),
        ).group_by(r.state),
    )
    d = schema.devices.c
    # A device that is not offered, such as the disk of the root file system, has no deployable.
    offered = sa.exists().where(schema.deployables.c.device_id == d.id).correlate(schema.devices)
    devices_by_state = _all(
        connection,
        sa.select(
            d.status,
            d.health,
            sa.func.count().label("count"),
            count_if(sa.and_(sa.not_(d.deliverable), offered)).label("undeliverable"),
        ).group_by(d.status, d.health),
    )
    a = schema.attachments.c
    query = sa.select(a.state, a.step, sa.func.count().label("count"))
    query = query.where(a.maintained_device.is_not(None)).group_by(a.state, a.step)
    successors, not_attachments = Counter[str](), Counter[str]()
    for row in _all(connection, query):
        successors[successor_state(row["state"], row["step"])] += row["count"]
        not_attachments[row["state"]] += row["count"]
    uses = _handles(connection)
    num_providers = sa.select(sa.func.count()).select_from(schema.providers)
    return Counts(
        arqs={row["state"]: row["count"] for row in arqs_by_state},
        orphans_suspected=sum(row["suspected"] for row in arqs_by_state),
        owners_unverified=sum(row["unverified"] for row in arqs_by_state),
        device_contexts=_by_state(connection, schema.device_contexts),
        # Subtracted, since an index on the state alone counts all rows.
        attachments=dict(Counter(_by_state(connection, schema.attachments)) - not_attachments),
        successors=dict(successors),
        handles={key: number for key, number in uses.items() if key.use != UNDELIVERABLE},
        handles_undeliverable={
            key.resource_class: number for key, number in uses.items() if key.use == UNDELIVERABLE
        },
        devices={(row["status"], row["health"]): row["count"] for row in devices_by_state},
        devices_undeliverable=sum(row["undeliverable"] for row in devices_by_state),
        device_sets=_device_sets(connection),
        providers=connection.scalar(num_providers) or 0,
    )


def read(connection: sa.Connection, *, now: datetime, max_unhealthy: int = MAX_UNHEALTHY) -> Totals:
    """Return pending and failing work, and services by their liveness, in eight statements.

    ``max_unhealthy`` limits the list of unhealthy devices.
    """
    r, p = schema.arqs.c, schema.providers.c
    started = sa.select(sa.func.min(sa.func.coalesce(r.updated_at, r.created_at)))
    # NULL for a provider that is only due for verification.
    stale_since = sa.case((sa.not_(p.verify_only), p.stale_since))
    # An alias, since SQLAlchemy would correlate the table with that of the query around it.
    oldest_verified = sa.select(sa.func.min(schema.providers.alias().c.verified_at))
    # A provider whose publishing failed stays stale, so that the index on stale_since finds it.
    (stale,) = _all(
        connection,
        sa.select(
            sa.func.count(stale_since).label("count"),
            sa.func.count(p.error).label("failing"),
            sa.func.min(stale_since).label("oldest"),
            oldest_verified.scalar_subquery().label("oldest_verified"),
        ).where(p.stale_since.is_not(None)),
    )
    windows = sa.select(sa.func.count()).select_from(schema.device_maintenances)
    # Indexes have the devices that are closed until a time, and the ARQs whose devices guests lack.
    failing = sa.select(sa.func.count()).where(schema.devices.c.retry_at.is_not(None))
    missing = sa.select(sa.func.count()).where(schema.arqs.c.attach_failed_at.is_not(None))
    audit = sa.select(schema.audits.c.num_findings).where(schema.audits.c.state == State.DONE)
    audit = audit.order_by(schema.audits.c.id.desc()).limit(1)
    (pending,) = _all(
        connection,
        sa.select(
            windows.scalar_subquery().label("windows"),
            failing.scalar_subquery().label("failing"),
            missing.scalar_subquery().label("missing"),
            audit.scalar_subquery().label("findings"),
        ),
    )
    services_by_state = _services(connection, now)
    return Totals(
        maintenance_windows=pending["windows"],
        devices_failing=pending["failing"],
        guest_devices_missing=pending["missing"],
        audit_findings=pending["findings"],
        oldest_bind_started=connection.scalar(started.where(r.state == ArqState.BIND_STARTED)),
        unhealthy=_unhealthy(connection, max_unhealthy),
        services={(row["binary"], row["liveness"]): row["count"] for row in services_by_state},
        hosts_cordoned=sum(row["cordoned"] for row in services_by_state),
        outbox=_outbox(connection),
        jobs=_jobs(connection, now),
        providers_stale=stale["count"],
        providers_failing=stale["failing"],
        oldest_stale=stale["oldest"],
        oldest_verified=stale["oldest_verified"],
        self_heal_actions=find_self_heal(connection),
    )


def _by_state(connection: sa.Connection, table: sa.Table) -> dict[str, int]:
    """Return the number of rows by state; each table has an index that begins with the state."""
    query = sa.select(table.c.state, sa.func.count().label("count")).group_by(table.c.state)
    return {row["state"]: row["count"] for row in _all(connection, query)}


def _handles(connection: sa.Connection) -> dict[HandleUse, int]:
    """Return the numbers of handles by resource class and use, without zeros."""
    # Grouped before the join, which then has a row for each deployable and not for each handle.
    by_deployable = handles.by_deployable()
    d, c = schema.deployables.c, by_deployable.c
    state = sa.case(
        (accelerators.DEVICE_DRAINING, "draining"),
        (sa.and_(accelerators.UNSCHEDULABLE, sa.not_(schema.devices.c.deliverable)), UNDELIVERABLE),
        (accelerators.UNSCHEDULABLE, "cordoned"),
        else_="free",
    ).label("device_state")
    sums = (sa.func.sum(c[name]).label(name) for name in ("owned", "draining", "dirty", "clean"))
    query = sa.select(d.resource_class, state, *sums)
    query = query.join_from(by_deployable, schema.deployables, d.id == c.deployable_id)
    query = query.join(schema.devices, schema.devices.c.id == d.device_id)
    query = query.outerjoin(schema.services, joins.AGENT_OF_DEVICE)
    counts = Counter[HandleUse]()
    for row in _all(connection, query.group_by(d.resource_class, "device_state")):
        name, device_state = row["resource_class"], row["device_state"]
        counts[HandleUse(name, "owned")] += int(row["owned"])
        counts[HandleUse(name, "draining")] += int(row["draining"])
        # As in the list of accelerators, a dirty handle of a draining device is draining.
        dirty = "draining" if device_state == "draining" else "dirty"
        counts[HandleUse(name, dirty)] += int(row["dirty"])
        # Handles without an owner and without work to do have the state of their device.
        counts[HandleUse(name, device_state)] += int(row["clean"])
        # Undeliverable handles are cordoned ones as well: they are in both numbers.
        if device_state == UNDELIVERABLE:
            counts[HandleUse(name, "cordoned")] += int(row["clean"])
    return dict(+counts)


def _device_sets(connection: sa.Connection) -> dict[SetKey, int]:
    """Return the numbers of device sets by kind, size and offer."""
    d = schema.deployables.c
    # Grouped outside: some databases do not accept a bound parameter in the expression of a group.
    sets = (
        sa.select(
            d.device_set["kind"].as_string().label("kind"),
            d.set_size.label("size"),
            OFFER.label("offer"),
        )
        .where(d.set_size.is_not(None))
        .subquery()
    )
    query = sa.select(*sets.c, sa.func.count().label("count")).group_by(*sets.c)
    return {
        SetKey(row["kind"], row["size"], row["offer"]): row["count"]
        for row in _all(connection, query)
    }


def _unhealthy(connection: sa.Connection, limit: int) -> list[UnhealthyRow]:
    d = schema.devices.c
    query = sa.select(d.host, d.address, d.health_since).where(d.health == Health.UNHEALTHY)
    query = query.order_by(d.health_since, d.id).limit(limit)
    return fetch_all(UnhealthyRow, connection.execute(query))


def _services(connection: sa.Connection, now: datetime) -> list[Row]:
    s = schema.services.c
    state = sa.case((s.down_at <= now, "down"), (s.late_at <= now, "late"), else_="up")
    counts = (sa.func.count().label("count"), sa.func.count(s.down_since).label("cordoned"))
    query = sa.select(s.binary, state.label("liveness"), *counts)
    return _all(connection, query.group_by(s.binary, "liveness"))


def _outbox(connection: sa.Connection) -> list[OutboxCountRow]:
    o, oldest = schema.outbox.c, sa.func.min(schema.outbox.c.created_at)
    query = (
        sa.select(*row_columns(OutboxCountRow, schema.outbox, count=sa.func.count(), oldest=oldest))
        .group_by(o.kind, o.state)
        .order_by(o.kind, o.state)
    )
    return fetch_all(OutboxCountRow, connection.execute(query))


def _jobs(connection: sa.Connection, now: datetime) -> list[JobCountRow]:
    """Count the open jobs of each kind."""
    jobs = schema.jobs.c
    counts = {
        "count": sa.func.count(),
        # The comparison is NULL for a job without a deadline, which is never overdue.
        "overdue": count_if(sa.func.coalesce(jobs.deadline < now, sa.false())),
        "oldest": sa.func.min(jobs.created_at),
    }
    query = (
        sa.select(*row_columns(JobCountRow, schema.jobs, **counts))
        .where(jobs.state == JobState.OPEN)
        .group_by(jobs.kind)
        .order_by(jobs.kind)
    )
    return fetch_all(JobCountRow, connection.execute(query))


def _all(connection: sa.Connection, query: sa.Executable) -> list[Row]:
    return [dict(row) for row in connection.execute(query).mappings()]

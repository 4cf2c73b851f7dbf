# SPDX-License-Identifier: Apache-2.0
"""Read audits, their findings, and the records of a host that an audit compares."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NotRequired, TypedDict

import sqlalchemy as sa

from cyborg.core.audit import sources
from cyborg.core.binding.states import OWNING_STATES, ArqState
from cyborg.core.jobs.job import JobState
from cyborg.db import joins
from cyborg.db.listing import Listing, columns_of
from cyborg.db.schema import (
    arqs,
    attachments,
    audits,
    deployables,
    devices,
    jobs,
    providers,
    set_members,
)
from cyborg.db.schema import attach_handles as handles


class AuditRow(TypedDict):
    """An audit; ``host`` is None for all hosts. Only ``get`` reads the findings."""

    uuid: str
    host: str | None
    repair: bool
    state: str
    error: str | None
    sources: list[str]
    hosts_done: int
    hosts_total: int
    num_findings: int
    created_at: datetime
    updated_at: datetime | None
    findings: NotRequired[list[dict[str, Any]]]


SORTABLE = columns_of(audits, "uuid", "host", "state", "created_at", "updated_at")
AUDITS = Listing(
    row=AuditRow,
    table=audits,
    columns=[audits.c[name] for name in AuditRow.__annotations__ if name != "findings"],
    # Up to megabytes: only the page of one audit shows them.
    details=[audits.c.findings],
    sortable=SORTABLE,
    filters=columns_of(audits, "host", "state"),
)
find = AUDITS.find
get = AUDITS.get


def read_snapshot(tx: sa.Connection, host: str) -> sources.DatabaseSnapshot:
    """Return devices with their deployables and handles, providers, and their ARQs."""
    handles_by_deployable = _handles(tx, host)
    members_by_set = _members(tx, host)
    deployables_by_device = defaultdict[int, list[sources.DeployableRecord]](list)
    query = sa.select(deployables).join(devices, devices.c.id == deployables.c.device_id)
    for row in tx.execute(query.where(devices.c.host == host).order_by(deployables.c.id)):
        record = sources.DeployableRecord(
            row.address,
            row.resource_class,
            provider=row.rp_uuid,
            name=row.name,
            draining=row.draining,
            programming=row.job_id is not None,
            handles=tuple(handles_by_deployable[row.id]),
            members=frozenset(members_by_set[row.id]),
        )
        deployables_by_device[row.device_id].append(record)
    d = devices.c
    query = sa.select(d.id, d.address, d.backend, d.draining).where(d.host == host).order_by(d.id)
    return sources.DatabaseSnapshot(
        tuple(
            sources.DeviceRecord(address, backend, draining, tuple(deployables_by_device[id_]))
            for id_, address, backend, draining in tx.execute(query)
        ),
        _providers(tx, host),
        tuple(_arqs(tx, host)),
    )


def _handles(tx: sa.Connection, host: str) -> dict[int, list[sources.HandleRecord]]:
    """Return the handles of a host by deployable."""
    h, r, sets = handles.c, arqs.c, deployables.alias("sets")
    query = (
        sa.select(
            h.id,
            h.deployable_id,
            h.address,
            h.draining,
            h.needs_cleaning,
            (jobs.c.state == JobState.OPEN).label("cleaning"),
            r.uuid.label("owner"),
            r.state.label("owner_state"),
            r.device_rp_uuid.label("owner_provider"),
            sets.c.rp_uuid.label("set_provider"),
        )
        .select_from(joins.HANDLES)
        .outerjoin(sets, sets.c.id == h.set_id)
        .outerjoin(arqs, r.id == h.arq_id)
        .outerjoin(jobs, jobs.c.id == h.job_id)
        .where(devices.c.host == host)
        .order_by(h.id)
    )
    handles_by_deployable = defaultdict[int, list[sources.HandleRecord]](list)
    for row in tx.execute(query):
        state = None if row.owner_state is None else ArqState(row.owner_state)
        record = sources.HandleRecord(
            row.id,
            row.address,
            draining=row.draining,
            needs_cleaning=row.needs_cleaning,
            cleaning=bool(row.cleaning),
            owner=row.owner,
            owner_state=state,
            owner_provider=row.owner_provider,
            set_provider=row.set_provider,
        )
        handles_by_deployable[row.deployable_id].append(record)
    return handles_by_deployable


def _members(tx: sa.Connection, host: str) -> dict[int, set[int]]:
    """Return the row ids of the handles of each device set of a host."""
    query = sa.select(set_members.c.deployable_id, set_members.c.handle_id).join(
        deployables, deployables.c.id == set_members.c.deployable_id
    )
    members_by_set = defaultdict[int, set[int]](set)
    for row in tx.execute(query.where(deployables.c.host == host)):
        members_by_set[row.deployable_id].add(row.handle_id)
    return members_by_set


def _providers(tx: sa.Connection, host: str) -> dict[str, sources.ProviderRecord]:
    p = providers.c
    query = sa.select(p.uuid, p.name, p.stale_since, p.error).where(p.host == host).order_by(p.id)
    return {row.uuid: sources.ProviderRecord(*row) for row in tx.execute(query)}


def _arqs(tx: sa.Connection, host: str) -> Iterable[sources.ArqRecord]:
    """Yield the ARQs that own handles of a host, or should."""
    r = arqs.c
    query = (
        sa.select(
            r.id,
            r.uuid,
            r.state,
            r.hostname,
            r.device_rp_uuid,
            r.instance_uuid,
            sa.func.coalesce(r.updated_at, r.created_at).label("changed_at"),
            handles.c.id.is_not(None).label("has_handle"),
            r.orphan_since,
            # The consumer of the allocation: the attachment if there is no instance.
            sa.case((r.instance_uuid.is_(None), attachments.c.uuid)).label("attachment"),
        )
        .join(deployables, deployables.c.rp_uuid == r.device_rp_uuid)
        .join(devices, devices.c.id == deployables.c.device_id)
        .outerjoin(handles, handles.c.arq_id == r.id)
        .outerjoin(attachments, attachments.c.id == r.attachment_id)
        .where(devices.c.host == host, r.state.in_(sorted(OWNING_STATES)))
        .order_by(r.id)
    )
    for row in tx.execute(query):
        yield sources.ArqRecord(
            row.id,
            row.uuid,
            ArqState(row.state),
            hostname=row.hostname or "",
            provider=row.device_rp_uuid,
            instance=row.instance_uuid or "",
            updated_at=row.changed_at,
            has_handle=row.has_handle,
            orphan_since=row.orphan_since,
            attachment=row.attachment or "",
        )

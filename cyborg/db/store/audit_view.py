# SPDX-License-Identifier: Apache-2.0
"""What the database says of one host, for an audit: six statements, however much the host has."""

from collections import defaultdict
from collections.abc import Iterable

import sqlalchemy as sa

from cyborg.core.audit_view import (
    DeviceRecord,
    HandleRecord,
    PartRecord,
    ProviderRecord,
    Records,
    RequestRecord,
)
from cyborg.core.job import JobState
from cyborg.core.states import HOLDING, RequestState
from cyborg.db.schema import attach_handles as handles
from cyborg.db.schema import deployables, devices, jobs, providers, requests, services
from cyborg.db.store.audits import AGENT


def agent(tx: sa.Connection, host: str) -> sa.RowMapping | None:
    """Return last_seen_at and down_since of a host's agent, None when none ever spoke."""
    query = sa.select(services.c.last_seen_at, services.c.down_since)
    mine = query.where(services.c.binary == AGENT, services.c.host == host)
    return tx.execute(mine).mappings().first()


def read(tx: sa.Connection, host: str) -> Records:
    """Return devices with their parts and handles, providers, and the requests they serve."""
    held = _handles(tx, host)
    parts: dict[int, list[PartRecord]] = defaultdict(list)
    query = sa.select(deployables).join(devices, devices.c.id == deployables.c.device_id)
    for row in tx.execute(query.where(devices.c.host == host).order_by(deployables.c.id)):
        parts[row.device_id].append(
            PartRecord(
                row.address,
                row.resource_class,
                row.rp_uuid,
                row.name,
                bool(row.draining),
                row.job_id is not None,
                tuple(held.get(row.id, ())),
            )
        )
    d = devices.c
    found = sa.select(d.id, d.address, d.backend, d.draining).where(d.host == host).order_by(d.id)
    return Records(
        tuple(
            DeviceRecord(row.address, row.backend, bool(row.draining), tuple(parts[row.id]))
            for row in tx.execute(found)
        ),
        _providers(tx, host),
        tuple(_requests(tx, host)),
    )


def _handles(tx: sa.Connection, host: str) -> dict[int, list[HandleRecord]]:
    h, r = handles.c, requests.c
    query = (
        sa.select(
            h.id,
            h.deployable_id,
            h.address,
            h.draining,
            h.prepared,
            (jobs.c.state == JobState.OPEN).label("cleaning"),
            r.uuid.label("owner"),
            r.state.label("owner_state"),
            r.device_rp_uuid.label("owner_provider"),
        )
        .join(deployables, deployables.c.id == h.deployable_id)
        .join(devices, devices.c.id == deployables.c.device_id)
        .outerjoin(requests, r.id == h.request_id)
        .outerjoin(jobs, jobs.c.id == h.job_id)
        .where(devices.c.host == host)
        .order_by(h.id)
    )
    found: dict[int, list[HandleRecord]] = defaultdict(list)
    for row in tx.execute(query):
        state = None if row.owner_state is None else RequestState(row.owner_state)
        found[row.deployable_id].append(
            HandleRecord(
                row.id,
                row.address,
                bool(row.draining),
                bool(row.prepared),
                bool(row.cleaning),
                row.owner,
                state,
                row.owner_provider,
            )
        )
    return found


def _providers(tx: sa.Connection, host: str) -> dict[str, ProviderRecord]:
    p = providers.c
    query = sa.select(p.uuid, p.name, p.stale_since, p.error).where(p.host == host).order_by(p.id)
    return {row.uuid: ProviderRecord(*row) for row in tx.execute(query)}


def _requests(tx: sa.Connection, host: str) -> Iterable[RequestRecord]:
    r = requests.c
    query = (
        sa.select(
            r.id,
            r.uuid,
            r.state,
            r.hostname,
            r.device_rp_uuid,
            r.instance_uuid,
            sa.func.coalesce(r.updated_at, r.created_at).label("touched"),
            handles.c.id.is_not(None).label("has_handle"),
            r.orphan_since,
        )
        .join(deployables, deployables.c.rp_uuid == r.device_rp_uuid)
        .join(devices, devices.c.id == deployables.c.device_id)
        .outerjoin(handles, handles.c.request_id == r.id)
        .where(devices.c.host == host, r.state.in_(sorted(HOLDING)))
        .order_by(r.id)
    )
    for row in tx.execute(query):
        yield RequestRecord(
            row.id,
            row.uuid,
            RequestState(row.state),
            row.hostname or "",
            row.device_rp_uuid,
            row.instance_uuid or "",
            row.touched,
            bool(row.has_handle),
            row.orphan_since,
        )

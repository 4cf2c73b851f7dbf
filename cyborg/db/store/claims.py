# SPDX-License-Identifier: Apache-2.0
"""Who owns which attach handle.

A claim is one UPDATE guarded by "nobody owns it", a release one UPDATE guarded by the owner. The
column is UNIQUE, so a handle has at most one owner and an owner at most one handle whatever the
code above does.

A handle is free when nobody owns it, it does not drain and it is not marked as prepared: by that
mark one without an owner is dirty, and a job cleans it before anybody gets it. It is set for what
the host prepares, and for what it must sanitise afterwards.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.core.device import Health
from cyborg.db.schema import attach_handles as handles
from cyborg.db.schema import deployables, devices
from cyborg.db.store import providers as publishing


def providers(tx: sa.Connection, uuids: Collection[str]) -> Sequence[sa.RowMapping]:
    """Return what decides whether a provider's handles may be given out, one row a provider.

    Keys: deployable_id, provider (its uuid), address, device, backend, host, resource_class,
    traits, abilities, device_status, health, setup_required, reboot_required, withdrawn,
    programming (a job has it), draining (of the device or of this part of it).
    """
    return tx.execute(_PROVIDERS, {"uuids": sorted(uuids)}).mappings().all()


def lock_free(
    tx: sa.Connection, deployable_id: int, limit: int, *, wait: bool
) -> Sequence[sa.RowMapping]:
    """Return id, uuid and address of up to ``limit`` free handles, locked until the end.

    Without ``wait``, handles that another transaction holds are passed over, so that claims at the
    same time take different handles and none queues for another. What is then missing may still be
    given back by a transaction that fails: only with ``wait`` is "there are no more" an answer.
    A database without row locks (SQLite) lets one writer in at a time and needs neither.
    """
    query = _LOCK_FREE_WAITING if wait else _LOCK_FREE
    return tx.execute(query, {"part": deployable_id, "most": limit}).mappings().all()


def census(tx: sa.Connection, deployable_ids: Collection[int]) -> Sequence[sa.RowMapping]:
    """Return every handle of the deployables with what speaks against it, to explain a refusal.

    Keys: id, uuid, deployable_id, taken, dirty, draining.
    """
    owned = handles.c.request_id.is_not(None)
    query = (
        sa.select(
            handles.c.id,
            handles.c.uuid,
            handles.c.deployable_id,
            owned.label("taken"),
            sa.and_(handles.c.prepared, sa.not_(owned)).label("dirty"),
            handles.c.draining,
        )
        .where(handles.c.deployable_id.in_(deployable_ids))
        .order_by(handles.c.id)
    )
    return tx.execute(query).mappings().all()


def claim(tx: sa.Connection, owners: Mapping[int, int], *, prepared: Collection[int] = ()) -> int:
    """Give each handle (by id) to a request (by id); return how many could be given.

    Those of ``prepared`` are marked as prepared from now on: whatever becomes of the host work,
    they are cleaned before another gets them. The guard looks at the device once more, so that one
    which was closed since the candidates were read gives nothing out.
    """
    values: dict[str, Any] = {"request_id": sa.case(owners, value=handles.c.id)}
    if prepared:
        values["prepared"] = handles.c.id.in_(sorted(prepared))
    return tx.execute(
        sa.update(handles).where(handles.c.id.in_(sorted(owners)), *_FREE, _OPEN).values(**values)
    ).rowcount


def release(tx: sa.Connection, request_ids: Collection[int]) -> Sequence[sa.RowMapping]:
    """Take back the handles of requests, which the caller has locked; return the dirty ones.

    Keys: id, address, deployable (address), device (address), backend, host. One that was only kept
    because it was owned stays, draining and without an owner, until the next report removes it
    (``services.ask_again`` asks for one); its provider is marked stale.
    """
    mine = handles.c.request_id.in_(request_ids)
    plain = sa.and_(sa.not_(handles.c.prepared), sa.not_(handles.c.draining))
    freed = tx.execute(sa.update(handles).where(mine, plain).values(request_id=None)).rowcount
    if freed == len(request_ids):
        return []
    query = (
        sa.select(
            handles.c.id,
            handles.c.address,
            handles.c.prepared,
            handles.c.draining,
            deployables.c.address.label("deployable"),
            deployables.c.rp_uuid,
            devices.c.address.label("device"),
            devices.c.backend,
            devices.c.host,
        )
        .join(deployables, deployables.c.id == handles.c.deployable_id)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(mine)
        .order_by(handles.c.id)
    )
    held = tx.execute(query).mappings().all()
    if not held:
        return []
    tx.execute(
        sa.update(handles)
        .where(handles.c.id.in_([row["id"] for row in held]), mine)
        .values(request_id=None)
    )
    if gone := {row["rp_uuid"] for row in held if row["draining"]}:
        publishing.mark_known(tx, gone, timeutils.utcnow())
    return [row for row in held if row["prepared"]]


_BY_OWNER = "ix_attach_handles_deployable_id_request_id"
_FREE = (
    handles.c.request_id.is_(None),
    sa.not_(handles.c.prepared),
    sa.not_(handles.c.draining),
)
# Built once: SQLAlchemy takes longer to build such a statement than a database to answer it.
_PROVIDERS = (
    sa.select(
        deployables.c.id.label("deployable_id"),
        deployables.c.rp_uuid.label("provider"),
        deployables.c.address,
        deployables.c.job_id.is_not(None).label("programming"),
        devices.c.address.label("device"),
        devices.c.backend,
        devices.c.abilities,
        deployables.c.resource_class,
        deployables.c.traits,
        sa.or_(deployables.c.draining, devices.c.draining).label("draining"),
        devices.c.host,
        devices.c.status.label("device_status"),
        devices.c.health,
        devices.c.setup_required,
        devices.c.reboot_required,
        devices.c.withdrawn,
    )
    .join(devices, devices.c.id == deployables.c.device_id)
    .where(deployables.c.rp_uuid.in_(sa.bindparam("uuids", expanding=True)))
    .order_by(deployables.c.id)
)
_CHOOSE_FREE = (
    sa.select(handles.c.id, handles.c.uuid, handles.c.address)
    # MariaDB would rather filter the deployable's handles by the free ones of the whole cloud.
    # That grows with the cloud, and locks on the way what others then pass over.
    .with_hint(handles, f"FORCE INDEX ({_BY_OWNER})", "mysql")
    .where(handles.c.deployable_id == sa.bindparam("part", type_=sa.BigInteger), *_FREE)
    .limit(sa.bindparam("most", type_=sa.Integer))
)
_LOCK_FREE = _CHOOSE_FREE.with_for_update(skip_locked=True)
# Only who waits can be part of a deadlock, and an order costs a better plan.
_LOCK_FREE_WAITING = _CHOOSE_FREE.order_by(handles.c.id).with_for_update()
_OPEN = sa.exists(
    sa.select(deployables.c.id)
    .join(devices, devices.c.id == deployables.c.device_id)
    .where(
        deployables.c.id == handles.c.deployable_id,
        deployables.c.job_id.is_(None),
        sa.not_(deployables.c.draining),
        sa.not_(devices.c.draining),
        devices.c.status == "enabled",
        sa.not_(devices.c.withdrawn),
        devices.c.health != Health.UNHEALTHY,
        sa.not_(devices.c.setup_required),
        sa.not_(devices.c.reboot_required),
    )
)
"""The device may give something out: the guard of a claim, as ``core.life`` has it."""

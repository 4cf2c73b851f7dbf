# SPDX-License-Identifier: Apache-2.0
"""Who owns which attach handle.

A claim is one UPDATE guarded by "nobody owns it", a release one UPDATE guarded by the owner. The
column is UNIQUE, so a handle has at most one owner and an owner at most one handle whatever the
code above does.
"""

from collections.abc import Collection, Mapping, Sequence

import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.db.schema import attach_handles as handles
from cyborg.db.schema import deployables, devices
from cyborg.db.schema import providers as publishing


def providers(tx: sa.Connection, uuids: Collection[str]) -> Sequence[sa.RowMapping]:
    """Return what decides whether a provider's handles may be given out, one row a provider.

    Keys: deployable_id, provider (its uuid), host, resource_class, traits, device_status, health,
    setup_required, reboot_required, draining (of the device or of this part of it).
    """
    query = (
        sa.select(
            deployables.c.id.label("deployable_id"),
            deployables.c.rp_uuid.label("provider"),
            deployables.c.resource_class,
            deployables.c.traits,
            sa.or_(deployables.c.draining, devices.c.draining).label("draining"),
            devices.c.host,
            devices.c.status.label("device_status"),
            devices.c.health,
            devices.c.setup_required,
            devices.c.reboot_required,
        )
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(deployables.c.rp_uuid.in_(uuids))
        .order_by(deployables.c.id)
    )
    return tx.execute(query).mappings().all()


def lock_free(
    tx: sa.Connection, deployable_id: int, limit: int, *, wait: bool
) -> Sequence[sa.RowMapping]:
    """Return id and uuid of up to ``limit`` handles that are free, locked until the end.

    Without ``wait``, handles that another transaction holds are passed over, so that claims at the
    same time take different handles and none queues for another. What is then missing may still be
    given back by a transaction that fails: only with ``wait`` is "there are no more" an answer.
    A database without row locks (SQLite) lets one writer in at a time and needs neither.
    """
    query = (
        sa.select(handles.c.id, handles.c.uuid)
        .where(
            handles.c.deployable_id == deployable_id,
            handles.c.request_id.is_(None),
            sa.not_(handles.c.draining),
        )
        .limit(limit)
        .with_for_update(skip_locked=not wait)
    )
    if wait:  # only who waits can be part of a deadlock, and an order costs a better plan
        query = query.order_by(handles.c.id)
    return tx.execute(query).mappings().all()


def census(tx: sa.Connection, deployable_ids: Collection[int]) -> Sequence[sa.RowMapping]:
    """Return every handle of the deployables with what speaks against it, to explain a refusal.

    Keys: id, uuid, deployable_id, taken, draining.
    """
    query = (
        sa.select(
            handles.c.id,
            handles.c.uuid,
            handles.c.deployable_id,
            handles.c.request_id.is_not(None).label("taken"),
            handles.c.draining,
        )
        .where(handles.c.deployable_id.in_(deployable_ids))
        .order_by(handles.c.id)
    )
    return tx.execute(query).mappings().all()


def claim(tx: sa.Connection, owners: Mapping[int, int]) -> int:
    """Give each handle (by id) to a request (by id); return how many were free to be given."""
    return tx.execute(
        sa.update(handles)
        .where(
            handles.c.id.in_(sorted(owners)),
            handles.c.request_id.is_(None),
            sa.not_(handles.c.draining),
        )
        .values(request_id=sa.case(owners, value=handles.c.id))
    ).rowcount


def release(tx: sa.Connection, request_ids: Collection[int]) -> int:
    """Take back the handles of requests, which the caller has locked; return how many there were.

    One that was only kept because it was owned stays, draining and without an owner, until the next
    report removes it (``services.ask_again`` asks for one); its provider is marked stale.
    """
    query = (
        sa.select(
            handles.c.id,
            deployables.c.rp_uuid,
            sa.or_(handles.c.draining, deployables.c.draining, devices.c.draining).label("gone"),
        )
        .join(deployables, deployables.c.id == handles.c.deployable_id)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(handles.c.request_id.in_(request_ids))
    )
    held = tx.execute(query).mappings().all()
    if not held:
        return 0
    freed = tx.execute(
        sa.update(handles)
        .where(
            handles.c.id.in_(sorted(row["id"] for row in held)),
            handles.c.request_id.in_(request_ids),
        )
        .values(request_id=None)
    ).rowcount
    if gone := [row for row in held if row["gone"]]:
        _stale(tx, {row["rp_uuid"] for row in gone})
    return freed


def _stale(tx: sa.Connection, uuids: Collection[str]) -> None:
    """Have the publisher look at providers again."""
    tx.execute(
        sa.update(publishing)
        .where(publishing.c.uuid.in_(sorted(uuids)))
        .values(
            revision=publishing.c.revision + 1,
            stale_since=sa.func.coalesce(publishing.c.stale_since, timeutils.utcnow()),
        )
    )

# SPDX-License-Identifier: Apache-2.0
"""Writing what the reconciler found out of requests.

None of this counts as a change of the request itself: ``updated_at`` stays the moment of the bind,
from which the time without suspicion is measured.
"""

from collections.abc import Collection, Sequence
from datetime import datetime

import sqlalchemy as sa

from cyborg.core.states import RequestState
from cyborg.db.schema import requests

EXPIRING = (RequestState.INITIAL, RequestState.UNBOUND, RequestState.BIND_FAILED)
"""The states of requests that nobody may ever delete; none holds a handle."""

_TOUCHED = sa.func.coalesce(requests.c.updated_at, requests.c.created_at)
_BOUND = requests.c.state == RequestState.BOUND


def page(tx: sa.Connection, provider: str, after: int, limit: int) -> Sequence[sa.RowMapping]:
    """Return the next bound requests behind this provider and request id, one provider at a time.

    Keys: id, uuid, instance_uuid, device_rp_uuid, project_id, owner_known, orphan_since,
    created_at, updated_at. A round starts with "" and 0.
    """
    r = requests.c
    query = (
        sa.select(
            r.id,
            r.uuid,
            r.instance_uuid,
            r.device_rp_uuid,
            r.project_id,
            r.owner_known,
            r.orphan_since,
            r.created_at,
            r.updated_at,
        )
        .where(_BOUND)
        # Without the first term a database walks the index of providers from its start.
        .where(
            r.device_rp_uuid >= provider,
            sa.or_(r.device_rp_uuid > provider, r.id > after),
        )
        .order_by(r.device_rp_uuid, r.id)
        .limit(limit)
    )
    return tx.execute(query).mappings().all()


def suspect(tx: sa.Connection, ids: Collection[int], now: datetime, bound_before: datetime) -> int:
    """Mark bound requests as suspected since now; return how many were not marked until now.

    One that was bound anew meanwhile, so after ``bound_before``, is left alone.
    """
    if not ids:
        return 0
    return tx.execute(
        sa.update(requests)
        .where(
            requests.c.id.in_(sorted(ids)),
            _BOUND,
            requests.c.orphan_since.is_(None),
            bound_before >= _TOUCHED,
        )
        .values(orphan_since=now, updated_at=requests.c.updated_at)
    ).rowcount


def clear(tx: sa.Connection, ids: Collection[int]) -> int:
    """Take a suspicion back; return how many requests were under one."""
    if not ids:
        return 0
    return tx.execute(
        sa.update(requests)
        .where(requests.c.id.in_(sorted(ids)), requests.c.orphan_since.is_not(None))
        .values(orphan_since=None, updated_at=requests.c.updated_at)
    ).rowcount


def settle(tx: sa.Connection, ids: Collection[int], instance: str, project: str) -> int:
    """Give requests of an instance to its project, if nobody has yet; return how many."""
    return tx.execute(
        sa.update(requests)
        .where(
            requests.c.id.in_(sorted(ids)),
            requests.c.instance_uuid == instance,
            sa.not_(requests.c.owner_known),
        )
        .values(project_id=project, owner_known=True, updated_at=requests.c.updated_at)
    ).rowcount


def expire(tx: sa.Connection, before: datetime, limit: int) -> int:
    """Delete up to ``limit`` requests without a handle that nobody touched since ``before``."""
    old = sa.and_(requests.c.state.in_(EXPIRING), before > _TOUCHED)
    ids = tx.scalars(sa.select(requests.c.id).where(old).order_by(requests.c.id).limit(limit)).all()
    if not ids:
        return 0
    # A bind may have been faster.
    return tx.execute(sa.delete(requests).where(requests.c.id.in_(ids), old)).rowcount

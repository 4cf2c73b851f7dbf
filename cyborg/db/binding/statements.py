# SPDX-License-Identifier: Apache-2.0
"""Statements on ARQs that each boot and deletion of a server executes, with bind parameters.

They are built once: SQLAlchemy needs more time to build such a statement, and to find it in its
cache of compiled statements, than a database to run it. The names of parameters of an UPDATE start
with ``new_`` or ``old_``, because SQLAlchemy reserves the names of columns.
"""

from typing import Any

import sqlalchemy as sa

from cyborg.core.binding.states import Step, source_states
from cyborg.db.schema import arqs

_UUIDS: sa.BindParameter[Any] = sa.bindparam("uuids", expanding=True)
_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
_INSTANCE: sa.BindParameter[Any] = sa.bindparam("instance", type_=sa.String)
_SCOPE = arqs.c.project_id == sa.bindparam("scope", type_=sa.String)
_other = arqs.alias("other")
_OTHER_COUNT = (
    sa.select(sa.func.count())
    .where(
        _other.c.instance_uuid == _INSTANCE,
        _other.c.uuid.not_in(_UUIDS),
        sa.not_(sa.and_(_other.c.hidden, _other.c.attachment_id.is_not(None))),
    )
    .scalar_subquery()
    .label("other_arqs")
)
_HIDDEN_SLOT = (
    sa.select(sa.func.max(_other.c.instance_slot))
    .where(
        _other.c.instance_uuid == _INSTANCE,
        _other.c.hidden,
        _other.c.attachment_id.is_not(None),
    )
    .scalar_subquery()
    .label("hidden_slot")
)
_ALL = sa.select(arqs).order_by(arqs.c.id).with_for_update()

LOCK = _ALL.where(arqs.c.uuid.in_(_UUIDS))
LOCK_SCOPED = LOCK.where(_SCOPE)
LOCK_TO_BIND = LOCK.add_columns(_OTHER_COUNT, _HIDDEN_SLOT)
LOCK_TO_BIND_SCOPED = LOCK_TO_BIND.where(_SCOPE)
LOCK_OF_INSTANCE = _ALL.where(arqs.c.instance_uuid == _INSTANCE)
LOCK_OF_INSTANCE_SCOPED = LOCK_OF_INSTANCE.where(_SCOPE)
DELETE = sa.delete(arqs).where(
    arqs.c.id.in_(_IDS), arqs.c.state.in_(sorted(source_states(Step.DELETE)))
)


def _new(name: str) -> sa.BindParameter[Any]:
    return sa.bindparam(f"new_{name}", type_=arqs.c[name].type)


BIND_ONE = (
    sa.update(arqs)
    .where(
        arqs.c.id == sa.bindparam("old_id", type_=sa.BigInteger),
        # The guard of ``write.arqs.bind``.
        arqs.c.state.in_(sorted(source_states(Step.START))),
    )
    .values(
        {
            **{
                name: _new(name)
                for name in (
                    *("state", "hostname", "instance_uuid", "instance_slot"),
                    *("device_rp_uuid", "owner_verified"),
                )
            },
            # None keeps the project.
            "project_id": sa.func.coalesce(_new("project_id"), arqs.c.project_id),
            "orphan_since": None,
            "job_id": None,
        }
    )
)
"""The bind of one ARQ, as in most calls. That of several ARQs has a CASE for each."""

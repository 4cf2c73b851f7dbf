# SPDX-License-Identifier: Apache-2.0
"""Writing accelerator requests.

Every step takes the rows' locks first, in the order of their ids, and is then one guarded UPDATE or
DELETE: its guard is the list of states from which ``core.states`` allows the step, its row count
says whether it happened.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from cyborg.core.states import RequestState, Step, sources
from cyborg.db.schema import requests


def insert_all(tx: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add requests. Raises oslo.db's DBReferenceError when their profile is gone."""
    tx.execute(sa.insert(requests), [dict(row) for row in rows])


def lock(
    tx: sa.Connection, uuids: Collection[str], scope: str | None = None
) -> Sequence[sa.RowMapping]:
    """Return the requests of these uuids in the order of their ids, locked until the end.

    ``scope`` is the project whose requests exist for the caller, None for every project.
    """
    return _locked(tx, requests.c.uuid.in_(uuids), scope)


def lock_of_instance(
    tx: sa.Connection, instance: str, scope: str | None = None
) -> Sequence[sa.RowMapping]:
    """Return the requests of an instance in the order of their ids, locked until the end."""
    return _locked(tx, requests.c.instance_uuid == instance, scope)


def _locked(
    tx: sa.Connection, which: sa.ColumnElement[bool], scope: str | None
) -> Sequence[sa.RowMapping]:
    query = sa.select(requests).where(which).order_by(requests.c.id).with_for_update()
    if scope is not None:
        query = query.where(requests.c.project_id == scope)
    return tx.execute(query).mappings().all()


def others_of_instance(
    tx: sa.Connection, instance: str, ids: Collection[int]
) -> Sequence[sa.RowMapping]:
    """Return uuid and state of a few requests of the instance that are not among ``ids``."""
    query = sa.select(requests.c.uuid, requests.c.state).where(
        requests.c.instance_uuid == instance, requests.c.id.not_in(ids)
    )
    return tx.execute(query.limit(3)).mappings().all()


def bind(
    tx: sa.Connection,
    *,
    providers: Mapping[int, str],
    projects: Mapping[int, str],
    hostname: str,
    instance: str,
    first_slot: int,
) -> int:
    """Mark requests Bound to the provider of each, and return how many were in a state for it.

    ``providers`` maps request ids to provider uuids; ``projects`` names the project of those whose
    owner changes with the bind. The requests take the instance's places from ``first_slot`` on.
    Raises oslo.db's DBDuplicateEntry when another bind for the instance has taken one of them.
    """
    ids = sorted(providers)
    values: dict[str, Any] = {
        "state": RequestState.BOUND,
        "hostname": hostname,
        "instance_uuid": instance,
        "device_rp_uuid": _each(providers),
        "instance_slot": _each({id_: first_slot + n for n, id_ in enumerate(ids)}),
    }
    if projects:
        values["project_id"] = _each(projects, otherwise=requests.c.project_id)
    # The claim of a handle is part of this step, so that its guard is that of START: a request that
    # is BindStarted owns a handle already.
    return _step(tx, Step.START, ids, values)


def unbind(tx: sa.Connection, ids: Collection[int]) -> int:
    """Mark requests Unbound, of no host and no instance; return how many were in a state for it."""
    values: dict[str, Any] = {
        "state": RequestState.UNBOUND,
        "hostname": None,
        "device_rp_uuid": None,
        "instance_uuid": None,
        "instance_slot": None,
    }
    return _step(tx, Step.UNBIND, ids, values)


def delete(tx: sa.Connection, ids: Collection[int]) -> int:
    """Delete requests that hold no handle; return how many were in a state for it."""
    return tx.execute(
        sa.delete(requests).where(
            requests.c.id.in_(ids), requests.c.state.in_(sources(Step.DELETE))
        )
    ).rowcount


def _step(tx: sa.Connection, step: Step, ids: Collection[int], values: Mapping[str, Any]) -> int:
    allowed = sources(step)
    return tx.execute(
        sa.update(requests)
        .where(requests.c.id.in_(ids), requests.c.state.in_(allowed))
        .values(**values)
    ).rowcount


def _each(values: Mapping[int, Any], otherwise: Any = None) -> Any:
    # One statement with a CASE, not one UPDATE for each row: a bind of sixteen costs what one does.
    return sa.case(values, value=requests.c.id, else_=otherwise)

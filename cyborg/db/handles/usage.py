# SPDX-License-Identifier: Apache-2.0
"""Count attach handles by use, for pages of devices and hosts.

A handle counts once: as ``owned``, or without an owner as ``draining``, ``dirty`` (not cleaned
yet), ``cordoned`` (the device is not schedulable) or ``free``, the first that applies. As in the
list of accelerators, a dirty handle of a draining device is draining.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.core.inventory.device_set import OfferState
from cyborg.db import joins
from cyborg.db.binding import accelerators
from cyborg.db.paging import id_in
from cyborg.db.schema import attach_handles, deployables, devices, services, set_members


class ClassUseRow(TypedDict):
    """The handles of one resource class of a host: see ``of_hosts``."""

    resource_class: str
    total: int
    free: int
    owned: int
    dirty: int
    draining: int
    cordoned: int
    undeliverable: int
    whole_free: int
    largest_free: int


USES = ("free", "owned", "dirty", "draining", "cordoned")
# Has what the numbers of the handles of a deployable need: no row of a handle is read.
COUNTING_INDEX = "ix_attach_handles_deployable_id_arq_id_needs_cleaning_draining"

# Deployables whose handles one statement counts. MariaDB makes a table of a longer list of ids, and
# joins and sorts all their handles (in_predicate_conversion_threshold).
MAX_DEPLOYABLES = 900


def by_deployable(ids: Collection[int] | None = None) -> sa.Subquery:
    """Return a query of the numbers of handles of each deployable by their own state.

    It has ``owned``, ``draining``, ``dirty`` and ``clean``, for the deployables ``ids`` or all.
    """
    h = attach_handles.c
    free = h.arq_id.is_(None)
    # By the deployable alone, since an index has the handles in this order: nothing is sorted.
    # MariaDB would group the handles of each deployable on its own (LATERAL DERIVED), or sort all.
    # It cannot if the joined column is an aggregate: hence min().
    query = sa.select(
        sa.func.min(h.deployable_id).label("deployable_id"),
        sa.func.count(h.arq_id).label("owned"),
        count_if(sa.and_(free, h.draining)).label("draining"),
        count_if(sa.and_(free, sa.not_(h.draining), h.needs_cleaning)).label("dirty"),
        count_if(sa.and_(free, sa.not_(h.draining), sa.not_(h.needs_cleaning))).label("clean"),
    ).group_by(h.deployable_id)
    if ids is not None:
        query = query.where(id_in(h.deployable_id, ids))
    # MariaDB would take another index on the deployable, and read the row of each handle.
    return query.with_hint(attach_handles, f"FORCE INDEX ({COUNTING_INDEX})", "mysql").subquery()


def count_if(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    """Return the expression for the number of rows in a group that meet a condition."""
    return sa.func.count(sa.case((condition, 1)))


def of_devices(connection: sa.Connection, ids: Collection[int]) -> dict[int, dict[str, int]]:
    """Return the numbers of USES of devices, by row id.

    Execute one statement, and one for each MAX_DEPLOYABLES deployables of the devices.

    For a device without handles the result has a default: zeros. Clean handles count as ``free``,
    whatever the state of the device is. A source of device sets has the members of its sets, each
    once, which costs one more statement.
    """
    d = deployables.c
    query = sa.select(d.id, d.device_id, d.draining, d.set_size).where(id_in(d.device_id, ids))
    uses_by_device = defaultdict[int, dict[str, int]](lambda: dict.fromkeys(USES, 0))
    rows = [dict(row) for row in connection.execute(query).mappings()] if ids else []
    for row in _with_handles(connection, rows):
        for use, number in _uses(row, is_draining=row["draining"], is_closed=False).items():
            uses_by_device[row["device_id"]][use] += number
    sources = {row["device_id"] for row in rows if row["set_size"] is not None}
    return uses_by_device | _count_members(connection, sources)


def _count_members(
    connection: sa.Connection, sources: Collection[int]
) -> dict[int, dict[str, int]]:
    """Return the numbers of USES of the members of all sets of each source, by its row id."""
    if not sources:
        return {}
    h, m, own = attach_handles.c, set_members.c, deployables.alias("own")
    # ``d`` is the set, a deployable of the source; ``own`` is the deployable of the member itself.
    d = deployables.c
    members = (
        sa.select(
            d.device_id,
            h.arq_id,
            sa.or_(h.draining, own.c.draining).label("draining"),
            h.needs_cleaning.label("dirty"),
            h.id.label("handle_id"),
        )
        # Sets overlap: each handle once for a source.
        .distinct()
        .select_from(
            set_members.join(deployables, d.id == m.deployable_id)
            .join(attach_handles, h.id == m.handle_id)
            .join(own, own.c.id == h.deployable_id)
        )
        .where(id_in(d.device_id, sources))
        .subquery()
    )
    c = members.c
    unowned = c.arq_id.is_(None)
    query = sa.select(
        c.device_id,
        sa.func.count(c.arq_id).label("owned"),
        count_if(sa.and_(unowned, c.draining)).label("draining"),
        count_if(sa.and_(unowned, sa.not_(c.draining), c.dirty)).label("dirty"),
        count_if(sa.and_(unowned, sa.not_(c.draining), sa.not_(c.dirty))).label("free"),
    ).group_by(c.device_id)
    return {
        row.pop("device_id"): {**dict.fromkeys(USES, 0), **row}
        for row in map(dict, connection.execute(query).mappings())
    }


def of_hosts(connection: sa.Connection, hosts: Sequence[str]) -> dict[str, list[ClassUseRow]]:
    """Return the handles of hosts by resource class, by the name of the host.

    Execute one statement, and one for each MAX_DEPLOYABLES deployables of the hosts.

    Each has the numbers of USES, their ``total``, ``undeliverable`` (cordoned, of a device that
    cannot be attached to an instance), ``whole_free`` (free, with all others of their deployable)
    and ``largest_free`` (the most free ones of one deployable, which one group of a request can
    get). If a host has device sets of a class, ``largest_free`` is the size of the largest offered
    one: other devices of this class are not taken into account.
    """
    d = deployables.c
    query = sa.select(
        d.id,
        devices.c.host,
        d.resource_class,
        devices.c.deliverable,
        accelerators.DEVICE_DRAINING.label("draining"),
        accelerators.UNSCHEDULABLE.label("closed"),
        d.set_size,
        d.offer,
    )
    query = query.join_from(deployables, devices, devices.c.id == d.device_id)
    query = query.outerjoin(services, joins.AGENT_OF_DEVICE)
    query = query.where(devices.c.host.in_(hosts))
    rows = [dict(row) for row in connection.execute(query).mappings()]
    largest_sets = _find_largest_sets(rows)
    sums_by_host: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in _with_handles(connection, rows):
        name = row["resource_class"]
        sums = sums_by_host[row["host"]].setdefault(name, {"resource_class": name, **_ZEROS})
        uses = _uses(row, is_draining=row["draining"], is_closed=row["closed"])
        for use, number in uses.items():
            sums[use] += number
        sums["total"] += sum(uses.values())
        sums["undeliverable"] += 0 if row["deliverable"] else uses["cordoned"]
        sums["whole_free"] += uses["free"] if uses["free"] == sum(uses.values()) else 0
        largest = largest_sets.get((row["host"], name), uses["free"])
        sums["largest_free"] = max(sums["largest_free"], largest)
    return {
        host: [cast(ClassUseRow, classes[name]) for name in sorted(classes)]
        for host, classes in sums_by_host.items()
    }


_ZEROS = dict.fromkeys(("total", *USES, "undeliverable", "whole_free", "largest_free"), 0)


def _find_largest_sets(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str], int]:
    """Return the size of the largest offered set by host and class; 0 if none of them is."""
    largest: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["set_size"] is not None:
            key = row["host"], row["resource_class"]
            is_offered = row["offer"] == OfferState.OFFERED and not (
                row["closed"] or row["draining"]
            )
            largest[key] = max(largest.get(key, 0), row["set_size"] if is_offered else 0)
    return largest


def _with_handles(
    connection: sa.Connection, rows: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return those deployables that have handles, with the numbers of their handles."""
    by_id = {row["id"]: row for row in rows}
    ids = sorted(by_id)
    found: list[dict[str, Any]] = []
    for start in range(0, len(ids), MAX_DEPLOYABLES):
        query = sa.select(by_deployable(ids[start : start + MAX_DEPLOYABLES]))
        for row in connection.execute(query).mappings():
            found.append({**by_id[row["deployable_id"]], "handles": row})
    return found


def _uses(row: Mapping[str, Any], *, is_draining: bool, is_closed: bool) -> dict[str, int]:
    owned, draining, dirty, clean = (
        row["handles"][name] for name in ("owned", "draining", "dirty", "clean")
    )
    uses = {**dict.fromkeys(USES, 0), "owned": owned, "draining": draining}
    if is_draining:
        return {**uses, "draining": draining + dirty + clean}
    return {**uses, "dirty": dirty, "cordoned" if is_closed else "free": clean}

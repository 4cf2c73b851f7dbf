# SPDX-License-Identifier: Apache-2.0
"""Read what decides the offers of the device sets of a host."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import sqlalchemy as sa

from cyborg.core.device_sets.groups import SizeSummary
from cyborg.core.device_sets.offers import OVERLAPS, SPLIT, WAITS, UnitUse
from cyborg.core.device_sets.reported import ReportedSet, Unit
from cyborg.core.inventory.device_set import DeviceSet, OfferState, SetMember
from cyborg.core.inventory.device_state import DeviceCondition, DeviceFacts, evaluate
from cyborg.db import joins
from cyborg.db.deployables import facts
from cyborg.db.deployables.facts import DeviceFactsColumns
from cyborg.db.rows import fetch_all, row_columns
from cyborg.db.schema import attach_handles as handles
from cyborg.db.schema import deployables, devices, providers, set_members


class SetRow(DeviceFactsColumns):
    """A device set of a host, with the facts of its source, which is a device.

    ``source`` is the address of this device. ``is_published`` is whether Placement has, or had, the
    provider.
    """

    id: int
    uuid: str
    rp_uuid: str
    address: str
    source: str
    set_group: str | None
    device_set: dict[str, Any]
    offer: str | None
    offer_reason: str | None
    health_reason: str | None
    is_published: bool


class UnitRow(DeviceFactsColumns):
    """A member of a set, with the facts of its device; ``set_id`` is the set of its claim."""

    member_of: int
    address: str
    deployable: str
    device: str
    resource_class: str
    set_id: int | None
    is_owned: bool
    needs_cleaning: bool
    handle_draining: bool
    health_reason: str | None
    undeliverable_reason: str | None


class _GroupRow(TypedDict):
    host: str
    set_size: int
    offered: int
    inside: int
    split: int


class HostSets(NamedTuple):
    """The sets of a host in the order of their row ids, and the uses of their units that have one.

    The uses are by the name of the unit.
    """

    sets: Sequence[ReportedSet]
    uses: dict[str, UnitUse]


def find_sets(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[SetRow]:
    """Return the sets whose deployables meet a condition, in the order of their row ids."""
    is_published = sa.func.coalesce(providers.c.published_revision, 0) > 0
    columns = {**facts.COLUMNS, "is_published": is_published, "source": devices.c.address}
    query = sa.select(*row_columns(SetRow, deployables, devices, **columns))
    query = query.join(devices, devices.c.id == deployables.c.device_id)
    query = query.outerjoin(providers, providers.c.uuid == deployables.c.rp_uuid)
    query = query.where(condition, deployables.c.set_size.is_not(None))
    return fetch_all(SetRow, connection.execute(query.order_by(deployables.c.id)))


def sets_of_host(connection: sa.Connection, host: str) -> list[SetRow]:
    """Return the sets of a host, in the order of their row ids."""
    return find_sets(connection, deployables.c.host == host)


def units_of_host(connection: sa.Connection, host: str) -> list[UnitRow]:
    """Return the members of all sets of a host, once for each set."""
    others = {
        **facts.COLUMNS,
        **joins.ADDRESSES,
        "member_of": set_members.c.deployable_id,
        "resource_class": deployables.c.resource_class,
        "is_owned": handles.c.arq_id.is_not(None),
        "handle_draining": handles.c.draining,
    }
    query = (
        sa.select(*row_columns(UnitRow, handles, devices, **others))
        .select_from(joins.HANDLES)
        .join(set_members, set_members.c.handle_id == handles.c.id)
        .where(devices.c.host == host)
        .order_by(set_members.c.deployable_id, handles.c.id)
    )
    return fetch_all(UnitRow, connection.execute(query))


def make_sets(rows: Sequence[SetRow], unit_rows: Sequence[UnitRow]) -> HostSets:
    """Return the sets of a host from their rows and those of their units."""
    units_by_set = defaultdict[int, list[Unit]](list)
    uses: dict[str, UnitUse] = {}
    for row in unit_rows:
        member = SetMember(row["device"], row["deployable"], row["address"])
        unit = Unit(member, row["resource_class"], _find_condition(row))
        units_by_set[row["member_of"]].append(unit)
        if row["is_owned"] or row["needs_cleaning"]:
            uses[unit.name] = UnitUse(row["set_id"], cleaning=not row["is_owned"])
    sets = [
        ReportedSet(
            id=row["id"],
            name=row["address"],
            source=row["source"],
            device_set=DeviceSet.from_dict(row["device_set"]),
            units=tuple(units_by_set[row["id"]]),
            state=_find_state(row),
            source_condition=_describe(row, row["health_reason"]),
        )
        for row in rows
    ]
    return HostSets(sets, uses)


def summarize_group(connection: sa.Connection, group: str) -> list[SizeSummary]:
    """Return the numbers of free sets of each size on each host of a group.

    The free units of a host are those of its offered sets. The cost grows with the sets of the
    group: hence groups, and not the whole cloud.
    """
    d = deployables.c
    # The reason of a set that is not offered begins with a constant text: see ``SizeSummary``.
    reason = sa.func.coalesce(d.offer_reason, "")
    # A set that waits will be offered: it counts already, as in ``SizeSummary``.
    offered = sa.or_(d.offer == OfferState.OFFERED, reason.startswith(WAITS))

    def count(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
        return sa.func.sum(sa.case((condition, 1), else_=0))

    query = (
        sa.select(
            d.host,
            d.set_size,
            count(offered).label("offered"),
            count(reason.startswith(OVERLAPS)).label("inside"),
            count(reason.startswith(SPLIT)).label("split"),
        )
        .where(d.set_group == group)
        .group_by(d.host, d.set_size)
        .order_by(d.host, d.set_size)
    )
    rows = fetch_all(_GroupRow, connection.execute(query))
    free_units = Counter[str]()
    for row in rows:
        free_units[row["host"]] += row["set_size"] * int(row["offered"])
    return [
        SizeSummary(
            host=row["host"],
            size=row["set_size"],
            offered=int(row["offered"]),
            inside=int(row["inside"]),
            split=int(row["split"]),
            free_units=free_units[row["host"]],
        )
        for row in rows
    ]


def _find_state(row: SetRow) -> OfferState | None:
    if row["offer"] is not None:
        return OfferState(row["offer"])
    # A published set was removed and has returned: a server may have an allocation of the former
    # one.
    return OfferState.WITHDRAWING if row["is_published"] else None


def _find_condition(row: UnitRow) -> str | None:
    condition = _describe(row, row["health_reason"] or row["undeliverable_reason"])
    if condition is None and row["handle_draining"]:
        return str(DeviceCondition.DRAINING)
    return condition


def _describe(row: DeviceFactsColumns, detail: str | None) -> str | None:
    """Return the condition of a device that excludes it, with details; None if there is none."""
    # The plan ignores whether the host is down, and decides itself which sets are withheld.
    status = evaluate(DeviceFacts.from_row(row, host_down=False, withheld=False))
    if status.schedulable:
        return None
    return f"{status.state}: {detail}" if detail else str(status.state)

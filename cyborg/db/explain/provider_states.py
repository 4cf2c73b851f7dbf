# SPDX-License-Identifier: Apache-2.0
"""Read the states of single providers: those of a page, of a host, or of a bind.

The handles are counted by the database. ``provider_counts`` has the providers of the whole cloud.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import sqlalchemy as sa

from cyborg.core.binding.profile import REQUIRED_INFO, AttachTarget
from cyborg.core.explain.explanation import HandleCounts, Holder, ProviderState
from cyborg.core.explain.predicates import Predicate
from cyborg.core.inventory.device import Layout
from cyborg.core.inventory.device_state import DeviceFacts
from cyborg.db import joins
from cyborg.db.deployables import facts
from cyborg.db.deployables.read import failed_restores
from cyborg.db.paging import NameRow, Page, paginate
from cyborg.db.rows import fetch_all
from cyborg.db.schema import arqs, deployables, devices, providers, services, set_members
from cyborg.db.schema import attach_handles as handles

# Maximum number of owners of one provider.
MAX_HOLDERS = 16
MAX_REMARK = 255


def find(
    connection: sa.Connection,
    *,
    resource_classes: Collection[str] | None = None,
    host: str | None = None,
    hosts: Collection[str] | None = None,
    owner: str | None = None,
    uuids: Collection[str] | None = None,
    attach_targets: Collection[AttachTarget | None] = (),
) -> list[ProviderState]:
    """Return the states of providers, ordered by host; execute five statements.

    ``resource_classes`` limits them to providers of these classes and to those of devices with a
    layout that has one of them, ``owner`` to those of which a project has handles, ``hosts`` and
    ``uuids`` to those of some hosts, or to some providers. ``attach_targets`` are the targets whose
    handles are counted. Without ``uuids``, the providers are left out whose devices are allocated
    in device sets only: Placement has no inventory of them.
    """
    where = [] if host is None else [devices.c.host == host]
    if hosts is not None:
        where.append(devices.c.host.in_(sorted(hosts)))
    if resource_classes is not None:
        of_class = deployables.c.resource_class.in_(sorted(resource_classes))
        where.append(sa.or_(of_class, has_layout_of(resource_classes)))
    if owner is not None:
        owned = sa.select(arqs.c.device_rp_uuid).where(arqs.c.project_id == owner)
        where.append(deployables.c.rp_uuid.in_(owned))
    if uuids is not None:
        where.append(deployables.c.rp_uuid.in_(sorted(uuids)))
    failed = failed_restores(connection)
    is_small = (uuids, host, hosts) != (None, None, None)
    counts = _count_handles(connection, where, attach_targets, is_small=is_small)
    layouts: dict[int, tuple[Layout, ...]] = {}
    states = [
        _to_state(row, counts.get(row["id"]), row["uuid"] in failed, layouts)
        for row in connection.execute(_STATES.where(*where)).mappings()
    ]
    return states if uuids is not None else [state for state in states if not state.in_sets]


def find_uuids(
    connection: sa.Connection, page: Page | None = None, *, host: str | None = None
) -> list[NameRow]:
    """Return a page of the uuids of the providers that ``find`` returns, by default by host.

    The sort keys are ``hostname`` and ``uuid``. A marker costs one more statement. Raise Invalid as
    ``paginate`` does.
    """
    page = page or Page()
    if page.sort_key is None:
        page = replace(page, sort_key="hostname")
    query = sa.select(_LISTED.c.uuid)
    if host is not None:
        query = query.where(_LISTED.c.host == host)
    sortable = {"hostname": _LISTED.c.host, "uuid": _LISTED.c.uuid}
    return fetch_all(
        NameRow, connection.execute(paginate(connection, query, _LISTED, page, sortable))
    )


def find_other_uuids(
    connection: sa.Connection, resource_classes: Collection[str], limit: int
) -> list[str]:
    """Return the uuids of up to ``limit`` providers that ``provider_counts.find`` does not return.

    They have none of these resource classes, and their devices no layout with one. They are ordered
    by host.
    """
    query = (
        sa.select(deployables.c.rp_uuid)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(
            deployables.c.resource_class.not_in(sorted(resource_classes)),
            sa.not_(has_layout_of(resource_classes)),
            sa.not_(IN_SETS),
        )
        .order_by(deployables.c.host, deployables.c.id)
    )
    return list(connection.scalars(query.limit(limit)))


def find_holders(
    connection: sa.Connection, provider_uuids: Collection[str]
) -> dict[str, list[Holder]]:
    """Return the first owners of handles of each provider, at most MAX_HOLDERS, by its uuid.

    Execute one statement.
    """
    provider = arqs.c.device_rp_uuid
    number = sa.func.row_number().over(partition_by=provider, order_by=handles.c.id)
    query = sa.select(provider, *_HOLDER_COLUMNS, number.label("number"))
    query = query.join(handles, handles.c.arq_id == arqs.c.id)
    owned = query.where(provider.in_(sorted(provider_uuids))).subquery().c
    # Alternative not taken: sort the row ids alone, and read the first ARQs then. It takes MariaDB
    # half of the time, but PostgreSQL would read all ARQs of the cloud.
    first = sa.select(owned.device_rp_uuid, *(owned[column.name] for column in _HOLDER_COLUMNS))
    first = first.where(owned.number <= MAX_HOLDERS).order_by(owned.device_rp_uuid, owned.number)
    holders = defaultdict[str, list[Holder]](list)
    for uuid, *fields in connection.execute(first):
        holders[uuid].append(Holder(*fields))
    return dict(holders)


class OwnHolders(NamedTuple):
    """The handles of a provider that one project owns: their number and their first owners."""

    first: list[Holder]
    total: int


def find_own_holders(
    connection: sa.Connection, project: str, resource_classes: Collection[str]
) -> dict[str, OwnHolders]:
    """Return, by provider uuid, the handles that one project owns, with up to MAX_HOLDERS owners.

    Draining handles are left out, as in ``HandleCounts.taken``. Execute one statement. It selects
    by resource class, because there can be too many providers for the parameters of a statement.
    """
    uuid = deployables.c.rp_uuid
    query = sa.select(
        uuid,
        *_HOLDER_COLUMNS,
        sa.func.row_number().over(partition_by=uuid, order_by=arqs.c.id).label("number"),
        sa.func.count().over(partition_by=uuid).label("total"),
    ).where(
        arqs.c.project_id == project,
        deployables.c.resource_class.in_(sorted(resource_classes)),
        handles.c.draining.is_(sa.false()),
    )
    owned = query.select_from(_OWNED_HANDLES).subquery()
    first = sa.select(owned).where(owned.c.number <= MAX_HOLDERS)
    holders: dict[str, OwnHolders] = {}
    for row in connection.execute(first.order_by(owned.c.rp_uuid, owned.c.number)):
        holder = Holder(row.uuid, row.instance_uuid, row.project_id)
        holders.setdefault(row.rp_uuid, OwnHolders([], row.total)).first.append(holder)
    return holders


_NO_HANDLES = HandleCounts()
IS_MEMBER = sa.exists().where(set_members.c.handle_id == handles.c.id).correlate(handles)
_IS_OWN = handles.c.deployable_id == deployables.c.id
# All handles of the deployable, of which there is one at least, are members of device sets.
IN_SETS = sa.and_(
    deployables.c.set_size.is_(None),
    sa.exists().where(_IS_OWN, IS_MEMBER).correlate(deployables),
    sa.not_(sa.exists().where(_IS_OWN, sa.not_(IS_MEMBER)).correlate(deployables)),
)
# The providers of the list; a marker is found by the column ``uuid``.
_LISTED = (
    sa.select(deployables.c.id, deployables.c.rp_uuid.label("uuid"), deployables.c.host)
    .where(sa.not_(IN_SETS))
    .subquery("listed")
)
# By the provider of the ARQ: the handle of a device set belongs to another deployable.
_OWNED_HANDLES = arqs.join(handles, handles.c.arq_id == arqs.c.id).join(
    deployables, deployables.c.rp_uuid == arqs.c.device_rp_uuid
)
_HOLDER_COLUMNS = (arqs.c.uuid, arqs.c.instance_uuid, arqs.c.project_id)
_STATES = (
    sa.select(
        deployables.c.id,
        deployables.c.rp_uuid.label("uuid"),
        deployables.c.resource_class,
        deployables.c.traits,
        deployables.c.address.label("deployable"),
        deployables.c.set_size,
        devices.c.id.label("device_id"),
        devices.c.uuid.label("device_uuid"),
        *(devices.c[name] for name in ("host", "address", "numa_node", "layout", "layouts")),
        # Failed restores are read once for all providers, by a statement of their own.
        *facts.columns("restore_failed"),
        facts.HOST_DOWN.label("host_down"),
        devices.c.health_reason,
        devices.c.undeliverable_reason,
        deployables.c.offer_reason,
        sa.func.coalesce(providers.c.published_revision, 0).label("published_revision"),
        providers.c.error,
    )
    .select_from(deployables)
    .join(devices, devices.c.id == deployables.c.device_id)
    .outerjoin(services, joins.AGENT_OF_DEVICE)
    .outerjoin(providers, providers.c.uuid == deployables.c.rp_uuid)
    .order_by(devices.c.host, deployables.c.id)
)


def has_layout_of(resource_classes: Collection[str]) -> sa.ColumnElement[bool]:
    """Return the condition that a device has one of the classes in one of its layouts."""
    # JSON has no operator that all databases have; a class has no character that JSON escapes.
    text = sa.cast(devices.c.layouts, sa.Text())
    found = (text.contains(f'"{name}"', autoescape=True) for name in sorted(resource_classes))
    return sa.or_(sa.false(), *found)


def _count_handles(
    connection: sa.Connection,
    where: Sequence[sa.ColumnElement[bool]],
    attach_targets: Collection[AttachTarget | None],
    *,
    is_small: bool,
) -> dict[int, HandleCounts]:
    """Return the numbers of handles by the row id of the deployable, if it has any.

    They are 0 if all of them belong to device sets. ``is_small`` is whether the conditions select
    few handles, such as those of one host.
    """
    h = handles.c
    keys = sorted({key for target in attach_targets if target for key in REQUIRED_INFO[target]})
    lacking = [sa.func.coalesce(h.info[key].as_string(), "") == "" for key in keys]
    use = sa.case(
        (h.draining, "draining"),
        (h.arq_id.is_not(None), "taken"),
        (h.needs_cleaning, "cleaning"),
        *((condition, "without_info") for condition in lacking),
        else_="free",
    ).label("handle_use")
    by_use = defaultdict[int, Counter[str]](Counter)

    def add(
        id_: sa.ColumnElement[int],
        source: sa.FromClause,
        *conditions: sa.ColumnElement[bool],
        sign: int = 1,
    ) -> None:
        """Add the handles of a source to those of ``id_``; a sign of -1 subtracts them."""
        # The outer GROUP BY is over a subquery: some databases do not accept a bound parameter in
        # the expression of a group.
        selected = sa.select(id_.label("id"), use).select_from(source)
        uses = selected.where(*where, *conditions).subquery()
        query = sa.select(uses.c.id, uses.c.handle_use, sa.func.count())
        for deployable, name, count in connection.execute(
            query.group_by(uses.c.id, uses.c.handle_use)
        ):
            by_use[deployable][name] += sign * count

    add(h.deployable_id, joins.HANDLES)
    # The handles of a device set are those of its members. Of their own deployables they cannot be
    # claimed. Counted apart: a condition on each handle of the cloud would cost more.
    if is_small:
        # All members of the cloud would cost more.
        is_member = sa.exists().where(set_members.c.handle_id == h.id)
        add(h.deployable_id, joins.HANDLES, is_member, sign=-1)
    else:
        member = sa.select(set_members.c.handle_id).distinct().subquery()
        add(h.deployable_id, joins.HANDLES.join(member, member.c.handle_id == h.id), sign=-1)
    sets = set_members.join(handles, h.id == set_members.c.handle_id)
    sets = sets.join(deployables, deployables.c.id == set_members.c.deployable_id)
    add(set_members.c.deployable_id, sets.join(devices, devices.c.id == deployables.c.device_id))
    return {
        id_: HandleCounts(
            total=uses.total(),
            # All fields but the total; the free handles follow from them.
            **{name: count for name, count in uses.items() if name != "free"},
        )
        for id_, uses in by_use.items()
    }


def _to_state(
    row: Mapping[Any, Any],
    counts: HandleCounts | None,
    restore_failed: bool,
    layouts: dict[int, tuple[Layout, ...]],
) -> ProviderState:
    """Convert a row; ``layouts`` collects the layouts by the row id of their device."""
    if row["device_id"] not in layouts:
        layouts[row["device_id"]] = tuple(Layout.from_dict(body) for body in row["layouts"])
    remarks = {
        Predicate.UNDELIVERABLE: row["undeliverable_reason"],
        Predicate.UNHEALTHY: row["health_reason"],
        Predicate.UNPUBLISHED: row["error"],
        Predicate.WITHHELD: row["offer_reason"],
    }
    return ProviderState(
        uuid=row["uuid"],
        host=row["host"],
        device_uuid=row["device_uuid"],
        # Of a set its own address: its device is the source of all sets.
        device=row["address"] if row["set_size"] is None else row["deployable"],
        resource_class=row["resource_class"],
        traits=frozenset(row["traits"]),
        facts=DeviceFacts.from_row(row, restore_failed=restore_failed),
        handles=counts or _NO_HANDLES,
        published=row["published_revision"] > 0,
        layout=row["layout"],
        layouts=layouts[row["device_id"]],
        numa_node=row["numa_node"],
        set_size=row["set_size"],
        # It has handles, but all of them belong to device sets: see ``_count_handles``.
        in_sets=counts is not None and not counts.total,
        remarks={name: text[:MAX_REMARK] for name, text in remarks.items() if text},
    )

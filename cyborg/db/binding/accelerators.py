# SPDX-License-Identifier: Apache-2.0
"""Read accelerators: each attach handle, joined with the ARQ that owns it.

``state`` is an AcceleratorState. ``error`` is the last error of the job that cleans the handle, or
that prepares it again after a reboot of its host; None if it has not failed. ``state_reasons`` are
the conditions (DeviceCondition) that make the device unschedulable. ``driver`` is None if the agent
no longer has this backend.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa
from sqlalchemy.sql import visitors

from cyborg.core.binding import accelerator
from cyborg.core.binding.accelerator import AcceleratorState
from cyborg.core.binding.states import ArqState
from cyborg.core.hosts import AGENT
from cyborg.core.inventory import device_state
from cyborg.db import joins, paging
from cyborg.db.deployables import facts
from cyborg.db.deployables.read import FAILED_RESTORES
from cyborg.db.paging import Page
from cyborg.db.rows import equal
from cyborg.db.schema import arqs, backends, deployables, devices, jobs, services
from cyborg.db.schema import attach_handles as table


class AcceleratorRow(TypedDict):
    """An attach handle; the fields of the ARQ are None if no ARQ owns the handle."""

    uuid: str
    type: str
    vendor: str
    model: str
    backend: str
    hostname: str
    driver: str | None
    device_uuid: str
    deployable_uuid: str
    rp_uuid: str
    resource_class: str
    attach_handle_type: str
    attach_handle_info: dict[str, Any]
    arq_uuid: str | None
    instance_uuid: str | None
    project_id: str | None
    name: str | None
    description: str | None
    tags: list[str]
    attached_at: datetime | None
    attach_error: str | None
    created_at: datetime
    updated_at: datetime | None
    error: str | None
    state: str
    state_reasons: list[str]


# The condition that a device or its deployable is draining, with all handles.
DEVICE_DRAINING = sa.or_(deployables.c.draining, devices.c.draining)
_DRAINING = sa.or_(table.c.draining, DEVICE_DRAINING)
_CLEANING = jobs.alias("cleaning")
_OWNER_JOB = jobs.alias("owner_job")
COLUMNS = [
    table.c.uuid,
    *(devices.c[name] for name in ("type", "vendor", "model", "backend")),
    devices.c.host.label("hostname"),
    backends.c.driver,
    devices.c.uuid.label("device_uuid"),
    deployables.c.uuid.label("deployable_uuid"),
    deployables.c.rp_uuid,
    deployables.c.resource_class,
    table.c.type.label("attach_handle_type"),
    table.c.info.label("attach_handle_info"),
    arqs.c.uuid.label("arq_uuid"),
    arqs.c.instance_uuid,
    arqs.c.project_id,
    arqs.c.label_name.label("name"),
    arqs.c.label_description.label("description"),
    arqs.c.label_tags.label("tags"),
    arqs.c.attached_at,
    arqs.c.attach_error,
    table.c.created_at,
    table.c.updated_at,
    sa.case((table.c.arq_id.is_(None), _CLEANING.c.error), else_=_OWNER_JOB.c.error).label("error"),
    arqs.c.state.label("holder"),
    table.c.needs_cleaning,
    _DRAINING.label("draining"),
    *facts.columns("draining"),
    facts.HOST_DOWN.label("host_down"),
]
_INTERNAL = {*device_state.FACTS, "holder", "needs_cleaning", "row_id"}
# UNSCHEDULABLE without the condition that the host is down, which is one of another table.
BLOCKED = sa.or_(*facts.conditions("draining"))
# The condition that a device that is not draining is not schedulable (``device_state``).
UNSCHEDULABLE = sa.or_(BLOCKED, facts.HOST_DOWN)


def _join_details(source: sa.FromClause) -> sa.FromClause:
    """Join handles, or ARQs with their handles, with all tables that describe them.

    All joins are outer joins, also with tables that always have the row: a database leaves out
    most outer joins whose columns a statement does not use.
    """
    return (
        source.outerjoin(deployables, deployables.c.id == table.c.deployable_id)
        .outerjoin(devices, devices.c.id == deployables.c.device_id)
        .outerjoin(services, joins.AGENT_OF_DEVICE)
        .outerjoin(backends, joins.BACKEND_OF_DEVICE)
        .outerjoin(_CLEANING, _CLEANING.c.id == table.c.job_id)
        .outerjoin(_OWNER_JOB, _OWNER_JOB.c.id == arqs.c.job_id)
    )


_OWNER = arqs.c.id == table.c.arq_id
_FROM = _join_details(table.outerjoin(arqs, _OWNER))
_FROM_ARQS = _join_details(arqs.join(table, _OWNER))
_ALL = sa.select(*COLUMNS).select_from(_FROM)
_OWNED = table.c.arq_id.is_not(None)


def _is_false(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """Return the negation of a condition on an outer join, true also for a missing row.

    With NOT, MariaDB could read the joined tables before the handles, and would.
    """
    return condition.is_not(sa.true())


_PREPARING = arqs.c.state == ArqState.BIND_STARTED
_DIRTY = sa.and_(_is_false(_DRAINING), sa.not_(_OWNED), table.c.needs_cleaning)
_CLEAN = sa.and_(_is_false(_DRAINING), sa.not_(_OWNED), sa.not_(table.c.needs_cleaning))
# Only for the filter; core computes the state in the result. A test compares the two. No CASE
# expression: no index serves it, and PostgreSQL cannot know how many rows a state has.
CONDITIONS: Mapping[AcceleratorState, sa.ColumnElement[bool]] = {
    AcceleratorState.DRAINING: _DRAINING,
    AcceleratorState.PREPARING: sa.and_(_is_false(_DRAINING), _OWNED, _PREPARING),
    AcceleratorState.BOUND: sa.and_(_is_false(_DRAINING), _OWNED, _is_false(_PREPARING)),
    AcceleratorState.ERROR: sa.and_(_DIRTY, _CLEANING.c.error.is_not(None)),
    AcceleratorState.DIRTY: sa.and_(_DIRTY, _CLEANING.c.error.is_(None)),
    AcceleratorState.CORDONED: sa.and_(_CLEAN, UNSCHEDULABLE),
    AcceleratorState.FREE: sa.and_(_CLEAN, _is_false(UNSCHEDULABLE)),
}
# The order of creation is that of the row ids: no index on the time is needed.
SORTABLE: Mapping[str, sa.ColumnElement[Any]] = {"uuid": table.c.uuid, "created_at": table.c.id}
_STATES_WITH_OWNER = frozenset({AcceleratorState.PREPARING, AcceleratorState.BOUND})
_STATES_TO_CLEAN = frozenset({AcceleratorState.DIRTY, AcceleratorState.ERROR})
_CLEAN_STATES = frozenset({AcceleratorState.FREE, AcceleratorState.CORDONED})
_STATES_WITHOUT_OWNER = _STATES_TO_CLEAN | _CLEAN_STATES
# Only hosts that are down are read, not the agent of each device: PostgreSQL needs half the time.
_ON_DOWN_HOST = devices.c.host.in_(
    sa.select(services.c.host).where(services.c.binary == AGENT, facts.HOST_DOWN)
)
# The conditions of the states that few deployables have. A handle may be the only draining one.
_CONDITIONS_OF_DEPLOYABLES: Mapping[AcceleratorState, sa.ColumnElement[bool]] = {
    AcceleratorState.CORDONED: sa.or_(BLOCKED, _ON_DOWN_HOST),
    AcceleratorState.DRAINING: sa.or_(
        DEVICE_DRAINING,
        deployables.c.id.in_(sa.select(table.c.deployable_id).where(table.c.draining)),
    ),
}
_OWN_FACTS = ("programming", "restore_failed", "withheld")  # of a deployable, not of its device
_IDS = sa.select(deployables.c.id)
# MariaDB would read each deployable to find the few devices.
_IDS_BY_DEVICE = _IDS.join_from(
    devices, deployables, deployables.c.device_id == devices.c.id
).prefix_with("STRAIGHT_JOIN", dialect="mysql")
_FAILED = FAILED_RESTORES.subquery("failed")
# The same as queries of the ids: each has an index, or reads the devices alone, which OR does not.
_IDS_OF_DEPLOYABLES: Mapping[AcceleratorState, Sequence[sa.Select[Any]]] = {
    AcceleratorState.CORDONED: (
        _IDS_BY_DEVICE.where(sa.or_(*facts.conditions("draining", *_OWN_FACTS))),
        *(_IDS.where(facts.CONDITIONS[name]) for name in ("programming", "withheld")),
        _IDS.join_from(_FAILED, deployables, deployables.c.rp_uuid == _FAILED.c.device_rp_uuid),
        _IDS.join_from(services, devices, joins.AGENT_OF_DEVICE)
        .join(deployables, deployables.c.device_id == devices.c.id)
        .where(facts.HOST_DOWN),
    ),
    AcceleratorState.DRAINING: (
        _IDS.where(deployables.c.draining),
        _IDS_BY_DEVICE.where(devices.c.draining),
        sa.select(table.c.deployable_id).where(table.c.draining),
    ),
}
_CLEAN_INDEX = "ix_attach_handles_needs_cleaning_arq_id_id"
_CLEAN_COLUMNS = (table.c.needs_cleaning, table.c.arq_id)
_DEPLOYABLE_ORDER = (table.c.deployable_id, table.c.id)
# Maximum number of deployables whose accelerators one statement reads.
MAX_CHUNK = 2000
# Maximum number of deployables in few-deployable states whose accelerators one statement sorts.
MAX_SORTED = 900


@dataclass(frozen=True, slots=True)
class Filters:
    """Selected values of accelerators; None selects all. See ``find``.

    ``address`` is that of a handle or, of a mediated device, that of its parent.
    """

    project_id: str | None = None
    hostname: str | None = None
    device_uuid: str | None = None
    driver: str | None = None
    instance_uuid: str | None = None
    resource_class: str | None = None
    name: str | None = None
    address: str | None = None
    states: Collection[str] = ()

    def of_owner(self) -> list[sa.ColumnElement[bool]]:
        """Return the conditions on ARQs."""
        owner, instance = arqs.c.project_id, arqs.c.instance_uuid
        values = {owner: self.project_id, instance: self.instance_uuid}
        return equal({**values, arqs.c.label_name: self.name})

    def of_device(self) -> list[sa.ColumnElement[bool]]:
        """Return the conditions on deployables, their devices and backends."""
        values = {devices.c.host: self.hostname, devices.c.uuid: self.device_uuid}
        conditions = equal({**values, deployables.c.resource_class: self.resource_class})
        if self.driver is not None:
            names = (backends.c.driver, devices.c.backend)
            conditions.append(sa.or_(*(name == self.driver for name in names)))
        # Only if each state has such a condition: any deployable may have another state.
        if self.are_of_few():
            conditions.append(
                sa.or_(*(_CONDITIONS_OF_DEPLOYABLES[s] for s in sorted(self._states())))
            )
        return conditions

    def of_handle(self) -> list[sa.ColumnElement[bool]]:
        """Return the conditions on the handle and its state, with those that follow from it."""
        states, conditions = self._states(), list[sa.ColumnElement[bool]]()
        if self.address is not None:
            address = table.c.address
            below = address.startswith(f"{self.address}/", autoescape=True)
            conditions.append(sa.or_(address == self.address, below))
        if not states:
            return conditions
        conditions.append(sa.or_(*(CONDITIONS[state] for state in sorted(states))))
        # The condition of a single state has the terms below itself.
        if len(states) == 1:
            return conditions
        # An index serves what the states have in common, but not OR.
        if states <= _STATES_WITHOUT_OWNER:
            conditions.append(table.c.arq_id.is_(None))
        if states <= _STATES_WITH_OWNER:
            conditions.append(table.c.arq_id.is_not(None))
        if states <= _STATES_TO_CLEAN:
            conditions.append(table.c.needs_cleaning)
        if states <= _CLEAN_STATES:
            conditions.append(sa.not_(table.c.needs_cleaning))
        return conditions

    def _states(self) -> frozenset[AcceleratorState]:
        return frozenset(map(AcceleratorState, self.states))

    def are_at_one_place(self) -> bool:
        """Return whether all accelerators are on one host or at one address: indexes find them."""
        return (self.hostname, self.device_uuid, self.address) != (None, None, None)

    def are_of_few(self) -> bool:
        """Return whether few deployables have accelerators in the states."""
        return bool(self.states) and self._states() <= _CONDITIONS_OF_DEPLOYABLES.keys()

    def ids_of_few(self) -> sa.Subquery:
        """Return a query of the ids of all deployables with accelerators in the states.

        Some of them may have none, because their handles are bound, or are dirty.
        """
        queries = (
            query for state in sorted(self._states()) for query in _IDS_OF_DEPLOYABLES[state]
        )
        return sa.union(*queries).subquery("of_few")

    def are_clean(self) -> bool:
        """Return whether all accelerators in the states have no owner and need no cleaning."""
        return bool(self.states) and self._states() <= _CLEAN_STATES

    def conditions(self) -> list[sa.ColumnElement[bool]]:
        """Return all conditions."""
        return [*self.of_owner(), *self.of_device(), *self.of_handle()]


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    uuids: Collection[str] | None = None,
    **filters: Any,
) -> list[AcceleratorRow]:
    """Return accelerators; ``filters`` are the fields of Filters.

    ``project_id`` selects accelerators owned by an ARQ of this project. ``driver`` is the name of a
    driver or of a backend. Without ``states``, accelerators in all states are selected.

    Without a sort key, the accelerators of a project are in the order of its ARQs, those of a
    resource class or a driver in the order of their deployables, and all others in the order of
    their creation: an index has the rows of the page in this order.

    Execute one statement without a limit, or two with a limit; a marker needs one statement more.
    If few accelerators of a resource class or driver are selected, execute more statements to find
    them.
    """
    page, chosen = page or Page(), Filters(**filters)
    conditions = chosen.conditions()
    if uuids is not None:
        conditions.append(table.c.uuid.in_(uuids))
    # All rows: one statement, since there is no page to find first.
    if page.limit is None:
        query = paging.paginate(connection, _ALL.where(*conditions), table, page, SORTABLE)
        return [_row(row) for row in connection.execute(query).mappings()]
    at_one_place = chosen.are_at_one_place()
    # By the sort key, or in the order of the accelerators.
    if page.sort_key is not None or uuids is not None or not conditions:
        is_searched = uuids is None and not at_one_place
        few = _of_few(connection, chosen) if is_searched and chosen.are_of_few() else []
        # The order of creation is that of the index of the clean handles.
        clean = is_searched and not few and chosen.are_clean() and page.sort_key == "created_at"
        # Few handles may have a resource class or a driver: another index finds these.
        clean = clean and chosen.resource_class is None and chosen.driver is None
        ids = _find_ids(connection, _FROM, [*conditions, *few], page, table, clean=clean)
    # In the order of the ARQs of the project.
    elif chosen.of_owner():
        ids = _find_ids(connection, _FROM_ARQS, conditions, page, arqs)
    # Deployable by deployable, until the page is full.
    elif chosen.of_device() and not at_one_place:
        # Counted here: the read by deployable stops at the end of the page.
        if page.total is not None:
            query = sa.select(table.c.id).select_from(_FROM).where(*conditions)
            page.total.count(connection, query, table.c.id)
        ids = list(_find_ids_by_deployable(connection, chosen, page))
    else:
        # ``clean`` selects the index of clean handles, which is of use for the whole cloud only.
        ids = _find_ids(
            connection,
            _FROM,
            conditions,
            page,
            table,
            clean=not at_one_place and chosen.are_clean(),
        )
    if not ids:
        return []
    query = _ALL.add_columns(table.c.id.label("row_id")).where(table.c.id.in_(ids))
    rows = {row["row_id"]: row for row in connection.execute(query).mappings()}
    # A row may have been deleted between the two statements.
    return [_row(rows[id_]) for id_ in ids if id_ in rows]


def _of_few(connection: sa.Connection, filters: Filters) -> list[sa.ColumnElement[bool]]:
    """Return the condition that accelerators belong to the few deployables in the states.

    Without it, all accelerators of the cloud would be read in the order of the page to find those
    of a page. Return none if the deployables are many: then the page is full soon.
    """
    few = _find_deployables(connection, filters, None, True, MAX_SORTED + 1)
    return [table.c.deployable_id.in_(few)] if len(few) <= MAX_SORTED else []


def _find_ids(
    connection: sa.Connection,
    source: sa.FromClause,
    conditions: Collection[sa.ColumnElement[bool]],
    page: Page,
    ordered: sa.Table,
    *,
    clean: bool = False,
) -> Sequence[int]:
    """Return the row ids of a page, by default in the order of the table ``ordered``.

    ``clean`` is whether the conditions select only handles without an owner that need no cleaning.
    """
    if source is _FROM and _are_of_handles(conditions):
        source = table
    query = sa.select(table.c.id).select_from(source).where(*conditions)
    # An index has the clean handles in the order of their ids. MariaDB would read all handles in
    # this order, PostgreSQL too, unless the order names the columns before the id.
    if clean and connection.dialect.name == "postgresql":
        ascending = paging.is_ascending(page)
        query = query.order_by(*(c.asc() if ascending else c.desc() for c in _CLEAN_COLUMNS))
    query = paging.paginate(connection, query, table, page, SORTABLE, ordered.c.id)
    if clean:
        # Not before: the marker is found by another index.
        query = query.with_hint(table, f"FORCE INDEX ({_CLEAN_INDEX})", "mysql")
    return connection.scalars(query).all()


def _are_of_handles(conditions: Collection[sa.ColumnElement[bool]]) -> bool:
    """Return whether conditions use only columns of the handles, as all sort keys do.

    MariaDB does not leave out all outer joins that it could, and joins before it sorts: the ids of
    a page of 10 000 handles with one address took 0.6 s, without joins 3 ms.
    """
    used = itertools.chain.from_iterable(map(visitors.iterate, conditions))
    return {column.table for column in used if isinstance(column, sa.Column)} <= {table}


def _find_ids_by_deployable(
    connection: sa.Connection, filters: Filters, page: Page
) -> Iterator[int]:
    """Yield the row ids of a page in the order of their deployables.

    The deployables are read in chunks of a growing size until the page is full. One statement would
    sort all accelerators of the resource class before it returns the first of them.
    """
    # ``find`` calls this only for a page with a limit.
    ascending, missing = paging.is_ascending(page), paging.check_limit(page.limit or 0)
    handles = sa.select(table.c.id).select_from(_FROM).where(*filters.of_handle())
    previous: int | None = None  # the deployable after which the next chunk begins
    after_marker: sa.ColumnElement[bool] = sa.true()
    if page.marker is not None:
        listed = handles.where(*filters.of_device())
        columns = (table.c.deployable_id, table.c.id)
        deployable, handle = paging.find_marker(connection, listed, table, page.marker, *columns)
        later = table.c.id > handle if ascending else table.c.id < handle
        after_marker = sa.or_(table.c.deployable_id != deployable, later)
        # The deployable of the marker may have further accelerators in this page.
        previous = deployable - 1 if ascending else deployable + 1
    order = [column.asc() if ascending else column.desc() for column in _DEPLOYABLE_ORDER]
    size = missing
    while missing:
        chunk = _find_deployables(connection, filters, previous, ascending, size)
        query = handles.where(table.c.deployable_id.in_(chunk), after_marker)
        ids = connection.scalars(query.order_by(*order).limit(missing)).all()
        yield from ids
        missing -= len(ids)
        if len(chunk) < size:
            return
        previous = chunk[-1]
        after_marker = sa.true()
        size = min(2 * size, MAX_CHUNK)


def _find_deployables(
    connection: sa.Connection, filters: Filters, after: int | None, ascending: bool, limit: int
) -> Sequence[int]:
    """Return the row ids of up to ``limit`` deployables, in order, after the row id ``after``."""
    d = deployables.c
    source = (
        deployables.outerjoin(devices, devices.c.id == d.device_id)
        .outerjoin(services, joins.AGENT_OF_DEVICE)
        .outerjoin(backends, joins.BACKEND_OF_DEVICE)
    )
    if filters.are_of_few():
        # Before the others, since the statement keeps this order.
        few = filters.ids_of_few()
        source = few.join(source, d.id == few.c.id)
    query = sa.select(d.id).select_from(source).where(*filters.of_device())
    if after is not None:
        query = query.where(d.id > after if ascending else d.id < after)
    # Other orders of the joins read all devices of a driver before the first deployable.
    query = query.prefix_with("STRAIGHT_JOIN", dialect="mysql")
    return connection.scalars(
        query.order_by(d.id.asc() if ascending else d.id.desc()).limit(limit)
    ).all()


def get(
    connection: sa.Connection, uuid: str, project_id: str | None = None
) -> AcceleratorRow | None:
    """Return one accelerator, or None; with a project, only if an ARQ of this project owns it."""
    return next(iter(find(connection, uuids=[uuid], project_id=project_id)), None)


def _row(row: Mapping[Any, Any]) -> AcceleratorRow:
    """Convert a row of the query: the state replaces the columns from which it follows."""
    condition = device_state.evaluate_row(row)
    state = accelerator.evaluate(
        accelerator.AcceleratorFacts(
            owner_state=row["holder"],
            needs_cleaning=row["needs_cleaning"],
            cleaning_failed=row["error"] is not None,
            draining=bool(row["draining"]),
            schedulable=condition.schedulable,
        )
    )
    shown = {name: value for name, value in row.items() if name not in _INTERNAL}
    reasons = [str(reason) for reason in condition.reasons]
    computed = {"tags": row["tags"] or [], "state": str(state), "state_reasons": reasons}
    return cast(AcceleratorRow, {**shown, **computed})

# SPDX-License-Identifier: Apache-2.0
"""Count the providers of the whole cloud by host and kind, for explanations and capacities.

A cloud can have 80 000 providers with more than a million handles. Of each provider that can matter
to the groups of a request, the database makes a short text of what decides whether it can serve
them: equal providers have equal texts, which are counted here. Alternative not taken: GROUP BY in
the database, which costs MariaDB more time than the rows that it saves. Names, addresses and the
details of conditions are read for the providers of a page only (``provider_states``).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from cyborg.core import naming
from cyborg.core.binding.profile import REQUIRED_INFO
from cyborg.core.explain.explanation import GroupDemand, HandleCounts, ProviderState
from cyborg.core.explain.provider_counts import Census, ProviderCounts
from cyborg.core.inventory.device import Health, Layout
from cyborg.core.inventory.device_state import ENABLED, FACTS, DeviceFacts
from cyborg.db import joins
from cyborg.db.deployables import facts
from cyborg.db.explain.provider_states import IN_SETS, IS_MEMBER, has_layout_of
from cyborg.db.handles.usage import COUNTING_INDEX, count_if
from cyborg.db.paging import id_in
from cyborg.db.schema import attach_handles, deployables, devices, providers, services, set_members

# Maximum number of providers that a statement reads, and of devices with layouts. The time of a
# statement does not grow with the cloud: 0.1 s on MariaDB, far below its timeout.
MAX_PROVIDERS = 5000
MAX_DEVICES = 1000

# Conditions in one number of a text: an integer of PostgreSQL has 31 bits.
_BITS = 30
_SEPARATOR = "|"


class _Shape(NamedTuple):
    """What of a provider matters to groups: all else is not read."""

    classes: frozenset[str]
    traits: tuple[str, ...]  # that a group requires or forbids
    info: tuple[str, ...]  # keys that the info of a handle must have
    has_numa: bool  # whether one of the traits is that of a NUMA node

    @classmethod
    def of(cls, demands: Iterable[GroupDemand]) -> Self:
        demands = list(demands)
        classes = frozenset(demand.resource_class for demand in demands if demand.resource_class)
        traits = sorted({name for demand in demands for name in demand.required | demand.forbidden})
        targets = {demand.target for demand in demands if demand.target is not None}
        info = sorted({key for target in targets for key in REQUIRED_INFO[target]})
        has_numa = any(naming.parse_numa_trait(name) is not None for name in traits)
        return cls(classes, tuple(traits), tuple(info), has_numa)


def find(
    connection: sa.Connection, demands: Iterable[GroupDemand], *, host: str | None = None
) -> ProviderCounts:
    """Return the providers that can matter to groups, without the number of the others.

    These are the providers of a resource class that a group requests, and all providers of devices
    with a layout that has one. Providers are left out whose devices are allocated in device sets
    only: Placement has no inventory of them. Execute a statement for each class and one for the
    devices with layouts, and more if there are many of them.
    """
    shape = _Shape.of(demands)
    tally = _Tally(shape)
    for rows in _read(connection, shape, host):
        tally.add(connection, rows)
    return ProviderCounts(tally.kinds, tally.census.compositions())


def add_others(
    connection: sa.Connection, counts: ProviderCounts, *, host: str | None = None
) -> ProviderCounts:
    """Return ``counts`` with the number of all other providers. Execute one statement."""
    d, h, m = deployables.c, attach_handles.c, set_members.c
    owned = attach_handles.join(deployables, d.id == h.deployable_id)
    members = set_members.join(owned, h.id == m.handle_id)
    # A handle counts once for each of its sets, and not for its own deployable.
    memberships = sa.func.count() - sa.func.count(m.handle_id.distinct())
    queries = {
        "providers": sa.select(sa.func.count()).select_from(deployables),
        # The first condition follows from the second, and starts at the few sets: see ``_MEMBERS``.
        "in_sets": sa.select(sa.func.count())
        .select_from(deployables)
        .where(d.id.in_(_MEMBERS), IN_SETS),
        # The tables alone, if all hosts are counted: a join would read each deployable.
        "handles": sa.select(sa.func.count()).select_from(
            attach_handles if host is None else owned
        ),
        "memberships": sa.select(memberships).select_from(set_members if host is None else members),
    }
    if host is not None:
        queries = {name: query.where(d.host == host) for name, query in queries.items()}
    row = connection.execute(
        sa.select(*(query.scalar_subquery().label(name) for name, query in queries.items()))
    ).one()
    num_providers, num_handles = counts.totals()
    # Never negative: rows may have been added or removed after they were counted.
    return replace(
        counts,
        others=max(0, row.providers - row.in_sets - num_providers),
        other_handles=max(0, row.handles + row.memberships - num_handles),
    )


class _digest(FunctionElement[str]):
    """SQL function that returns a short text for a long one; only equal texts have equal ones."""

    type = sa.String(64)
    inherit_cache = True


@compiles(_digest)
def _default(element: Any, compiler: Any, **options: Any) -> str:
    # SQLite has no such function, and no large cloud.
    return str(compiler.process(element.clauses, **options))


@compiles(_digest, "postgresql")
def _postgresql(element: Any, compiler: Any, **options: Any) -> str:
    text = compiler.process(element.clauses, **options)
    return f"encode(sha256(convert_to({text}, 'UTF8')), 'hex')"


@compiles(_digest, "mysql")
@compiles(_digest, "mariadb")
def _mysql(element: Any, compiler: Any, **options: Any) -> str:
    return f"sha2({compiler.process(element.clauses, **options)}, 256)"


# Deployables with a handle that is a member of a device set. The query starts at the sets, of which
# most clouds have none, and does not depend on the outer query.
_own = attach_handles.alias("own")
_MEMBERS = sa.select(_own.c.deployable_id).join(set_members, set_members.c.handle_id == _own.c.id)

_FACTS: Mapping[str, sa.ColumnElement[bool]] = {**facts.CONDITIONS, "host_down": facts.HOST_DOWN}
_IS_PUBLISHED = sa.func.coalesce(providers.c.published_revision, 0) > 0


def _read(connection: sa.Connection, shape: _Shape, host: str | None) -> Iterator[Sequence[Any]]:
    """Yield rows of providers: (row id, host, row id of a device with layouts, class, text)."""
    d, v = deployables.c, devices.c
    query = (
        sa.select(d.id, d.host, *_columns(shape))
        .select_from(deployables)
        .join(devices, v.id == d.device_id)
        .outerjoin(services, joins.AGENT_OF_DEVICE)
        .outerjoin(providers, providers.c.uuid == d.rp_uuid)
    )
    changeable = sa.select(v.id).where(has_layout_of(shape.classes))
    if host is not None:
        query, changeable = query.where(d.host == host), changeable.where(v.host == host)
    # Not one query with OR, for which no database uses the index on the class.
    for name in sorted(shape.classes):
        of_class = query.where(d.resource_class == name)
        yield from _read_batches(connection, of_class, d.id, MAX_PROVIDERS)
    of_other_class = query.where(d.resource_class.not_in(sorted(shape.classes)))
    for device_rows in _read_batches(connection, changeable, v.id, MAX_DEVICES):
        of_devices = id_in(d.device_id, [row.id for row in device_rows])
        yield connection.execute(of_other_class.where(of_devices)).all()


def _read_batches(
    connection: sa.Connection, query: sa.Select[Any], key: sa.ColumnElement[int], size: int
) -> Iterator[Sequence[Any]]:
    """Yield up to ``size`` rows of a query at a time, in the order of ``key``, its first column."""
    query = query.order_by(key).limit(size)
    rows = connection.execute(query).all()
    while rows:
        yield rows
        if len(rows) < size:
            return
        last_key, *_ = rows[-1]
        rows = connection.execute(query.where(key > last_key)).all()


def _columns(shape: _Shape) -> list[sa.ColumnElement[Any]]:
    """Return the columns of a provider after its host."""
    d, v = deployables.c, devices.c
    traits = sa.cast(d.traits, sa.Text())
    # JSON has no operator that all databases have; a trait has no character that JSON escapes.
    conditions = [
        *_FACTS.values(),
        _IS_PUBLISHED,
        *(traits.contains(f'"{name}"', autoescape=True) for name in shape.traits),
    ]
    numbers = [
        *_pack(conditions),
        sa.func.coalesce(v.numa_node, -1) if shape.has_numa else sa.literal(-1),
        d.set_size,
    ]
    return [
        # NULL for a device without layouts.
        sa.case((sa.cast(v.layouts, sa.Text()) != "[]", v.id)),
        d.resource_class,
        _join_texts(numbers) + _handle_uses(shape.info),
    ]


def _join_texts(values: Iterable[sa.ColumnElement[Any]]) -> sa.ColumnElement[str]:
    """Return the expression for the texts of numbers, with _SEPARATOR after each of them.

    NULL is 0.
    """
    text: sa.ColumnElement[str] = sa.literal("")
    for value in values:
        # Each database makes a text of a number by itself; a cast takes MariaDB more time.
        number = sa.type_coerce(sa.func.coalesce(value, 0), sa.String())
        text = text + number + _SEPARATOR
    return text


def _pack(conditions: Sequence[sa.ColumnElement[bool]]) -> list[sa.ColumnElement[int]]:
    """Return numbers whose bits are the conditions, the first one the lowest."""
    numbers = []
    for start in range(0, len(conditions), _BITS):
        number: sa.ColumnElement[int] = sa.literal(0)
        for bit, condition in enumerate(conditions[start : start + _BITS]):
            number = number + sa.case((condition, 1 << bit), else_=0)
        numbers.append(number)
    return numbers


def _unpack(numbers: Iterable[str]) -> Iterator[bool]:
    for number in map(int, numbers):
        for bit in range(_BITS):
            yield bool(number >> bit & 1)


def _handle_uses(info: Iterable[str]) -> sa.ColumnElement[str]:
    """Return the text with the numbers of the handles of a deployable, and whether it is a member.

    The handles of a device set are those of its members. Of their own deployables they cannot be
    claimed. A subquery for each deployable finds its entries of an index next to each other, so
    that the cost is that of these handles, in each plan.
    """
    h, d = attach_handles.c, deployables.c
    is_owned, is_present = h.arq_id.is_not(None), sa.not_(h.draining)
    unowned = sa.and_(is_present, sa.not_(is_owned))
    numbers: list[sa.ColumnElement[int]] = [
        sa.func.count(),
        count_if(h.draining),
        count_if(sa.and_(is_present, is_owned)),
        count_if(sa.and_(unowned, h.needs_cleaning)),
    ]
    lacks_key = [sa.func.coalesce(h.info[key].as_string(), "") == "" for key in info]
    # Free handles without one of the keys; if no key is needed, there are none.
    lacking = sa.and_(unowned, sa.not_(h.needs_cleaning), sa.or_(sa.false(), *lacks_key))
    numbers.append(count_if(lacking) if lacks_key else sa.literal(0))

    def count(
        source: sa.FromClause, *conditions: sa.ColumnElement[bool], is_member: int = 0
    ) -> sa.ScalarSelect[str]:
        """Return the text for the handles of a source; ``is_member`` is 0 or 1, its last number."""
        query = sa.select(_join_texts([*numbers, sa.literal(is_member)])).select_from(source)
        query = query.where(*conditions).correlate(deployables)
        if source is attach_handles:
            # MariaDB would take another index on the deployable, and read the row of each handle.
            query = query.with_hint(attach_handles, f"FORCE INDEX ({COUNTING_INDEX})", "mysql")
        return query.scalar_subquery()

    is_own = h.deployable_id == d.id
    of_set = set_members.join(attach_handles, h.id == set_members.c.handle_id)
    return sa.case(
        (d.set_size.is_not(None), count(of_set, set_members.c.deployable_id == d.id)),
        # Only the handles that are no members: the others are allocated in sets.
        (d.id.in_(_MEMBERS), count(attach_handles, is_own, sa.not_(IS_MEMBER), is_member=1)),
        else_=count(attach_handles, is_own),
    )


class _Changeable(NamedTuple):
    """A device with layouts: the current one, the digest of all, whether it has more deployables.

    The deployables of such a device change together.
    """

    layout: str | None
    digest: str
    is_shared: bool


@dataclass(slots=True)
class _Tally:
    """The providers that were read so far; ``layouts`` are those of devices by their digest.

    ``kinds`` has a representative of each kind of providers, also of those that are not counted:
    providers whose devices are allocated in device sets only. ``kind_indexes`` has the index of the
    kind, None for one that is not counted, by what distinguishes kinds: resource class, text, and
    the layouts of the device.
    """

    shape: _Shape
    census: Census = field(default_factory=Census)
    kinds: list[ProviderState] = field(default_factory=list)
    kind_indexes: dict[object, int | None] = field(default_factory=dict)
    layouts: dict[str, tuple[Layout, ...]] = field(default_factory=dict)

    def add(self, connection: sa.Connection, rows: Sequence[Any]) -> None:
        """Count rows of ``_read``; read the layouts of their devices, if they have any."""
        ids = {device for _, _, device, _, _ in rows if device is not None}
        changeable_devices = self._read_changeable(connection, ids) if ids else {}
        # Unpacked, since there are many rows: access by name takes longer.
        for _, host, device, resource_class, text in rows:
            changeable = changeable_devices.get(device)
            # Equal texts and layouts: the same kind.
            key = (resource_class, text, changeable and (changeable.layout, changeable.digest))
            if key not in self.kind_indexes:
                state = _to_state(self.shape, resource_class, text)
                if changeable is not None:
                    layouts = self.layouts.get(changeable.digest, ())
                    state = replace(state, layout=changeable.layout, layouts=layouts)
                self.kind_indexes[key] = None if state.in_sets else len(self.kinds)
                self.kinds.append(state)
            if (kind := self.kind_indexes[key]) is not None:
                is_shared = changeable is not None and changeable.is_shared
                self.census.add(host, kind, device=device if is_shared else None)

    def _read_changeable(
        self, connection: sa.Connection, ids: set[int]
    ) -> Mapping[int, _Changeable]:
        """Return the devices with these row ids; add their layouts to ``layouts``."""
        v = devices.c
        number = sa.select(sa.func.count()).where(deployables.c.device_id == v.id)
        is_shared = number.correlate(devices).scalar_subquery() > 1
        query = sa.select(v.id, v.layout, _digest(sa.cast(v.layouts, sa.Text())), is_shared)
        changeable_devices = {
            id_: _Changeable(*fields)
            for id_, *fields in connection.execute(query.where(id_in(v.id, ids)))
        }
        # One device of each unknown digest: the texts of layouts are long.
        unknown = {
            device.digest: id_
            for id_, device in changeable_devices.items()
            if device.digest not in self.layouts
        }
        if unknown:
            query = sa.select(v.id, v.layouts).where(id_in(v.id, set(unknown.values())))
            for id_, bodies in connection.execute(query):
                digest = changeable_devices[id_].digest
                self.layouts[digest] = tuple(map(Layout.from_dict, bodies))
        return changeable_devices


def _to_state(shape: _Shape, resource_class: str, text: str) -> ProviderState:
    """Return the representative of the providers with a text: a state without names."""
    # The numbers of ``_columns``, then those of ``_handle_uses``; the text ends with a separator.
    *flags, numa, set_size, total, draining, taken, cleaning, lacking, is_member = (
        value for value in text.split(_SEPARATOR) if value
    )
    # In the order of ``_columns``: the facts, whether it is published, and below its traits.
    bits = _unpack(flags)
    failing = {name for name in _FACTS if next(bits)}
    published = next(bits)
    handles = HandleCounts(*map(int, (total, draining, taken, cleaning, lacking)))
    return ProviderState(
        uuid="",
        host="",
        device_uuid="",
        device="",
        resource_class=resource_class,
        traits=frozenset(name for name in shape.traits if next(bits)),
        facts=_to_facts(failing),
        handles=handles,
        published=published,
        numa_node=None if numa == "-1" else int(numa),
        set_size=int(set_size) or None,
        in_sets=is_member == "1" and not handles.total,
    )


def _to_facts(failing: set[str]) -> DeviceFacts:
    """Return facts of which exactly these make a device unschedulable."""
    values: dict[str, Any] = {name: name in failing for name in FACTS}
    return DeviceFacts(
        **values
        | {
            # Any other status does the same: see ``core.inventory.device_state.evaluate``.
            "status": "" if "status" in failing else ENABLED,
            "health": Health.UNHEALTHY if "health" in failing else Health.OK,
            "deliverable": "deliverable" not in failing,
        }
    )

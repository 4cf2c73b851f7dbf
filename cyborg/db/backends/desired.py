# SPDX-License-Identifier: Apache-2.0
"""Write the desired backends of each host, and the outcomes that its agent reports.

The generation of the desired state is a column of the agent's row. A higher generation makes the
agent fetch the desired state. The UPDATE also locks the row, so that changes of one host are
serialized.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypedDict

import sqlalchemy as sa

from cyborg.core.drivers.desired_state import (
    BackendOutcome,
    DesiredBackend,
    DesiredHostState,
    DesiredStatus,
)
from cyborg.core.hosts import AGENT
from cyborg.core.inventory.device import CLEANING_ABILITIES
from cyborg.core.inventory.device_state import ENABLED
from cyborg.core.jobs.job import DRAINS, JobKind, JobState
from cyborg.db import bulk, joins
from cyborg.db.columns import Moment
from cyborg.db.rows import equal, fetch_all, fetch_first, row_columns
from cyborg.db.schema import attach_handles, backends, deployables, devices, jobs, services
from cyborg.db.schema import desired_backends as table


class BackendKey(NamedTuple):
    """A backend, by the row id of its agent and its name."""

    service_id: int
    backend: str


@dataclass(frozen=True, slots=True)
class DesiredRecord:
    """Desired state of a backend, and whether its agent reported that it is applied."""

    desired: DesiredBackend
    applied: bool


class AgentRow(TypedDict):
    """An agent; ``down_since`` is None unless it is marked down.

    Not all columns, as ``services.write`` has: a change of a driver reads the agents of a cloud.
    """

    id: int
    host: str
    desired_generation: int
    down_since: datetime | None


_COLUMNS = tuple(table.c[name] for name in ("backend", "driver", "status", "generation", "config"))
AGENT_COLUMNS = row_columns(AgentRow, services)


def lock(tx: sa.Connection, host: str, epoch: str) -> AgentRow | None:
    """Return a host's agent, locked; None if it has another epoch."""
    query = sa.select(*AGENT_COLUMNS).where(joins.agent_of(host, epoch)).with_for_update()
    return fetch_first(AgentRow, tx.execute(query))


def lock_host(tx: sa.Connection, host: str) -> None:
    """Lock the row of a host's agent, whatever its epoch."""
    tx.execute(sa.select(services.c.id).where(joins.agent_of(host)).with_for_update()).first()


def lock_agents(tx: sa.Connection, agents: Collection[int]) -> dict[int, AgentRow]:
    """Lock agents in the order of their row ids; return their rows by row id.

    A caller that changes the desired state, or cordons devices, must hold these locks. So the
    caller waits for a report in progress, and the next report sees the change.
    """
    rows: dict[int, AgentRow] = {}
    # Sorted: two callers that lock the same agents do not wait for each other.
    for chunk in bulk.chunks(sorted(set(agents))):
        query = (
            sa.select(*AGENT_COLUMNS)
            .where(services.c.id.in_(chunk))
            .order_by(services.c.id)
            .with_for_update()
        )
        rows |= {row["id"]: row for row in fetch_all(AgentRow, tx.execute(query))}
    return rows


def of_host(tx: sa.Connection, host: str, epoch: str) -> DesiredHostState | None:
    """Return the desired state of a host, None if its agent has another epoch."""
    # One statement, so that the generation matches the returned backends.
    query = (
        sa.select(services.c.desired_generation, *_COLUMNS)
        # A backend that is only cordoned has generation 0 and is not for the agent.
        .outerjoin(table, sa.and_(table.c.service_id == services.c.id, table.c.generation > 0))
        .where(joins.agent_of(host, epoch))
        .order_by(table.c.backend)
    )
    rows = tx.execute(query).mappings().all()
    if not rows:
        return None
    # An agent without desired backends is one row without a backend.
    desired = tuple(_value(row) for row in rows if row["backend"] is not None)
    return DesiredHostState(rows[0]["desired_generation"], desired)


def find(
    tx: sa.Connection, driver: str | None = None, backend: str | None = None
) -> dict[BackendKey, DesiredRecord]:
    """Return the desired state of a driver's backends, or of all backends with a name."""
    return _read(tx, *equal({table.c.driver: driver, table.c.backend: backend}))


def find_successors(tx: sa.Connection, driver: str) -> dict[BackendKey, DesiredRecord]:
    """Return the desired state of backends that now have another driver than ``driver``.

    Their agents still report ``driver``: they have not applied that state yet.
    """
    is_reported = sa.exists().where(
        backends.c.service_id == table.c.service_id,
        backends.c.name == table.c.backend,
        backends.c.driver == driver,
    )
    return _read(tx, table.c.driver != driver, is_reported)


def agents_at_limit(tx: sa.Connection, agents: Collection[int], max_backends: int) -> set[int]:
    """Return the agents, by row id, that have ``max_backends`` or more desired backends."""
    at_limit: set[int] = set()
    for chunk in bulk.chunks(agents):
        query = (
            sa.select(table.c.service_id)
            .where(table.c.service_id.in_(chunk))
            .group_by(table.c.service_id)
            .having(sa.func.count() >= max_backends)
        )
        at_limit |= set(tx.scalars(query))
    return at_limit


def removed_backends(tx: sa.Connection, host: str, backends: Collection[str]) -> set[str]:
    """Return the given backends of a host whose desired status is ABSENT."""
    query = (
        sa.select(table.c.backend)
        .join(services, services.c.id == table.c.service_id)
        .where(
            joins.agent_of(host),
            table.c.backend.in_(sorted(backends)),
            table.c.status == str(DesiredStatus.ABSENT),
        )
    )
    return set(tx.scalars(query))


def removed_with_drained_handles(tx: sa.Connection, limit: int) -> Sequence[tuple[str, str]]:
    """Return (host, backend) of removed backends that still have a drained handle.

    Only hosts that are down are included: on other hosts the next report deletes the handle. Owned
    handles and dirty handles are ignored.
    """
    query = (
        sa.select(services.c.host, table.c.backend)
        .distinct()
        .join(table, table.c.service_id == services.c.id)
        .join(
            devices,
            sa.and_(devices.c.host == services.c.host, devices.c.backend == table.c.backend),
        )
        .join(deployables, deployables.c.device_id == devices.c.id)
        .join(attach_handles, attach_handles.c.deployable_id == deployables.c.id)
        .where(
            services.c.binary == AGENT,
            services.c.down_since.is_not(None),
            table.c.status == str(DesiredStatus.ABSENT),
            attach_handles.c.draining,
            attach_handles.c.arq_id.is_(None),
            sa.not_(attach_handles.c.needs_cleaning),
        )
        .order_by(services.c.host, table.c.backend)
        .limit(limit)
    )
    return [(row.host, row.backend) for row in tx.execute(query)]


def cordon(
    tx: sa.Connection, driver: str, stored: Collection[BackendKey], targets: Collection[BackendKey]
) -> None:
    """Cordon backends in the database only; their hosts do nothing.

    ``stored`` are the backends that already have a desired state. The caller must hold locks on the
    agents' rows.
    """
    # Generation 0 is for no agent: see ``of_host``.
    disabled = str(DesiredStatus.DISABLED)
    for condition, status in _group({key: disabled for key in targets if key in stored}):
        tx.execute(sa.update(table).where(condition).values(status=status))
    values = {"driver": driver, "status": disabled, "config": {}, "generation": 0}
    new = [{**key._asdict(), **values} for key in targets if key not in stored]
    bulk.insert(tx, table, new)


def bump_generation(tx: sa.Connection, agents: Collection[int]) -> None:
    """Raise the generation of the desired state of hosts, by their agents' row ids."""
    generation = services.c.desired_generation + 1
    bulk.update_where(tx, services.c.id, sorted(set(agents)), desired_generation=generation)


def write(tx: sa.Connection, service_id: int, desired: DesiredBackend) -> bool:
    """Write the desired state of one backend; return whether it was written.

    Nothing is written while the backend belongs to another driver, unless it is ABSENT there. The
    caller must hold a lock on the agent's row.
    """
    same_backend = sa.and_(table.c.service_id == service_id, table.c.backend == desired.backend)
    is_available = sa.or_(
        table.c.driver == desired.driver, table.c.status == str(DesiredStatus.ABSENT)
    )
    values = _to_columns(desired)
    if tx.execute(sa.update(table).where(same_backend, is_available).values(**values)).rowcount:
        return True
    # No other transaction inserts the row meanwhile: it would need the lock of the agent's row.
    if tx.execute(sa.select(table.c.id).where(same_backend)).first():
        return False
    tx.execute(sa.insert(table).values(service_id=service_id, backend=desired.backend, **values))
    return True


def revert(
    tx: sa.Connection,
    service_id: int,
    backend: str,
    generation: int | None,
    previous: DesiredBackend | None,
) -> bool:
    """Restore the previous desired state of a backend if it still has this ``generation``.

    Return whether it had. ``generation`` is None for a step that wrote no desired state: no row has
    it, so that nothing is restored. Without a previous state, delete the desired state, so that the
    host's configuration file applies. The caller must hold a lock on the agent's row.
    """
    condition = sa.and_(
        table.c.service_id == service_id,
        table.c.backend == backend,
        table.c.generation == generation,
    )
    if previous is None:
        return tx.execute(sa.delete(table).where(condition)).rowcount > 0
    restored = sa.update(table).where(condition).values(**_to_columns(previous))
    return tx.execute(restored).rowcount > 0


class PreviousState(NamedTuple):
    """The desired state of a backend before a change, as plain values; None if it had none.

    ``agent`` is the row id of the agent, None if the agent was deleted.
    """

    agent: int | None
    backend: str
    values: Mapping[str, Any] | None


def uncordon(tx: sa.Connection, previous: Collection[PreviousState]) -> None:
    """Undo ``cordon``; without a previous state, the configuration file applies again.

    The caller must hold locks on the agents' rows.
    """
    statuses = {
        BackendKey(state.agent, state.backend): (
            None if state.values is None else str(state.values["status"])
        )
        for state in previous
        # The desired state of a deleted agent was deleted with the agent.
        if state.agent is not None
    }
    # One statement for all backends that get the same status.
    for condition, status in _group(statuses):
        if status is None:
            tx.execute(sa.delete(table).where(condition))
        else:
            tx.execute(sa.update(table).where(condition).values(status=status))


def record_outcomes(tx: sa.Connection, service_id: int, outcomes: Sequence[BackendOutcome]) -> None:
    """Write the outcomes that an agent reports, unless the desired state has changed since."""
    for outcome in outcomes:
        tx.execute(
            sa.update(table)
            .where(
                table.c.service_id == service_id,
                table.c.backend == outcome.backend,
                table.c.generation == outcome.generation,
            )
            .values(applied=outcome.error is None, error=outcome.error)
        )


def sync_cordon(tx: sa.Connection, hosts: Collection[str], now: datetime) -> int:
    """Cordon or uncordon each device of these hosts, as the state of its backend requires.

    A device is cordoned if the desired status of its backend is not ENABLED, if its backend is
    cordoned and its handles need host work, or if it drains for another layout. Any other device is
    uncordoned.

    ``cordoned_since`` of a device that is cordoned by this call is ``now``, or the earlier time of
    its status: servers in build may get its handles for some time from then on. It is None if none
    may, because the backend is being removed or is cordoned. Return the number of devices that
    changed; the caller must mark their providers stale.
    """
    backend = sa.and_(
        table.c.service_id == services.c.id,
        services.c.binary == AGENT,
        services.c.host == devices.c.host,
        table.c.backend == devices.c.backend,
    )
    disabled = sa.exists().where(backend, table.c.status != str(DesiredStatus.ENABLED))
    removed = sa.exists().where(backend, table.c.status == str(DesiredStatus.ABSENT))
    changed = 0
    for chunk in bulk.chunks(sorted(hosts)):
        on_hosts = devices.c.host.in_(chunk)
        unusable = devices.c.id.in_(_cordoned(tx, chunk))
        cordoned = sa.or_(disabled, unusable, devices.c.uuid.in_(_draining(tx, chunk)))
        since = sa.case(
            (sa.or_(removed, unusable), None),
            else_=sa.func.coalesce(devices.c.cordoned_since, sa.literal(now, Moment)),
        )
        # If the status of the device cordons it as well, the time of the status remains.
        kept = sa.case((devices.c.status != ENABLED, devices.c.cordoned_since), else_=None)
        to_cordon = sa.update(devices).where(on_hosts, sa.not_(devices.c.cordoned), cordoned)
        to_uncordon = sa.update(devices).where(on_hosts, devices.c.cordoned, sa.not_(cordoned))
        # Devices that were cordoned before: servers in build may not use them any more, either.
        to_close = sa.update(devices).where(
            on_hosts, devices.c.cordoned_since.is_not(None), sa.or_(removed, unusable)
        )
        changed += tx.execute(to_cordon.values(cordoned=True, cordoned_since=since)).rowcount
        changed += tx.execute(to_uncordon.values(cordoned=False, cordoned_since=kept)).rowcount
        tx.execute(to_close.values(cordoned_since=None))
    return changed


def _cordoned(tx: sa.Connection, hosts: Collection[str]) -> list[int]:
    """Return the ids of the devices of cordoned backends whose handles need host work."""
    query = (
        sa.select(devices.c.id, devices.c.abilities)
        .join(services, services.c.host == devices.c.host)
        .join(backends, joins.BACKEND_OF_DEVICE)
        .where(services.c.binary == AGENT, services.c.host.in_(hosts), backends.c.cordoned)
        .order_by(devices.c.id)
    )
    # Here, not in the statement: the databases have no common operator for a list in JSON.
    return [row.id for row in tx.execute(query) if CLEANING_ABILITIES & set(row.abilities)]


def _draining(tx: sa.Connection, hosts: Collection[str]) -> list[str]:
    """Return the uuids of the devices with an open partition job that waits for their release."""
    query = sa.select(jobs.c.subject, jobs.c.arguments).where(
        jobs.c.state == JobState.OPEN, jobs.c.kind == JobKind.PARTITION, jobs.c.host.in_(hosts)
    )
    # Here, not in the statement: the databases have no common operator for keys in JSON.
    return [row.subject for row in tx.execute(query) if DRAINS in row.arguments]


def _group(
    values: Mapping[BackendKey, str | None],
) -> list[tuple[sa.ColumnElement[bool], str | None]]:
    """Group backends by name and value; return the condition and the value of each group."""
    agents = defaultdict[tuple[str, str | None], list[int]](list)
    for key, value in values.items():
        agents[key.backend, value].append(key.service_id)
    return [
        (sa.and_(table.c.backend == backend, table.c.service_id.in_(chunk)), value)
        # As text: a value may be None, which has no order.
        for (backend, value), ids in sorted(agents.items(), key=str)
        for chunk in bulk.chunks(ids)
    ]


def _to_columns(desired: DesiredBackend) -> dict[str, Any]:
    # Not applied: the agent reports its outcome for each generation.
    return {
        "driver": desired.driver,
        "status": str(desired.status),
        "config": dict(desired.config),
        "generation": desired.generation,
        "applied": False,
        "error": None,
    }


def _read(
    tx: sa.Connection, *conditions: sa.ColumnElement[bool]
) -> dict[BackendKey, DesiredRecord]:
    query = sa.select(table.c.service_id, table.c.applied, *_COLUMNS).where(*conditions)
    return {
        BackendKey(r["service_id"], r["backend"]): DesiredRecord(_value(r), bool(r["applied"]))
        for r in tx.execute(query).mappings()
    }


def _value(row: sa.RowMapping) -> DesiredBackend:
    return DesiredBackend(
        backend=row["backend"],
        driver=row["driver"],
        status=DesiredStatus(row["status"]),
        generation=row["generation"],
        config=row["config"],
    )

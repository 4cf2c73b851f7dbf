# SPDX-License-Identifier: Apache-2.0
"""Write the backends of a host as its agent reports them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core.hosts import AGENT
from cyborg.core.inventory import capability
from cyborg.core.inventory import functions as core_functions
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.core.jobs.job import INVENTORY_KINDS, JobState
from cyborg.db import bulk, joins
from cyborg.db.schema import backend_functions, backends, deployables, devices, jobs, services
from cyborg.db.schema import desired_backends as desired


@dataclass(frozen=True, slots=True)
class Replacement:
    """Result of the replacement of the backends of an agent.

    ``agent_id`` is the row id of the agent. ``has_overrides`` is whether new devices may need a
    cordon, because an operator changed a backend or a backend is cordoned. ``has_failed_changes``
    is whether an open job that changes a device of the host has failed at least once.
    ``changed_cordons`` are the names of the backends that were cordoned or uncordoned.
    """

    agent_id: int
    identity: dict[str, Any]
    drivers_digest: str | None
    has_overrides: bool
    has_failed_changes: bool
    changed_cordons: Sequence[str]


def replace(tx: sa.Connection, host: str, states: Sequence[BackendState]) -> Replacement:
    """Replace the backends of a host's agent; rows that do not change are not written.

    Remarks and settings that are None in the report keep their old values. The caller must hold a
    lock on the agent's row.
    """
    # An outer join: an agent without backends is one row, whose columns of backends are NULL.
    rows = tx.execute(_of_host(host)).mappings().all()
    agent = rows[0]
    stored = {row["name"]: row for row in rows if row["id"] is not None}
    previously_cordoned = {name for name, row in stored.items() if row["cordoned"]}
    # A restarted agent counts failures from 0, so only a successful discovery uncordons.
    cordoned = {
        state.name
        for state in states
        if state.cordoned
        or (state.name in previously_cordoned and state.status is not BackendStatus.READY)
    }
    reported = {
        state.name: _values(state, stored.get(state.name)) | {"cordoned": state.name in cordoned}
        for state in states
    }
    bulk.delete(tx, backends, [row["id"] for name, row in stored.items() if name not in reported])
    bulk.update(
        tx,
        backends,
        [
            {"id": stored[name]["id"], **values}
            for name, values in reported.items()
            if name in stored and any(stored[name][key] != values[key] for key in values)
        ],
    )
    new = [
        {"uuid": str(uuid4()), "service_id": agent["agent_id"], "name": name, **values}
        for name, values in reported.items()
        if name not in stored
    ]
    bulk.insert(tx, backends, new)
    if new:
        # The host may have devices of a backend that was not configured for a while.
        sync_functions(tx, host)
    return Replacement(
        agent_id=agent["agent_id"],
        identity=agent["identity"],
        drivers_digest=agent["drivers_digest"],
        has_overrides=bool(agent["has_overrides"] or cordoned),
        has_failed_changes=bool(agent["has_failed_changes"]),
        changed_cordons=sorted(previously_cordoned ^ cordoned),
    )


def _of_host(host: str) -> sa.Select[Any]:
    """Return the query of the backends of a host's agent, one row without any if it has none."""
    has_overrides = sa.exists().where(desired.c.service_id == services.c.id).correlate(services)
    has_failed_changes = sa.exists().where(
        jobs.c.host == host,
        jobs.c.state == JobState.OPEN,
        jobs.c.error.is_not(None),
        jobs.c.kind.in_(INVENTORY_KINDS),
    )
    return (
        sa.select(
            services.c.id.label("agent_id"),
            services.c.identity,
            services.c.drivers_digest,
            has_overrides.label("has_overrides"),
            has_failed_changes.label("has_failed_changes"),
            *(backends.c[name] for name in ("id", "name", "cordoned")),
            *(backends.c[name] for name in ("driver", "status", "error", "remarks", "settings")),
        )
        .outerjoin(backends, backends.c.service_id == services.c.id)
        .where(joins.agent_of(host))
    )


def sync_functions(tx: sa.Connection, host: str) -> None:
    """Write the functions of a host's backends as they follow from its devices.

    Needed after each change of the backends, of the devices or of their resource classes and
    capability trees. The caller must hold a lock on the agent's row. Executes two statements, and
    up to two more if functions have changed.
    """
    of_host = sa.and_(services.c.host == host, services.c.binary == AGENT)
    query = (
        sa.select(
            backends.c.name,
            backends.c.id.label("backend_id"),
            backend_functions.c.id,
            backend_functions.c.function,
        )
        .join(services, services.c.id == backends.c.service_id)
        .outerjoin(backend_functions, backend_functions.c.backend_id == backends.c.id)
        .where(of_host)
    )
    rows = tx.execute(query).all()
    ids = {row.name: row.backend_id for row in rows}
    stored = {(row.backend_id, row.function): row.id for row in rows if row.id is not None}
    offered = {(ids[name], item) for name, item in _offered(tx, host) if name in ids}
    bulk.delete(tx, backend_functions, [stored[key] for key in stored.keys() - offered])
    bulk.insert(
        tx,
        backend_functions,
        [
            {"backend_id": id_, "function": function}
            for id_, function in sorted(offered - stored.keys())
        ],
    )


def _offered(tx: sa.Connection, host: str) -> Iterator[tuple[str, str]]:
    """Yield the name of a backend and a function, for each function of each device of a host."""
    query = (
        sa.select(devices.c.backend, deployables.c.resource_class, devices.c.vendor_board_info)
        .join(deployables, deployables.c.device_id == devices.c.id)
        .where(devices.c.host == host)
    )
    for backend, resource_class, board in tx.execute(query):
        tree = capability.encoded_text(board)
        for function in core_functions.names_of(resource_class, tree):
            yield backend, function


def _values(state: BackendState, stored: sa.RowMapping | None) -> dict[str, Any]:
    """Return the values of a backend's row."""
    remarks, settings = state.remarks, state.settings
    previous = {"remarks": None, "settings": None} if stored is None else stored
    return {
        "driver": state.driver,
        "status": str(state.status),
        "error": state.error,
        "remarks": previous["remarks"] if remarks is None else list(remarks),
        "settings": previous["settings"] if settings is None else [s.to_dict() for s in settings],
    }

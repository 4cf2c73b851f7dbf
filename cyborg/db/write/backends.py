# SPDX-License-Identifier: Apache-2.0
"""Write the backends of a host as its agent reports them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core.hosts.service import AGENT
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.core.jobs.job import INVENTORY_KINDS, JobState
from cyborg.db import bulk
from cyborg.db.schema import backends, desired_backends, jobs, services


@dataclass(frozen=True, slots=True)
class Replacement:
    """Result of the replacement of the backends of an agent.

    ``agent`` is the row id of the agent. ``has_overrides`` is whether new devices may need a
    cordon, because an operator changed a backend or a backend is cordoned. ``has_failed_changes``
    is whether an open job that changes a device of the host has failed at least once.
    ``changed_cordons`` are the names of the backends that were cordoned or uncordoned.
    """

    agent: int
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
    query = (
        sa.select(
            services.c.id.label("agent"),
            services.c.identity,
            services.c.drivers_digest,
            sa.exists()
            .where(desired_backends.c.service_id == services.c.id)
            .correlate(services)
            .label("has_overrides"),
            sa.exists()
            .where(jobs.c.host == host, jobs.c.state == JobState.OPEN, jobs.c.error.is_not(None))
            .where(jobs.c.kind.in_(INVENTORY_KINDS))
            .label("has_failed_changes"),
            backends.c.id,
            backends.c.name,
            backends.c.driver,
            backends.c.status,
            backends.c.error,
            backends.c.remarks,
            backends.c.settings,
            backends.c.cordoned,
        )
        .outerjoin(backends, backends.c.service_id == services.c.id)
        .where(services.c.binary == AGENT, services.c.host == host)
    )
    rows = tx.execute(query).mappings().all()
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
    bulk.insert(
        tx,
        backends,
        [
            {"uuid": str(uuid4()), "service_id": rows[0]["agent"], "name": name, **values}
            for name, values in reported.items()
            if name not in stored
        ],
    )
    return Replacement(
        rows[0]["agent"],
        rows[0]["identity"],
        rows[0]["drivers_digest"],
        bool(rows[0]["has_overrides"]) or bool(cordoned),
        bool(rows[0]["has_failed_changes"]),
        sorted(previously_cordoned ^ cordoned),
    )


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

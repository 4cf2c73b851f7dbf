# SPDX-License-Identifier: Apache-2.0
"""Writing the configured drivers of a host, as its agent tells of them."""

from collections.abc import Sequence
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core.report import BackendState
from cyborg.db.schema import backends, services, wanted_backends
from cyborg.db.store import bulk
from cyborg.db.store.services import AGENT


def replace(tx: sa.Connection, host: str, states: Sequence[BackendState]) -> sa.RowMapping:
    """Bring the backends of a host's agent to these; what is equal is not written.

    Returns of the agent's row, which is read along: agent (its id), identity, catalogue (the
    fingerprint) and marks: whether operators have said anything of its backends that counts. The
    caller holds that row, so that nobody else does the same.
    """
    query = (
        sa.select(
            services.c.id.label("agent"),
            services.c.identity,
            services.c.catalogue,
            sa.exists()
            .where(wanted_backends.c.service_id == services.c.id)
            .correlate(services)
            .label("marks"),
            backends.c.id,
            backends.c.name,
            backends.c.driver,
            backends.c.status,
            backends.c.error,
        )
        .outerjoin(backends, backends.c.service_id == services.c.id)
        .where(services.c.binary == AGENT, services.c.host == host)
    )
    rows = tx.execute(query).mappings().all()
    known = {row["name"]: row for row in rows if row["id"] is not None}
    wanted = {
        state.name: {"driver": state.driver, "status": str(state.status), "error": state.error}
        for state in states
    }
    bulk.delete(tx, backends, [row["id"] for name, row in known.items() if name not in wanted])
    bulk.update(
        tx,
        backends,
        [
            {"id": known[name]["id"], **values}
            for name, values in wanted.items()
            if name in known and any(known[name][key] != values[key] for key in values)
        ],
    )
    bulk.insert(
        tx,
        backends,
        [
            {"uuid": str(uuid4()), "service_id": rows[0]["agent"], "name": name, **values}
            for name, values in wanted.items()
            if name not in known
        ],
    )
    return rows[0]

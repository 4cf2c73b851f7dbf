# SPDX-License-Identifier: Apache-2.0
"""Writing the configured drivers of a host, as its agent tells of them."""

from collections.abc import Sequence
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core.report import BackendState
from cyborg.db.schema import backends
from cyborg.db.store import bulk


def replace(tx: sa.Connection, service_id: int, states: Sequence[BackendState]) -> None:
    """Bring a host's backends to these; what is equal is not written.

    The caller holds the row of the service, so that nobody else does the same.
    """
    known = {
        row["name"]: row
        for row in tx.execute(
            sa.select(backends).where(backends.c.service_id == service_id)
        ).mappings()
    }
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
            {"uuid": str(uuid4()), "service_id": service_id, "name": name, **values}
            for name, values in wanted.items()
            if name not in known
        ],
    )

# SPDX-License-Identifier: Apache-2.0
"""Writing the labels of accelerators, which lie with the requests that hold them."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from cyborg.db.schema import attach_handles, requests


def write(tx: sa.Connection, handle: str, label: Mapping[str, Any], scope: str | None) -> bool:
    """Change the label of what holds the handle of this uuid; return whether anything holds it.

    ``scope`` is the project whose requests exist for the caller, None for every project.
    ``updated_at`` stays the moment of the bind, by which the reconciler counts.
    """
    holder = sa.select(attach_handles.c.request_id).where(attach_handles.c.uuid == handle)
    guard = [requests.c.id == holder.scalar_subquery()]
    if scope is not None:
        guard.append(requests.c.project_id == scope)
    values = {f"label_{name}": value for name, value in label.items()}
    change = sa.update(requests).where(*guard)
    return bool(tx.execute(change.values(**values, updated_at=requests.c.updated_at)).rowcount)

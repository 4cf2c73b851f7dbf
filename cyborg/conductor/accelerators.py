# SPDX-License-Identifier: Apache-2.0
"""What those who hold an accelerator call it."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from oslo_log import log

from cyborg.conductor.limits import optional
from cyborg.conductor.moments import iso
from cyborg.core.accelerator import parse_label
from cyborg.core.errors import NotFound, WrongState
from cyborg.core.request import parse_uuid
from cyborg.db.read import accelerators as read
from cyborg.db.read.paging import Row
from cyborg.db.store import labels
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)


class Accelerators:
    """What may be done to accelerators."""

    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    def update(self, uuid: str, label: Mapping[str, Any], scope: str | None) -> dict[str, Any]:
        """Change the label of an accelerator; return its row as plain values.

        ``scope`` is the project whose accelerators exist for the caller, None for every one. The
        label is of the request that holds it: one that nobody holds has none. Raises Invalid,
        NotFound, and WrongState for one that nobody holds.
        """
        accelerator = parse_uuid(uuid, "uuid")
        changes = parse_label(label)
        # An empty project is that of a token without one, and holds nothing.
        scope = scope if scope == "" else optional("scope", scope)

        def write(tx: sa.Connection) -> Row:
            held = labels.write(tx, accelerator, changes, scope)
            row = read.get(tx, accelerator, scope)
            if row is None:
                raise NotFound(f"no accelerator {accelerator}", accelerator=accelerator)
            if not held:
                raise WrongState(
                    f"accelerator {accelerator} is held by nobody: a label is of the request that "
                    "holds it, bind one first",
                    accelerator=accelerator,
                )
            return row

        row = self._uow.run(write)
        LOG.info("Accelerator %s has another label: %s", accelerator, ", ".join(sorted(changes)))
        return {k: iso(v) if isinstance(v, datetime) else v for k, v in row.items()}

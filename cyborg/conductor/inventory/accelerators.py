# SPDX-License-Identifier: Apache-2.0
"""Change the labels that users give to bound accelerators."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from cyborg.core.binding.accelerator import parse_label
from cyborg.core.errors import NotFound, WrongState
from cyborg.core.log import get_logger
from cyborg.core.timestamps import to_iso
from cyborg.core.validation import check_optional_text, parse_uuid
from cyborg.db.binding import accelerators
from cyborg.db.binding import write as arqs
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)


class Accelerators:
    """Operations on accelerators."""

    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    def update(
        self, uuid: str, label: Mapping[str, Any], project_scope: str | None
    ) -> dict[str, Any]:
        """Change the label of an accelerator; return its row as plain values.

        ``project_scope`` limits the call to accelerators of one project; None means all projects. A
        label belongs to the ARQ that is bound to the accelerator. Raise Invalid, NotFound, and
        WrongState if the accelerator is not bound.
        """
        accelerator = parse_uuid(uuid, "uuid")
        changes = parse_label(label)
        # An empty scope is that of a token without a project, which has no accelerators.
        scope = "" if project_scope == "" else check_optional_text("project_scope", project_scope)

        def write(tx: sa.Connection) -> accelerators.AcceleratorRow:
            is_bound = arqs.write_label(tx, accelerator, changes, scope)
            row = accelerators.get(tx, accelerator, scope)
            if row is None:
                raise NotFound(f"no accelerator {accelerator}", accelerator=accelerator)
            if not is_bound:
                raise WrongState(
                    f"accelerator {accelerator} is not bound; only a bound accelerator can be "
                    "labelled",
                    accelerator=accelerator,
                )
            return row

        row = self._uow.run_once(write, _plain)
        LOG.info(
            "Updated label of accelerator: %s",
            ", ".join(sorted(changes)),
            accelerator=accelerator,
            arq=row["arq_uuid"],
            instance=row["instance_uuid"],
        )
        return _plain(row)


def _plain(row: accelerators.AcceleratorRow) -> dict[str, Any]:
    return {k: to_iso(v) if isinstance(v, datetime) else v for k, v in row.items()}

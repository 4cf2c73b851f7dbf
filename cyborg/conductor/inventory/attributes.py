# SPDX-License-Identifier: Apache-2.0
"""Manage attributes that operators add to deployables. Reports of agents do not change them."""

from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.core.errors import Conflict, NotFound
from cyborg.core.log import get_logger
from cyborg.core.timestamps import to_iso
from cyborg.core.validation import check_text, parse_uuid
from cyborg.db.deployables import write as deployables
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)


class Attributes:
    """Operations on attributes of deployables."""

    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    def create(self, deployable: str, key: str, value: str) -> dict[str, Any]:
        """Add an attribute to the deployable with this uuid; return its row as plain values.

        The new attribute hides an attribute with the same key that the agent reports. Raise
        Invalid, NotFound, and Conflict if an operator has already added this key.
        """
        owner = parse_uuid(deployable, "deployable_id")
        now = self._uow.clock()
        row: deployables.NewAttributeRow = {
            "uuid": str(uuid4()),
            "key": check_text("key", key),
            "value": check_text("value", value),
            "created_at": now,
        }
        made = {**row, "deployable_uuid": owner, "created_at": to_iso(now), "updated_at": None}

        def write(tx: sa.Connection) -> None:
            if not deployables.add_attribute(tx, owner, row):
                raise _no_deployable(owner)

        try:
            self._uow.run_once(write, lambda _: made)
        except db_exc.DBDuplicateEntry as exc:
            raise Conflict(
                f"deployable {owner} already has an attribute {key!r}, delete it first",
                deployable=owner,
                key=key,
            ) from exc
        except db_exc.DBReferenceError as exc:
            raise _no_deployable(owner) from exc
        LOG.info("Created attribute %s (%s)", row["uuid"], key, deployable=owner)
        return made

    def delete(self, uuid: str) -> None:
        """Delete an attribute. Raise Invalid, NotFound."""
        attribute = parse_uuid(uuid, "uuid")

        def write(tx: sa.Connection) -> None:
            if not deployables.delete_attribute(tx, attribute):
                raise NotFound(f"no attribute {attribute}", attribute=attribute)

        self._uow.run_once(write)
        LOG.info("Deleted attribute %s", attribute)


def _no_deployable(uuid: str) -> NotFound:
    return NotFound(
        f"deployable_id: no deployable {uuid}; GET /v2/deployables lists the known ones",
        deployable=uuid,
    )

# SPDX-License-Identifier: Apache-2.0
"""Attributes that operators give to deployables. No report of an agent touches them."""

from typing import Any
from uuid import uuid4

from oslo_db import exception as db_exc
from oslo_log import log
from oslo_utils import timeutils

from cyborg.conductor.limits import text
from cyborg.conductor.moments import iso
from cyborg.core.errors import Conflict, NotFound
from cyborg.core.request import parse_uuid
from cyborg.db.store import attributes as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)


class Attributes:
    """What may be done to the attributes of deployables."""

    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    def create(self, deployable: str, key: str, value: str) -> dict[str, Any]:
        """Give an attribute to the deployable of this uuid; return its row as plain values.

        Over an attribute of the same key that the agent reports, the operator's is the one shown.
        Raises Invalid, NotFound, and Conflict when an operator gave one of this key already.
        """
        owner = parse_uuid(deployable, "deployable_id")
        now = timeutils.utcnow()
        row = {
            "uuid": str(uuid4()),
            "key": text("key", key),
            "value": text("value", value),
            "created_at": now,
        }
        try:
            found = self._uow.run(lambda tx: store.insert(tx, owner, row))
        except db_exc.DBDuplicateEntry as bad:
            raise Conflict(
                f"deployable {owner} has an attribute {key!r} already: delete that one first",
                deployable=owner,
                key=key,
            ) from bad
        except db_exc.DBReferenceError:
            found = False
        if not found:
            raise NotFound(f"deployable_id: no deployable {owner}", deployable=owner)
        LOG.info("Attribute %s is %r of deployable %s", row["uuid"], key, owner)
        return row | {"deployable_uuid": owner, "created_at": iso(now), "updated_at": None}

    def delete(self, uuid: str) -> None:
        """Take an attribute away. Raises Invalid, NotFound."""
        attribute = parse_uuid(uuid, "uuid")
        if not self._uow.run(lambda tx: store.delete(tx, attribute)):
            raise NotFound(f"no attribute {attribute}", attribute=attribute)
        LOG.info("Attribute %s is deleted", attribute)

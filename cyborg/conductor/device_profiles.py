# SPDX-License-Identifier: Apache-2.0
"""Device profiles: made and deleted. Reading them is the API's own affair."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_db import exception as db_exc
from oslo_utils import timeutils

from cyborg.conductor.limits import text
from cyborg.conductor.moments import iso
from cyborg.conductor.notices import Notices
from cyborg.core.errors import Conflict, InUse, Invalid, NotFound
from cyborg.core.notification import Event
from cyborg.core.profile import parse_groups, parse_name
from cyborg.core.request import parse_uuid
from cyborg.db.read import device_profiles as read
from cyborg.db.read.paging import Row
from cyborg.db.store import device_profiles as store
from cyborg.db.store import outbox
from cyborg.db.unit_of_work import UnitOfWork

MAX_DESCRIPTION = 4096


class DeviceProfiles:
    """What may be done to device profiles."""

    def __init__(self, uow: UnitOfWork, notices: Notices | None = None) -> None:
        """Without ``notices`` no listener is told."""
        self._uow = uow
        self._notices = notices

    def create(self, profile: Mapping[str, Any]) -> dict[str, Any]:
        """Make a profile of ``name``, ``groups`` and, if given, ``uuid`` and ``description``.

        Returns the row as plain values. Raises Invalid, naming the field, and Conflict when the
        name or the uuid is taken.
        """
        row = _read(profile)
        try:
            self._uow.run(lambda tx: self._insert(tx, row))
        except db_exc.DBDuplicateEntry as bad:
            raise _taken(row, bad) from bad
        return row | {"created_at": iso(row["created_at"]), "updated_at": None}

    def delete(self, keys: Sequence[str]) -> None:
        """Delete the profiles of these uuids or names, all of them or none.

        Raises NotFound when a key names none, and InUse when a request was made from one.
        """
        if not isinstance(keys, Sequence) or isinstance(keys, str | bytes) or not keys:
            raise Invalid("expected the uuids or names of device profiles", field="value")
        keys = [text("value", key) for key in keys]
        try:
            self._uow.run(lambda tx: self._delete(tx, keys))
        except db_exc.DBReferenceError as bad:
            raise self._in_use(keys) from bad

    def _insert(self, tx: sa.Connection, row: Mapping[str, Any]) -> None:
        store.insert(tx, row)
        if self._notices is not None:
            outbox.add_all(tx, self._notices.rows(Event.PROFILE_CREATED, [row]))

    def _delete(self, tx: sa.Connection, keys: Sequence[str]) -> None:
        rows = store.find(tx, keys)
        uuids = {row["uuid"]: row["id"] for row in rows}
        names = {row["name"]: row["id"] for row in rows}
        # A key that is one profile's uuid and another's name means the uuid.
        ids = {key: uuids.get(key, names.get(key)) for key in keys}
        if unknown := sorted(key for key, id_ in ids.items() if id_ is None):
            raise _unknown(unknown)
        wanted = {id_ for id_ in ids.values() if id_ is not None}
        gone: Sequence[Row] = ()
        if self._notices is not None and self._notices.enabled:
            gone = read.find(tx, uuids=[row["uuid"] for row in rows if row["id"] in wanted])
        if store.delete(tx, sorted(wanted)) != len(wanted):
            raise _unknown(sorted(ids))
        if self._notices is not None:
            outbox.add_all(tx, self._notices.rows(Event.PROFILE_DELETED, gone))

    def _in_use(self, keys: Sequence[str]) -> InUse:
        # Counted afterwards: the transaction that met the foreign key has ended, and the count is
        # for the reader of the message, not for the decision.
        used = self._uow.run(lambda tx: store.usage(tx, keys))
        told = "; ".join(f"{name} by {_count(count)}" for name, count in used.items())
        return InUse(
            f"device profile in use: {told or 'a request was made from it at this moment'}",
            requests=dict(used),
        )


def _unknown(keys: Sequence[str]) -> NotFound:
    return NotFound(f"no device profile {', '.join(keys)}", unknown=list(keys))


def _read(profile: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(profile, Mapping):
        raise Invalid("a device profile must be an object", field="body")
    description = profile.get("description")
    if description is not None and (
        not isinstance(description, str)
        or len(description) > MAX_DESCRIPTION
        or not "".join(description.split()).isprintable()
    ):
        raise Invalid(
            f"description must be a printable string of at most {MAX_DESCRIPTION} characters",
            field="description",
        )
    uuid = profile.get("uuid")
    return {
        "uuid": str(uuid4()) if uuid is None else parse_uuid(uuid, "uuid"),
        "name": parse_name(profile.get("name")),
        "description": description,
        "groups": [group.to_dict() for group in parse_groups(profile.get("groups"))],
        "created_at": timeutils.utcnow(),
    }


def _taken(row: Mapping[str, Any], bad: db_exc.DBDuplicateEntry) -> Conflict:
    # SQLite names the column, the others the value.
    by_uuid = bad.value == row["uuid"] or any("uuid" in column for column in bad.columns or ())
    field = "uuid" if by_uuid else "name"
    return Conflict(f"a device profile of {field} {row[field]} exists already", field=field)


def _count(count: int) -> str:
    return f"{count} accelerator request{'' if count == 1 else 's'}"

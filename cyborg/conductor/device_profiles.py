# SPDX-License-Identifier: Apache-2.0
"""Create and delete device profiles. The API reads them directly from the database."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.binding.profile import (
    HIDDEN_PREFIX,
    is_hidden_profile_name,
    parse_groups,
    parse_name,
)
from cyborg.core.errors import Conflict, InUse, Invalid, NotFound
from cyborg.core.notification import Event
from cyborg.core.text import join_limited, to_iso
from cyborg.core.validation import check_text, parse_uuid
from cyborg.db.binding.write import ArqRow
from cyborg.db.outbox import write as outbox
from cyborg.db.profiles import read
from cyborg.db.profiles import write as store
from cyborg.db.unit_of_work import UnitOfWork

MAX_DESCRIPTION = 4096
# ARQs listed in the error of a delete; the rest is counted.
MAX_NAMED = 10


@dataclass(frozen=True)
class DeviceProfiles:
    """Operations on device profiles."""

    uow: UnitOfWork
    notifications: NotificationBuilder

    def create(self, profile: Mapping[str, Any]) -> dict[str, Any]:
        """Create a profile from ``name``, ``groups`` and optional ``uuid`` and ``description``.

        Return the row as plain values. Raise Invalid with the field, and Conflict if the name or
        the uuid exists.
        """
        row = _parse_profile(profile, self.uow.clock())
        created = {**row, "created_at": to_iso(row["created_at"]), "updated_at": None}
        try:
            self.uow.run_once(lambda tx: self._insert(tx, row), lambda _: created)
        except db_exc.DBDuplicateEntry as exc:
            raise _duplicate_error(row, exc) from exc
        return created

    def delete(self, keys: Sequence[str]) -> None:
        """Delete the profiles with these uuids or names, all or none.

        Raise NotFound if a profile does not exist, and InUse, with up to MAX_NAMED ARQs, if ARQs
        were created from a profile, or if it is the hidden profile of a device context.
        """
        if not isinstance(keys, Sequence) or isinstance(keys, str | bytes) or not keys:
            raise Invalid("expected the uuids or names of device profiles", field="value")
        keys = [check_text("value", key) for key in keys]
        try:
            self.uow.run_once(lambda tx: self._delete(tx, keys))
        except db_exc.DBReferenceError as exc:
            raise self._in_use(keys) from exc

    def _insert(self, tx: sa.Connection, row: store.NewProfileRow) -> None:
        store.insert(tx, row)
        outbox.add_all(tx, self.notifications.build_messages(Event.PROFILE_CREATED, [row]))

    def _delete(self, tx: sa.Connection, keys: Sequence[str]) -> None:
        """Delete profiles by uuid or name, all or none. Raise NotFound, InUse."""
        rows = store.find(tx, keys)
        uuids = {row["uuid"]: row["id"] for row in rows}
        names = {row["name"]: row["id"] for row in rows}
        # If a key is the uuid of one profile and the name of another, the uuid takes precedence.
        ids = {key: uuids.get(key, names.get(key)) for key in keys}
        if missing := sorted(key for key, id_ in ids.items() if id_ is None):
            raise _not_found(missing)
        profile_ids = {id_ for id_ in ids.values() if id_ is not None}
        if hidden := [row for row in rows if row["context_id"] and row["id"] in profile_ids]:
            name = hidden[0]["name"]
            context = name.removeprefix(HIDDEN_PREFIX)
            raise InUse(
                f"device profile {name} belongs to device context {context}: delete the context",
                device_context=context,
            )
        # Read before the deletion, for the notification only: without listeners it costs no query.
        deleted: Sequence[read.DeviceProfileRow] = ()
        if self.notifications.enabled:
            uuids_to_delete = [row["uuid"] for row in rows if row["id"] in profile_ids]
            deleted = read.find(tx, uuids=uuids_to_delete)
        # The foreign key of ARQs is the check for use: a query before it could be outdated.
        if store.delete(tx, sorted(profile_ids)) != len(profile_ids):
            raise _not_found(sorted(ids))
        outbox.add_all(tx, self.notifications.build_messages(Event.PROFILE_DELETED, deleted))

    def _in_use(self, keys: Sequence[str]) -> InUse:
        """Return the error that names what uses the profiles."""
        # Read in a new transaction, because the one that failed on the foreign key has ended. The
        # result is only for the message, not for the decision.
        counts, arqs = self.uow.run(
            lambda tx: (store.usage(tx, keys), store.users(tx, keys, MAX_NAMED))
        )
        if not counts:
            return InUse(
                "device profile in use: an ARQ was created from it concurrently", requests={}
            )
        uses = "; ".join(f"{name} by {_count(count)}" for name, count in counts.items())
        users = join_limited([_describe(arq) for arq in arqs], MAX_NAMED, sum(counts.values()))
        return InUse(
            f"device profile in use: {uses}: {users}",
            requests=dict(counts),
            arqs=[arq["uuid"] for arq in arqs],
        )


def _not_found(keys: Sequence[str]) -> NotFound:
    return NotFound(f"no device profile {', '.join(keys)}", unknown=list(keys))


def _parse_profile(profile: Mapping[str, Any], now: datetime) -> store.NewProfileRow:
    """Return the row of a new profile. Raise Invalid with the field."""
    if not isinstance(profile, Mapping):
        raise Invalid("a device profile must be an object", field="body")
    description = profile.get("description")
    if description is not None and (
        not isinstance(description, str)
        or len(description) > MAX_DESCRIPTION
        # White space is allowed, such as the end of a line.
        or not "".join(description.split()).isprintable()
    ):
        raise Invalid(
            f"description must be a printable string of at most {MAX_DESCRIPTION} characters",
            field="description",
        )
    uuid = profile.get("uuid")
    name = parse_name(profile.get("name"))
    if is_hidden_profile_name(name):
        raise Invalid(
            f"name {name!r} is reserved for hidden profiles of device contexts and attachments",
            field="name",
        )
    return {
        "uuid": str(uuid4()) if uuid is None else parse_uuid(uuid, "uuid"),
        "name": name,
        "description": description,
        "groups": [group.to_dict() for group in parse_groups(profile.get("groups"))],
        "created_at": now,
    }


def _duplicate_error(row: store.NewProfileRow, exc: db_exc.DBDuplicateEntry) -> Conflict:
    # SQLite reports the column, the other databases the value.
    by_uuid = exc.value == row["uuid"] or any("uuid" in column for column in exc.columns or ())
    field, value = ("uuid", row["uuid"]) if by_uuid else ("name", row["name"])
    return Conflict(
        f"a device profile with {field} {value} already exists; use it, or take another {field}",
        field=field,
    )


def _describe(row: ArqRow) -> str:
    instance = row["instance_uuid"]
    return f"{row['uuid']} ({row['state']}{f', instance {instance}' if instance else ''})"


def _count(count: int) -> str:
    return f"{count} accelerator request{'' if count == 1 else 's'}"

# SPDX-License-Identifier: Apache-2.0
"""Read the rows of a database of OpenStack Cyborg, host by host; nothing is written there."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import sqlalchemy as sa

from cyborg.core.errors import Conflict, NotFound
from cyborg.core.migration import reference
from cyborg.db import bulk

T = TypeVar("T")

_tables = sa.MetaData()


def _table(name: str, *names: str) -> sa.Table:
    # Without types: the values are those of the driver, and no schema is created from them.
    return sa.Table(name, _tables, *(sa.Column(column) for column in ("id", *names)))


devices = _table(
    "devices",
    *("uuid", "type", "vendor", "model", "std_board_info", "vendor_board_info", "hostname"),
    *("status", "device_state"),
)
control_paths = _table("controlpath_ids", "device_id", "cpid_info")
deployables = _table(
    "deployables",
    *("uuid", "device_id", "parent_id", "name", "rp_uuid", "driver_name", "bitstream_id"),
)
attributes = _table("attributes", "uuid", "deployable_id", "key", "value")
handles = _table("attach_handles", "uuid", "deployable_id", "attach_type", "attach_info", "in_use")
profiles = _table("device_profiles", "uuid", "name", "description", "profile_json")
arqs = _table(
    "extended_accelerator_requests",
    *("uuid", "project_id", "state", "device_profile_id", "device_profile_group_id"),
    *("hostname", "instance_uuid", "attach_handle_id"),
)
_version = sa.Table("alembic_version", _tables, sa.Column("version_num"))


def check_revision(connection: sa.Connection) -> str:
    """Return the revision of the database.

    Raise NotFound without a table of revisions, and Conflict for an unknown revision.
    """
    where = connection.engine.url.render_as_string(hide_password=True)
    if not sa.inspect(connection).has_table(_version.name):
        raise NotFound(f"{where} has no table {_version.name}: it is no database of Cyborg")
    found = connection.scalars(sa.select(_version.c.version_num)).all()
    revision = ", ".join(map(str, found)) or "none"
    if revision not in reference.RELEASES:
        known = ", ".join(f"{name} ({text})" for name, text in reference.RELEASES.items())
        raise Conflict(
            f"{where} has the revision {revision}; an import reads {known}. Upgrade it with the "
            "cyborg-dbsync of OpenStack Cyborg, or use a newer release of this service"
        )
    return revision


def read_hosts(connection: sa.Connection) -> Sequence[str]:
    """Return the names of all hosts with devices, in their order."""
    query = sa.select(devices.c.hostname).distinct().order_by(devices.c.hostname)
    return [str(name) for name in connection.scalars(query)]


def read_profiles(connection: sa.Connection) -> list[reference.ProfileRow]:
    """Return all device profiles."""
    columns = (profiles.c[n] for n in ("id", "uuid", "name", "description", "profile_json"))
    return _load(reference.ProfileRow, connection, sa.select(*columns))


def read_host(connection: sa.Connection, host: str) -> reference.HostRows:
    """Return the rows of one host, in a number of statements that does not depend on theirs."""
    found = _read_devices(connection, host)
    own = list(
        _load_chunks(
            reference.DeployableRow, connection, deployables, "device_id", [d.id for d in found]
        )
    )
    ids = [deployable.id for deployable in own]
    of_handle = ("id", "uuid", "deployable_id", "attach_type", "attach_info", "in_use")
    own_handles = list(
        _load_chunks(reference.HandleRow, connection, handles, "deployable_id", ids, of_handle)
    )
    of_attribute = ("uuid", "deployable_id", "key", "value")
    return reference.HostRows(
        tuple(found),
        tuple(own),
        tuple(
            _load_chunks(
                reference.AttributeRow, connection, attributes, "deployable_id", ids, of_attribute
            )
        ),
        tuple(own_handles),
        tuple(
            _load_chunks(
                reference.ArqRow,
                connection,
                arqs,
                "attach_handle_id",
                [handle.id for handle in own_handles],
            )
        ),
    )


def read_unbound(connection: sa.Connection) -> list[tuple[str, str]]:
    """Return uuid and state of the ARQs without a handle."""
    query = sa.select(arqs.c.uuid, arqs.c.state).where(arqs.c.attach_handle_id.is_(None))
    return [(str(row.uuid), str(row.state)) for row in connection.execute(query)]


def _read_devices(connection: sa.Connection, host: str) -> list[reference.DeviceRow]:
    has_state = any(
        column["name"] == "device_state"
        for column in sa.inspect(connection).get_columns(devices.name)
    )
    first = (
        sa.select(control_paths.c.cpid_info)
        .where(control_paths.c.device_id == devices.c.id)
        .order_by(control_paths.c.id)
        .limit(1)
        .scalar_subquery()
    )
    names = ("id", "uuid", "type", "vendor", "model", "std_board_info", "vendor_board_info")
    state = devices.c.device_state if has_state else sa.null()
    query = sa.select(
        *(devices.c[name] for name in names), devices.c.hostname, devices.c.status, state, first
    )
    query = query.where(devices.c.hostname == host).order_by(devices.c.id)
    return _load(reference.DeviceRow, connection, query)


def _load_chunks(
    kind: type[T],
    connection: sa.Connection,
    table: sa.Table,
    key: str,
    ids: Collection[int],
    columns: Sequence[str] = (),
) -> Iterator[T]:
    """Yield the rows of a table whose column ``key`` is one of ``ids``, ordered by id."""
    chosen = [table.c[name] for name in columns] if columns else list(table.c)
    for chunk in bulk.chunks(ids):
        query = sa.select(*chosen).where(table.c[key].in_(chunk)).order_by(table.c.id)
        yield from _load(kind, connection, query)


def _load(kind: type[T], connection: sa.Connection, query: sa.Select[Any]) -> list[T]:
    """Return rows as values; the columns have the order of the fields."""
    assert len(query.selected_columns) == len(fields(kind))  # type: ignore[arg-type]
    return [kind(*row) for row in connection.execute(query)]

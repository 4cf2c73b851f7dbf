# SPDX-License-Identifier: Apache-2.0
"""Read the rows of a database of OpenStack Cyborg, host by host; nothing is written there."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from cyborg.core.errors import Conflict, NotFound
from cyborg.core.migration import import_plan
from cyborg.db import bulk

_tables = sa.MetaData()


def _table(name: str, *names: str) -> sa.Table:
    # Without types: the values are those of the driver, and no schema is created from them.
    return sa.Table(name, _tables, *(sa.Column(column) for column in ("id", "uuid", *names)))


# The columns have the order of the fields of the rows.
devices = _table(
    "devices",
    *("type", "vendor", "model", "std_board_info", "vendor_board_info", "hostname", "status"),
    "device_state",
)
control_paths = _table("controlpath_ids", "device_id", "cpid_info")
deployables = _table("deployables", "device_id", "parent_id", "name", "rp_uuid", "bitstream_id")
attributes = _table("attributes", "deployable_id", "key", "value")
handles = _table("attach_handles", "deployable_id", "attach_type", "attach_info")
profiles = _table("device_profiles", "name", "description", "profile_json")
arqs = _table(
    "extended_accelerator_requests",
    *("project_id", "state", "device_profile_id", "device_profile_group_id", "hostname"),
    *("instance_uuid", "attach_handle_id"),
)
_version = sa.Table("alembic_version", _tables, sa.Column("version_num"))

TABLES: Mapping[type[import_plan.Row], sa.Table] = {
    import_plan.ProfileRow: profiles,
    import_plan.DeviceRow: devices,
    import_plan.ControlPathRow: control_paths,
    import_plan.DeployableRow: deployables,
    import_plan.AttributeRow: attributes,
    import_plan.HandleRow: handles,
    import_plan.ArqRow: arqs,
}


def check_revision(connection: sa.Connection) -> str:
    """Return the revision of the database.

    Raise NotFound without a table of revisions, and Conflict for an unknown revision.
    """
    where = connection.engine.url.render_as_string(hide_password=True)
    if not sa.inspect(connection).has_table(_version.name):
        raise NotFound(f"{where} has no table {_version.name}: it is no database of Cyborg")
    revisions = connection.scalars(sa.select(_version.c.version_num)).all()
    revision = ", ".join(map(str, revisions)) or "none"
    if revision not in import_plan.RELEASES:
        releases = ", ".join(f"{name} ({text})" for name, text in import_plan.RELEASES.items())
        raise Conflict(
            f"{where} has the revision {revision}; an import reads {releases}. Upgrade it with the "
            "cyborg-dbsync of OpenStack Cyborg, or use a newer release of this service"
        )
    return revision


def count_rows(connection: sa.Connection) -> Counter[str]:
    """Return the number of rows by kind."""
    return Counter(
        {
            kind.KIND: connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0
            for kind, table in TABLES.items()
        }
    )


def read_hosts(connection: sa.Connection) -> dict[str, list[int]]:
    """Return the row ids of the devices of each host, by its name; without a name by ""."""
    # Grouped here: MySQL takes names for equal that differ only in case.
    hosts: dict[str, list[int]] = {}
    query = sa.select(devices.c.id, devices.c.hostname).order_by(devices.c.id)
    for id_, name in connection.execute(query):
        hosts.setdefault(name if isinstance(name, str) else "", []).append(id_)
    return dict(sorted(hosts.items()))


def read_profiles(
    connection: sa.Connection,
) -> tuple[list[import_plan.ProfileRow], list[import_plan.Drop]]:
    """Return all device profiles, and the malformed ones among them."""
    loader = _Loader(connection)
    loader.load(import_plan.ProfileRow)
    return loader.rows.get(import_plan.ProfileRow, []), loader.drops


def read_host(connection: sa.Connection, ids: Collection[int]) -> import_plan.HostRows:
    """Return the rows of devices, in a number of statements that does not depend on theirs."""
    loader = _Loader(connection)
    loader.load(import_plan.DeviceRow, devices.c.id, ids)
    loader.load(import_plan.ControlPathRow, control_paths.c.device_id, ids)
    loader.load_parts(loader.load(import_plan.DeployableRow, deployables.c.device_id, ids))
    return loader.to_host_rows()


def read_orphans(connection: sa.Connection) -> import_plan.HostRows:
    """Return the rows whose device, deployable or attach handle does not exist, with their parts.

    A request without an attach handle is one of them.
    """
    loader = _Loader(connection)
    loader.load(import_plan.ControlPathRow, where=_lacks(control_paths.c.device_id, devices))
    loader.load(import_plan.AttributeRow, where=_lacks(attributes.c.deployable_id, deployables))
    orphans = loader.load(import_plan.HandleRow, where=_lacks(handles.c.deployable_id, deployables))
    loader.load(import_plan.ArqRow, arqs.c.attach_handle_id, orphans)
    loader.load_parts(
        loader.load(import_plan.DeployableRow, where=_lacks(deployables.c.device_id, devices))
    )
    loader.load(import_plan.ArqRow, where=_lacks(arqs.c.attach_handle_id, handles))
    return loader.to_host_rows()


def _lacks(key: sa.Column[Any], parent: sa.Table) -> sa.ColumnElement[bool]:
    """Return the condition that no row of a table has the id in column ``key``."""
    return ~sa.exists().where(parent.c.id == key)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads rows, and collects them by table."""

    connection: sa.Connection
    rows: dict[type[import_plan.Row], list[Any]] = field(default_factory=dict)
    drops: list[import_plan.Drop] = field(default_factory=list)

    def load(
        self,
        kind: type[import_plan.Row],
        key: sa.Column[Any] | None = None,
        ids: Collection[int] = (),
        *,
        where: sa.ColumnElement[bool] | None = None,
    ) -> list[int]:
        """Load rows with ``key`` in ``ids``, or all that meet ``where``; return their row ids."""
        table = TABLES[kind]
        query = sa.select(*self._columns(table)).order_by(table.c.id)
        if key is not None:
            queries = [query.where(key.in_(chunk)) for chunk in bulk.chunks(ids)]
        else:
            queries = [query if where is None else query.where(where)]
        row_ids = []
        for part in queries:
            for values in self.connection.execute(part):
                row_ids.append(values.id)
                row = import_plan.load_row(kind, values)
                if isinstance(row, import_plan.Drop):
                    self.drops.append(row)
                else:
                    self.rows.setdefault(kind, []).append(row)
        return row_ids

    def load_parts(self, ids: Collection[int]) -> None:
        """Load attributes, handles and ARQs of the deployables with these row ids."""
        self.load(import_plan.AttributeRow, attributes.c.deployable_id, ids)
        own = self.load(import_plan.HandleRow, handles.c.deployable_id, ids)
        self.load(import_plan.ArqRow, arqs.c.attach_handle_id, own)

    def _columns(self, table: sa.Table) -> list[sa.ColumnElement[Any]]:
        if table is devices and not self._has_state():
            # An older release of the source has no such column.
            return [c for c in table.c if c.name != "device_state"] + [sa.null()]
        return list(table.c)

    def _has_state(self) -> bool:
        names = {column["name"] for column in sa.inspect(self.connection).get_columns(devices.name)}
        return "device_state" in names

    def to_host_rows(self) -> import_plan.HostRows:
        """Return what was loaded."""
        # TABLES has the order of the fields, after the profiles, which belong to no host.
        kinds = [kind for kind in TABLES if kind is not import_plan.ProfileRow]
        loaded: list[list[Any]] = [*(self.rows.get(kind, []) for kind in kinds), self.drops]
        return import_plan.HostRows(*map(tuple, loaded))

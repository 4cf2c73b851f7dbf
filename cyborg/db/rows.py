# SPDX-License-Identifier: Apache-2.0
"""Typed rows: dictionaries with the keys of a TypedDict, so that mypy finds a wrong column name."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypedDict, TypeVar

import sqlalchemy as sa

R = TypeVar("R")


class StoredRow(TypedDict):
    """The columns that every table has."""

    id: int
    created_at: datetime
    updated_at: datetime | None


class DeviceColumns(TypedDict):
    """The columns of a device, except ``host`` and the columns of ``StoredRow``.

    ``status``: set by the operator (enabled or maintaining). ``cordoned``: its backend is disabled
    or being uninstalled. ``failing``: closed for a time, because its last prepare jobs failed.
    ``layout``: the name of the current layout. ``layouts``: ``core.inventory.device.Layout``.
    ``desired_layout``: the last layout that an operator chose. ``boot_check``:
    ``core.inventory.device_state``.
    """

    uuid: str
    address: str
    backend: str
    type: str
    vendor: str
    model: str
    std_board_info: dict[str, Any]
    vendor_board_info: dict[str, Any]
    numa_node: int | None
    serial: str | None
    health: str
    health_reason: str | None
    health_since: datetime
    setup_required: bool
    reboot_required: bool
    status: str
    cordoned: bool
    cordoned_since: datetime | None
    draining: bool
    abilities: list[str]
    deliverable: bool
    undeliverable_reason: str | None
    topology: dict[str, str]
    layout: str | None
    layouts: list[dict[str, Any]]
    desired_layout: str | None
    boot_check: str | None
    job_failures: list[dict[str, Any]] | None
    failed_prepares: int
    failing: bool
    retry_at: datetime | None


class DeviceRow(StoredRow, DeviceColumns):
    """All columns of a device."""

    host: str


def row_columns(
    kind: Any, *tables: sa.FromClause, **others: sa.ColumnElement[Any]
) -> list[sa.ColumnElement[Any]]:
    """Return the columns of a query for rows of ``kind``, a TypedDict, in the order of its keys.

    A key is a column of the first of the tables that has it, or what ``others`` has for the key.
    """
    # From the keys, so that no list of columns can differ from the type of its rows.
    columns = {column.name: column for table in reversed(tables) for column in table.c}
    for name, other in others.items():
        is_named_by_key = isinstance(other, sa.Column) and other.name == name
        columns[name] = other if is_named_by_key else other.label(name)
    return [columns[name] for name in kind.__annotations__]


def equal(values: Mapping[Any, Any]) -> list[sa.ColumnElement[bool]]:
    """Return the conditions that columns have these values; None selects all."""
    return [column == value for column, value in values.items() if value is not None]


def fetch_all(kind: Callable[..., R], result: sa.CursorResult[Any]) -> list[R]:
    """Return the rows of a query whose columns are the keys of ``kind``, a TypedDict."""
    names = tuple(result.keys())
    return [kind(zip(names, row, strict=True)) for row in result]


def fetch_first(kind: Callable[..., R], result: sa.CursorResult[Any]) -> R | None:
    """Return the first row of a query as ``fetch_all`` does, or None."""
    row = result.mappings().first()
    return None if row is None else kind(**row)

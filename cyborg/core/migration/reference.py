# SPDX-License-Identifier: Apache-2.0
"""Rows of a database of OpenStack Cyborg, releases 12 to 17, as far as an import reads them.

The columns and their meaning are those of the tables that these releases create: the migrations up
to the revisions of ``RELEASES``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar, get_type_hints

from cyborg.core.text import abbreviate, sanitize

RELEASES: Mapping[str, str] = {
    "6c77bd6afea5": "12.0 to 16.0",
    "9625668549b5": "a development version of 17.0",
    "a35b4295a0e5": "a development version of 17.0",
    "b47c8f2d1e3a": "17.0",
}
"""The releases whose schema has a revision of Alembic."""

BOUND = "Bound"
"""The state of an accelerator request that owns a handle."""

MAINTAINING = "maintaining"
STATUSES = frozenset({"enabled", MAINTAINING})
"""Values of ``status`` of a device."""

CLEAN_STATES = frozenset({None, "available", "allocated"})
"""Values of ``device_state`` of a device that has no data of a former owner."""

PROFILE, DEVICE, CONTROL_PATH = "device profile", "device", "control path"
DEPLOYABLE, ATTRIBUTE = "deployable", "attribute"
HANDLE, ARQ = "attach handle", "accelerator request"
KINDS = (PROFILE, DEVICE, CONTROL_PATH, DEPLOYABLE, ATTRIBUTE, HANDLE, ARQ)
"""A kind for each table that an import reads."""


@dataclass(frozen=True, slots=True)
class Drop:
    """A row that is not taken: its kind, its uuid or name, and the reason."""

    kind: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table; ``id`` is the primary key."""

    KIND: ClassVar[str]
    id: int
    uuid: str


@dataclass(frozen=True, slots=True)
class DeviceRow(Row):
    """A row of ``devices``; ``state`` is None before release 17."""

    KIND: ClassVar[str] = DEVICE
    type: str
    vendor: str
    model: str
    std_board_info: str | None
    vendor_board_info: str | None
    host: str
    status: str
    state: str | None


@dataclass(frozen=True, slots=True)
class ControlPathRow(Row):
    """A row of ``controlpath_ids``; ``info`` is a JSON object with the device's PCI address."""

    KIND: ClassVar[str] = CONTROL_PATH
    device_id: int
    info: str


@dataclass(frozen=True, slots=True)
class DeployableRow(Row):
    """A row of ``deployables``; ``provider`` is the uuid of its resource provider."""

    KIND: ClassVar[str] = DEPLOYABLE
    device_id: int
    parent_id: int | None
    name: str
    provider: str | None
    bitstream_id: str | None


@dataclass(frozen=True, slots=True)
class AttributeRow(Row):
    """A row of ``attributes``. The drivers write the keys ``rc`` and ``trait...``."""

    KIND: ClassVar[str] = ATTRIBUTE
    deployable_id: int
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class HandleRow(Row):
    """A row of ``attach_handles``; ``info`` is a JSON object with the PCI address."""

    KIND: ClassVar[str] = HANDLE
    deployable_id: int
    type: str
    info: str


@dataclass(frozen=True, slots=True)
class ArqRow(Row):
    """A row of ``extended_accelerator_requests``."""

    KIND: ClassVar[str] = ARQ
    project: str | None
    state: str
    profile_id: int
    group_id: int
    host: str | None
    instance: str | None
    handle_id: int | None


@dataclass(frozen=True, slots=True)
class ProfileRow(Row):
    """A row of ``device_profiles``; ``text`` is a JSON object with the key ``groups``."""

    KIND: ClassVar[str] = PROFILE
    name: str
    description: str | None
    text: str


@dataclass(frozen=True, slots=True)
class HostRows:
    """The rows of one host, or all rows without a host; the ARQs are those of its handles.

    ``drops`` are the malformed ones among the rows.
    """

    devices: tuple[DeviceRow, ...] = ()
    control_paths: tuple[ControlPathRow, ...] = ()
    deployables: tuple[DeployableRow, ...] = ()
    attributes: tuple[AttributeRow, ...] = ()
    handles: tuple[HandleRow, ...] = ()
    arqs: tuple[ArqRow, ...] = ()
    drops: tuple[Drop, ...] = ()


R = TypeVar("R", bound=Row)


def load_row(kind: type[R], values: Sequence[Any]) -> R | Drop:
    """Return a row as a value, or why it is dropped: a column is NULL or has a wrong type.

    The values have the order of the fields.
    """
    for name, expected, value in zip(*_FIELDS[kind], values, strict=True):
        if not isinstance(value, expected):
            found = "NULL" if value is None else repr(abbreviate(value))
            text = "a number" if expected is int else "a text"
            return Drop(
                kind.KIND, _name_row(kind, values), f"its {name} is {found}, expected {text}"
            )
    return kind(*values)


def drop_row(row: Row, reason: str) -> Drop:
    """Return why a row is dropped, with its name."""
    name = row.name if isinstance(row, ProfileRow) else row.uuid
    return Drop(row.KIND, _name_row(type(row), (row.id, row.uuid, name)), reason)


def _name_row(kind: type[Row], values: Sequence[Any]) -> str:
    """Return the name of a profile, the uuid of another row, or the number of the row."""
    name = values[2] if kind is ProfileRow else values[1]
    plain = sanitize(name, 80) if isinstance(name, str) else ""
    return plain or f"of row {abbreviate(values[0])}"


_FIELDS: Mapping[type[Row], tuple[list[str], list[Any]]] = {
    kind: (
        [field.name for field in fields(kind)],
        [get_type_hints(kind)[field.name] for field in fields(kind)],
    )
    for kind in (
        *(ProfileRow, DeviceRow, ControlPathRow, DeployableRow, AttributeRow, HandleRow, ArqRow),
    )
}
"""Names and types of the fields of each row."""

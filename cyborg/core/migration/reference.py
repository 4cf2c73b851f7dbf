# SPDX-License-Identifier: Apache-2.0
"""Rows of a database of OpenStack Cyborg, releases 12 to 17, as far as an import reads them.

The columns and their meaning are those of the tables that these releases create: the migrations up
to the revisions of ``RELEASES``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

RELEASES: Mapping[str, str] = {
    "6c77bd6afea5": "12.0 to 16.0",
    "9625668549b5": "a development version of 17.0",
    "a35b4295a0e5": "a development version of 17.0",
    "b47c8f2d1e3a": "17.0",
}
"""The releases whose schema has a revision of Alembic."""

BOUND = "Bound"
"""The state of an accelerator request that owns a handle."""

DIRTY_STATES = frozenset({"pending_cleaning", "cleaning", "error"})
"""Values of ``device_state`` of a device that may have data of a former owner."""


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A row of ``devices`` with the ``cpid_info`` of its first row in ``controlpath_ids``.

    ``state`` is None before release 17; ``control_path`` is None without such a row.
    """

    id: int
    uuid: str
    type: str
    vendor: str
    model: str
    std_board_info: str | None
    vendor_board_info: str | None
    host: str
    status: str
    state: str | None
    control_path: str | None


@dataclass(frozen=True, slots=True)
class DeployableRow:
    """A row of ``deployables``; ``provider`` is the uuid of its resource provider."""

    id: int
    uuid: str
    device_id: int
    parent_id: int | None
    name: str
    provider: str | None
    driver: str | None
    bitstream_id: str | None


@dataclass(frozen=True, slots=True)
class AttributeRow:
    """A row of ``attributes``. The drivers write the keys ``rc`` and ``trait...``."""

    uuid: str
    deployable_id: int
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class HandleRow:
    """A row of ``attach_handles``; ``info`` is a JSON object with the PCI address."""

    id: int
    uuid: str
    deployable_id: int
    type: str
    info: str
    in_use: bool


@dataclass(frozen=True, slots=True)
class ArqRow:
    """A row of ``extended_accelerator_requests``."""

    id: int
    uuid: str
    project: str | None
    state: str
    profile_id: int
    group_id: int
    host: str | None
    instance: str | None
    handle_id: int | None


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """A row of ``device_profiles``; ``text`` is a JSON object with the key ``groups``."""

    id: int
    uuid: str
    name: str
    description: str | None
    text: str


@dataclass(frozen=True, slots=True)
class HostRows:
    """The rows of one host; the ARQs are those that own a handle of the host."""

    devices: tuple[DeviceRow, ...] = ()
    deployables: tuple[DeployableRow, ...] = ()
    attributes: tuple[AttributeRow, ...] = ()
    handles: tuple[HandleRow, ...] = ()
    arqs: tuple[ArqRow, ...] = ()

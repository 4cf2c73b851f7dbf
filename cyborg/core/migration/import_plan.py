# SPDX-License-Identifier: Apache-2.0
"""What an import reads of a database of OpenStack Cyborg, releases 12 to 17, and takes from it.

The columns and their meaning are those of the tables that these releases create: the migrations up
to the revisions of ``RELEASES``. ``host_plan`` decides which rows of a host are taken.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar, get_type_hints

from cyborg.core import naming, validation
from cyborg.core.address import PciAddress
from cyborg.core.binding.profile import Group, parse_groups, parse_name
from cyborg.core.errors import Invalid
from cyborg.core.inventory.device import AttachHandle, Device, DeviceType, HandleType
from cyborg.core.inventory.plan import Attribute
from cyborg.core.inventory.reference_names import UNPUBLISHED, describe_remedy
from cyborg.core.text import abbreviate, sanitize

# The releases whose schema has a revision of Alembic.
RELEASES: Mapping[str, str] = {
    "6c77bd6afea5": "12.0 to 16.0",
    "9625668549b5": "a development version of 17.0",
    "a35b4295a0e5": "a development version of 17.0",
    "b47c8f2d1e3a": "17.0",
}

# The state of an accelerator request that owns a handle.
BOUND = "Bound"

MAINTAINING = "maintaining"
# Values of ``status`` of a device.
STATUSES = frozenset({"enabled", MAINTAINING})

# Values of ``device_state`` of a device that has no data of a former owner. None: before release 17
# the table has no such column.
CLEAN_STATES = frozenset({None, "available", "allocated"})

PROFILE, DEVICE, CONTROL_PATH = "device profile", "device", "control path"
DEPLOYABLE, ATTRIBUTE = "deployable", "attribute"
HANDLE, ARQ = "attach handle", "accelerator request"
# A kind for each table that an import reads.
KINDS = (PROFILE, DEVICE, CONTROL_PATH, DEPLOYABLE, ATTRIBUTE, HANDLE, ARQ)


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
    names, types = _FIELDS[kind]
    for name, expected, value in zip(names, types, values, strict=True):
        if not isinstance(value, expected):
            found = "NULL" if value is None else repr(abbreviate(value))
            text = "a text" if expected in (str, str | None) else "a number"
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
    # A malformed row may have neither.
    name = values[2] if kind is ProfileRow else values[1]
    plain = sanitize(name, 80) if isinstance(name, str) else ""
    return plain or f"of row {abbreviate(values[0])}"


# Names and types of the fields of each row. Once, because get_type_hints evaluates the annotations
# of a class at each call, and an import loads a row for each object of a cloud.
_FIELDS: Mapping[type[Row], tuple[list[str], list[Any]]] = {
    kind: (
        [field.name for field in fields(kind)],
        [get_type_hints(kind)[field.name] for field in fields(kind)],
    )
    for kind in (
        *(ProfileRow, DeviceRow, ControlPathRow, DeployableRow, AttributeRow, HandleRow, ArqRow),
    )
}


def find_unserved_names(
    groups: Iterable[Group],
    offered: Collection[str],
    reported: Collection[str],
    release: int | None,
) -> dict[str, str]:
    """Return the names in the groups of a profile that no device has, with what to do.

    ``reported`` are the traits and resource classes of the devices. ``offered`` are those of
    imported devices, which agents have not reported yet: of these, the names of OpenStack Cyborg
    stay with ``release`` only.
    """
    remedies: dict[str, str] = {}
    for group in groups:
        for name in sorted({*group.resources, *group.required} - {naming.OWNER_TRAIT}):
            remedy = describe_remedy(name)
            # A name with a remedy is one of OpenStack Cyborg: the first report of an agent replaces
            # it, unless [conductor] reference_traits keeps it.
            stays = remedy is None or (release is not None and name not in UNPUBLISHED)
            if name not in reported and not (name in offered and stays):
                remedies[name] = remedy or "compare with 'cyborg deployable-list --long'"
    return remedies


# The backend of an imported device until its host reports it.
BACKEND = "imported"

_TYPES = {"NVME": DeviceType.SSD, "MDEV": DeviceType.OTHER, "PCI": DeviceType.OTHER}


@dataclass(frozen=True, slots=True)
class ImportedProfile:
    """A device profile to insert; ``id`` is that of the source."""

    id: int
    uuid: str
    name: str
    description: str | None
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class ImportedDeployable:
    """The identity of a deployable: its uuids, and the attributes of operators."""

    uuid: str
    provider: str
    attributes: tuple[Attribute, ...]


@dataclass(frozen=True, slots=True)
class ImportedDevice:
    """A device to insert, with its deployables and handles in ``value``.

    ``deployables`` maps their addresses to their identities, ``handles`` the addresses of
    deployable and handle to the uuid of the handle. ``dirty`` is whether its free handles must be
    cleaned before they are assigned. ``rows`` is the number of rows of each kind that it is made
    from.
    """

    uuid: str
    status: str
    dirty: bool
    value: Device
    deployables: Mapping[str, ImportedDeployable]
    handles: Mapping[tuple[str, str], str]
    rows: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ImportedArq:
    """A bound ARQ to insert; ``handle`` and ``provider`` are uuids, ``profile_id`` the source's."""

    uuid: str
    project: str | None
    profile_id: int
    profile: str
    group_id: int
    group: Group
    resource_class: str
    provider: str
    instance: str
    handle: str


@dataclass(frozen=True, slots=True)
class UnknownUse:
    """A dropped bound request whose device is not taken: a server may still have the device.

    The agent reports such a device as a new one, with free handles. ``address`` is that of the
    device or, failing this, of the handle; None means that the source has no valid value.
    """

    arq: str
    host: str | None
    address: str | None
    instance: str | None


@dataclass(frozen=True, slots=True)
class HostImport:
    """What is taken from one host, and what is not."""

    host: str
    devices: tuple[ImportedDevice, ...]
    arqs: tuple[ImportedArq, ...]
    drops: tuple[Drop, ...]
    unknown_uses: tuple[UnknownUse, ...] = ()

    def count_taken(self) -> Counter[str]:
        """Return the number of rows that are taken, by kind."""
        counts = Counter({ARQ: len(self.arqs)})
        for device in self.devices:
            counts.update(device.rows)
        return counts

    def find_names(self) -> set[str]:
        """Return the traits and resource classes of the devices."""
        values = [value for device in self.devices for value in device.value.deployables]
        return {value.resource_class for value in values}.union(*(v.traits for v in values))


def plan_profiles(
    rows: Sequence[ProfileRow],
) -> tuple[dict[int, ImportedProfile], tuple[Drop, ...]]:
    """Return the device profiles to insert by their ids in the source, and the dropped ones."""
    taken: dict[int, ImportedProfile] = {}
    drops: list[Drop] = []
    owners: dict[str, ImportedProfile] = {}  # of names and uuids
    for row in rows:
        try:
            body = _load_object(row.text, "profile_json")
            profile = ImportedProfile(
                row.id,
                validation.parse_uuid(row.uuid, "uuid"),
                parse_name(row.name),
                None if row.description is None else sanitize(row.description),
                parse_groups(body.get("groups")),
            )
            # Names and uuids together: a profile is found by either in one path of the API.
            for field, text in (("name", profile.name), ("uuid", profile.uuid)):
                if (other := owners.get(text)) is not None:
                    raise Invalid(f"its {field} is that of device profile {other.uuid} as well")
        except Invalid as exc:
            drops.append(drop_row(row, exc.message))
        else:
            taken[row.id] = owners[profile.name] = owners[profile.uuid] = profile
    return taken, tuple(drops)


def parse_pci_info(text: str) -> PciAddress:
    """Return the address in a JSON object of ``domain``, ``bus``, ``device`` and ``function``.

    Raise Invalid for other texts.
    """
    info = _load_object(text, "the PCI address")
    try:
        parts = [info[key] for key in ("domain", "bus", "device", "function")]
        # Only of letters and digits: int() accepts signs, spaces and underscores, too. With one
        # number less PciAddress raises TypeError.
        numbers = [int(part, 16) for part in map(str, parts) if part.isalnum()]
        return PciAddress(*numbers)
    except (KeyError, ValueError, TypeError, RecursionError) as exc:
        raise Invalid(f"{abbreviate(text)!r} is no PCI address in JSON") from exc


def parse_handle(row: HandleRow) -> AttachHandle:
    """Return an attach handle; raise Invalid for a mediated device and for invalid values."""
    if row.type == HandleType.MDEV:
        raise Invalid(
            "a handle of type MDEV is not taken: this service derives the uuid of a mediated "
            "device from its address. Its server keeps the device until it is deleted"
        )
    if row.type not in (HandleType.PCI, HandleType.TEST_PCI):
        raise Invalid(f"its type {abbreviate(row.type)!r} is unknown")
    address = parse_pci_info(row.info)
    return AttachHandle(str(address), HandleType(row.type), address.attach_info())


def parse_device_type(name: str) -> DeviceType:
    """Return the type of a device; raise Invalid for an unknown one."""
    try:
        return _TYPES.get(name) or DeviceType(name)
    except ValueError as exc:
        raise Invalid(f"its type {abbreviate(name)!r} is unknown") from exc


def load_texts(text: str | None) -> dict[str, str]:
    """Return a JSON object of board information as texts; another text has the key ``info``."""
    if not text:
        return {}
    try:
        return {str(key): str(value) for key, value in _load_object(text, "").items()}
    except (Invalid, ValueError, RecursionError):
        # The information is only shown, so that a text of another form is no reason to drop the
        # device.
        return {"info": text}


def _load_object(text: str | None, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError) as exc:
        raise Invalid(f"{name} is no JSON") from exc
    if not isinstance(value, dict):
        raise Invalid(f"{name} is no JSON object")
    return value

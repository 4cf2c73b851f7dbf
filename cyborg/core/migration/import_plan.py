# SPDX-License-Identifier: Apache-2.0
"""What an import takes from the rows of OpenStack Cyborg, and what it drops and why.

A device is identified by its host and PCI address, a deployable by the part of its name after the
host, a handle by its PCI address: the same values that an agent of this service reports, so that
its first report adopts what was imported. The uuids of all objects and of the resource providers
stay the same.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from cyborg.core import naming
from cyborg.core.address import PciAddress
from cyborg.core.arq.profile import Group, parse_groups, parse_name
from cyborg.core.errors import Invalid
from cyborg.core.inventory.device import (
    MAX_TEXT,
    AttachHandle,
    Deployable,
    Device,
    DeviceType,
    HandleType,
)
from cyborg.core.inventory.tombstone import Attribute
from cyborg.core.migration import reference
from cyborg.core.migration.reference import (
    ArqRow,
    AttributeRow,
    DeployableRow,
    DeviceRow,
    HandleRow,
    HostRows,
    ProfileRow,
)

DEVICE, DEPLOYABLE, ATTRIBUTE = "device", "deployable", "attribute"
HANDLE, PROFILE, ARQ = "attach handle", "device profile", "accelerator request"
KINDS = (PROFILE, DEVICE, DEPLOYABLE, ATTRIBUTE, HANDLE, ARQ)

BACKEND = "imported"
"""The backend of an imported device until its host reports it."""

_TYPES = {"NVME": DeviceType.SSD, "MDEV": DeviceType.OTHER, "PCI": DeviceType.OTHER}
_CLASS_KEY, _TRAIT_KEY = "rc", "trait"


@dataclass(frozen=True, slots=True)
class Drop:
    """An object that is not taken: its kind, its uuid or name, and the reason."""

    kind: str
    name: str
    reason: str


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
    cleaned before they are assigned.
    """

    uuid: str
    status: str
    dirty: bool
    value: Device
    deployables: Mapping[str, ImportedDeployable]
    handles: Mapping[tuple[str, str], str]


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
class HostImport:
    """What is taken from one host, and what is not."""

    host: str
    devices: tuple[ImportedDevice, ...]
    arqs: tuple[ImportedArq, ...]
    drops: tuple[Drop, ...]


def plan_profiles(
    rows: Sequence[ProfileRow],
) -> tuple[dict[int, ImportedProfile], tuple[Drop, ...]]:
    """Return the device profiles to insert by their ids in the source, and the dropped ones."""
    taken: dict[int, ImportedProfile] = {}
    drops: list[Drop] = []
    for row in rows:
        try:
            body = _load_object(row.text, "profile_json")
            profile = ImportedProfile(
                row.id,
                _parse_uuid(row.uuid),
                parse_name(row.name),
                row.description,
                parse_groups(body.get("groups")),
            )
        except Invalid as exc:
            drops.append(Drop(PROFILE, row.name, exc.message))
        else:
            taken[row.id] = profile
    return taken, tuple(drops)


def plan_host(host: str, rows: HostRows, profiles: Mapping[int, ImportedProfile]) -> HostImport:
    """Return what is taken from the rows of one host."""
    return _HostPlanner(host, rows, profiles).plan()


@dataclass(slots=True)
class _HostPlanner:
    """The state of a plan: what has been taken so far, by the ids of the source."""

    host: str
    rows: HostRows
    profiles: Mapping[int, ImportedProfile]
    drops: dict[tuple[str, str], Drop] = field(default_factory=dict)
    # Of each taken handle: its uuid and its deployable.
    handles: dict[int, tuple[str, DeployableRow]] = field(default_factory=dict)
    classes: dict[int, str] = field(default_factory=dict)  # of deployables
    deployables_of: dict[int, list[DeployableRow]] = field(default_factory=dict)
    attributes_of: dict[int, list[AttributeRow]] = field(default_factory=dict)
    handles_of: dict[int, list[HandleRow]] = field(default_factory=dict)

    def plan(self) -> HostImport:
        """Return the plan."""
        for deployable in self.rows.deployables:
            self.deployables_of.setdefault(deployable.device_id, []).append(deployable)
        for attribute in self.rows.attributes:
            self.attributes_of.setdefault(attribute.deployable_id, []).append(attribute)
        for handle in self.rows.handles:
            self.handles_of.setdefault(handle.deployable_id, []).append(handle)
        devices: list[ImportedDevice] = []
        addresses: set[str] = set()
        for row in self.rows.devices:
            try:
                device = self._device(row)
                if device.value.address in addresses:
                    raise Invalid(f"another device of the host has {device.value.address}")
            except Invalid as exc:
                self._drop_device(row, exc.message)
            else:
                addresses.add(device.value.address)
                devices.append(device)
        arqs = [arq for row in self.rows.arqs if (arq := self._arq(row)) is not None]
        return HostImport(self.host, tuple(devices), tuple(arqs), tuple(self.drops.values()))

    def _device(self, row: DeviceRow) -> ImportedDevice:
        if row.control_path is None:
            raise Invalid("it has no row in controlpath_ids, so its PCI address is unknown")
        address = str(parse_pci_info(row.control_path))
        identities: dict[str, ImportedDeployable] = {}
        handle_uuids: dict[tuple[str, str], str] = {}
        values: list[Deployable] = []
        own = self.deployables_of.get(row.id, [])
        names = {d.id: d.name for d in own}
        for deployable in own:
            try:
                value, attributes = self._deployable(
                    deployable, names.get(deployable.parent_id or 0)
                )
                if value.address in identities:
                    raise Invalid(f"another deployable has the name {deployable.name}")
                uuid, provider = _parse_uuid(deployable.uuid), _parse_uuid(deployable.provider)
            except Invalid as exc:
                self._drop_deployable(deployable, exc.message)
                continue
            handles = self._handles(deployable, value.address, handle_uuids)
            identities[value.address] = ImportedDeployable(uuid, provider, attributes)
            self.classes[deployable.id] = value.resource_class
            values.append(
                Deployable(
                    value.address,
                    value.resource_class,
                    value.traits,
                    handles,
                    {},
                    value.parent,
                    value.bitstream_id,
                )
            )
        taken = {value.address for value in values}
        device = Device(
            address=address,
            type=_device_type(row.type),
            vendor=row.vendor,
            model=row.model,
            backend=BACKEND,
            std_board_info=_load_texts(row.std_board_info),
            vendor_board_info=_load_texts(row.vendor_board_info),
            deployables=tuple(
                value if value.parent in taken else _without_parent(value) for value in values
            ),
        )
        return ImportedDevice(
            _parse_uuid(row.uuid),
            row.status,
            row.state in reference.DIRTY_STATES,
            device,
            identities,
            handle_uuids,
        )

    def _deployable(
        self, row: DeployableRow, parent: str | None
    ) -> tuple[Deployable, tuple[Attribute, ...]]:
        """Return a deployable without handles, and the attributes of operators."""
        if row.provider is None:
            raise Invalid("it has no resource provider in Placement")
        own = self.attributes_of.get(row.id, [])
        classes = [a.value for a in own if a.key == _CLASS_KEY]
        if not classes or not naming.is_accelerator_class(classes[0]):
            raise Invalid(f"its attribute {_CLASS_KEY} is no resource class of accelerators")
        traits = [a for a in own if a.key.startswith(_TRAIT_KEY)]
        value = Deployable(
            self._address(row.name),
            classes[0],
            frozenset(
                a.value for a in traits if self._is_usable(a) and a.value != naming.OWNER_TRAIT
            ),
            parent=None if parent is None else self._address(parent),
            bitstream_id=row.bitstream_id,
        )
        others = [a for a in own if a.key != _CLASS_KEY and a not in traits and self._fits(a)]
        return value, tuple(Attribute(_parse_uuid(a.uuid), a.key, a.value) for a in others)

    def _is_usable(self, row: AttributeRow) -> bool:
        """Return whether the value of a row is a trait; drop the row otherwise."""
        if naming.is_trait(row.value):
            return True
        self._drop(ATTRIBUTE, row.uuid, f"{row.value!r} is no trait of Placement")
        return False

    def _fits(self, row: AttributeRow) -> bool:
        """Return whether key and value of a row fit in our columns; drop the row otherwise."""
        if max(len(row.key), len(row.value)) <= MAX_TEXT:
            return True
        self._drop(ATTRIBUTE, row.uuid, f"its key or value is longer than {MAX_TEXT} characters")
        return False

    def _address(self, name: str) -> str:
        prefix = naming.provider_name(self.host, "")
        if not name.startswith(prefix) or name == prefix:
            raise Invalid(
                f"its name {name!r} does not begin with {prefix!r}: the agent reports it under "
                "another name"
            )
        return name.removeprefix(prefix)

    def _handles(
        self, deployable: DeployableRow, address: str, uuids: dict[tuple[str, str], str]
    ) -> tuple[AttachHandle, ...]:
        handles: list[AttachHandle] = []
        for row in self.handles_of.get(deployable.id, []):
            try:
                uuid, handle = _parse_uuid(row.uuid), parse_handle(row)
                if (address, handle.address) in uuids:
                    raise Invalid(f"another handle has the address {handle.address}")
            except Invalid as exc:
                self._drop(HANDLE, row.uuid, exc.message)
                continue
            uuids[address, handle.address] = uuid
            self.handles[row.id] = uuid, deployable
            handles.append(handle)
        return tuple(handles)

    def _arq(self, row: ArqRow) -> ImportedArq | None:
        try:
            if row.state != reference.BOUND or row.instance is None:
                raise Invalid(f"its state is {row.state}: Nova creates another one or deletes it")
            if row.handle_id not in self.handles:
                raise Invalid("its attach handle was not taken")
            profile = self.profiles.get(row.profile_id)
            if profile is None or not 0 <= row.group_id < len(profile.groups):
                raise Invalid("its device profile was not taken")
            handle, deployable = self.handles[row.handle_id]
            return ImportedArq(
                _parse_uuid(row.uuid),
                row.project,
                profile.id,
                profile.name,
                row.group_id,
                profile.groups[row.group_id],
                self.classes[deployable.id],
                str(deployable.provider),
                _parse_uuid(row.instance),
                handle,
            )
        except Invalid as exc:
            self._drop(ARQ, row.uuid, exc.message)
            return None

    def _drop(self, kind: str, name: str, reason: str) -> None:
        """Record the first reason for which an object is dropped."""
        self.drops.setdefault((kind, name), Drop(kind, name, reason))

    def _drop_device(self, row: DeviceRow, reason: str) -> None:
        self._drop(DEVICE, row.uuid, reason)
        for deployable in self.deployables_of.get(row.id, []):
            self.classes.pop(deployable.id, None)
            self._drop_deployable(deployable, f"its device {row.uuid} was not taken")

    def _drop_deployable(self, row: DeployableRow, reason: str) -> None:
        self._drop(DEPLOYABLE, row.uuid, reason)
        for handle in self.handles_of.get(row.id, []):
            self.handles.pop(handle.id, None)
            self._drop(HANDLE, handle.uuid, f"its deployable {row.uuid} was not taken")


def parse_pci_info(text: str) -> PciAddress:
    """Return the address in a JSON object of ``domain``, ``bus``, ``device`` and ``function``.

    Raise Invalid for other texts.
    """
    info = _load_object(text, "the PCI address")
    try:
        numbers = [int(str(info[key]), 16) for key in ("domain", "bus", "device", "function")]
    except (KeyError, ValueError) as exc:
        raise Invalid(f"{text!r} is no PCI address in JSON") from exc
    return PciAddress(*numbers)


def parse_handle(row: HandleRow) -> AttachHandle:
    """Return an attach handle; raise Invalid for a mediated device and for invalid values."""
    if row.type not in (HandleType.PCI, HandleType.TEST_PCI):
        raise Invalid(
            f"a handle of type {row.type} is not taken: this service derives the uuid of a "
            "mediated device from its address. Its server keeps the device until it is deleted"
        )
    address = parse_pci_info(row.info)
    return AttachHandle(str(address), HandleType(row.type), address.attach_info())


def _device_type(name: str) -> DeviceType:
    try:
        return _TYPES.get(name) or DeviceType(name)
    except ValueError as exc:
        raise Invalid(f"its type {name!r} is unknown") from exc


def _without_parent(value: Deployable) -> Deployable:
    return Deployable(
        value.address,
        value.resource_class,
        value.traits,
        value.handles,
        value.attributes,
        None,
        value.bitstream_id,
    )


def _load_object(text: str | None, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "")
    except ValueError as exc:
        raise Invalid(f"{name} is no JSON") from exc
    if not isinstance(value, dict):
        raise Invalid(f"{name} is no JSON object")
    return value


def _load_texts(text: str | None) -> dict[str, str]:
    """Return a JSON object of board information as texts; another text has the key ``info``."""
    if not text:
        return {}
    try:
        return {str(key): str(value) for key, value in _load_object(text, "").items()}
    except Invalid:
        return {"info": text}


def _parse_uuid(text: str | None) -> str:
    try:
        return str(UUID(text or ""))
    except ValueError as exc:
        raise Invalid(f"{text!r} is not a uuid") from exc

# SPDX-License-Identifier: Apache-2.0
"""Which rows of a host an import takes, and why it drops the others.

A device is identified by its host and PCI address, a deployable by the part of its name after the
host, a handle by its PCI address: the same values that an agent of this service reports, so that
its first report adopts what was imported. The uuids of all objects and of the resource providers
stay the same.

Each row is taken or dropped, and no two taken rows have an identity that the schema of this service
allows once. Of two such rows the one that a server uses is taken, otherwise the first. If a bound
request is dropped, its device is closed: a server may still have the handle. If the device is
dropped too, nothing can close it: the plan names the server.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from cyborg.core import naming
from cyborg.core.errors import Invalid
from cyborg.core.inventory.device import AttachHandle, Deployable, Device
from cyborg.core.inventory.plan import Attribute
from cyborg.core.inventory.report import MAX_PROVIDER_NAME
from cyborg.core.migration import import_plan
from cyborg.core.migration.import_plan import (
    BACKEND,
    ArqRow,
    AttributeRow,
    ControlPathRow,
    DeployableRow,
    DeviceRow,
    Drop,
    HandleRow,
    HostImport,
    HostRows,
    ImportedArq,
    ImportedDeployable,
    ImportedDevice,
    ImportedProfile,
    Row,
    UnknownUse,
    load_texts,
    parse_device_type,
    parse_handle,
    parse_pci_info,
)
from cyborg.core.text import abbreviate
from cyborg.core.validation import check_text, parse_uuid

_CLASS_KEY, _TRAIT_KEY = "rc", "trait"

R = TypeVar("R", bound=Row)
T = TypeVar("T")


class Identity(NamedTuple):
    """A value that only one row may have: what it is, and where it is unique if not everywhere."""

    name: str
    value: str
    scope: str = ""


class TakenHandle(NamedTuple):
    """The uuid of a handle, with the resource class and the provider of its deployable."""

    uuid: str
    resource_class: str
    provider: str


@dataclass(frozen=True, slots=True)
class ImportPlanner:
    """Plans one host after another; what one of them has taken is not taken again."""

    profiles: Mapping[int, ImportedProfile]
    # Of all hosts: a uuid or a name is unique in the whole database of this service.
    _owners: dict[Identity, str] = field(default_factory=dict)

    def plan(self, host: str, rows: HostRows) -> HostImport:
        """Return what is taken from the rows of one host; rows without a host are all dropped."""
        return _HostPlanner(host, rows, self.profiles, self._owners).plan()


@dataclass(slots=True)
class _HostPlanner:
    """The state of a plan: what has been taken so far, by the ids of the source."""

    host: str
    rows: HostRows
    profiles: Mapping[int, ImportedProfile]
    owners: dict[Identity, str]
    # By kind and id: the rows that are taken, and those that are not.
    taken: set[tuple[str, int]] = field(default_factory=set)
    drops: dict[tuple[str, int], Drop] = field(default_factory=dict)
    handles: dict[int, TakenHandle] = field(default_factory=dict)  # those that are taken
    uuids: dict[tuple[str, int], str] = field(default_factory=dict)  # of all possible parents
    unknown_uses: list[UnknownUse] = field(default_factory=list)
    paths_of: Mapping[int, list[ControlPathRow]] = field(default_factory=dict)
    deployables_of: Mapping[int, list[DeployableRow]] = field(default_factory=dict)
    attributes_of: Mapping[int, list[AttributeRow]] = field(default_factory=dict)
    handles_of: Mapping[int, list[HandleRow]] = field(default_factory=dict)

    def plan(self) -> HostImport:
        """Return the plan."""
        rows = self.rows
        # What a server uses comes first: of two rows with one identity the first is taken.
        bound = {arq.handle_id for arq in rows.arqs if arq.state == import_plan.BOUND}
        handles = sorted(rows.handles, key=lambda row: row.id not in bound)
        used_deployables = {row.deployable_id for row in handles if row.id in bound}
        deployables = sorted(rows.deployables, key=lambda row: row.id not in used_deployables)
        used_devices = {row.device_id for row in deployables if row.id in used_deployables}
        self.paths_of = _group(rows.control_paths, lambda row: row.device_id)
        self.deployables_of = _group(deployables, lambda row: row.device_id)
        self.attributes_of = _group(rows.attributes, lambda row: row.deployable_id)
        self.handles_of = _group(handles, lambda row: row.deployable_id)
        # ``_try`` drops a row that cannot be taken.
        devices = [
            self._add_parts(row, device)
            for row in sorted(rows.devices, key=lambda row: row.id not in used_devices)
            if (device := self._try(self._device, row)) is not None
        ]
        # Of two requests of one handle the one of this host is taken, or else the newer one: the
        # other may have been left behind.
        arqs = {
            row.id: arq
            for row in sorted(rows.arqs, key=lambda row: (row.host != self.host, -row.id))
            if (arq := self._try(self._arq, row)) is not None
        }
        closed = self._close_devices({arq.handle for arq in arqs.values()})
        self._drop_others()
        return HostImport(
            self.host,
            devices=tuple(
                # A status that an operator can change back.
                replace(device, status=import_plan.MAINTAINING) if device.uuid in closed else device
                for device in devices
            ),
            arqs=tuple(arq for _, arq in sorted(arqs.items())),
            drops=(*rows.drops, *self.drops.values()),
            unknown_uses=tuple(self.unknown_uses),
        )

    def _try(self, parse: Callable[[R], T], row: R) -> T | None:
        """Take a row, or drop it if it cannot be parsed."""
        try:
            value = parse(row)
        except Invalid as exc:
            self._drop(row, exc.message)
            return None
        self.taken.add((row.KIND, row.id))
        return value

    def _device(self, row: DeviceRow) -> ImportedDevice:
        """Return a device without deployables."""
        check_text("host", self.host)
        if not (paths := self.paths_of.get(row.id)):
            raise Invalid("it has no row in controlpath_ids, so its PCI address is unknown")
        path, *other_paths = paths
        if row.status not in import_plan.STATUSES:
            raise Invalid(
                f"its status {abbreviate(row.status)!r} is unknown, expected "
                f"{' or '.join(sorted(import_plan.STATUSES))}"
            )
        device = Device(
            address=str(parse_pci_info(path.info)),
            type=parse_device_type(row.type),
            vendor=row.vendor,
            model=row.model,
            backend=BACKEND,
            std_board_info=load_texts(row.std_board_info),
            vendor_board_info=load_texts(row.vendor_board_info),
        )
        uuid = parse_uuid(row.uuid, "uuid")
        self._claim(row, Identity("uuid", uuid), Identity("PCI address", device.address, self.host))
        self.taken.add((path.KIND, path.id))
        for other in other_paths:
            self._drop(other, f"its device has the control path {path.uuid}")
        dirty = row.state not in import_plan.CLEAN_STATES
        # ``_add_parts`` fills the maps.
        return ImportedDevice(
            uuid, row.status, dirty, value=device, deployables={}, handles={}, rows={}
        )

    def _add_parts(self, row: DeviceRow, device: ImportedDevice) -> ImportedDevice:
        """Return a device with those of its deployables and handles that are taken."""
        row_counts = Counter({import_plan.DEVICE: 1, import_plan.CONTROL_PATH: 1})
        deployables: list[tuple[DeployableRow, Deployable]] = []
        address_of_row: dict[int | None, str] = {}
        identities: dict[str, ImportedDeployable] = {}
        # By the addresses of deployable and handle.
        handle_uuids: dict[tuple[str, str], str] = {}
        for source in self.deployables_of.get(row.id, []):
            if (parsed := self._try(self._deployable, source)) is None:
                continue
            deployable, identity = parsed
            address = deployable.address
            traits, attributes = self._attributes(source)
            handles = self._take_handles(source, deployable.resource_class, identity.provider)
            handle_uuids |= {(address, item.address): uuid for uuid, item in handles.items()}
            deployable = replace(deployable, traits=traits, handles=tuple(handles.values()))
            deployables.append((source, deployable))
            address_of_row[source.id] = address
            identities[address] = replace(identity, attributes=attributes)
            row_counts[import_plan.ATTRIBUTE] += sum(
                (a.KIND, a.id) in self.taken for a in self.attributes_of.get(source.id, [])
            )
        row_counts[import_plan.DEPLOYABLE] = len(deployables)
        row_counts[import_plan.HANDLE] = len(handle_uuids)
        # A deployable whose parent is not taken has none.
        complete = tuple(
            replace(deployable, parent=address_of_row.get(source.parent_id))
            for source, deployable in deployables
        )
        return replace(
            device,
            value=replace(device.value, deployables=complete),
            deployables=identities,
            handles=handle_uuids,
            rows=row_counts,
        )

    def _take_handles(
        self, owner: DeployableRow, resource_class: str, provider: str
    ) -> dict[str, AttachHandle]:
        """Take the handles of a deployable: return them by uuid."""
        handles: dict[str, AttachHandle] = {}
        for row in self.handles_of.get(owner.id, []):
            if (parsed := self._try(self._handle, row)) is not None:
                uuid, handle = parsed
                handles[uuid] = handle
                self.handles[row.id] = TakenHandle(uuid, resource_class, provider)
        return handles

    def _deployable(self, row: DeployableRow) -> tuple[Deployable, ImportedDeployable]:
        """Return a deployable and its identity, without parent, traits, handles and attributes."""
        # Of several classes the first one counts: see ``_attributes``.
        classes = [a for a in self.attributes_of.get(row.id, []) if a.key == _CLASS_KEY]
        if not classes or not naming.is_accelerator_class(classes[0].value):
            raise Invalid(f"its attribute {_CLASS_KEY} is no resource class of accelerators")
        if row.provider is None:
            raise Invalid("it has no resource provider in Placement")
        self._check_ancestors(row)
        value = Deployable(
            self._address(row.name), classes[0].value, bitstream_id=row.bitstream_id or None
        )
        uuid = parse_uuid(row.uuid, "uuid")
        provider = parse_uuid(row.provider, "rp_uuid")
        self._claim(
            row, Identity("uuid", uuid), Identity("provider", provider), Identity("name", row.name)
        )
        return value, ImportedDeployable(uuid, provider, ())

    def _check_ancestors(self, row: DeployableRow) -> None:
        rows = {d.id: d for d in self.deployables_of[row.device_id]}
        # The database would accept a cycle, and no walk up the tree would end.
        seen = {row.id}
        above = rows.get(row.parent_id or 0)
        while above is not None:
            if above.id in seen:
                raise Invalid("it is its own ancestor, or a deployable above it is")
            seen.add(above.id)
            above = rows.get(above.parent_id or 0)

    def _address(self, name: str) -> str:
        prefix = naming.provider_name(self.host, "")
        if not name.startswith(prefix) or name == prefix:
            raise Invalid(
                f"its name {abbreviate(name)!r} does not begin with {prefix!r}: the agent reports "
                "it under another name"
            )
        if len(name) > MAX_PROVIDER_NAME:
            raise Invalid(f"its name is longer than {MAX_PROVIDER_NAME} characters")
        return name.removeprefix(prefix)

    def _attributes(self, owner: DeployableRow) -> tuple[frozenset[str], tuple[Attribute, ...]]:
        """Take the attributes of a deployable: return its traits, and those of operators."""
        traits: set[str] = set()
        attributes: list[Attribute] = []
        class_known = False
        for row in self.attributes_of.get(owner.id, []):
            # The first one is the class of the deployable, see ``_deployable``.
            if row.key == _CLASS_KEY and class_known:
                self._drop(row, "its deployable has another resource class")
            elif row.key == _CLASS_KEY:
                class_known = True
                self.taken.add((row.KIND, row.id))
            elif row.key.startswith(_TRAIT_KEY):
                if (trait := self._try(_parse_trait, row)) is not None:
                    traits.add(trait)
            elif (attribute := self._try(self._attribute, row)) is not None:
                attributes.append(attribute)
        # The publisher sets this trait on each provider; it says nothing about the device.
        return frozenset(traits - {naming.OWNER_TRAIT}), tuple(attributes)

    def _attribute(self, row: AttributeRow) -> Attribute:
        attribute = Attribute(
            parse_uuid(row.uuid, "uuid"), check_text("key", row.key), check_text("value", row.value)
        )
        self._claim(
            row,
            Identity("uuid", attribute.uuid),
            Identity("key", row.key, f"deployable {row.deployable_id}"),
        )
        return attribute

    def _handle(self, row: HandleRow) -> tuple[str, AttachHandle]:
        handle, uuid = parse_handle(row), parse_uuid(row.uuid, "uuid")
        self._claim(row, Identity("uuid", uuid), Identity("PCI address", handle.address, self.host))
        return uuid, handle

    def _arq(self, row: ArqRow) -> ImportedArq:
        """Return the ARQ to write. Raise Invalid with why it is dropped."""
        if row.state != import_plan.BOUND:
            raise Invalid(
                f"its state is {abbreviate(row.state)}: Nova creates another one or deletes it"
            )
        if row.instance is None or row.handle_id is None:
            raise Invalid(
                f"it is {import_plan.BOUND} and has no "
                f"{'instance' if row.instance is None else 'attach handle'}"
            )
        if row.handle_id not in self.handles:
            raise Invalid(self._explain(import_plan.HANDLE, row.handle_id))
        profile = self.profiles.get(row.profile_id)
        if profile is None:
            raise Invalid("its device profile was not taken")
        if not 0 <= row.group_id < len(profile.groups):
            raise Invalid(f"its device profile {profile.name} has no group {row.group_id}")
        handle = self.handles[row.handle_id]
        arq = ImportedArq(
            uuid=parse_uuid(row.uuid, "uuid"),
            project=None if row.project is None else check_text("project_id", row.project),
            profile_id=profile.id,
            profile=profile.name,
            group_id=row.group_id,
            group=profile.groups[row.group_id],
            resource_class=handle.resource_class,
            provider=handle.provider,
            instance=parse_uuid(row.instance, "instance_uuid"),
            handle=handle.uuid,
        )
        self._claim(row, Identity("uuid", arq.uuid), Identity("attach handle", handle.uuid))
        return arq

    def _close_devices(self, owned: Collection[str]) -> set[str]:
        """Return the uuids of the taken devices that servers of dropped requests may still use.

        ``owned`` has the uuids of the handles of the requests that are taken. The reasons of the
        drops of these requests get the consequence. A dropped request whose device is not taken
        becomes an unknown use.
        """
        device_of = {row.id: row.device_id for row in self.rows.deployables}
        device_of_handle = {r.id: device_of.get(r.deployable_id) for r in self.rows.handles}
        devices = {
            row.id: parse_uuid(row.uuid, "uuid")
            for row in self.rows.devices
            if (row.KIND, row.id) in self.taken
        }
        closed: set[str] = set()
        for row in self.rows.arqs:
            drop = self.drops.get((row.KIND, row.id))
            if drop is None or row.state != import_plan.BOUND:
                continue
            # No row has the id 0, so that it stands for a handle or device that is unknown.
            source_device = device_of_handle.get(row.handle_id or 0) or 0
            device = devices.get(source_device)
            if device is None:
                address = self._find_address(source_device, row.handle_id)
                self.unknown_uses.append(UnknownUse(row.uuid, row.host, address, row.instance))
                continue
            # The handle is taken with the request that owns it, so that nothing can assign it
            # again.
            if row.handle_id in self.handles and self.handles[row.handle_id].uuid in owned:
                continue
            closed.add(device)
            self.drops[row.KIND, row.id] = replace(
                drop,
                reason=f"{drop.reason}; a server may use its attach handle, so device {device} is "
                f"taken as {import_plan.MAINTAINING}: enable it when no server does",
            )
        return closed

    def _find_address(self, device_id: int, handle_id: int | None) -> str | None:
        """Return the PCI address of a device, or else of a handle; None if neither is valid."""
        infos = [path.info for path in self.paths_of.get(device_id, ())]
        # A handle is a function of the device: its address leads an operator to the card too.
        infos += [row.info for row in self.rows.handles if row.id == handle_id]
        for info in infos:
            with contextlib.suppress(Invalid):
                return str(parse_pci_info(info))
        return None

    def _claim(self, row: Row, *identities: Identity) -> None:
        """Record the identities of a row; raise Invalid if another row has one of them."""
        # All are checked before one is recorded: a row that is dropped must not block another one.
        keys = [key._replace(scope=f"{row.KIND} {key.scope}") for key in identities]
        for key in keys:
            if (owner := self.owners.get(key)) is not None:
                raise Invalid(f"its {key.name} {abbreviate(key.value)} is that of {owner} as well")
        self.owners.update(dict.fromkeys(keys, f"{row.KIND} {row.uuid} of host {self.host}"))

    def _drop(self, row: Row, reason: str) -> None:
        """Record the first reason for which a row is dropped."""
        # The first reason is the cause; a later one says that the parent was not taken.
        self.drops.setdefault((row.KIND, row.id), import_plan.drop_row(row, reason))

    def _drop_others(self) -> None:
        """Drop the rows that were not reached, since their parent was not taken."""
        rows = self.rows
        parts: list[tuple[Row, str, int]] = [
            *((row, import_plan.DEVICE, row.device_id) for row in rows.control_paths),
            *((row, import_plan.DEVICE, row.device_id) for row in rows.deployables),
            *((row, import_plan.DEPLOYABLE, row.deployable_id) for row in rows.attributes),
            *((row, import_plan.DEPLOYABLE, row.deployable_id) for row in rows.handles),
        ]
        for row, kind, parent in parts:
            if (row.KIND, row.id) not in self.taken:
                self._drop(row, self._explain(kind, parent))

    def _explain(self, kind: str, id_: int) -> str:
        """Return why a row is dropped whose parent has this kind and row id."""
        # At the first drop: most hosts have none.
        if not self.uuids:
            rows: tuple[Row, ...] = (*self.rows.devices, *self.rows.deployables, *self.rows.handles)
            self.uuids.update({(row.KIND, row.id): row.uuid for row in rows})
        if (uuid := self.uuids.get((kind, id_))) is not None:
            return f"its {kind} {uuid} was not taken"
        return f"its {kind}, row {id_}, does not exist or is malformed"


def _parse_trait(row: AttributeRow) -> str:
    if not naming.is_trait(row.value):
        raise Invalid(f"{abbreviate(row.value)!r} is no trait of Placement")
    return row.value


def _group(rows: Iterable[R], key: Callable[[R], int]) -> Mapping[int, list[R]]:
    """Return the rows by the ids of their parents."""
    groups: dict[int, list[R]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups

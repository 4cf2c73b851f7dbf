# SPDX-License-Identifier: Apache-2.0
"""Inventory that a driver reports: devices, their deployables and attach handles.

::

    Device (a card)  1 --- n  Deployable (a resource provider)  1 --- n  AttachHandle

An address identifies a device or a deployable on its host, and a handle within its deployable.
These values have no reference to a host, a database or a uuid.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import not_
from typing import Any

from cyborg.core.codec import Serializable, as_list, wire
from cyborg.core.errors import Invalid
from cyborg.core.inventory.device_set import DeviceSet
from cyborg.core.text import sanitize
from cyborg.core.validation import check_integer, check_text, find_duplicate, string

# Characters of an address: a provider has the name ``<host>_<address>``, for which Placement has
# 200 characters.
MAX_ADDRESS = 120
MAX_TEXT = 255
# Entries of one of the maps of a device or deployable.
MAX_INFO_ENTRIES = 256
MAX_NUMA_NODE = 65535
MAX_LAYOUTS = 64
NO_REASON = "its driver gives no reason"
# The key of ``vendor_board_info`` with the reason why a device or deployable is not offered.
NOT_OFFERED = "not_offered"


class HandleType(StrEnum):
    """Attach types: values of ``attach_handle_type`` in the v2 API.

    Nova attaches PCI and MDEV. It ignores other types: the agent attaches a VFIO handle to the
    guest at each of its starts.
    """

    PCI = "PCI"
    MDEV = "MDEV"
    TEST_PCI = "TEST_PCI"
    VFIO = "VFIO"


# Types of handles that are one PCI function of the host, which has one user at a time.
FUNCTION_TYPES = frozenset({HandleType.PCI, HandleType.VFIO})
# The value of ``delivery`` in the info of a VFIO handle: a reader of a bound ARQ learns that the
# agent attaches the device, and not Nova.
BY_AGENT = "agent"


class DeviceType(StrEnum):
    """Device types: values of ``type`` in the v2 API."""

    GPU = "GPU"
    FPGA = "FPGA"
    AICHIP = "AICHIP"
    QAT = "QAT"
    NIC = "NIC"
    SSD = "SSD"
    CRYPTO = "CRYPTO"
    OTHER = "OTHER"


class Health(StrEnum):
    """Health of a device, as its driver measures it."""

    OK = "ok"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"


class Ability(StrEnum):
    """Abilities of a backend in addition to discovery."""

    PREPARES = "prepares"
    SANITISES = "sanitises"
    PROGRAMS = "programs"
    PARTITIONS = "partitions"
    MEASURES = "measures"


# With any of these, a handle must be cleaned on its host before it is allocated again.
CLEANING_ABILITIES = frozenset({Ability.PREPARES, Ability.SANITISES})


def load_abilities(names: Any) -> frozenset[Ability]:
    """Parse a list of abilities; ignore unknown abilities of a newer sender. Raise TypeError."""
    known = [string(name) for name in as_list(names)]
    return frozenset(ability for ability in Ability if ability in known)


@dataclass(frozen=True, slots=True)
class AttachHandle(Serializable):
    """One unit that can be attached to an instance: a PCI function or a mediated device.

    The info of a VFIO handle gets ``delivery``.
    """

    address: str
    type: HandleType
    info: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_text("handle address", self.address, MAX_ADDRESS)
        for key, value in self.info.items():
            # Nova builds names from these, so they are refused and not sanitised.
            check_text("attach handle info", key, MAX_TEXT)
            check_text("attach handle info", value, MAX_TEXT)
        if self.type is HandleType.VFIO:
            # Here, so that no driver forgets it; the way to set a field of a frozen dataclass.
            object.__setattr__(self, "info", {**self.info, "delivery": BY_AGENT})


@dataclass(frozen=True, slots=True)
class Deployable(Serializable):
    """A schedulable part of a device: one resource provider with one resource class.

    ``parent`` is the address of the deployable of the same device that contains it, if any. The
    total of its inventory is the number of its handles, or of the members of its ``device_set``; a
    deployable with a device set has no handles.
    """

    address: str
    resource_class: str
    traits: frozenset[str] = field(default=frozenset(), metadata=wire(required=True))
    handles: tuple[AttachHandle, ...] = field(default=(), metadata=wire(required=True))
    attributes: Mapping[str, str] = field(default_factory=dict)
    parent: str | None = None
    bitstream_id: str | None = None
    # Left out if None: the digest stays equal to that of an older release.
    device_set: DeviceSet | None = field(default=None, metadata=wire(omit=not_))

    def __post_init__(self) -> None:
        check_text("deployable address", self.address, MAX_ADDRESS)
        check_text("resource class", self.resource_class, MAX_TEXT)
        for trait in self.traits:
            check_text("trait", trait, MAX_TEXT)
        if self.bitstream_id is not None:
            check_text("bitstream_id", self.bitstream_id, MAX_TEXT)
        if self.device_set is not None and self.handles:
            raise Invalid(
                f"deployable {self.address} has a device set and handles of its own",
                field="device_set",
            )
        _clean_info(self, "attributes")
        _check_unique("handle", self.address, [h.address for h in self.handles])

    def without_handles(self) -> "Deployable":
        """Return the deployable without its handles."""
        return replace(self, handles=())


@dataclass(frozen=True, slots=True)
class Layout(Serializable):
    """One way to partition a device.

    ``offers`` is the number of handles of each resource class that a device with this layout has in
    all its deployables. ``traits`` are traits that each of these deployables has; they distinguish
    layouts with the same ``offers``.
    """

    name: str
    offers: Mapping[str, int]
    traits: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_text("layout", self.name, MAX_TEXT)
        for trait in self.traits:
            check_text("trait", trait, MAX_TEXT)
        for resource_class, count in self.offers.items():
            check_text("resource class", resource_class, MAX_TEXT)
            subject = f"layout {self.name}, handles of {resource_class}"
            check_integer("offers", count, subject=subject)

    def matches(self, device: "Device") -> bool:
        """Return whether the device has this layout."""
        # A layout may name a class of which it has no handle; the counts of a device do not.
        offers = {name: count for name, count in self.offers.items() if count}
        return offers == count_handles(device) and all(
            self.traits <= deployable.traits for deployable in device.deployables
        )


@dataclass(frozen=True, slots=True)
class Device(Serializable):
    """A card in one slot of the bus, with all its deployables.

    ``backend`` is the configured driver that found it. With ``setup_required`` it is not
    schedulable until it is set up, with ``reboot_required`` until the host has rebooted.
    ``abilities`` are the abilities of the backend; the agent sets them. ``health_reason`` is a
    sentence for people, or None.

    A device that is not ``deliverable`` cannot be attached to an instance: it is shown and not
    schedulable. ``undeliverable_reason`` says why and has a remedy; it is None for a deliverable
    device. ``topology`` describes the place of the device in its host: see
    ``drivers.pci.topology``.

    ``layouts`` are the possible layouts of a device that can be partitioned, and ``layout`` is the
    name of the current layout; the agent sets both.
    """

    address: str
    type: DeviceType
    vendor: str
    model: str
    backend: str
    std_board_info: Mapping[str, str] = field(default_factory=dict)
    vendor_board_info: Mapping[str, str] = field(default_factory=dict)
    numa_node: int | None = None
    serial: str | None = None
    health: Health = Health.OK
    # Left out if None: the digest stays equal to that of an older release.
    health_reason: str | None = field(default=None, metadata=wire(omit=not_))
    setup_required: bool = False
    reboot_required: bool = False
    abilities: frozenset[Ability] = field(default=frozenset(), metadata=wire(load=load_abilities))
    # Left out with these values: the digest stays equal to that of an older release.
    deliverable: bool = field(default=True, metadata=wire(omit=bool))
    undeliverable_reason: str | None = field(default=None, metadata=wire(omit=not_))
    topology: Mapping[str, str] = field(default_factory=dict, metadata=wire(omit=not_))
    layout: str | None = field(default=None, metadata=wire(omit=not_))
    layouts: tuple[Layout, ...] = field(default=(), metadata=wire(omit=not_))
    deployables: tuple[Deployable, ...] = field(default=(), metadata=wire(required=True))

    def __post_init__(self) -> None:
        check_text("device address", self.address, MAX_ADDRESS)
        check_text("vendor", self.vendor, MAX_TEXT)
        check_text("model", self.model, MAX_TEXT)
        check_text("backend", self.backend, MAX_TEXT)
        for name in ("serial", "health_reason"):
            # Another type is not refused here: the agent names it to the driver.
            if isinstance(text := getattr(self, name), str):
                # The way to set a field of a frozen dataclass while it is created.
                object.__setattr__(self, name, sanitize(text, MAX_TEXT) or None)
        if self.deliverable:
            object.__setattr__(self, "undeliverable_reason", None)
        elif isinstance(self.undeliverable_reason, str | None):
            reason = sanitize(self.undeliverable_reason or "", MAX_TEXT).strip() or NO_REASON
            object.__setattr__(self, "undeliverable_reason", reason)
        if self.numa_node is not None and not 0 <= self.numa_node <= MAX_NUMA_NODE:
            raise Invalid(
                f"device {self.address}: numa_node {self.numa_node} out of range "
                f"0..{MAX_NUMA_NODE} (use None if unknown)",
                field="numa_node",
            )
        for name in ("std_board_info", "vendor_board_info", "topology"):
            _clean_info(self, name)
        if len(self.layouts) > MAX_LAYOUTS:
            raise Invalid(
                f"device {self.address} has {len(self.layouts)} layouts, at most {MAX_LAYOUTS} are "
                "allowed",
                field="layouts",
            )
        _check_unique("layout", self.address, [layout.name for layout in self.layouts])
        _check_unique("deployable", self.address, [d.address for d in self.deployables])
        addresses = {d.address for d in self.deployables}
        for deployable in self.deployables:
            parent = deployable.parent
            if parent is not None and (parent not in addresses or parent == deployable.address):
                raise Invalid(
                    f"deployable {deployable.address} of device {self.address} has the parent "
                    f"{parent}, which is not another deployable of the device",
                    field="parent",
                )
        _check_acyclic(self.address, {d.address: d.parent for d in self.deployables})

    def without_deployables(self) -> "Device":
        """Return the device without its deployables."""
        return replace(self, deployables=())


def count_handles(device: Device) -> dict[str, int]:
    """Return the number of handles of each resource class of a device."""
    counts: dict[str, int] = {}
    for deployable in device.deployables:
        if deployable.handles:
            count = counts.get(deployable.resource_class, 0)
            counts[deployable.resource_class] = count + len(deployable.handles)
    return counts


def _clean_info(owner: object, name: str) -> None:
    """Sanitise a map of descriptive texts, which are only displayed."""
    info: Mapping[str, str] = getattr(owner, name)
    if len(info) > MAX_INFO_ENTRIES:
        raise Invalid(
            f"{name} has {len(info)} entries, at most {MAX_INFO_ENTRIES} are allowed", field=name
        )
    if not all(isinstance(text, str) for pair in info.items() for text in pair):
        return  # the agent reports wrong types to the driver, device by device
    plain = {sanitize(key, MAX_TEXT): sanitize(value) for key, value in info.items()}
    if plain != info:
        object.__setattr__(owner, name, plain)


def _check_unique(name: str, owner: str, addresses: list[str]) -> None:
    if (address := find_duplicate(addresses)) is not None:
        raise Invalid(f"{owner} reports a duplicate {name} address {address}", field="address")


def _check_acyclic(device: str, parents: Mapping[str, str | None]) -> None:
    """Raise Invalid for a cycle of parents: none of the providers could be created first."""
    acyclic: set[str | None] = {None}
    for start in parents:
        path: dict[str, None] = {}
        at: str | None = start
        while at is not None and at not in acyclic:
            if at in path:
                raise Invalid(
                    f"deployable {at} of device {device} is its own ancestor",
                    field="parent",
                )
            path[at] = None
            at = parents[at]
        acyclic.update(path)

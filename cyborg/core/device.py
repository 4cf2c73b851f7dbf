# SPDX-License-Identifier: Apache-2.0
"""What a driver reports: devices, the deployables they offer and the handles to attach these by.

::

    Device (a card)  1 --- n  Deployable (a resource provider)  1 --- n  AttachHandle

Identity is the address: of a device on its host, of a deployable on its host, of a handle within
its deployable. Nothing here knows of a host, a database or a uuid.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from cyborg.core.errors import Invalid
from cyborg.core.text import clean

MAX_ADDRESS = 120  # provider names are `<host>_<address>`, and Placement takes 200 characters
MAX_TEXT = 255
MAX_FACTS = 256  # in one of the maps of a device or deployable
MAX_NODE = 65535


class HandleType(StrEnum):
    """How Nova attaches a handle: the values of ``attach_handle_type`` in the v2 API."""

    PCI = "PCI"
    MDEV = "MDEV"
    TEST_PCI = "TEST_PCI"


class DeviceType(StrEnum):
    """What a device is for: the values of ``type`` in the v2 API."""

    GPU = "GPU"
    FPGA = "FPGA"
    AICHIP = "AICHIP"
    QAT = "QAT"
    NIC = "NIC"
    SSD = "SSD"
    CRYPTO = "CRYPTO"
    OTHER = "OTHER"


class Health(StrEnum):
    """What the driver's own measurements say of the device."""

    OK = "ok"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"


class Ability(StrEnum):
    """What a backend can do with a device beyond finding it."""

    PREPARES = "prepares"
    SANITISES = "sanitises"
    PROGRAMS = "programs"
    PARTITIONS = "partitions"
    MEASURES = "measures"


CLEANED = frozenset({Ability.PREPARES, Ability.SANITISES})
"""With any of these a handle that was given out must be cleaned on its host before the next."""


@dataclass(frozen=True, slots=True)
class AttachHandle:
    """One thing that can be given to one instance: a PCI function, a mediated device."""

    address: str
    type: HandleType
    info: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _text("handle address", self.address, MAX_ADDRESS)
        for key, value in self.info.items():
            # Nova builds names from these: what is not printable is no slip of a label.
            _text("attach handle info", key, MAX_TEXT)
            _text("attach handle info", value, MAX_TEXT)


@dataclass(frozen=True, slots=True)
class Deployable:
    """A part of a device that the scheduler counts: one resource provider, one resource class.

    ``parent`` is the address of the deployable it lies within on the same device, if any. The
    inventory's total is the number of its handles.
    """

    address: str
    resource_class: str
    traits: frozenset[str] = frozenset()
    handles: tuple[AttachHandle, ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)
    parent: str | None = None
    bitstream_id: str | None = None

    def __post_init__(self) -> None:
        _text("deployable address", self.address, MAX_ADDRESS)
        _text("resource class", self.resource_class, MAX_TEXT)
        for trait in self.traits:
            _text("trait", trait, MAX_TEXT)
        if self.bitstream_id is not None:
            _text("bitstream_id", self.bitstream_id, MAX_TEXT)
        _facts(self, "attributes")
        _unique("handle", self.address, [h.address for h in self.handles])

    def bare(self) -> "Deployable":
        """Return the deployable's own facts, without its handles."""
        return replace(self, handles=())


@dataclass(frozen=True, slots=True)
class Device:
    """A card: what stands in one slot of the bus, whatever it is divided into.

    ``backend`` is the configured driver that found it. ``setup_required`` hardware is no inventory
    until it is set up; ``reboot_required`` closes it until the host has booted again.
    ``abilities`` are the backend's; a driver leaves them to the agent. ``health_reason`` is a
    sentence for people, None when there is nothing to say.
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
    health_reason: str | None = None
    setup_required: bool = False
    reboot_required: bool = False
    abilities: frozenset[Ability] = frozenset()
    deployables: tuple[Deployable, ...] = ()

    def __post_init__(self) -> None:
        _text("device address", self.address, MAX_ADDRESS)
        _text("vendor", self.vendor, MAX_TEXT)
        _text("model", self.model, MAX_TEXT)
        _text("backend", self.backend, MAX_TEXT)
        if isinstance(self.serial, str):
            object.__setattr__(self, "serial", clean(self.serial, MAX_TEXT) or None)
        if isinstance(self.health_reason, str):
            object.__setattr__(self, "health_reason", clean(self.health_reason, MAX_TEXT) or None)
        if self.numa_node is not None and not 0 <= self.numa_node <= MAX_NODE:
            raise Invalid(
                f"device {self.address}: NUMA node {self.numa_node} is not of 0 to {MAX_NODE}; "
                "one that is on no node has None",
                field="numa_node",
            )
        _facts(self, "std_board_info")
        _facts(self, "vendor_board_info")
        _unique("deployable", self.address, [d.address for d in self.deployables])
        known = {d.address for d in self.deployables}
        for deployable in self.deployables:
            parent = deployable.parent
            if parent is not None and (parent not in known or parent == deployable.address):
                raise Invalid(
                    f"deployable {deployable.address} of device {self.address} names {parent} as "
                    "its parent, which is no other deployable of the device",
                    field="parent",
                )
        _no_ring(self.address, {d.address: d.parent for d in self.deployables})

    def bare(self) -> "Device":
        """Return the device's own facts, without its deployables."""
        return replace(self, deployables=())


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which a device can be divided.

    ``offers`` is how many handles of each resource class the device has then, all of its
    deployables taken together.
    """

    name: str
    offers: Mapping[str, int]

    def __post_init__(self) -> None:
        _text("layout", self.name, MAX_TEXT)
        for resource_class, count in self.offers.items():
            _text("resource class", resource_class, MAX_TEXT)
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise Invalid(
                    f"layout {self.name} offers {count!r} of {resource_class}; expected a whole "
                    "number of handles",
                    field="offers",
                )

    def fits(self, device: Device) -> bool:
        """Tell whether the device is divided so."""
        return {name: count for name, count in self.offers.items() if count} == offers(device)


def offers(device: Device) -> dict[str, int]:
    """Return how many handles of each resource class a device has."""
    counts: dict[str, int] = {}
    for part in device.deployables:
        if part.handles:
            there = counts.get(part.resource_class, 0)
            counts[part.resource_class] = there + len(part.handles)
    return counts


def _text(what: str, value: str, longest: int) -> None:
    if not value or len(value) > longest or not value.isprintable():
        raise Invalid(
            f"{what} {value[:40]!r} is not usable: expected 1 to {longest} printable characters",
            field=what,
        )


def _facts(owner: object, name: str) -> None:
    """Clean a map of descriptive text, which is shown and decides nothing."""
    facts: Mapping[str, str] = getattr(owner, name)
    if len(facts) > MAX_FACTS:
        raise Invalid(f"{name} has {len(facts)} entries, at most {MAX_FACTS} fit", field=name)
    if not all(isinstance(text, str) for pair in facts.items() for text in pair):
        return  # a driver that breaks the types is told so by the agent, device by device
    plain = {clean(key, MAX_TEXT): clean(value) for key, value in facts.items()}
    if plain != facts:
        object.__setattr__(owner, name, plain)


def _unique(what: str, where: str, addresses: list[str]) -> None:
    seen: set[str] = set()
    for address in addresses:
        if address in seen:
            raise Invalid(f"{where} reports the {what} address {address} twice", field="address")
        seen.add(address)


def _no_ring(device: str, parents: Mapping[str, str | None]) -> None:
    """Refuse deployables that lie within each other: none of them could be created first."""
    sound: set[str | None] = {None}
    for start in parents:
        path: dict[str, None] = {}
        at: str | None = start
        while at is not None and at not in sound:
            if at in path:
                raise Invalid(
                    f"deployable {at} of device {device} lies within itself by its parents",
                    field="parent",
                )
            path[at] = None
            at = parents[at]
        sound.update(path)

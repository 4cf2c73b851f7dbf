# SPDX-License-Identifier: Apache-2.0
"""The driver API: a driver discovers devices and may be able to prepare, program or clean them.

A driver is an entry point of ``cyborg.accelerator.driver``. The agent creates one object for each
backend, that is for each configured use of the driver on the host. It calls ``discover`` in a
thread of that backend and never twice at the same time. The methods of the abilities run in other
threads: concurrently with ``discover`` and for several handles, but never concurrently for one
handle. A driver imports only ``cyborg.core`` and ``cyborg.drivers``: no bus, no database and no
option library.
"""

import abc
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from cyborg.core.codec import Serializable
from cyborg.core.drivers.registry import Kind, Option, Setting, Support
from cyborg.core.errors import DriverFailed, Invalid, Misconfigured
from cyborg.core.inventory.device import Ability, Device, DeviceType, Layout
from cyborg.core.inventory.device_state import Measurement
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.host_use.domains import ReadDomains, read_nothing

# What drivers of other packages import: without the list, mypy would refuse the names of ``core``.
__all__ = [
    "ABILITY_INTERFACES",
    "CheckProperties",
    "Driver",
    "Image",
    "ImageStore",
    "InvalidOption",
    "Kind",
    "MeasureInterface",
    "Memory",
    "NoImageStore",
    "Option",
    "PartitionInterface",
    "PrepareInterface",
    "ProgramInterface",
    "RecreateInterface",
    "SanitiseInterface",
    "SetupInterface",
    "UseInterface",
    "VolatileMemory",
    "in_range",
    "load_record",
    "one_of",
]

_Parsed = TypeVar("_Parsed")
_Record = TypeVar("_Record", bound=Serializable)
_Enum = TypeVar("_Enum", bound=StrEnum)


class Memory(Protocol):
    """Key-value store of the texts that a driver needs after a restart of the agent.

    An example is a property of a device that the host cannot read while a server uses the device.
    All backends of a driver on a host share it, so that a device can change its backend.
    """

    def get(self, key: str) -> str | None:
        """Return the text of a key; None if it is unknown."""

    def put(self, key: str, text: str | None) -> bool:
        """Store the text of a key; None removes the key. Return whether a restart keeps the change.

        Do nothing if the key already has this text.
        """


class VolatileMemory:
    """Memory whose texts are lost when the process ends."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def get(self, key: str) -> str | None:
        """Return the text of a key; None if it is unknown."""
        return self._texts.get(key)

    def put(self, key: str, text: str | None) -> bool:
        """Store the text of a key, or remove it."""
        if text is None:
            self._texts.pop(key, None)
        else:
            self._texts[key] = text
        return True


def load_record(kind: type[_Record], text: str | None) -> _Record | None:
    """Return the record that a text of a memory has; None without one, or if it is malformed."""
    try:
        return None if text is None else kind.from_dict(json.loads(text))
    except (Invalid, KeyError, RecursionError, TypeError, ValueError):
        # Another release, or an operator, may have written it: what it says is not known then.
        return None


class InvalidOption(ValueError):
    """The value of an option is not usable.

    ``found`` is the wrong value or the wrong part of it, ``expected`` describes a valid one.
    """

    def __init__(self, found: object, expected: str) -> None:
        super().__init__(f"found {found!r}; expected {expected}")
        self.found = found
        self.expected = expected


def one_of(kind: type[_Enum]) -> Callable[[Any], _Enum]:
    """Return a parser of the values of an enumeration."""

    def parse(value: Any) -> _Enum:
        try:
            return kind(value)
        except ValueError as exc:
            raise InvalidOption(value, f"one of {', '.join(kind)}") from exc

    return parse


def in_range(minimum: float, maximum: float, unit: str = "") -> Callable[[Any], Any]:
    """Return a parser of numbers in a range; ``unit`` is shown after the limits."""

    def parse(value: Any) -> Any:
        # Not "or": a comparison with NaN is false.
        if not minimum <= value <= maximum:
            raise InvalidOption(value, f"{minimum:g} to {maximum:g}{unit}")
        return value

    return parse


CheckProperties = Callable[[Mapping[str, str]], None]


@dataclass(frozen=True, slots=True)
class Image:
    """A verified image in a local file.

    ``path`` is a regular file that only the agent can write, of ``size`` bytes. ``properties`` are
    the custom properties of the image in the image service.
    """

    uuid: str
    path: Path
    size: int
    properties: Mapping[str, str]


class ImageStore(Protocol):
    """Store of the images of a host."""

    def open(
        self, uuid: str, check: CheckProperties = lambda properties: None
    ) -> AbstractContextManager[Image]:
        """Yield an image, fetched and verified; its file exists until the context ends.

        ``check`` is called with the custom properties before the image is fetched. It raises
        DriverFailed if the image does not fit the device. Raise DriverFailed also for an image that
        does not exist, is not active, is too large, arrives too slowly, or has another digest or
        signature than the image service says; Unavailable if the service does not answer.
        """

    def find(self, properties: Mapping[str, str]) -> str:
        """Return the uuid of the only active image with these custom properties.

        Raise DriverFailed if there is none or more than one; Unavailable if the service does not
        answer.
        """


class NoImageStore:
    """Store of an agent without an image service."""

    def open(
        self, uuid: str, check: CheckProperties = lambda properties: None
    ) -> AbstractContextManager[Image]:
        """Raise DriverFailed."""
        raise DriverFailed(f"image {uuid} cannot be fetched: {_REMEDY}")

    def find(self, properties: Mapping[str, str]) -> str:
        """Raise DriverFailed."""
        raise DriverFailed(f"images cannot be searched: {_REMEDY}")


_REMEDY = "this agent has no image service; set the section [glance] of its configuration"


class Driver(abc.ABC):
    """Base class of drivers. ``name`` is the name of the entry point; ``version`` is free text."""

    name: ClassVar[str]
    version: ClassVar[str]
    # Type of all devices of the driver; None if they can have different types.
    DEVICE_TYPE: ClassVar[DeviceType | None] = None
    SUPPORT_LEVEL: ClassVar[Support] = Support.UNKNOWN
    OPTIONS: ClassVar[tuple[Option, ...]] = ()
    # Kernel subsystems whose uevents trigger a discovery at once, such as ``pci``.
    #
    # The names are those of ``/sys/bus`` and ``/sys/class``. The agent receives the uevents. It
    # does not pass them to the driver: ``discover`` reads the current state, as always.
    UEVENT_SUBSYSTEMS: ClassVar[frozenset[str]] = frozenset()

    # Effective options, shown to operators; the agent sets this attribute.
    settings: tuple[Setting, ...] = ()
    # Name of the host in this service, for ``handle_uuid``; the agent sets this attribute.
    host: str = ""
    # Images of the image service, for drivers that load them; the agent sets this attribute.
    images: ImageStore = NoImageStore()

    def __init__(
        self, backend: str, options: Mapping[str, Any], sysfs_root: str | Path = "/sys"
    ) -> None:
        """Check the options without side effects. Raise Misconfigured if one is not usable.

        An option that is missing in ``options`` has its default. The agent does not start if a
        backend is misconfigured.
        """
        self.backend = backend
        self.memory: Memory = VolatileMemory()  # the agent sets one that survives a restart
        self.read_domains: ReadDomains = read_nothing  # the agent sets one that reads libvirt
        self.options: dict[str, Any] = {o.name: o.default for o in self.OPTIONS} | dict(options)
        self.sysfs_root = Path(sysfs_root)

    @property
    def abilities(self) -> frozenset[Ability]:
        """Return the abilities that this backend has with its options; the agent reports them.

        For each ability the driver must have the methods of its ``ABILITY_INTERFACES`` protocol.
        """
        return frozenset()

    @property
    def remarks(self) -> Sequence[str]:
        """Return warnings about the configuration, one sentence each.

        An example is a rule that matches no device of this host. The agent reads the warnings after
        each discovery, shows them with the backend and logs them when they change. Identical hosts
        must have identical remarks.
        """
        return ()

    @abc.abstractmethod
    def discover(self) -> Sequence[Device]:
        """Return every device that is present now, with ``backend`` set to ``self.backend``.

        The agent calls this periodically; the result must depend only on the state of the host.
        Omit a device that cannot be read. Any exception is shown as the error of the backend, and
        the devices of the previous discovery stay unchanged.
        """

    def parse_option(self, option: str, parse: Callable[[Any], _Parsed]) -> _Parsed:
        """Return the parsed value of an option. Raise Misconfigured if it is an InvalidOption."""
        try:
            return parse(self.options[option])
        except InvalidOption as exc:
            raise self.misconfigured(option, exc.found, exc.expected) from exc

    def misconfigured(self, option: str, found: Any, expected: str) -> Misconfigured:
        """Return the error for an option with an invalid value."""
        return Misconfigured(
            f"[{self.backend}] {option}: found {found!r}; expected {expected}",
            section=self.backend,
            option=option,
            found=str(found),
            expected=expected,
        )


@runtime_checkable
class SetupInterface(Protocol):
    """Interface of a driver that sets up the host before the first discovery."""

    def setup(self) -> None:
        """Set up the host; do nothing if it is set up already.

        The agent calls this before the first discovery of a backend that an operator installs,
        changes or reloads, with the timeout of a discovery. An exception leaves the backends of the
        host unchanged and is shown to the operator. After a boot of the host the agent calls this
        again, and retries until it succeeds.
        """


@runtime_checkable
class PrepareInterface(Protocol):
    """Interface of a driver whose handles need work on the host before an instance uses them.

    Both methods must be idempotent: the agent may repeat a call after it succeeded, after it
    failed, and after the agent was killed during it. An exception fails the job and is shown to the
    operator.
    """

    def prepare(self, item: WorkItem, instance: str | None) -> None:
        """Prepare a handle for an instance; do nothing if it is prepared already.

        ``instance`` is None under the lease of a device context and for the host itself, and may
        differ in a repeated call: do not store it as the owner of the handle.
        """

    def release(self, item: WorkItem) -> None:
        """Undo ``prepare`` and clean up, also after an incomplete ``prepare``.

        Succeed for a handle or device that no longer exists or was never prepared.
        """


@runtime_checkable
class UseInterface(Protocol):
    """Interface of a driver that finds out whether the host uses a device."""

    def check_unused(self, address: str) -> None:
        """Raise DriverFailed if the host uses the PCI function at an address now.

        The agent calls it before it attaches a handle to a running server, from another thread than
        that of the discovery, whose result may be older than the use.
        """


@runtime_checkable
class RecreateInterface(Protocol):
    """Interface of a driver whose prepared handles other programs of the host can remove."""

    def recreate(self, address: str) -> None:
        """Create what ``prepare`` created for the handle at an address again, if it is missing.

        The agent calls it before it attaches a handle of the type VFIO to a running server. Do
        nothing for a handle that is as it was prepared, or that was released meanwhile. Raise
        DriverFailed, also if another program uses the handle.
        """


@runtime_checkable
class SanitiseInterface(Protocol):
    """Interface of a driver that wipes a handle before the next instance uses it."""

    def sanitise(self, item: WorkItem) -> None:
        """Wipe the memory, keys and files of the previous user of a handle.

        The agent calls this before a released handle can be claimed again, after ``release`` if the
        driver has that method. It calls this also for a handle that no instance ever used. It must
        be idempotent, and succeed for a handle or device that no longer exists. After an exception
        the handle stays unavailable, the error is shown to the operator, and the agent retries.
        """


@runtime_checkable
class ProgramInterface(Protocol):
    """Interface of a driver that loads images into deployables."""

    def program(self, item: WorkItem, image: str) -> None:
        """Load the image with this uuid into the deployable of the item.

        The next discovery must report the image as the ``bitstream_id`` of the deployable.
        """


@runtime_checkable
class PartitionInterface(Protocol):
    """Interface of a driver whose devices can be partitioned in several ways."""

    def layouts(self, device: Device) -> Sequence[Layout]:
        """Return the possible layouts of a device, including the current one. Change nothing."""

    def partition(self, item: WorkItem, layout: str) -> None:
        """Apply the layout of this name to the device of the item, unless the device has it.

        The item names no deployable and no handle, and no handle of the device is in use. The next
        discovery must show the new layout, also after a restart of the agent. Raise DriverFailed
        for a layout that the device does not support, and leave the device unchanged in this case.
        """


@runtime_checkable
class MeasureInterface(Protocol):
    """Interface of a driver that can measure the health of its devices often and cheaply."""

    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        """Return the current measurements of these devices by device address. Change nothing.

        The agent calls this in the thread of ``discover``, after each discovery and between
        discoveries, with the devices of the last discovery. A device that is omitted keeps its last
        measurement; an address that is not in ``devices`` is ignored. An exception is shown as the
        error of the backend, and all devices keep their last measurements.
        """


# The interface that a driver must implement for each ability.
ABILITY_INTERFACES: Mapping[Ability, type] = {
    Ability.PREPARES: PrepareInterface,
    Ability.SANITISES: SanitiseInterface,
    Ability.PROGRAMS: ProgramInterface,
    Ability.PARTITIONS: PartitionInterface,
    Ability.MEASURES: MeasureInterface,
}

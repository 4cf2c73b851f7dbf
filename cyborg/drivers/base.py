# SPDX-License-Identifier: Apache-2.0
"""What a driver is: a class that says what devices are there, and may be able to work on them.

A driver is an entry point of ``cyborg.accelerator.driver``. The agent makes one object for each
backend, that is for each configured use of the driver on the host, and calls ``discover`` in a
thread of the backend's own, never twice at once. What the abilities promise is called in other
threads: beside ``discover``, for several handles at once, but never twice at once for one handle. A
driver reads ``cyborg.core`` and the host; it knows no bus, no database and no option library.
"""

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from cyborg.core.catalogue import Support
from cyborg.core.device import Ability, Device, DeviceType, Layout
from cyborg.core.errors import Misconfigured
from cyborg.core.health import Measurement
from cyborg.core.job import Item
from cyborg.core.option import Kind, Option

__all__ = [
    "NEEDED",
    "Driver",
    "Kind",
    "Measures",
    "Option",
    "Partitions",
    "Prepares",
    "Programs",
    "Sanitises",
    "Setup",
]


class Driver(abc.ABC):
    """The contract. ``name`` is the entry point's, ``version`` the driver's own."""

    name: ClassVar[str]
    version: ClassVar[str]
    TYPE: ClassVar[DeviceType | None] = None
    """What kind of devices it finds, None for any."""
    SUPPORT: ClassVar[Support] = Support.UNKNOWN
    OPTIONS: ClassVar[tuple[Option, ...]] = ()
    WATCHES: ClassVar[frozenset[str]] = frozenset()
    """The kernel's subsystems whose uevents call for a discovery at once, such as ``pci``.

    They are named as in ``/sys/bus`` and ``/sys/class``. It is the agent that hears them, and a
    driver is told nothing of them: it reads what there is, as always.
    """

    def __init__(
        self, backend: str, options: Mapping[str, Any], sysfs_root: str | Path = "/sys"
    ) -> None:
        """Check the options, touch nothing. Raises Misconfigured: then the agent does not start.

        ``options`` need not hold all: the others have their defaults.
        """
        self.backend = backend
        self.options: dict[str, Any] = {o.name: o.default for o in self.OPTIONS} | dict(options)
        self.sysfs_root = Path(sysfs_root)

    @property
    def abilities(self) -> frozenset[Ability]:
        """What this backend, as it is configured, can do now. The agent reports it.

        Each asks for the methods of the protocol that ``NEEDED`` names.
        """
        return frozenset()

    @abc.abstractmethod
    def discover(self) -> Sequence[Device]:
        """Return every device that is there now; each one's ``backend`` is ``self.backend``.

        Called again and again, and equal hosts must give equal answers. A device that cannot be
        read is left out. Whatever this raises is shown as the backend's error, and the devices
        that it returned last stay as they were.
        """

    def misconfigured(self, option: str, found: Any, expected: str) -> Misconfigured:
        """Return the error for an option whose value is not usable."""
        return Misconfigured(
            f"[{self.backend}] {option}: found {found!r}; expected {expected}",
            section=self.backend,
            option=option,
            found=str(found),
            expected=expected,
        )


@runtime_checkable
class Setup(Protocol):
    """A driver that gets the host ready before it looks for devices."""

    def setup(self) -> None:
        """Get the host ready; nothing is to be done if it is.

        Called before the backend's first discovery when an operator installs, changes or reloads
        it, with the time that a discovery has. What is raised leaves the host's backends as they
        were and is shown to the operator. Called once more after a boot of the host, and then again
        and again until it raises nothing.
        """


@runtime_checkable
class Prepares(Protocol):
    """A driver whose handles need work on the host before an instance can have them.

    Work may be asked for again after it was done, after it failed, and after the agent was killed
    in the midst of it. What is raised fails the job and is shown to the operator.
    """

    def prepare(self, item: Item, instance: str | None) -> None:
        """Make a handle ready for an instance; nothing is to be done if it is."""

    def release(self, item: Item) -> None:
        """Take that back and clean up, whatever was left half done.

        A handle or device that is gone, or was never prepared, counts as released.
        """


@runtime_checkable
class Sanitises(Protocol):
    """A driver that leaves nothing of an instance in a handle when the next one gets it."""

    def sanitise(self, item: Item) -> None:
        """Wipe the memory, keys and files of whoever had the handle last.

        Called when its instance is gone, after ``release`` if there is one, and before anybody else
        can have the handle; also for one that no instance came to use. Once wiped, it is fine to be
        asked again; a handle or device that is gone counts as wiped. What is raised keeps the
        handle from everybody, is shown to the operator, and is tried again.
        """


@runtime_checkable
class Programs(Protocol):
    """A driver that loads images into deployables."""

    def program(self, item: Item, image: str) -> None:
        """Load the image of this uuid into the item's deployable.

        The discovery that follows tells what the deployable holds: its ``bitstream_id``.
        """


@runtime_checkable
class Partitions(Protocol):
    """A driver whose devices can be divided in several ways."""

    def layouts(self, device: Device) -> Sequence[Layout]:
        """Return the ways in which a device can be divided; the present one is among them.

        It reads and changes nothing.
        """

    def partition(self, item: Item, layout: str) -> None:
        """Divide the item's device as the layout of this name; nothing is to be done if it is.

        The item names no deployable and no handle, and no handle of the device is in use. The
        discovery that follows shows what there is now, and so does that of another agent process.
        Raises DriverFailed for a layout that the device cannot have, and leaves it as it was then.
        """


@runtime_checkable
class Measures(Protocol):
    """A driver that can tell the health of its devices, often and cheaply."""

    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        """Return what is measured of these devices now, by the device's address.

        Called in the thread of ``discover``, after each discovery and between them, with what was
        discovered last. It reads and changes nothing. A device that is left out stays as it was
        measured last; an address that was not asked for is passed over. What this raises is shown
        as the backend's error, and all devices stay as they were measured last.
        """


NEEDED: Mapping[Ability, type] = {
    Ability.PREPARES: Prepares,
    Ability.SANITISES: Sanitises,
    Ability.PROGRAMS: Programs,
    Ability.PARTITIONS: Partitions,
    Ability.MEASURES: Measures,
}
"""What a driver must be to have an ability."""

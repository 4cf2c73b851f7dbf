# SPDX-License-Identifier: Apache-2.0
"""Replacement of the image of a region, with the previous image restored after a failure.

Only one image is loaded at a time on each card. Sources in Linux:
``Documentation/ABI/testing/sysfs-class-fpga-manager`` (``state``; the names of errors end with
"error") and ``Documentation/admin-guide/sysctl/kernel.rst`` (``random/boot_id``).

The kernel has no records of the images that were loaded. Those of the driver are in the memory of
the driver, one text for each card. A record is trusted only until the host reboots, and only while
the region has the same identity and shows the same function id. The record of a region is removed
before the region is changed, so that a crash leaves no wrong record.
"""

import errno
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from cyborg.core.address import PciAddress
from cyborg.core.errors import CyborgError, DriverFailed, Invalid
from cyborg.core.log import get_logger
from cyborg.drivers.base import Image, ImageStore, Memory
from cyborg.drivers.fpga import cards, images
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.sysfs import PciFunction, Sysfs

LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """Record of the image in a region.

    ``function_id`` is the function id in the properties of the image, and ``shown`` the function id
    that the kernel showed after the image was loaded. ``identity`` is the identity of the region.
    ``given`` is True while a server may use the card as a whole and can load other images.
    """

    image: str
    function_id: str | None
    boot_id: str
    identity: int
    shown: str | None
    given: bool = False

    def is_trusted(self, region: cards.Region, boot_id: str | None) -> bool:
        """Return whether the region still has the recorded image."""
        return (
            self.boot_id == boot_id
            and self.identity == region.identity
            and self.shown == region.function_id
        )


# One for all stores: a backend and its successor have one memory, and may have the same card.
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class RecordStore:
    """Store of the records, by card and number of the region. Thread-safe.

    ``memory`` returns the memory of the driver, which the agent sets later.
    """

    memory: Callable[[], Memory]

    def get(self, card: str, number: int) -> Record | None:
        """Return the record of a region, trusted or not."""
        with _LOCK:
            return self._read(card).get(str(number))

    def put(self, card: str, number: int, record: Record | None) -> None:
        """Store the record of a region; None removes it. Raise OSError."""
        with _LOCK:
            self._write(card, {**self._read(card), str(number): record})

    def mark_given(self, card: str) -> None:
        """Mark the records of a card before a server gets the card as a whole. Raise OSError."""
        with _LOCK:
            found = self._read(card)
            self._write(card, {key: replace(record, given=True) for key, record in found.items()})

    def forget_given(self, card: str) -> None:
        """Remove the marked records of a card that a server has released. Raise OSError."""
        with _LOCK:
            found = self._read(card)
            # Written also without a change: an earlier call may have failed to write its change.
            self._write(card, {key: None if r.given else r for key, r in found.items()})

    def _read(self, card: str) -> dict[str, Record]:
        """Return the records of a card by region number; none if they are damaged."""
        text = self.memory().get(_key(card))
        if text is None:
            return {}
        try:
            body: Any = json.loads(text)
            return {str(number): Record(**fields) for number, fields in body.items()}
        except (ValueError, TypeError, AttributeError) as exc:
            LOG.warning(
                "Records of loaded images cannot be read, the images of the card count as "
                "unknown: %s",
                exc,
                device=card,
            )
            return {}

    def _write(self, card: str, records: Mapping[str, Record | None]) -> None:
        body = {number: asdict(record) for number, record in records.items() if record is not None}
        if not self.memory().put(_key(card), json.dumps(body) if body else None):
            raise OSError(errno.EIO, "the memory of the drivers cannot be written")


def _key(card: str) -> str:
    return f"images {card}"


# Cards of this host: two backends, or a backend and its successor, may have the same card.
_LOCKS: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
_LOCKS_LOCK = threading.Lock()


class _Observed(NamedTuple):
    """What shows that a region has changed: the state of its FPGA manager and its function id."""

    manager_state: str | None
    function_id: str | None


@dataclass(frozen=True, slots=True)
class Place(images.Target):
    """A region to program, as it was before; ``number`` is the number of it on its card.

    ``function`` is the physical function of the card, ``count`` its number of regions.
    """

    number: int
    function: PciFunction
    count: int


@dataclass(frozen=True, slots=True)
class ImageLoader:
    """Loader of images into the regions of a host.

    ``get_images`` returns the image store, which the agent sets later. ``timeout`` limits the run
    of a tool, in seconds.
    """

    sysfs: Sysfs
    get_images: Callable[[], ImageStore]
    records: RecordStore
    access: HostAccess
    programmer: cards.ProgrammerName
    timeout: float

    def load(
        self, device: str, deployable: str, image: str | None, function_id: str | None = None
    ) -> str | None:
        """Load the image with a uuid, or with a function id, unless the region already has it.

        One of ``image`` and ``function_id`` is given.
        Return the uuid of the image; None if there was nothing to do. Raise DriverFailed if the
        image does not fit or cannot be loaded; the error says which image is then in the region.
        """
        card = parse_address(device)
        with _LOCKS_LOCK:
            lock = _LOCKS[card]
        with lock:
            place = self._find_place(card, deployable)
            # Under the lock: another job may have loaded the image meanwhile.
            record = self.trusted_record(card, place.number, place.region)
            if record is not None and (
                record.image == image or (image is None and record.function_id == function_id)
            ):
                return None
            programmer = self._find_programmer(place)
            if image is None:
                image = self.get_images().find(_properties(function_id or "", place.region))
                if record is not None and record.image == image:
                    return None
            self._replace(place, programmer, image, record)
        return image

    def trusted_record(self, card: str, number: int, region: cards.Region) -> Record | None:
        """Return the record of the image of a region, if the region still has the image."""
        record = self.records.get(card, number)
        trusted = record is not None and record.is_trusted(region, self._boot_id())
        return record if trusted else None

    def manager_state(self, region: cards.Region) -> str | None:
        """Return the state of the FPGA manager of a region; None if the region has no manager."""
        if region.manager is None:
            return None
        return self.sysfs.read_text(cards.MANAGERS / region.manager / "state")

    def _find_place(self, card: str, deployable: str) -> Place:
        """Return the region of a deployable. Raise DriverFailed if there is none."""
        functions = {f.address: f for f in self.sysfs.pci_functions()}
        if (function := functions.get(card)) is None:
            raise DriverFailed(f"there is no card {card}")
        card_regions = cards.read_regions(self.sysfs, functions.values()).get(card)
        regions = cards.list_regions(self.sysfs, function, card_regions)
        if not regions:
            raise DriverFailed(
                f"{card} has no FPGA region: it is bound to the kernel driver "
                f"{function.kernel_driver}; expected the FPGA driver of the card"
            )
        number = cards.parse_region(card, deployable, len(regions))
        if number is None:
            raise DriverFailed(f"{deployable} is not a region of {card}")
        if len(regions) > 1 and function.numvfs != len(regions):
            raise DriverFailed(
                f"{card} is offered as a whole and has {len(regions)} regions: create a virtual "
                "function for each"
            )
        management = cards.find_management(function, functions)
        return Place(
            card=card,
            region=regions[number],
            management=management,
            kernel_driver=function.kernel_driver,
            number=number,
            function=function,
            count=len(regions),
        )

    def _find_programmer(self, place: Place) -> images.Programmer:
        """Return the programmer for a region. Raise DriverFailed if none can load an image."""
        if place.function.numvfs > place.count:
            raise DriverFailed(
                f"{place.card} has {place.function.numvfs} virtual functions for {place.count} "
                "region(s): an image would change the accelerator of other "
                "servers; create one virtual function for each region"
            )
        name = self.programmer
        if name is cards.ProgrammerName.AUTO:
            family = cards.find_family(place.function.vendor, place.function.product)
            name = cards.ProgrammerName.FIRMWARE if family is None else family.programmer
        if name is cards.ProgrammerName.NONE:
            raise DriverFailed(f"{place.card} cannot be programmed while the host runs")
        obstacle = place.region.obstacle or images.PROGRAMMERS[name].find_obstacle(place)
        if obstacle is not None:
            raise DriverFailed(f"{place.card} cannot be programmed by {name}: {obstacle}")
        return images.PROGRAMMERS[name]

    def _replace(
        self, place: Place, programmer: images.Programmer, image: str, previous: Record | None
    ) -> None:
        """Load an image; after a failure restore the previous image if the region has changed.

        Raise DriverFailed after each failure.
        """
        before = self._observe(place)
        # An image that cannot be fetched raises here: nothing was changed, nothing is restored.
        error = self._try(place, programmer, image)
        if error is None:
            return
        prefix = f"image {image} could not be loaded into {place.card}: {error}"
        if before == self._observe(place) and not _may_have_changed(before):
            prefix = f"{prefix}; the region is unchanged"
            try:
                if previous is not None:  # the attempt removed its record
                    self.records.put(place.card, place.number, previous)
            except OSError as exc:
                raise DriverFailed(f"{prefix}, its record is lost: {exc}") from exc
            raise DriverFailed(prefix)
        if previous is None:
            raise DriverFailed(f"{prefix}; the previous image is not known, so it was not restored")
        try:
            failure = self._try(place, programmer, previous.image)
        except CyborgError as exc:  # the previous image cannot be fetched any more
            failure = exc.message
        if failure is not None:
            raise DriverFailed(
                f"{prefix}; the previous image {previous.image} could not be restored: {failure}"
            )
        raise DriverFailed(f"{prefix}; the previous image {previous.image} was restored")

    def _try(self, place: Place, programmer: images.Programmer, image: str) -> str | None:
        """Load an image and record it; return the error text, or None after success.

        Raise DriverFailed or Unavailable if the image cannot be fetched or does not fit; in this
        case nothing was changed.
        """

        def check(properties: Mapping[str, str]) -> None:
            images.check_properties(
                properties,
                place.function.vendor,
                place.function.product,
                place.region.interface_id,
            )

        with self.get_images().open(image, check) as opened:
            try:
                # Before the change, so that a crash leaves no wrong record.
                self.records.put(place.card, place.number, record=None)
                programmer.load(place, opened, self.access, self.timeout)
                self._record(place, opened)
            except (CyborgError, OSError) as exc:
                return exc.message if isinstance(exc, CyborgError) else str(exc)
        return None

    def _record(self, place: Place, image: Image) -> None:
        """Record the loaded image. Raise DriverFailed if the region shows another function id."""
        region = self._read_region(place)
        if region is None:
            raise DriverFailed(f"{place.card} has lost its regions")
        # The port may be in reset although the way to load reported success.
        if region.obstacle is not None:
            raise DriverFailed(region.obstacle)
        stated = images.parse_id(image.properties.get(images.FUNCTION))
        if stated is not None and region.function_id not in (None, stated):
            raise DriverFailed(
                f"the region has the function {region.function_id}, the image states {stated}"
            )
        # Without both, a record could be trusted after a reboot, which clears the region.
        boot_id = self._boot_id()
        if boot_id is None or region.identity is None:
            raise DriverFailed("the boot id of the host or the region can no longer be read")
        record = Record(
            image=image.uuid,
            function_id=stated,
            boot_id=boot_id,
            identity=region.identity,
            shown=region.function_id,
        )
        self.records.put(place.card, place.number, record)

    def _read_region(self, place: Place) -> cards.Region | None:
        """Return the region as it is now; None if it has disappeared."""
        functions = self.sysfs.pci_functions()
        found = cards.read_regions(self.sysfs, functions).get(place.card)
        regions = cards.list_regions(self.sysfs, place.function, found)
        return regions[place.number] if place.number < len(regions) else None

    def _observe(self, place: Place) -> _Observed:
        region = self._read_region(place)
        function_id = None if region is None else region.function_id
        return _Observed(self.manager_state(place.region), function_id)

    def _boot_id(self) -> str | None:
        path = self.sysfs.root.parent / "proc/sys/kernel/random/boot_id"
        return self.sysfs.read_text(path) or None


def parse_address(text: str) -> str:
    """Return a PCI address in the kernel's notation. Raise DriverFailed if it is malformed."""
    try:
        return str(PciAddress.parse(text))
    except Invalid as exc:
        raise DriverFailed(exc.message) from exc


def _may_have_changed(observed: _Observed) -> bool:
    """Return whether an attempt may have changed a region although its state is the same."""
    # True if no manager shows a state, or if the manager showed an error before the attempt.
    return observed.manager_state is None or observed.manager_state.endswith("error")


def _properties(function_id: str, region: cards.Region) -> dict[str, str]:
    """Return the properties of an image that implements a function and fits a region."""
    found = {images.FUNCTION: function_id}
    return found | ({images.REGION: region.interface_id} if region.interface_id else {})

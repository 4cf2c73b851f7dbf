# SPDX-License-Identifier: Apache-2.0
"""A driver that keeps every rule of the conformance kit, and one that breaks it for each rule."""

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from cyborg.core.device import (
    Ability,
    AttachHandle,
    Deployable,
    Device,
    DeviceType,
    HandleType,
    Health,
    Layout,
)
from cyborg.core.errors import DriverFailed
from cyborg.core.health import WELL, Measurement
from cyborg.core.job import Item
from cyborg.drivers.base import Driver, Option

CARDS = ("0000:01:00.0", "0000:02:00.0")
FULL = "/dev/full"  # a file that can be opened for writing, and nothing comes of it
PREPARED: set[str] = set()  # the state of the host: handles
IMAGES: dict[str, str] = {}  # by device
WIPED: list[str] = []  # handles
SETUPS: list[int] = []  # one for each time
PARTS: dict[str, int] = {}  # by device, how many handles it has
KEPT: list[int] = []  # descriptors, for the test to close


def write() -> None:
    """Do what is forbidden."""
    os.close(os.open(FULL, os.O_WRONLY))


class Good(Driver):
    """Has all abilities, and two cards."""

    name = "good"
    version = "1.0"
    WATCHES = frozenset({"pci"})
    OPTIONS = (Option("model", "str", "card", "What the cards are called."),)
    abilities = frozenset(Ability)

    def discover(self) -> Sequence[Device]:
        return [self.card(address) for address in CARDS]

    def card(self, address: str) -> Device:
        parts = [address, f"{address}-half"][: PARTS.get(address, 1)]
        part = Deployable(
            address,
            "FPGA",
            frozenset({"CUSTOM_GOOD"}),
            tuple(AttachHandle(one, HandleType.TEST_PCI) for one in parts),
            bitstream_id=IMAGES.get(address),
        )
        return Device(
            address, DeviceType.FPGA, "abcd", self.options["model"], self.backend,
            deployables=(part,),
        )  # fmt: skip

    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        return {d.address: WELL for d in devices}

    def prepare(self, item: Item, instance: str | None) -> None:
        PREPARED.add(item.handle)

    def release(self, item: Item) -> None:
        PREPARED.discard(item.handle)

    def sanitise(self, item: Item) -> None:
        WIPED.append(item.handle)

    def program(self, item: Item, image: str) -> None:
        IMAGES[item.device] = image

    def setup(self) -> None:
        SETUPS.append(1)

    def layouts(self, device: Device) -> Sequence[Layout]:
        kind = device.deployables[0].resource_class
        return [Layout("whole", {kind: 1}), Layout("halves", {kind: 2})]

    def partition(self, item: Item, layout: str) -> None:
        if layout not in ("whole", "halves"):
            raise DriverFailed(f"there is no layout {layout}")
        PARTS[item.device] = 1 if layout == "whole" else 2


class NoDriver:
    name = "none"


class Misnamed(Good):
    name = "Good Driver"


class Unexplained(Good):
    OPTIONS = (*Good.OPTIONS, Option("depth", "int", 1, ""))


class Untold(Good):
    TYPE = "FPGA"


class Endless(Good):
    OPTIONS = (*Good.OPTIONS, Option("depth", "float", float("nan"), "How deep it looks."))


class Demanding(Good):
    OPTIONS = (*Good.OPTIONS, Option("path", "str", "", "Where to look; it must be given."))

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if not self.options["path"]:
            raise self.misconfigured("path", "", "a path")


class Choosy(Good):
    def __init__(self, backend: str, *args: Any) -> None:
        super().__init__(backend, *args)
        if "." in backend:
            raise ValueError(backend)


class Hasty(Good):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        os.listdir(self.sysfs_root)


class HastyWriter(Good):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        write()


class Claims(Driver):
    name = "claims"
    version = "1"
    abilities = frozenset({Ability.PROGRAMS})

    def discover(self) -> Sequence[Device]:
        return Good(self.backend, {}).discover()


class Listens(Good):
    WATCHES = "pci"


class Importer(Good):
    """Says that it comes from a module that imports what no driver may."""

    __module__ = "cyborg.agent.backends"


class Raises(Good):
    def discover(self) -> Sequence[Device]:
        raise OSError("the library is not there")


class Hangs(Good):
    def discover(self) -> Sequence[Device]:
        threading.Event().wait(3.0)
        return []


class Yields(Good):
    def discover(self) -> Any:
        return (self.card(address) for address in CARDS)


class Stubborn(Good):
    def discover(self) -> Sequence[Device]:
        return [replace(d, backend="good0") for d in super().discover()]


class Mistyped(Good):
    TYPE = DeviceType.GPU


class Twice(Good):
    def discover(self) -> Sequence[Device]:
        return [self.card(CARDS[0]), self.card(CARDS[0])]


class LongNamed(Good):
    def card(self, address: str) -> Device:
        card = super().card(address)
        object.__setattr__(card.deployables[0], "address", f"{address}-{'x' * 150}")
        return card


class Inventive(Good):
    def card(self, address: str) -> Device:
        card = super().card(address)
        return replace(card, deployables=(replace(card.deployables[0], resource_class="gzip"),))


class Untyped(Good):
    def card(self, address: str) -> Device:
        return replace(super().card(address), vendor_board_info={"slots": 4})


class Counts(Good):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.looks = 0

    def card(self, address: str) -> Device:
        self.looks += 1
        return replace(super().card(address), serial=str(self.looks))


class Individual(Good):
    made: ClassVar[list[int]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made.append(1)
        self.number = len(self.made)

    def card(self, address: str) -> Device:
        return replace(super().card(address), serial=str(self.number))


class Writes(Good):
    def discover(self) -> Sequence[Device]:
        write()
        return super().discover()


class Spawns(Good):
    def discover(self) -> Sequence[Device]:
        threading.Thread(target=threading.Event().wait, args=(2.0,), daemon=True).start()
        return super().discover()


class Leaks(Good):
    def discover(self) -> Sequence[Device]:
        KEPT.append(os.open("/dev/null", os.O_RDONLY))
        return super().discover()


class Expects(Good):
    def discover(self) -> Sequence[Device]:
        os.listdir(Path(self.sysfs_root) / "bus")
        return super().discover()


class Unmeasured(Good):
    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        raise OSError("no sensor")


class Talkative(Good):
    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        return {"0000:ff:00.0": WELL}


class MeasuresByWriting(Good):
    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        write()
        return {}


class Certain(Good):
    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        return {d.address: {CARDS[0]: WELL, CARDS[1]: WELL}[d.address] for d in devices}


class Thermometer(Counts):
    def card(self, address: str) -> Device:
        return Good.card(self, address)

    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        self.looks += 1
        return {d.address: Measurement(Health.OK, f"{self.looks} degrees") for d in devices}


class Once(Good):
    def prepare(self, item: Item, instance: str | None) -> None:
        if item.handle in PREPARED:
            raise ValueError(f"{item.handle} is prepared")
        PREPARED.add(item.handle)


class Hides(Good):
    def card(self, address: str) -> Device:
        card = super().card(address)
        if address in PREPARED:
            card = replace(card, deployables=(card.deployables[0].bare(),))
        return card


class ReleasesOnce(Good):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.released: list[Any] = []

    def release(self, item: Item) -> None:
        if item.to_dict() in self.released:
            raise ValueError(f"{item.handle} is released")
        self.released.append(item.to_dict())
        super().release(item)


class Strict(Good):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.had: set[str] = set()

    def prepare(self, item: Item, instance: str | None) -> None:
        self.had.add(item.handle)
        super().prepare(item, instance)

    def release(self, item: Item) -> None:
        if item.handle in CARDS and item.handle not in PREPARED | self.had:
            raise ValueError(f"{item.handle} was never prepared")
        super().release(item)


class Clinging(Good):
    def release(self, item: Item) -> None:
        if item.handle not in CARDS:
            raise ValueError(f"there is no {item.handle}")
        super().release(item)


class WipesOnce(Good):
    def sanitise(self, item: Item) -> None:
        if item.handle in WIPED:
            raise ValueError(f"{item.handle} is wiped")
        super().sanitise(item)


class Erases(Good):
    def card(self, address: str) -> Device:
        card = super().card(address)
        if address in WIPED:
            card = replace(card, deployables=(card.deployables[0].bare(),))
        return card


class Searching(Good):
    def sanitise(self, item: Item) -> None:
        if item.handle not in CARDS:
            raise ValueError(f"there is no {item.handle}")


class SetsUpOnce(Good):
    def setup(self) -> None:
        if SETUPS:
            raise ValueError("the host is set up")
        super().setup()


class Restless(Good):
    def card(self, address: str) -> Device:
        return replace(super().card(address), serial=str(len(SETUPS)))


class Unnamed(Good):
    def layouts(self, device: Device) -> Any:
        return [*super().layouts(device), Layout("whole", {"FPGA": 2})]


class Lost(Good):
    def layouts(self, device: Device) -> Sequence[Layout]:
        return [one for one in super().layouts(device) if not one.fits(device)]


class LaysOutByWriting(Good):
    def layouts(self, device: Device) -> Sequence[Layout]:
        write()
        return super().layouts(device)


class Indivisible(Good):
    def partition(self, item: Item, layout: str) -> None:
        if layout not in ("whole", "halves"):
            raise DriverFailed(f"there is no layout {layout}")


class Obliging(Good):
    def partition(self, item: Item, layout: str) -> None:
        PARTS[item.device] = 1 if layout == "whole" else 2


class Forgets(Good):
    def program(self, item: Item, image: str) -> None:
        pass


# By the rule: who breaks it, and which others he breaks with it.
BAD: dict[str, tuple[Any, frozenset[str]]] = {
    "is_a_driver": (NoDriver, frozenset()),
    "is_named": (Misnamed, frozenset()),
    "options_are_declared": (Unexplained, frozenset()),
    "says_type_and_support": (Untold, frozenset()),
    "can_be_listed": (Endless, frozenset()),
    "defaults_are_usable": (Demanding, frozenset()),
    "any_backend": (Choosy, frozenset()),
    "making_touches_nothing": (Hasty, frozenset()),
    "abilities_have_methods": (Claims, frozenset()),
    "watches_subsystems": (Listens, frozenset()),
    "imports_the_ground_alone": (Importer, frozenset()),
    "discovers": (Raises, frozenset({"empty_host_is_fine"})),
    "discovers_in_time": (Hangs, frozenset({"empty_host_is_fine"})),
    "returns_devices": (Yields, frozenset()),
    "names_its_backend": (Stubborn, frozenset()),
    "devices_are_of_its_type": (Mistyped, frozenset()),
    "addresses_are_unique": (Twice, frozenset()),
    "provider_names_fit": (LongNamed, frozenset({"survives_the_wire"})),
    "placement_takes_the_names": (Inventive, frozenset({"layouts_are_told"})),
    "survives_the_wire": (Untyped, frozenset()),
    "answers_are_stable": (Counts, frozenset({"setup_settles"})),
    "objects_agree": (Individual, frozenset()),
    "discovery_only_reads": (Writes, frozenset()),
    "leaves_no_thread": (Spawns, frozenset()),
    "leaves_no_descriptor": (Leaks, frozenset()),
    "empty_host_is_fine": (Expects, frozenset()),
    "sets_up_twice": (SetsUpOnce, frozenset({"setup_settles"})),
    "setup_settles": (Restless, frozenset()),
    "layouts_are_told": (Unnamed, frozenset()),
    "present_layout_is_told": (
        Lost,
        frozenset({"partitions_and_shows", "refuses_unknown_layouts"}),
    ),
    "layouts_only_reads": (LaysOutByWriting, frozenset()),
    "partitions_and_shows": (Indivisible, frozenset()),
    "refuses_unknown_layouts": (Obliging, frozenset()),
    "measures_in_time": (Unmeasured, frozenset({"measures_what_is_gone"})),
    "measures_what_it_is_asked": (Talkative, frozenset()),
    "measuring_only_reads": (MeasuresByWriting, frozenset()),
    "measures_what_is_gone": (Certain, frozenset()),
    "reasons_are_steady": (Thermometer, frozenset()),
    "prepares_twice": (Once, frozenset()),
    "prepared_handles_stay": (Hides, frozenset()),
    "releases_twice": (ReleasesOnce, frozenset()),
    "releases_the_unprepared": (Strict, frozenset()),
    "releases_the_gone": (Clinging, frozenset()),
    "sanitises_twice": (WipesOnce, frozenset({"sanitised_handles_stay", "sanitises_the_gone"})),
    "sanitised_handles_stay": (Erases, frozenset()),
    "sanitises_the_gone": (Searching, frozenset()),
    "programs_and_shows": (Forgets, frozenset()),
}

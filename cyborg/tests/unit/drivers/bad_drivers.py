# SPDX-License-Identifier: Apache-2.0
"""A driver that meets every rule of the conformance kit, and a bad driver for each rule."""

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from cyborg.core.drivers.registry import Option
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import (
    Ability,
    AttachHandle,
    Deployable,
    Device,
    DeviceType,
    HandleType,
    Health,
    Layout,
)
from cyborg.core.inventory.device_state import HEALTHY, Measurement
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import Driver

CARDS = ("0000:01:00.0", "0000:02:00.0")
FULL = "/dev/full"  # can be opened for writing without an effect
PREPARED: set[str] = set()  # the state of the host: handles
IMAGES: dict[str, str] = {}  # by device
WIPED: list[str] = []  # handles
SETUP_CALLS: list[int] = []  # one entry for each call
HANDLE_COUNTS: dict[str, int] = {}  # number of handles by device
OPEN_DESCRIPTORS: list[int] = []  # closed by the test


def write() -> None:
    """Open a file for writing, which is forbidden."""
    os.close(os.open(FULL, os.O_WRONLY))


class Good(Driver):
    """Driver with all abilities and two cards."""

    name = "good"
    version = "1.0"
    UEVENT_SUBSYSTEMS = frozenset({"pci"})
    OPTIONS: ClassVar[tuple[Option, ...]] = (Option("model", "str", "card", "Name of the cards."),)
    abilities = frozenset(Ability)

    def discover(self) -> Sequence[Device]:
        return [self.card(address) for address in CARDS]

    def card(self, address: str) -> Device:
        handles = [address, f"{address}-half"][: HANDLE_COUNTS.get(address, 1)]
        deployable = Deployable(
            address,
            "FPGA",
            frozenset({"CUSTOM_GOOD"}),
            tuple(AttachHandle(handle, HandleType.TEST_PCI) for handle in handles),
            bitstream_id=IMAGES.get(address),
        )
        return Device(
            address, DeviceType.FPGA, "abcd", self.options["model"], self.backend,
            deployables=(deployable,),
        )  # fmt: skip

    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        return {d.address: HEALTHY for d in devices}

    def prepare(self, item: WorkItem, instance: str | None) -> None:
        PREPARED.add(item.handle)

    def release(self, item: WorkItem) -> None:
        PREPARED.discard(item.handle)

    def sanitise(self, item: WorkItem) -> None:
        WIPED.append(item.handle)

    def program(self, item: WorkItem, image: str) -> None:
        IMAGES[item.device] = image

    def setup(self) -> None:
        SETUP_CALLS.append(1)

    def layouts(self, device: Device) -> Sequence[Layout]:
        kind = device.deployables[0].resource_class
        return [Layout("whole", {kind: 1}), Layout("halves", {kind: 2})]

    def partition(self, item: WorkItem, layout: str) -> None:
        if layout not in ("whole", "halves"):
            raise DriverFailed(f"there is no layout {layout}")
        HANDLE_COUNTS[item.device] = 1 if layout == "whole" else 2


class NoDriver:
    name = "none"


class Misnamed(Good):
    name = "Good Driver"


class Unexplained(Good):
    OPTIONS = (*Good.OPTIONS, Option("depth", "int", 1, ""))


class Opener(Good):
    OPTIONS = (*Good.OPTIONS, Option("journal", "str", "", "The path of a file that is written."))


class WrongType(Good):
    DEVICE_TYPE = "FPGA"  # type: ignore[assignment]


class Endless(Good):
    OPTIONS = (*Good.OPTIONS, Option("depth", "float", float("nan"), "How deep it count."))


class Demanding(Good):
    OPTIONS = (*Good.OPTIONS, Option("slot", "str", "", "PCI slot to scan; required."))

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if not self.options["slot"]:
            raise self.misconfigured("slot", "", "a path")


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
    UEVENT_SUBSYSTEMS = "pci"  # type: ignore[assignment]


class Importer(Good):
    """Driver that pretends to be in a module with forbidden imports."""

    __module__ = "cyborg.agent.backends.factory"


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
    DEVICE_TYPE = DeviceType.GPU


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
        info: Any = {"slots": 4}
        return replace(super().card(address), vendor_board_info=info)


class Counts(Good):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.count = 0

    def card(self, address: str) -> Device:
        self.count += 1
        return replace(super().card(address), serial=str(self.count))


class Individual(Good):
    instances: ClassVar[list[int]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.instances.append(1)
        self.number = len(self.instances)

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
        OPEN_DESCRIPTORS.append(os.open("/dev/null", os.O_RDONLY))
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
        return {"0000:ff:00.0": HEALTHY}


class MeasuresByWriting(Good):
    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        write()
        return {}


class Certain(Good):
    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        return {d.address: {CARDS[0]: HEALTHY, CARDS[1]: HEALTHY}[d.address] for d in devices}


class Thermometer(Counts):
    def card(self, address: str) -> Device:
        return Good.card(self, address)

    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        self.count += 1
        return {d.address: Measurement(Health.OK, f"{self.count} degrees") for d in devices}


class Once(Good):
    def prepare(self, item: WorkItem, instance: str | None) -> None:
        if item.handle in PREPARED:
            raise ValueError(f"{item.handle} is prepared")
        PREPARED.add(item.handle)


class Hides(Good):
    def card(self, address: str) -> Device:
        card = super().card(address)
        if address in PREPARED:
            card = replace(card, deployables=(card.deployables[0].without_handles(),))
        return card


class ReleasesOnce(Good):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.released: list[Any] = []

    def release(self, item: WorkItem) -> None:
        if item.to_dict() in self.released:
            raise ValueError(f"{item.handle} is released")
        self.released.append(item.to_dict())
        super().release(item)


class Strict(Good):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.had: set[str] = set()

    def prepare(self, item: WorkItem, instance: str | None) -> None:
        self.had.add(item.handle)
        super().prepare(item, instance)

    def release(self, item: WorkItem) -> None:
        if item.handle in CARDS and item.handle not in PREPARED | self.had:
            raise ValueError(f"{item.handle} was never prepared")
        super().release(item)


class Clinging(Good):
    def release(self, item: WorkItem) -> None:
        if item.handle not in CARDS:
            raise ValueError(f"there is no {item.handle}")
        super().release(item)


class WipesOnce(Good):
    def sanitise(self, item: WorkItem) -> None:
        if item.handle in WIPED:
            raise ValueError(f"{item.handle} is wiped")
        super().sanitise(item)


class Erases(Good):
    def card(self, address: str) -> Device:
        card = super().card(address)
        if address in WIPED:
            card = replace(card, deployables=(card.deployables[0].without_handles(),))
        return card


class Searching(Good):
    def sanitise(self, item: WorkItem) -> None:
        if item.handle not in CARDS:
            raise ValueError(f"there is no {item.handle}")


class SetsUpOnce(Good):
    def setup(self) -> None:
        if SETUP_CALLS:
            raise ValueError("the host is set up")
        super().setup()


class Restless(Good):
    def card(self, address: str) -> Device:
        return replace(super().card(address), serial=str(len(SETUP_CALLS)))


class Unnamed(Good):
    def layouts(self, device: Device) -> Any:
        return [*super().layouts(device), Layout("whole", {"FPGA": 2})]


class Lost(Good):
    def layouts(self, device: Device) -> Sequence[Layout]:
        return [layout for layout in super().layouts(device) if not layout.matches(device)]


class LaysOutByWriting(Good):
    def layouts(self, device: Device) -> Sequence[Layout]:
        write()
        return super().layouts(device)


class Indivisible(Good):
    def partition(self, item: WorkItem, layout: str) -> None:
        if layout not in ("whole", "halves"):
            raise DriverFailed(f"there is no layout {layout}")


class Obliging(Good):
    def partition(self, item: WorkItem, layout: str) -> None:
        HANDLE_COUNTS[item.device] = 1 if layout == "whole" else 2


class Forgets(Good):
    def program(self, item: WorkItem, image: str) -> None:
        pass


# For each rule: the driver that violates it, and the other rules that it also violates.
BAD_DRIVERS: dict[str, tuple[Any, frozenset[str]]] = {
    "is_driver_class": (NoDriver, frozenset()),
    "has_name_and_version": (Misnamed, frozenset()),
    "options_are_valid": (Unexplained, frozenset()),
    "path_options_are_host_only": (Opener, frozenset()),
    "declares_type_and_support": (WrongType, frozenset()),
    "metadata_is_serialisable": (Endless, frozenset()),
    "defaults_are_usable": (Demanding, frozenset()),
    "accepts_any_backend_name": (Choosy, frozenset()),
    "constructor_has_no_side_effects": (Hasty, frozenset()),
    "abilities_are_implemented": (Claims, frozenset()),
    "uevent_subsystems_are_valid": (Listens, frozenset()),
    "imports_only_core_and_drivers": (Importer, frozenset()),
    "discover_succeeds": (Raises, frozenset({"discover_accepts_empty_host"})),
    "discover_is_in_time": (Hangs, frozenset({"discover_accepts_empty_host"})),
    "discover_returns_devices": (Yields, frozenset()),
    "devices_name_their_backend": (Stubborn, frozenset()),
    "devices_match_device_type": (Mistyped, frozenset()),
    "addresses_are_unique": (Twice, frozenset()),
    "provider_names_are_valid": (LongNamed, frozenset({"devices_are_serialisable"})),
    "classes_and_traits_are_valid": (Inventive, frozenset({"layouts_are_valid"})),
    "devices_are_serialisable": (Untyped, frozenset()),
    "discovery_is_stable": (Counts, frozenset({"setup_preserves_devices"})),
    "discovery_is_reproducible": (Individual, frozenset()),
    "discover_is_read_only": (Writes, frozenset()),
    "discover_leaks_no_thread": (Spawns, frozenset()),
    "discover_leaks_no_descriptor": (Leaks, frozenset()),
    "discover_accepts_empty_host": (Expects, frozenset()),
    "setup_is_idempotent": (SetsUpOnce, frozenset({"setup_preserves_devices"})),
    "setup_preserves_devices": (Restless, frozenset()),
    "layouts_are_valid": (Unnamed, frozenset()),
    "layouts_include_current": (
        Lost,
        frozenset({"partition_is_discovered", "partition_rejects_unknown_layout"}),
    ),
    "layouts_is_read_only": (LaysOutByWriting, frozenset()),
    "partition_is_discovered": (Indivisible, frozenset()),
    "partition_rejects_unknown_layout": (Obliging, frozenset()),
    "measure_is_in_time": (Unmeasured, frozenset({"measure_accepts_missing_devices"})),
    "measure_returns_measurements": (Talkative, frozenset()),
    "measure_is_read_only": (MeasuresByWriting, frozenset()),
    "measure_accepts_missing_devices": (Certain, frozenset()),
    "health_reasons_are_stable": (Thermometer, frozenset()),
    "prepare_is_idempotent": (Once, frozenset()),
    "prepared_handles_are_discovered": (Hides, frozenset()),
    "release_is_idempotent": (ReleasesOnce, frozenset()),
    "release_accepts_unprepared": (Strict, frozenset()),
    "release_accepts_missing": (Clinging, frozenset()),
    "sanitise_is_idempotent": (
        WipesOnce,
        frozenset({"sanitised_handles_are_discovered", "sanitise_accepts_missing"}),
    ),
    "sanitised_handles_are_discovered": (Erases, frozenset()),
    "sanitise_accepts_missing": (Searching, frozenset()),
    "programmed_image_is_discovered": (Forgets, frozenset()),
}

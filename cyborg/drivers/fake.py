# SPDX-License-Identifier: Apache-2.0
"""A driver without hardware, for tests and demonstrations, and its options."""

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cyborg.core.address import PciAddress
from cyborg.core.drivers.registry import Option, Support
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.inventory import device as inventory
from cyborg.core.inventory.device_state import HEALTHY, Measurement
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import Driver, in_range
from cyborg.drivers.pci import managed

MAX_DEVICES = 4096
MAX_HANDLES = 256  # a PCI bus has 32 devices of 8 functions

# Options of files on the host: their help by name.
_FILES = {
    "gate": "Path of a file. A hanging call succeeds as soon as the file exists; without this "
    "option it hangs forever.",
    "sick": "Path of a file that lists the unhealthy cards, one per line: the address, or * for "
    "all, a space and the reason. All other cards are healthy. Without this option no health is "
    "measured.",
    "absent": "Path of a file that lists the addresses of absent cards, one per line. It is read "
    "at each discovery.",
    "divided": "Path of a file that stores the number of handles of each partitioned card, one "
    "address and number per line. Without this option cards cannot be partitioned.",
    "journal": "Path of a file to which the driver appends a line of JSON at the start of each "
    "setup and each prepare, release, sanitise and program call, and after each fetched image.",
}

OPTIONS = (
    Option("num_devices", "int", 1, f"Number of cards, up to {MAX_DEVICES}."),
    Option("num_handles", "int", 16, f"Number of handles of each card, up to {MAX_HANDLES}."),
    Option(
        "address",
        "str",
        "0000:0c:00.0",
        "PCI address of the first card; each further card is on the next bus. Two backends of "
        "one host need cards at different addresses.",
    ),
    *managed.OPTIONS,
    Option(
        "setup",
        "str",
        "none",
        "Result of setting up the host: ok, fail or hang; none means that no setup is needed.",
    ),
    Option(
        "fail", "str", "", "Error message of every discovery; empty means that discoveries succeed."
    ),
    Option("hang", "float", 0.0, "Duration of every discovery in seconds."),
    Option(
        "prepare",
        "str",
        "none",
        "Result of preparing a handle for an instance: ok, fail or hang; none means that handles "
        "need no preparation.",
    ),
    Option("prepare_seconds", "float", 0.0, "Duration of preparing a handle in seconds."),
    Option("releasing", "str", "ok", "Result of releasing a handle: ok, fail or hang."),
    Option(
        "sanitise",
        "str",
        "none",
        "Result of wiping a handle after an instance released it: ok, fail or hang; none means "
        "that handles are not wiped.",
    ),
    Option(
        "program",
        "str",
        "ok",
        "Result of loading an image: ok, fail or hang. The card reports the image until the agent "
        "stops or the backend changes.",
    ),
    Option(
        "fetch_images",
        "bool",
        False,
        "Whether to fetch each image that is loaded, and those that device profiles request by "
        "accel:bitstream_id or accel:function_id, from the image service. Their data are not used.",
    ),
    *(Option(name, "str", "", text, host_only=True) for name, text in _FILES.items()),
)


_BUSES = 256  # in a PCI domain
_POLL_INTERVAL = 0.05  # seconds between two checks of the gate file
_RESULTS = ("ok", "fail", "hang")
_OPTIONAL_RESULTS = ("none", *_RESULTS)
_MODES = {
    "setup": _OPTIONAL_RESULTS,
    "prepare": _OPTIONAL_RESULTS,
    "releasing": _RESULTS,
    "sanitise": _OPTIONAL_RESULTS,
    "program": _RESULTS,
}


class FakeDriver(Driver):
    """Simulator of cards, each on its own PCI bus; the PCI functions of a card are its handles."""

    name = "fake"
    version = "1.0"
    DEVICE_TYPE = inventory.DeviceType.FPGA
    SUPPORT_LEVEL = Support.REFERENCE
    OPTIONS = OPTIONS

    def __init__(
        self, backend: str, options: Mapping[str, Any], sysfs_root: str | Path = "/sys"
    ) -> None:
        super().__init__(backend, options, sysfs_root)
        self.parse_option("num_devices", in_range(0, MAX_DEVICES))
        self.parse_option("num_handles", in_range(0, MAX_HANDLES))
        try:
            self._first = PciAddress.parse(self.options["address"])
        except Invalid as exc:
            raise self.misconfigured(
                "address", self.options["address"], "a PCI address such as 0000:0c:00.0"
            ) from exc
        for option, modes in _MODES.items():
            if self.options[option] not in modes:
                raise self.misconfigured(option, self.options[option], f"one of {', '.join(modes)}")
        if self.options["prepare_seconds"] < 0:
            raise self.misconfigured(
                "prepare_seconds", self.options["prepare_seconds"], "0 or more"
            )
        self._managed = managed.read_options(self)
        self._images: dict[str, str] = {}

    @property
    def abilities(self) -> frozenset[inventory.Ability]:
        """Return PROGRAMS and the abilities that the options enable."""
        enabled = {
            inventory.Ability.PROGRAMS: True,
            inventory.Ability.PREPARES: self.options["prepare"] != "none",
            inventory.Ability.SANITISES: self.options["sanitise"] != "none",
            inventory.Ability.PARTITIONS: self.options["divided"],
            inventory.Ability.MEASURES: self.options["sick"],
        }
        return frozenset(ability for ability, is_enabled in enabled.items() if is_enabled)

    def discover(self) -> Sequence[inventory.Device]:
        """Return the cards, after the configured delay or failure."""
        if self.options["hang"]:
            threading.Event().wait(self.options["hang"])
        if self.options["fail"]:
            raise DriverFailed(self.options["fail"])
        absent = {line.strip() for line in _read_lines(self.options["absent"])}
        cards = (self._card(address) for address in self._addresses())
        return [card for card in cards if card.address not in absent]

    def measure(self, devices: Sequence[inventory.Device]) -> Mapping[str, Measurement]:
        """Return the health of each device according to the file of unhealthy cards."""
        lines = _read_lines(self.options["sick"])
        pairs = (line.partition(" ") for line in lines if line.strip())
        reasons = {key: reason.strip() or None for key, _, reason in pairs}
        measurements: dict[str, Measurement] = {}
        for device in devices:
            # A line with the address of a card counts before the line for all cards.
            key = device.address if device.address in reasons else "*"
            unhealthy = Measurement(inventory.Health.UNHEALTHY, reasons.get(key))
            measurements[device.address] = unhealthy if key in reasons else HEALTHY
        return measurements

    def setup(self) -> None:
        """Simulate the setup of the host with the configured result."""
        if self.options["setup"] != "none":
            self._append_journal({"act": "setup"})
            self._simulate("setup", "setup of the host")

    def prepare(self, item: WorkItem, instance: str | None) -> None:
        """Simulate the preparation with the configured duration and result."""
        self._record("prepare", item, instance=instance)
        if self.options["prepare_seconds"]:
            threading.Event().wait(self.options["prepare_seconds"])
        self._simulate_work("prepare", item)
        if item.handle not in {h.address for h in self._deployable(item).handles}:
            raise DriverFailed(f"card {item.deployable} has no handle {item.handle}")
        if self.options["fetch_images"]:
            self._fetch_requested(item)

    def release(self, item: WorkItem) -> None:
        """Simulate the release with the configured result; the handle need not exist."""
        self._record("release", item)
        self._simulate_work("release", item)

    def sanitise(self, item: WorkItem) -> None:
        """Simulate the wipe with the configured result; the handle need not exist."""
        self._record("sanitise", item)
        self._simulate_work("sanitise", item)

    def layouts(self, device: inventory.Device) -> Sequence[inventory.Layout]:
        """Return three layouts: one handle, half of the handles, and all handles."""
        total = self.options["num_handles"]
        return [
            inventory.Layout(str(n), {"FPGA": n})
            for n in sorted({min(1, total), total // 2 or total, total})
        ]

    def partition(self, item: WorkItem, layout: str) -> None:
        """Write the number of handles of the layout to the file of the option ``divided``."""
        card = next((d for d in self.discover() if d.address == item.device), None)
        if card is None or layout not in {supported.name for supported in self.layouts(card)}:
            raise DriverFailed(f"card {item.device} cannot be divided into {layout}")
        counts = {**self._handle_counts(), item.device: layout}
        text = "".join(f"{address} {number}\n" for address, number in counts.items())
        Path(self.options["divided"]).write_text(text, encoding="utf-8")

    def program(self, item: WorkItem, image: str) -> None:
        """Simulate the programming with the configured result, and store the image in memory."""
        self._record("program", item, image=image)
        self._simulate_work("program", item)
        address = self._deployable(item).address
        if self.options["fetch_images"]:
            self._fetch(item, image)
        self._images[address] = image

    def _fetch_requested(self, item: WorkItem) -> None:
        """Fetch the image that the device profile requests by its uuid or its function id."""
        image, function = item.accel.get("bitstream_id"), item.accel.get("function_id")
        if image is None and function is not None:
            image = self.images.find({"accel:function_id": function})
        if image is not None:
            self._fetch(item, image)

    def _fetch(self, item: WorkItem, image: str) -> None:
        """Fetch an image and record its digest."""
        with self.images.open(image) as fetched, fetched.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._record("fetch", item, image=fetched.uuid, sha256=digest)

    def _simulate_work(self, act: str, item: WorkItem) -> None:
        # The name "release" is taken by the option that lists released cards.
        option = "releasing" if act == "release" else act
        self._simulate(option, f"{act} of {item.handle or item.deployable}")

    def _simulate(self, option: str, description: str) -> None:
        if self.options[option] == "fail":
            raise DriverFailed(f"configured to fail: {description}")
        if self.options[option] == "hang":
            gate, never = self.options["gate"], threading.Event()
            while not (gate and os.path.exists(gate)):
                never.wait(_POLL_INTERVAL)

    def _record(self, act: str, item: WorkItem, **fields: str | None) -> None:
        self._append_journal(
            {"act": act, "deployable": item.deployable, "handle": item.handle, **fields}
        )

    def _append_journal(self, entry: Mapping[str, Any]) -> None:
        if self.options["journal"]:
            with open(self.options["journal"], "a", encoding="utf-8") as file:
                file.write(f"{json.dumps(entry)}\n")

    def _deployable(self, item: WorkItem) -> inventory.Deployable:
        for address in self._addresses():
            if str(address) == item.deployable:
                return self._card(address).deployables[0]
        raise DriverFailed(f"there is no card {item.deployable}")

    def _handle_counts(self) -> dict[str, str]:
        """Return the stored number of handles by card address."""
        return dict(line.split() for line in _read_lines(self.options["divided"]))

    def _num_handles(self, address: str) -> int:
        return int(self._handle_counts().get(address, self.options["num_handles"]))

    def _addresses(self) -> list[PciAddress]:
        """Return the addresses of all configured and adopted cards, without released cards."""
        configured = [self._nth_address(number) for number in range(self.options["num_devices"])]
        adopted = [PciAddress.parse(address) for address in self._managed.adopted]
        addresses = dict.fromkeys([*configured, *adopted])
        return [a for a in addresses if self._managed.decision(str(a)) is not False]

    def _nth_address(self, number: int) -> PciAddress:
        domains, bus = divmod(self._first.bus + number, _BUSES)
        return replace(self._first, domain=self._first.domain + domains, bus=bus)

    def _card(self, address: PciAddress) -> inventory.Device:
        deployable = inventory.Deployable(
            address=str(address),
            resource_class="FPGA",
            traits=frozenset({"CUSTOM_FAKE_DEVICE"}),
            handles=tuple(_handle(address, n) for n in range(self._num_handles(str(address)))),
            bitstream_id=self._images.get(str(address)),
        )
        return inventory.Device(
            address=str(address),
            type=inventory.DeviceType.FPGA,
            vendor="0xABCD",
            model="miss model info",
            backend=self.backend,
            std_board_info={"vendor_id": "0xABCD", "product_id": "0xABCD", "class": "Fake class"},
            vendor_board_info={"fake_vendor_info": "fake_vendor_info"},
            deployables=(deployable,),
        )


def _read_lines(path: str) -> list[str]:
    """Return the lines of a file that a test writes; an empty list if it does not exist."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines() if path else []
    except FileNotFoundError:
        return []


def _handle(card: PciAddress, number: int) -> inventory.AttachHandle:
    device, function = divmod(number, 8)
    address = replace(card, device=device, function=function)
    return inventory.AttachHandle(
        str(address), inventory.HandleType.TEST_PCI, address.attach_info()
    )

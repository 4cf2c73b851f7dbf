# SPDX-License-Identifier: Apache-2.0
"""A driver without hardware, for tests and for trying the service out.

Its handles have the type TEST_PCI, which Nova's libvirt driver passes over.
"""

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cyborg.core.address import PciAddress
from cyborg.core.device import (
    Ability,
    AttachHandle,
    Deployable,
    Device,
    DeviceType,
    HandleType,
    Health,
)
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.health import WELL, Measurement
from cyborg.core.job import Item
from cyborg.drivers.base import Driver, Option

MAX_DEVICES = 4096
MAX_HANDLES = 256  # a PCI bus has 32 devices of 8 functions
_BUSES = 256  # in a PCI domain
_PEEK = 0.05  # seconds between two looks at the gate
_ACTS = ("ok", "fail", "hang")
_MODES = {"prepare": ("none", *_ACTS), "release": _ACTS, "program": _ACTS}


class FakeDriver(Driver):
    """Invents cards, each alone on a bus, whose functions are the handles."""

    name = "fake"
    version = "1.0"
    OPTIONS = (
        Option("num_devices", "int", 1, f"How many cards there are, up to {MAX_DEVICES}."),
        Option("num_handles", "int", 16, f"How many handles each card has, up to {MAX_HANDLES}."),
        Option(
            "address",
            "str",
            "0000:0c:00.0",
            "Where the first card stands; each other has the next bus. Two backends of one host "
            "need cards at different addresses.",
        ),
        Option("fail", "str", "", "If not empty, every discovery fails with this message."),
        Option("hang", "float", 0.0, "Seconds that every discovery takes."),
        Option(
            "prepare",
            "str",
            "none",
            "What preparing a handle for an instance comes to: ok, fail or hang; with none the "
            "handles need not be prepared.",
        ),
        Option("prepare_seconds", "float", 0.0, "Seconds that preparing a handle takes."),
        Option("release", "str", "ok", "What releasing a handle comes to: ok, fail or hang."),
        Option(
            "program",
            "str",
            "ok",
            "What loading an image comes to: ok, fail or hang. The card shows the image until the "
            "agent ends.",
        ),
        Option(
            "gate",
            "str",
            "",
            "The path of a file: what hangs goes on, and is ok, once it is there. Without one it "
            "hangs for ever.",
        ),
        Option(
            "sick",
            "str",
            "",
            "The path of a file that names the cards which are sick, one a line: the address, or * "
            "for all, and after a space the reason. What it does not name is well. Without this "
            "option no health is measured.",
        ),
        Option(
            "absent",
            "str",
            "",
            "The path of a file that names the cards which are not there, an address a line. It is "
            "read at each discovery.",
        ),
        Option(
            "journal",
            "str",
            "",
            "The path of a file that gets a line of JSON for each handle prepared or released and "
            "each deployable programmed, when that begins.",
        ),
    )

    def __init__(
        self, backend: str, options: Mapping[str, Any], sysfs_root: str | Path = "/sys"
    ) -> None:
        super().__init__(backend, options, sysfs_root)
        for option, most in (("num_devices", MAX_DEVICES), ("num_handles", MAX_HANDLES)):
            if not 0 <= self.options[option] <= most:
                raise self.misconfigured(option, self.options[option], f"0 to {most}")
        try:
            self._first = PciAddress.parse(self.options["address"])
        except Invalid as bad:
            raise self.misconfigured(
                "address", self.options["address"], "a PCI address such as 0000:0c:00.0"
            ) from bad
        for option, modes in _MODES.items():
            if self.options[option] not in modes:
                raise self.misconfigured(option, self.options[option], f"one of {', '.join(modes)}")
        if self.options["prepare_seconds"] < 0:
            raise self.misconfigured(
                "prepare_seconds", self.options["prepare_seconds"], "0 or more"
            )
        self._images: dict[str, str] = {}

    @property
    def abilities(self) -> frozenset[Ability]:
        """Cards can be programmed, and are prepared and measured if so configured."""
        able = {Ability.PROGRAMS}
        if self.options["prepare"] != "none":
            able.add(Ability.PREPARES)
        if self.options["sick"]:
            able.add(Ability.MEASURES)
        return frozenset(able)

    def discover(self) -> Sequence[Device]:
        """Return the cards, unless told to hang or to fail."""
        if self.options["hang"]:
            threading.Event().wait(self.options["hang"])
        if self.options["fail"]:
            raise DriverFailed(self.options["fail"])
        gone = {line.strip() for line in _lines(self.options["absent"])}
        cards = (self._card(number) for number in range(self.options["num_devices"]))
        return [card for card in cards if card.address not in gone]

    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        """Return what the file says."""
        lines = _lines(self.options["sick"])
        pairs = (line.partition(" ") for line in lines if line.strip())
        named = {address: reason.strip() or None for address, _, reason in pairs}
        return {
            d.address: Measurement(Health.UNHEALTHY, named.get(d.address, named.get("*")))
            if d.address in named or "*" in named
            else WELL
            for d in devices
        }

    def prepare(self, item: Item, instance: str | None) -> None:
        """Take the time that is configured and do as told."""
        self._note("prepare", item, instance=instance)
        if self.options["prepare_seconds"]:
            threading.Event().wait(self.options["prepare_seconds"])
        self._do("prepare", item)
        if item.handle not in {h.address for h in self._part(item).handles}:
            raise DriverFailed(f"card {item.deployable} has no handle {item.handle}")

    def release(self, item: Item) -> None:
        """Do as told, be the handle there or not."""
        self._note("release", item)
        self._do("release", item)

    def program(self, item: Item, image: str) -> None:
        """Remember the image, or do as told."""
        self._note("program", item, image=image)
        self._do("program", item)
        self._images[self._part(item).address] = image

    def _do(self, act: str, item: Item) -> None:
        if self.options[act] == "fail":
            raise DriverFailed(f"told to fail: {act} of {item.handle or item.deployable}")
        if self.options[act] == "hang":
            gate, never = self.options["gate"], threading.Event()
            while not (gate and os.path.exists(gate)):
                never.wait(_PEEK)

    def _note(self, act: str, item: Item, **more: str | None) -> None:
        if self.options["journal"]:
            line = {"act": act, "deployable": item.deployable, "handle": item.handle, **more}
            with open(self.options["journal"], "a", encoding="utf-8") as file:
                file.write(f"{json.dumps(line)}\n")

    def _part(self, item: Item) -> Deployable:
        for number in range(self.options["num_devices"]):
            if str(self._place(number)) == item.deployable:
                return self._card(number).deployables[0]
        raise DriverFailed(f"there is no card {item.deployable}")

    def _place(self, number: int) -> PciAddress:
        beyond, bus = divmod(self._first.bus + number, _BUSES)
        return replace(self._first, domain=self._first.domain + beyond, bus=bus)

    def _card(self, number: int) -> Device:
        here = self._place(number)
        part = Deployable(
            address=str(here),
            resource_class="FPGA",
            traits=frozenset({"CUSTOM_FAKE_DEVICE"}),
            handles=tuple(_handle(here, n) for n in range(self.options["num_handles"])),
            bitstream_id=self._images.get(str(here)),
        )
        return Device(
            address=str(here),
            type=DeviceType.FPGA,
            vendor="0xABCD",
            model="miss model info",
            backend=self.backend,
            std_board_info={"vendor_id": "0xABCD", "product_id": "0xABCD", "class": "Fake class"},
            vendor_board_info={"fake_vendor_info": "fake_vendor_info"},
            deployables=(part,),
        )


def _lines(path: str) -> list[str]:
    """Return the lines of a file that a test writes; none while there is no such file."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines() if path else []
    except FileNotFoundError:
        return []


def _handle(card: PciAddress, number: int) -> AttachHandle:
    device, function = divmod(number, 8)
    address = replace(card, device=device, function=function)
    return AttachHandle(str(address), HandleType.TEST_PCI, address.attach_info())

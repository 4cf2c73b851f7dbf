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
from cyborg.core.catalogue import Support
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
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.health import WELL, Measurement
from cyborg.core.job import Item
from cyborg.drivers import managed
from cyborg.drivers.base import Driver
from cyborg.drivers.fake_options import MAX_DEVICES, MAX_HANDLES, OPTIONS

_BUSES = 256  # in a PCI domain
_PEEK = 0.05  # seconds between two looks at the gate
_ACTS = ("ok", "fail", "hang")
_ASKED = ("none", *_ACTS)
_MODES = {
    "setup": _ASKED,
    "prepare": _ASKED,
    "releasing": _ACTS,
    "sanitise": _ASKED,
    "program": _ACTS,
}


class FakeDriver(Driver):
    """Invents cards, each alone on a bus, whose functions are the handles."""

    name = "fake"
    version = "1.0"
    TYPE = DeviceType.FPGA
    SUPPORT = Support.REFERENCE
    OPTIONS = OPTIONS

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
        self._managed = managed.read(self)
        self._images: dict[str, str] = {}

    @property
    def abilities(self) -> frozenset[Ability]:
        """Cards can be programmed, and more if so configured."""
        able = {Ability.PROGRAMS}
        if self.options["prepare"] != "none":
            able.add(Ability.PREPARES)
        if self.options["sanitise"] != "none":
            able.add(Ability.SANITISES)
        if self.options["divided"]:
            able.add(Ability.PARTITIONS)
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
        cards = (self._card(place) for place in self._places())
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

    def setup(self) -> None:
        """Do as told."""
        if self.options["setup"] != "none":
            self._write({"act": "setup"})
            self._come_to("setup", "setup of the host")

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

    def sanitise(self, item: Item) -> None:
        """Do as told, be the handle there or not."""
        self._note("sanitise", item)
        self._do("sanitise", item)

    def layouts(self, device: Device) -> Sequence[Layout]:
        """Return all in one, in halves, and whole."""
        most = self.options["num_handles"]
        return [
            Layout(str(n), {"FPGA": n}) for n in sorted({min(1, most), most // 2 or most, most})
        ]

    def partition(self, item: Item, layout: str) -> None:
        """Keep the number in the file."""
        card = next((d for d in self.discover() if d.address == item.device), None)
        if card is None or layout not in {one.name for one in self.layouts(card)}:
            raise DriverFailed(f"card {item.device} cannot be divided into {layout}")
        kept = {**self._divided(), item.device: layout}
        text = "".join(f"{address} {number}\n" for address, number in kept.items())
        Path(self.options["divided"]).write_text(text, encoding="utf-8")

    def program(self, item: Item, image: str) -> None:
        """Remember the image, or do as told."""
        self._note("program", item, image=image)
        self._do("program", item)
        self._images[self._part(item).address] = image

    def _do(self, act: str, item: Item) -> None:
        # The option release is a list of cards.
        option = "releasing" if act == "release" else act
        self._come_to(option, f"{act} of {item.handle or item.deployable}")

    def _come_to(self, option: str, what: str) -> None:
        if self.options[option] == "fail":
            raise DriverFailed(f"told to fail: {what}")
        if self.options[option] == "hang":
            gate, never = self.options["gate"], threading.Event()
            while not (gate and os.path.exists(gate)):
                never.wait(_PEEK)

    def _note(self, act: str, item: Item, **more: str | None) -> None:
        self._write({"act": act, "deployable": item.deployable, "handle": item.handle, **more})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self.options["journal"]:
            with open(self.options["journal"], "a", encoding="utf-8") as file:
                file.write(f"{json.dumps(line)}\n")

    def _part(self, item: Item) -> Deployable:
        for place in self._places():
            if str(place) == item.deployable:
                return self._card(place).deployables[0]
        raise DriverFailed(f"there is no card {item.deployable}")

    def _divided(self) -> dict[str, str]:
        """Return what the file says, by the card's address."""
        return dict(line.split() for line in _lines(self.options["divided"]))

    def _num_handles(self, address: str) -> int:
        return int(self._divided().get(address, self.options["num_handles"]))

    def _places(self) -> list[PciAddress]:
        """Return where the cards stand: a row of them, and those adopted; not those released."""
        row = [self._place(number) for number in range(self.options["num_devices"])]
        adopted = [PciAddress.parse(address) for address in self._managed.adopted]
        every = dict.fromkeys([*row, *adopted])
        return [place for place in every if self._managed.decides(str(place)) is not False]

    def _place(self, number: int) -> PciAddress:
        beyond, bus = divmod(self._first.bus + number, _BUSES)
        return replace(self._first, domain=self._first.domain + beyond, bus=bus)

    def _card(self, here: PciAddress) -> Device:
        part = Deployable(
            address=str(here),
            resource_class="FPGA",
            traits=frozenset({"CUSTOM_FAKE_DEVICE"}),
            handles=tuple(_handle(here, n) for n in range(self._num_handles(str(here)))),
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

# SPDX-License-Identifier: Apache-2.0
"""A driver without hardware, for tests and for trying the service out.

Its handles have the type TEST_PCI, which Nova's libvirt driver passes over.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cyborg.core.address import PciAddress
from cyborg.core.device import AttachHandle, Deployable, Device, DeviceType, HandleType
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.base import Driver, Option

MAX_DEVICES = 4096
MAX_HANDLES = 256  # a PCI bus has 32 devices of 8 functions
_BUSES = 256  # in a PCI domain


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

    def discover(self) -> Sequence[Device]:
        """Return the cards, unless told to hang or to fail."""
        if self.options["hang"]:
            threading.Event().wait(self.options["hang"])
        if self.options["fail"]:
            raise DriverFailed(self.options["fail"])
        return [self._card(number) for number in range(self.options["num_devices"])]

    def _card(self, number: int) -> Device:
        beyond, bus = divmod(self._first.bus + number, _BUSES)
        here = replace(self._first, domain=self._first.domain + beyond, bus=bus)
        part = Deployable(
            address=str(here),
            resource_class="FPGA",
            traits=frozenset({"CUSTOM_FAKE_DEVICE"}),
            handles=tuple(_handle(here, n) for n in range(self.options["num_handles"])),
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


def _handle(card: PciAddress, number: int) -> AttachHandle:
    device, function = divmod(number, 8)
    address = replace(card, device=device, function=function)
    return AttachHandle(str(address), HandleType.TEST_PCI, address.attach_info())

# SPDX-License-Identifier: Apache-2.0
"""Simulated cards at invented addresses: replace discover() with a real discovery."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cyborg.core.address import PciAddress
from cyborg.core.drivers.registry import Option, Support
from cyborg.core.inventory.device import AttachHandle, Deployable, Device, DeviceType, HandleType
from cyborg.drivers.base import Driver


class AcmeDriver(Driver):
    """Driver with ``count`` simulated cards."""

    name = "acme"
    version = "1.0"
    DEVICE_TYPE = DeviceType.CRYPTO
    SUPPORT_LEVEL = Support.EXPERIMENTAL
    OPTIONS = (Option("count", "int", 1, "Number of cards, 1 to 16."),)

    def __init__(
        self, backend: str, options: Mapping[str, Any], sysfs_root: str | Path = "/sys"
    ) -> None:
        super().__init__(backend, options, sysfs_root)
        if not 1 <= self.options["count"] <= 16:
            raise self.misconfigured("count", self.options["count"], "1 to 16")

    def discover(self) -> Sequence[Device]:
        """Return the cards."""
        return [self._card(f"0000:{0x5E + n:02x}:00.0") for n in range(self.options["count"])]

    def _card(self, address: str) -> Device:
        info = PciAddress.parse(address).attach_info()
        return Device(
            address=address,
            type=DeviceType.CRYPTO,
            vendor="1234",
            model="Counting card",
            backend=self.backend,
            deployables=(
                Deployable(
                    address=address,
                    resource_class="CUSTOM_CRYPTO",
                    traits=frozenset({"CUSTOM_CRYPTO_COUNTING"}),
                    handles=(AttachHandle(address, HandleType.TEST_PCI, info),),
                ),
            ),
        )

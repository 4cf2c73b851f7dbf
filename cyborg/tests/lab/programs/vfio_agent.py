# SPDX-License-Identifier: Apache-2.0
"""The agent, whose driver ``generic`` offers some functions with handles of the type VFIO.

They stand for vGPUs, which keep their driver. LAB_VFIO in the environment has their addresses,
separated by commas; the arguments are those of the agent.
"""

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace

from cyborg.cmd import agent
from cyborg.core.inventory.device import Device, HandleType
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.pci.driver import PciDriver


def offer_vfio() -> None:
    """Let the driver ``generic`` offer handles of the type VFIO for the functions of LAB_VFIO."""
    addresses = frozenset(filter(None, os.environ.get("LAB_VFIO", "").split(",")))
    discover = GenericDriver.discover

    def discover_vfio(self: PciDriver) -> Sequence[Device]:
        return [_as_vfio(device, addresses) for device in discover(self)]

    GenericDriver.discover = discover_vfio  # type: ignore[method-assign]


def _as_vfio(device: Device, addresses: Collection[str]) -> Device:
    return replace(
        device,
        deployables=tuple(
            replace(
                deployable,
                handles=tuple(
                    replace(h, type=HandleType.VFIO) if h.address in addresses else h
                    for h in deployable.handles
                ),
            )
            for deployable in device.deployables
        ),
    )


if __name__ == "__main__":
    offer_vfio()
    sys.exit(agent.main(sys.argv[1:]))

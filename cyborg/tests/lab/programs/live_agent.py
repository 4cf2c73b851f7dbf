# SPDX-License-Identifier: Apache-2.0
"""The agent of a host with one running server, which has libvirt's driver in its own process.

The arguments are the uuid of the server, its kernel and its initial root, then those of the agent.
A file of ACTIONS in /io ends the server, starts it, or does both, and is deleted then.

With LAB_VFIO in the environment, the driver ``generic`` offers handles of the type VFIO:
its functions stand for vGPUs, which keep their driver.
"""

import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cyborg.agent.guests.hypervisor import load_library, start_event_loop
from cyborg.cmd import agent
from cyborg.core.inventory.device import Device, HandleType
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.pci.driver import PciDriver
from cyborg.tests.fixtures.machine import embedded_libvirt, nested_guest

IO = Path("/io")
# Whether the server is ended, and whether it is started, by the name of the file.
ACTIONS = {"stop": (True, False), "start": (False, True), "restart": (True, True)}
LOG = "/io/server.log"


def obey(connection: Any, xml: str) -> None:
    """Change the server on request, without end."""
    while True:
        for name, (ends, starts) in ACTIONS.items():
            if not (IO / name).exists():
                continue
            if ends:
                connection.lookupByName("server").destroy()
            if starts:
                connection.createXML(xml, 0)
            (IO / name).unlink()
        time.sleep(0.5)


def offer_vfio() -> None:
    """Let the driver ``generic`` offer handles of the type VFIO."""
    discover = GenericDriver.discover

    def discover_vfio(self: PciDriver) -> Sequence[Device]:
        return [_as_vfio(device) for device in discover(self)]

    GenericDriver.discover = discover_vfio  # type: ignore[method-assign]


def _as_vfio(device: Device) -> Device:
    return replace(
        device,
        deployables=tuple(
            replace(
                deployable,
                handles=tuple(replace(h, type=HandleType.VFIO) for h in deployable.handles),
            )
            for deployable in device.deployables
        ),
    )


def main() -> int:
    """Start the server, and run the agent."""
    uuid, kernel, initrd, *arguments = sys.argv[1:]
    if os.environ.get("LAB_VFIO"):
        offer_vfio()
    embedded_libvirt.prepare()
    library: Any = load_library()
    start_event_loop(library)
    connection = library.open(embedded_libvirt.URI)
    xml = nested_guest.render(uuid, kernel, initrd, LOG)
    connection.createXML(xml, 0)
    threading.Thread(target=obey, args=(connection, xml), daemon=True).start()
    return agent.main(arguments)


sys.exit(main())

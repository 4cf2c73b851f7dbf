# SPDX-License-Identifier: Apache-2.0
"""The agent of a host with one running server, which has libvirt's driver in its own process.

The arguments are the uuid of the server, its kernel and its initial root, then those of the agent.
A file of ACTIONS in /io ends the server, starts it, or does both, and is deleted then.

LAB_VFIO in the environment has the functions that get handles of the type VFIO (``vfio_agent``).
"""

import sys
import threading
import time
from pathlib import Path
from typing import Any

from cyborg.agent.guests.hypervisor import load_library, start_event_loop
from cyborg.cmd import agent
from cyborg.tests.fixtures.machine import embedded_libvirt, nested_guest
from cyborg.tests.lab.programs.vfio_agent import offer_vfio

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


def main() -> int:
    """Start the server, and run the agent."""
    uuid, kernel, initrd, *arguments = sys.argv[1:]
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

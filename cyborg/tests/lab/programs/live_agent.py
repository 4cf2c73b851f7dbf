# SPDX-License-Identifier: Apache-2.0
"""The agent of a host with one running server, which has libvirt's driver in its own process.

The arguments are the uuid of the server, its kernel and its initial root, then those of the agent.
The server is started again when the file ``/io/restart`` appears, which is deleted at the end.
"""

import sys
import threading
import time
from pathlib import Path
from typing import Any

from cyborg.agent.guests.hypervisor import load_library, start_event_loop
from cyborg.cmd import agent
from cyborg.tests.fixtures.machine import embedded_libvirt, nested_guest

RESTART = Path("/io/restart")
LOG = "/io/server.log"


def obey(connection: Any, xml: str) -> None:
    """Start the server again on request, without end."""
    while True:
        if RESTART.exists():
            connection.lookupByName("server").destroy()
            connection.createXML(xml, 0)
            RESTART.unlink()
        time.sleep(0.5)


def main() -> int:
    """Start the server, and run the agent."""
    uuid, kernel, initrd, *arguments = sys.argv[1:]
    embedded_libvirt.prepare()
    library: Any = load_library()
    start_event_loop(library)
    connection = library.open(embedded_libvirt.URI)
    xml = nested_guest.render(uuid, kernel, initrd, LOG)
    connection.createXML(xml, 0)
    threading.Thread(target=obey, args=(connection, xml), daemon=True).start()
    return agent.main(arguments)


sys.exit(main())

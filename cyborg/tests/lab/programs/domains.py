# SPDX-License-Identifier: Apache-2.0
"""Give a device to a domain of libvirt, and print why it is not offered.

For each state of the domain: the reason, which is null if the device is offered. The function of
the conductor says whether the domain is a server with an accelerator request.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from cyborg.agent.guests.function_users import FunctionUsers, RecordFile
from cyborg.agent.guests.hypervisor import LibvirtDomains, find_library, start_event_loop
from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.host_use import open_nodes
from cyborg.tests.fixtures.machine import embedded_libvirt

BUS = Path("/sys/bus/pci")
SERVER = "5f0d6f3c-6a8e-4a39-9b7a-0d5f6f3c6a8e"
RECORDS = Path("/run/guests.json")
SLOW = 120.0  # seconds for one read in the emulated host
DOMAIN = """
<domain type='qemu'><name>guest1</name><uuid>{uuid}</uuid><memory unit='MiB'>64</memory>
  <os><type arch='x86_64' machine='pc'>hvm</type></os>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='usb' model='none'/><memballoon model='none'/>
    {devices}
  </devices>
</domain>"""
HOSTDEV = """
<hostdev mode='subsystem' type='pci' managed='yes'>
  <source><address domain='0x{}' bus='0x{}' slot='0x{}' function='0x{}'/></source>
</hostdev>"""


class Conductor:
    """A conductor that gives each function of a guest the same owner."""

    owner: str | None = None

    def find_function_owners(self, host: str, functions: list[dict[str, str]]) -> Any:
        """Return the owner of each function."""
        return {"owners": [self.owner] * len(functions)}


def find_function(class_code: str) -> str:
    """Return the address of the function with a class code."""
    (found,) = (p.parent.name for p in BUS.glob("devices/*/class") if class_code in p.read_text())
    return found


def main() -> None:
    """Print the results."""
    subprocess.run(["modprobe", "-a", "vfio-pci"], check=True)
    open_nodes.MAX_AGE = 0.0
    embedded_libvirt.prepare()
    library: Any = find_library()
    start_event_loop(library)
    connection = library.open(embedded_libvirt.URI)
    address = find_function("0x00ff00")
    text = HOSTDEV.format(*address.replace(".", ":").split(":"))
    xml = DOMAIN.format(uuid=SERVER, devices=text)
    conductor = Conductor()
    domains = LibvirtDomains(embedded_libvirt.URI, library, SLOW)

    def find_reason() -> str | None:
        """Return why the function is not offered, for an agent that starts now."""
        driver = GenericDriver("g", {"devices": [f"address={address}"]})
        users = FunctionUsers(
            "h",
            conductor,  # type: ignore[arg-type]
            domains.read,
            RecordFile(RECORDS),
            lambda: None,
        )
        driver.read_domains = users.read
        (device,) = driver.discover()
        return device.vendor_board_info.get(NOT_OFFERED)

    results = {"no domain": find_reason()}
    domain = connection.defineXML(xml)
    results["a defined domain"] = find_reason()
    domain.create()
    results["a running domain"] = find_reason()
    assert (BUS / "devices" / address / "driver").resolve().name == "vfio-pci"
    domain.destroy()
    results["a stopped domain"] = find_reason()
    domain.undefine()
    results["no domain any more"] = find_reason()
    conductor.owner = "instance"
    domain = connection.createXML(xml)
    results["a running server"] = find_reason()
    domain.destroy()
    connection.defineXML(xml)
    results["a stopped server"] = find_reason()
    conductor.owner = None
    results["a stopped server without its request"] = find_reason()
    connection.defineXML(DOMAIN.format(uuid=SERVER, devices=""))
    results["a server without the device"] = find_reason()
    connection.defineXML(xml)
    results["the same server with the device again"] = find_reason()
    connection.lookupByUUIDString(SERVER).undefine()
    results["no server any more"] = find_reason()
    print("RESULT " + json.dumps(results))  # noqa: T201


main()

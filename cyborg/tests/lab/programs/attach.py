# SPDX-License-Identifier: Apache-2.0
"""Attach devices to a running domain of libvirt with the XML of os_acc, and detach them.

The arguments are the paths of the modules of mtty; without them there is no mediated device.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyborg import os_acc
from cyborg.core.address import PciAddress
from cyborg.tests.fixtures.machine import embedded_libvirt, libvirt
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.lab.programs.drive import load_driver

MDEV = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1002"
TYPE = Path("/sys/class/mdev_bus/mtty/mdev_supported_types/mtty-2")
PORTS = "".join(
    f"<controller type='pci' index='{index}' model='pcie-root-port'/>" for index in range(1, 5)
)
DOMAIN = f"""
<domain type='qemu'><name>guest</name><memory unit='MiB'>128</memory>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='pci' index='0' model='pcie-root'/>{PORTS}
    <controller type='pci' index='5' model='pcie-to-pci-bridge'/>
    <controller type='usb' model='none'/><memballoon model='none'/>
  </devices>
</domain>"""


def make_arq(number: int, handle_type: str, info: dict[str, str]) -> dict[str, Any]:
    """Return a bound ARQ as the REST API shows it."""
    return {
        "uuid": f"c2f0c1b0-2c4b-4f59-8f39-0d6d1d2f7c0{number}",
        "state": "Bound",
        "attach_handle_type": handle_type,
        "attach_handle_uuid": MDEV,
        "attach_handle_info": info,
    }


def kernel_driver(address: str) -> str | None:
    """Return the kernel driver of a PCI function."""
    link = Path("/sys/bus/pci/devices", address, "driver")
    return link.resolve().name if link.exists() else None


def error_of(call: Callable[[], None]) -> str:
    """Return the error of a call to libvirt, empty if it succeeds."""
    try:
        call()
    except libvirt.Rejected as exc:
        return str(exc)
    return ""


def find_alias(domain: libvirt.Domain, arq: dict[str, Any]) -> str | None:
    """Return the alias of a device in the running domain."""
    return os_acc.find_alias(arq, domain.describe())


def attach(domain: libvirt.Domain, arq: dict[str, Any]) -> dict[str, Any]:
    """Attach the device of an ARQ twice, and request its removal; return what the domain had."""
    found: dict[str, Any] = {"before": find_alias(domain, arq)}
    domain.attach(os_acc.attach(arq))
    found["attached"] = find_alias(domain, arq)
    found["driver"] = kernel_driver(os_acc.get_config(arq).get("address", ""))
    found["again"] = error_of(lambda: domain.attach(os_acc.attach(arq)))
    found["request"] = error_of(lambda: domain.detach(os_acc.detach(arq)))
    return found


def confirm_removal(domain: libvirt.Domain, arq: dict[str, Any]) -> dict[str, Any]:
    """Complete the removal of a PCI device; return the state afterwards."""
    # The domain has no operating system that could confirm the removal; a reset confirms it.
    domain.reset()
    wait_until("the device is removed", lambda: find_alias(domain, arq) is None)
    return {
        "released": kernel_driver(os_acc.get_config(arq)["address"]),
        "detach again": error_of(lambda: domain.detach(os_acc.detach(arq))),
    }


def main() -> None:
    """Print the results of a virtual function, and of a mediated device."""
    drive = load_driver()
    subprocess.run(["modprobe", "vfio-pci"], check=True)
    (drive / "sriov_drivers_autoprobe").write_text("0")
    (drive / "sriov_numvfs").write_text("1")
    function = PciAddress.parse((drive / "virtfn0").resolve().name)
    embedded_libvirt.prepare()
    libvirt.register_events()
    threading.Thread(target=libvirt.run_events, daemon=True).start()
    domain = libvirt.Connection(embedded_libvirt.URI).start(DOMAIN)
    arq = make_arq(1, "PCI", function.attach_info())
    results = {"pci": {**attach(domain, arq), **confirm_removal(domain, arq)}}
    if len(sys.argv) > 1:
        subprocess.run(["modprobe", "-a", "mdev", "vfio"], check=True)
        for module in sys.argv[1:]:
            subprocess.run(["insmod", module], check=True)
        (TYPE / "create").write_text(MDEV)
        arq = make_arq(2, "MDEV", {"parent": "mtty", "asked_type": "mtty-2"})
        results["mdev"] = attach(domain, arq)
    domain.destroy()
    print("RESULT " + json.dumps(results), flush=True)  # noqa: T201


main()

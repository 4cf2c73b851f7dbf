# SPDX-License-Identifier: Apache-2.0
"""Free PCIe root ports of a running guest: libvirt plugs a PCIe device into one of them only.

Sources: "PCI hotplug" of libvirt (``docs/pci-hotplug.rst``), "Controllers" of its "Domain XML
format", and ``qemuDomainDeviceCalculatePCIConnectFlags`` of ``src/qemu/qemu_domain_address.c``.
"""

from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from cyborg.core.attachments.server import ports_error
from cyborg.core.errors import DriverFailed

# Models of controllers with one slot, into which a running guest can get a device.
_PORTS = frozenset({"pcie-root-port", "pcie-switch-downstream-port"})
_ROOT = "pcie-root"


def count_free_ports(domain_xml: str) -> int | None:
    """Return the number of PCIe ports of a running domain into which a device can be plugged.

    Return None for a domain without PCIe, such as one with the machine type ``pc``, and for a text
    that is no domain: the check is then left to libvirt.
    """
    try:
        root = ElementTree.fromstring(domain_xml)  # noqa: S314  libvirt has written it
    except (ElementTree.ParseError, LookupError, ValueError):
        return None
    controllers = [c for c in root.iterfind("devices/controller") if c.get("type") == "pci"]
    if not any(controller.get("model") == _ROOT for controller in controllers):
        return None
    # Only the children of a device: <source> has addresses of the host.
    used = {
        _number(address.get("bus"))
        for address in root.iterfind("devices/*/address")
        if address.get("type") == "pci"
    }
    return sum(_accepts_plug(c) and _number(c.get("index")) not in used for c in controllers)


def check_free_ports(instance: str, domain_xml: str, needed: int) -> None:
    """Raise DriverFailed, with the remedy, if a guest has fewer free ports than ``needed``."""
    free = count_free_ports(domain_xml)
    if free is not None and free < needed:
        raise DriverFailed(ports_error(instance, free, needed))


def _accepts_plug(controller: Element) -> bool:
    target = controller.find("target")
    return controller.get("model") in _PORTS and (
        target is None or target.get("hotplug", "on") != "off"
    )


def _number(text: str | None) -> int | None:
    """Return the number of a bus: libvirt writes 0x03 in an address, 3 as an index."""
    try:
        return int(text or "", 0)
    except ValueError:
        return None

# SPDX-License-Identifier: Apache-2.0
"""Attach handles of the types PCI and TEST_PCI: functions of the PCI bus."""

import re
from collections.abc import Mapping
from xml.etree.ElementTree import Element, SubElement

from cyborg.core.address import PciAddress
from cyborg.core.errors import Invalid
from cyborg.os_acc.arq import BoundArq, check_info
from cyborg.os_acc.plugin import Plugin

# The forms of PciAddress.attach_info.
_PARTS = (
    ("domain", re.compile(r"[0-9a-fA-F]{4,8}"), "4 to 8 hexadecimal digits such as 0000"),
    ("bus", re.compile(r"[0-9a-fA-F]{2}"), "2 hexadecimal digits such as 3d"),
    ("device", re.compile(r"[01][0-9a-fA-F]"), "2 hexadecimal digits from 00 to 1f"),
    ("function", re.compile(r"[0-7]"), "a digit from 0 to 7"),
)

# The number of a domain is a signed integer of 32 bits in the Linux kernel.
_FIRST_ABSENT_DOMAIN = 0x80000000


def parse_address(arq: BoundArq) -> PciAddress:
    """Return the PCI address of the attach handle info. Raise Invalid with the field."""
    parts = (check_info(arq, key, pattern, text) for key, pattern, text in _PARTS)
    domain, bus, device, function = (int(part, 16) for part in parts)
    return PciAddress(domain, bus, device, function)


class PciPlugin(Plugin):
    """Renders a PCI function that libvirt takes from its driver on the host, and returns to it."""

    managed = True

    def get_config(self, arq: BoundArq) -> dict[str, str]:
        """Return ``address``, and its parts ``domain``, ``bus``, ``device`` and ``function``."""
        address = parse_address(arq)
        if not (address.domain or address.bus or address.device):
            # libvirt treats it as an absent address; the host bridge of every machine is there.
            raise Invalid(
                f"attach_handle_info of ARQ {arq.uuid}: {address} is a host bridge, which cannot "
                "be attached",
                field="attach_handle_info",
            )
        return {"address": str(address), **address.attach_info()}

    def build_hostdev(self, config: Mapping[str, str]) -> Element:
        """Return the element for the source address."""
        hostdev = Element(
            "hostdev",
            {"mode": "subsystem", "type": "pci", "managed": "yes" if self.managed else "no"},
        )
        source = SubElement(hostdev, "source")
        # libvirt reads digits without the prefix 0x as a decimal number.
        address = {
            "domain": f"0x{config['domain']}",
            "bus": f"0x{config['bus']}",
            "slot": f"0x{config['device']}",
            "function": f"0x{config['function']}",
        }
        SubElement(source, "address", address)
        return hostdev


class PciTestPlugin(PciPlugin):
    """Renders a function that the driver ``fake`` invents, for tests of code that composes guests.

    ``get_config`` returns the invented address, which a real device may have. The element has the
    address in a PCI domain that no machine has, so that its attachment fails.
    """

    managed = False

    def build_hostdev(self, config: Mapping[str, str]) -> Element:
        """Return the element for the source address, in the domain plus 0x80000000."""
        domain = int(config["domain"], 16) | _FIRST_ABSENT_DOMAIN
        return super().build_hostdev({**config, "domain": f"{domain:08x}"})

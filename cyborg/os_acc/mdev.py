# SPDX-License-Identifier: Apache-2.0
"""Attach handles of the type MDEV: mediated devices."""

import re
from collections.abc import Mapping
from xml.etree.ElementTree import Element, SubElement

from cyborg.core.validation import parse_uuid
from cyborg.os_acc.arq import BoundArq, check_info
from cyborg.os_acc.pci import parse_address
from cyborg.os_acc.plugin import Plugin

_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PARENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")


class MdevPlugin(Plugin):
    """Renders a mediated device, which exists before it is attached."""

    def get_config(self, arq: BoundArq) -> dict[str, str]:
        """Return ``mdev_uuid``, ``asked_type`` and ``parent``, a PCI address or a sysfs name."""
        if "parent" in arq.info:
            # A driver of the kernel without a device, such as the sample mtty.
            parent = check_info(arq, "parent", _PARENT, "the name of a parent in sysfs")
        else:
            parent = str(parse_address(arq))
        asked_type = check_info(arq, "asked_type", _TYPE, "the name of an mdev type")
        # The uuid of the handle is that of the mediated device: see core.naming.handle_uuid.
        mdev_uuid = parse_uuid(arq.handle_uuid, "attach_handle_uuid")
        return {"mdev_uuid": mdev_uuid, "asked_type": asked_type, "parent": parent}

    def build_hostdev(self, config: Mapping[str, str]) -> Element:
        """Return the element for the uuid of the mediated device."""
        hostdev = Element(
            "hostdev",
            # The agent creates and removes the mediated device; libvirt does neither.
            {"mode": "subsystem", "type": "mdev", "managed": "no", "model": "vfio-pci"},
        )
        SubElement(SubElement(hostdev, "source"), "address", {"uuid": config["mdev_uuid"]})
        return hostdev

# SPDX-License-Identifier: Apache-2.0
"""Bus addresses of PCI functions and mediated devices: parsing, ordering, formatting.

A PCI address is written ``DDDD:BB:DD.F`` in hexadecimal: domain (16 bits, or more behind Intel
VMD, whose domains start at 0x10000), bus (8 bits), device (5 bits) and function (3 bits), as in
``Documentation/PCI/sysfs-pci.rst`` of the Linux kernel.
"""

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from cyborg.core.errors import Invalid

_PCI = re.compile(r"^(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])$")


@dataclass(frozen=True, slots=True, order=True)
class PciAddress:
    """Address of a PCI function, ordered by domain, bus, device and function."""

    domain: int
    bus: int
    device: int
    function: int

    def __post_init__(self) -> None:
        # Not only of texts: numbers come from captures and imported rows too.
        limits = (
            ("domain", self.domain, 0xFFFFFFFF),
            ("bus", self.bus, 0xFF),
            ("device", self.device, 0x1F),
            ("function", self.function, 0x7),
        )
        for name, value, max_value in limits:
            if not 0 <= value <= max_value:
                raise Invalid(
                    f"PCI {name} {value:#x} is out of range 0..{max_value:#x}", field="address"
                )

    @classmethod
    def parse(cls, text: str) -> "PciAddress":
        """Parse ``0000:3d:00.0``, or ``3d:00.0`` in domain 0000. Raise Invalid for other texts."""
        match = _PCI.fullmatch(text)
        if match is None:
            raise Invalid(
                f"{text!r} is not a PCI address: expected DDDD:BB:DD.F in hexadecimal, "
                "such as 0000:3d:00.0",
                field="address",
            )
        domain, bus, device, function = match.groups()
        return cls(int(domain or "0", 16), int(bus, 16), int(device, 16), int(function, 16))

    @classmethod
    def parse_attach_info(cls, info: Mapping[str, object]) -> "PciAddress":
        """Return the address in the attach handle info of a PCI function. Raise Invalid."""
        values = (info.get(key) for key in ("domain", "bus", "device", "function"))
        return cls.parse("{}:{}:{}.{}".format(*values))

    def __str__(self) -> str:
        return f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.{self.function:x}"

    def attach_info(self) -> dict[str, str]:
        """Return the attach handle info of type PCI."""
        # Zero padded: Nova builds libvirt's node device name pci_0000_84_00_0 from these strings.
        return {
            "domain": f"{self.domain:04x}",
            "bus": f"{self.bus:02x}",
            "device": f"{self.device:02x}",
            "function": f"{self.function:x}",
        }


def is_pci_address(text: str) -> bool:
    """Return whether a text is the address of a PCI function."""
    try:
        PciAddress.parse(text)
    except Invalid:
        return False
    return True


@dataclass(frozen=True, slots=True, order=True)
class MdevAddress:
    """Address of a mediated device: its parent PCI function, its mdev type and its uuid.

    See ``Documentation/driver-api/vfio-mediated-device.rst`` of the Linux kernel.
    """

    parent: PciAddress
    asked_type: str
    uuid: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", self.asked_type):
            raise Invalid(f"{self.asked_type!r} is not an mdev type name", field="address")
        try:
            plain = str(uuid.UUID(self.uuid))
        except ValueError as exc:
            raise Invalid(f"{self.uuid!r} is not an mdev uuid", field="address") from exc
        # Canonical: two spellings of a uuid must not be two addresses.
        object.__setattr__(self, "uuid", plain)

    @classmethod
    def parse(cls, text: str) -> "MdevAddress":
        """Parse ``0000:3d:00.0/nvidia-35/<uuid>``. Raise Invalid for anything else."""
        parts = text.split("/")
        if len(parts) != 3:
            raise Invalid(
                f"{text!r} is not an mdev address: expected PCI-ADDRESS/TYPE/UUID", field="address"
            )
        return cls(PciAddress.parse(parts[0]), parts[1], parts[2])

    def __str__(self) -> str:
        return f"{self.parent}/{self.asked_type}/{self.uuid}"

    def attach_info(self) -> dict[str, str]:
        """Return the attach handle info of type MDEV: the parent's info and the mdev type."""
        return {**self.parent.attach_info(), "asked_type": self.asked_type, "vgpu_mark": "None"}

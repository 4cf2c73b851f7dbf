# SPDX-License-Identifier: Apache-2.0
"""Images of FPGAs: their properties, the formats of their files, and the ways to load them.

Custom properties of an image in the image service:

``accel:region_id``    the interface ids of the regions that the image fits, separated by commas
``accel:function_id``  the function that the image implements
``accel:vendor_id``    the PCI vendor of the cards that it fits: four hexadecimal digits
``accel:product_id``   the PCI product of these cards: four hexadecimal digits

Ids of regions and functions are 32 hexadecimal digits; here they may be upper-case and have dashes.

GBS is the format of images for Intel's DFL cards. A file begins with a magic number of 16 bytes,
the length of the metadata (32 bits, little-endian) and the metadata, a JSON document with the ids
of the interface and of the image's function (``afu-image``). The raw image follows. Source:
``libbitstream/metadatav1.c`` and ``bitstream.c`` of OPAE.

PACSign, which signs images of Intel cards, puts two blocks before the payload: a GBS file has them
after its metadata, any other file at its begin. Block 0 says what the payload is for. An image for
the static region, the management controller (BMC) or the keys of the card changes the flash for
good, and ``fpgasupdate`` writes it without a question. A server may ask for an image of its region
only.

Block 0, little-endian: magic number (32 bits), length of the payload in bytes (32 bits), content
(8 bits), certificate (8 bits). Both blocks together have 1024 bytes. Source:
``python/pacsign/pacsign/database.py`` and ``reader.py`` of OPAE. The images for a D5005 have other
blocks, which only a region can load.

The ways to load an image:

``firmware``     writes a file name to the attribute ``firmware`` of the FPGA manager. Kernels of
                 vendors have it, such as ``drivers/fpga/fpga-mgr.c`` of linux-xlnx; upstream Linux
                 has none
``dfl``          ioctl ``DFL_FPGA_FME_PORT_PR`` of ``include/uapi/linux/fpga-dfl.h``
``fpgasupdate``  the tools of OPAE, also for images signed for the card
``fpgaconf``     (``doc/src/fpga_tools`` of opae-sdk)
``xbmgmt``       the tools of XRT: with the management function, or the user function while it is
``xbutil``       bound to the kernel driver xocl (``XOCL_MODULE_NAME`` of ``xocl_drv.h`` of XRT)
"""

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cyborg.core.errors import DriverFailed
from cyborg.drivers.base import Image
from cyborg.drivers.fpga.cards import ProgrammerName, Region
from cyborg.drivers.pci.access import HostAccess

REGION, FUNCTION = "accel:region_id", "accel:function_id"
VENDOR, PRODUCT = "accel:vendor_id", "accel:product_id"
_ID = re.compile(r"[0-9a-f]{32}")


def parse_id(text: str | None) -> str | None:
    """Return an id of a region or function as 32 digits; None if the text is no id."""
    plain = (text or "").strip().lower().replace("-", "")
    return plain if _ID.fullmatch(plain) else None


def check_properties(
    properties: Mapping[str, str], vendor: str, product: str, interface_id: str | None
) -> None:
    """Raise DriverFailed if an image does not fit a region of a card.

    An image must name the interface id of the region. If the kernel does not show one, the image
    must name the vendor and the product of the card instead, and no region.
    """
    region_ids = [parse_id(text) for text in properties.get(REGION, "").split(",")]
    if interface_id is not None:
        if interface_id not in region_ids:
            raise DriverFailed(
                f"the image does not fit the region: its property {REGION} is "
                f"{properties.get(REGION)!r:.200}, the interface id of the region is {interface_id}"
            )
    # Whether such an image fits this card cannot be checked.
    elif REGION in properties:
        raise DriverFailed(
            f"the image is for regions with an interface id ({REGION}), and the region has none"
        )
    # Vendor and product are optional with an interface id, which is compared above.
    for key, expected in ((VENDOR, vendor), (PRODUCT, product)):
        if key not in properties and interface_id is not None:
            continue
        if properties.get(key, "").strip().lower().removeprefix("0x") != expected:
            raise DriverFailed(
                f"the image does not fit the card: its property {key} is "
                f"{properties.get(key)!r:.200}, expected {expected}"
            )


GBS_MAGIC = b"XeonFPGA\xb7GBSv001"
MAX_METADATA = 65536  # bytes; the metadata of a real image has about 1000
_HEADER = struct.Struct("<16sI")


@dataclass(frozen=True, slots=True)
class GbsHeader:
    """Header of a GBS file; the raw image begins at byte ``offset``."""

    offset: int
    interface_id: str
    function_id: str | None


def read_header(path: Path) -> GbsHeader:
    """Return the header of a GBS file. Raise DriverFailed if it is malformed."""
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(GBS_MAGIC):
            raise DriverFailed("the image is not a GBS file: its magic number is missing")
        # Before the metadata are read: the length is in the file of somebody else.
        _, length = _HEADER.unpack(head)
        if not 0 < length <= MAX_METADATA:
            raise DriverFailed(f"the image has metadata of {length} bytes: the limit is 64 KiB")
        text = file.read(length)
    if len(text) < length:
        raise DriverFailed("the image ends in its metadata")
    interface, function = _read_ids(text)
    if (interface_id := parse_id(interface)) is None:
        raise DriverFailed("the metadata of the image has no valid interface-uuid")
    return GbsHeader(_HEADER.size + length, interface_id, parse_id(function))


def _read_ids(text: bytes) -> tuple[str | None, str | None]:
    """Return the ids of the interface and of the first function in the metadata."""
    try:
        image: Any = json.loads(text)["afu-image"]
        clusters = image.get("accelerator-clusters") or [{}]
        found = image.get("interface-uuid"), clusters[0].get("accelerator-type-uuid")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as exc:
        raise DriverFailed(f"the metadata of the image is malformed: {type(exc).__name__}") from exc
    return tuple(value if isinstance(value, str) else None for value in found)  # type: ignore[return-value]


SIGNED_MAGIC = 0xB6EAFD19
BLOCKS = 1024  # bytes
_BLOCK_0 = struct.Struct("<IIBB")
_REGION = 2
_CONTENTS = {
    0: "the static region",
    1: "the BMC",
    _REGION: "a region",
    3: "the factory image",
    4: "the PXE ROM",
    5: "thermal settings of the static region",
    6: "thermal settings of a region",
    7: "the SDM",
    8: "a test of the static region",
    9: "the factory image of the BMC",
    10: "a test of a region",
    11: "a certificate of the static region",
    12: "a test of the SDM",
}
_CERTIFICATES = {1: "cancels a key", 2: "sets a root key", 3: "sets a root key"}


def check_image(path: Path, offset: int) -> None:
    """Raise DriverFailed for a signed image that is not one for a region.

    ``offset`` is the byte after the metadata of a GBS file.
    """
    # An image without these blocks is accepted: the card decides whether it loads it.
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(offset)
        head = file.read(_BLOCK_0.size)
    if len(head) < _BLOCK_0.size:
        return
    magic, length, content, certificate = _BLOCK_0.unpack(head)
    if magic != SIGNED_MAGIC:
        return
    if certificate:
        action = _CERTIFICATES.get(certificate, f"has a certificate of type {certificate}")
        raise DriverFailed(f"the image {action} of the card: it is not one for a region")
    if content != _REGION:
        target = _CONTENTS.get(content, f"content type {content}")
        raise DriverFailed(f"the image is signed for {target} of the card, not for a region")
    # Last: what an image is for matters more than that it is cut off.
    if offset + BLOCKS + length > size:
        raise DriverFailed(
            f"the image ends in its payload of {length} bytes: it has {size} bytes in all"
        )


@dataclass(frozen=True, slots=True)
class Target:
    """A region to program: ``card`` is the address of its physical function.

    ``management`` is the address of the management function of an Alveo card.
    """

    card: str
    region: Region
    management: str | None
    kernel_driver: str | None


class Programmer(Protocol):
    """One way to load images."""

    def find_obstacle(self, target: Target) -> str | None:
        """Return why no image can be loaded into a region; None if it can."""

    def load(self, target: Target, image: Image, access: HostAccess, timeout: float) -> None:
        """Load an image. Raise DriverFailed."""


class FirmwareProgrammer:
    """Programmer that uses the attribute ``firmware`` of an FPGA manager."""

    def find_obstacle(self, target: Target) -> str | None:
        """Return why no image can be loaded into a region; None if it can."""
        region = target.region
        if region.manager is None:
            return f"{region.name} has no FPGA manager of its own in /sys/class/fpga_manager"
        if not region.has_firmware:
            return (
                f"the FPGA manager {region.manager} has no attribute firmware: the kernel of the "
                "vendor is needed, or another programmer"
            )
        return None

    def load(self, target: Target, image: Image, access: HostAccess, timeout: float) -> None:
        """Load an image; the kernel limits the time."""
        assert target.region.manager is not None  # otherwise find_obstacle returns a reason
        access.load_firmware(target.region.manager, image.uuid, str(image.path), image.size)


class DflProgrammer:
    """Programmer that uses the ioctl of the FPGA management engine of a DFL card."""

    def find_obstacle(self, target: Target) -> str | None:
        """Return why no image can be loaded into a region; None if it can."""
        region = target.region
        if region.fme is None:
            return (
                "no management engine of the card is visible (dfl-fme): bind the physical function "
                "to the kernel driver dfl-pci"
            )
        if region.port is None:
            return f"{region.name} cannot be reconfigured, or the number of its port is not known"
        return None

    def load(self, target: Target, image: Image, access: HostAccess, timeout: float) -> None:
        """Load a GBS file; the kernel limits the time."""
        region, header = target.region, read_header(image.path)
        check_image(image.path, header.offset)
        if header.interface_id != region.interface_id:
            raise DriverFailed(
                f"the file of the image is for the interface id {header.interface_id}, that of the "
                f"region is {region.interface_id}"
            )
        # Otherwise find_obstacle returns a reason.
        assert region.fme is not None
        assert region.port is not None
        access.reconfigure(region.fme, region.port, str(image.path), image.size, header.offset)


@dataclass(frozen=True, slots=True)
class ToolProgrammer:
    """Programmer that runs a tool of a vendor.

    With ``management`` the tool gets the address of the management function. With ``gbs`` the image
    must be a GBS file: given another file, ``fpgasupdate`` writes the flash of the card.
    """

    tool: str
    management: bool = False
    gbs: bool = False
    kernel_driver: str | None = None

    def find_obstacle(self, target: Target) -> str | None:
        """Return why no image can be loaded into a region; None if it can."""
        if self.management and target.management is None:
            return "the management function of the card is not visible on this host"
        if self.kernel_driver is not None and target.kernel_driver != self.kernel_driver:
            return (
                f"{target.card} is bound to the kernel driver {target.kernel_driver}: "
                f"{self.tool} needs {self.kernel_driver}"
            )
        return None

    def load(self, target: Target, image: Image, access: HostAccess, timeout: float) -> None:
        """Run the tool; ``timeout`` is in seconds."""
        if self.gbs:
            check_image(image.path, read_header(image.path).offset)
        address = (target.management or "") if self.management else target.card
        access.run_tool(self.tool, address, str(image.path), image.size, timeout)


PROGRAMMERS: Mapping[ProgrammerName, Programmer] = {
    ProgrammerName.FIRMWARE: FirmwareProgrammer(),
    ProgrammerName.DFL: DflProgrammer(),
    ProgrammerName.FPGASUPDATE: ToolProgrammer("fpgasupdate", gbs=True),
    ProgrammerName.FPGACONF: ToolProgrammer("fpgaconf", gbs=True),
    ProgrammerName.XBMGMT: ToolProgrammer("xbmgmt", management=True),
    ProgrammerName.XBUTIL: ToolProgrammer("xbutil", kernel_driver="xocl"),
}

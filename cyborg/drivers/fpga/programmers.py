# SPDX-License-Identifier: Apache-2.0
"""Ways to load an image into a region, behind one protocol.

``firmware``     writes a file name to the attribute ``firmware`` of the FPGA manager. Kernels of
                 vendors have it, such as ``drivers/fpga/fpga-mgr.c`` of linux-xlnx; upstream Linux
                 has none
``dfl``          ioctl ``DFL_FPGA_FME_PORT_PR`` of ``include/uapi/linux/fpga-dfl.h``
``fpgasupdate``  the tools of OPAE, also for images signed for the card
``fpgaconf``     (``doc/src/fpga_tools`` of opae-sdk)
``xbmgmt``       the tools of XRT: with the management function, or the user function while it is
``xbutil``       bound to the kernel driver xocl (``XOCL_MODULE_NAME`` of ``xocl_drv.h`` of XRT)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cyborg.core.errors import DriverFailed
from cyborg.drivers.fpga import images
from cyborg.drivers.fpga.cards import ProgrammerName, Region
from cyborg.drivers.fpga.images import read_header
from cyborg.drivers.images import Image
from cyborg.drivers.pci.access import HostAccess


@dataclass(frozen=True, slots=True)
class Target:
    """A region to program: ``card`` is the address of its physical function.

    ``management`` is the address of the management function of an Alveo card.
    """

    card: str
    region: Region
    management: str | None = None
    kernel_driver: str | None = None


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
        manager = target.region.manager or ""
        access.load_firmware(manager, image.uuid, str(image.path), image.size)


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
        images.check_image(image.path, header.offset)
        if header.interface_id != region.interface_id:
            raise DriverFailed(
                f"the file of the image is for the interface id {header.interface_id}, that of the "
                f"region is {region.interface_id}"
            )
        access.reconfigure(
            region.fme or "", region.port or 0, str(image.path), image.size, header.offset
        )


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
            images.check_image(image.path, read_header(image.path).offset)
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

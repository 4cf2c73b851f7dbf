# SPDX-License-Identifier: Apache-2.0
"""Simulated programming of the DFL cards of a replayed host.

It follows ``fme_pr`` of ``drivers/fpga/dfl-fme-pr.c``, ``fpga_region_program_fpga`` of
``fpga-region.c`` and ``dfl-afu-main.c`` of Linux: the port is put into reset, the image is loaded,
and the port leaves the reset. After a failure the port stays in reset, ``afu_id`` cannot be read
(EBUSY), and later images do not change that, because the resets of a port are counted.
"""

import errno
from pathlib import Path

from cyborg.core.capture.model import Operation
from cyborg.core.errors import DriverFailed
from cyborg.drivers.fpga.gbs import read_header
from cyborg.drivers.fpga.regions import MANAGERS, REGIONS, Region, read_regions
from cyborg.drivers.nic import interfaces
from cyborg.drivers.replay.kernel import SimulatedKernel, failures

_STATES = {errno.EIO: "write error"}  # of the manager after a fault; others are seen before


class SimulatedControl:
    """Programming in the tree of a replayed host; implements ``fpga.programmers.Control``."""

    def __init__(self, kernel: SimulatedKernel) -> None:
        self._kernel = kernel

    def load_firmware(self, manager: str, image: str, path: str, size: int) -> None:
        """Raise DriverFailed: upstream Linux has no attribute ``firmware`` to follow."""
        raise _error(manager)

    def run_tool(self, tool: str, address: str, path: str, size: int, timeout: float) -> None:
        """Raise DriverFailed: the tools of vendors are not simulated."""
        raise _error(address)

    def reconfigure(self, fme: str, port: int, path: str, size: int, offset: int) -> None:
        """Let a port of a DFL card show the function of a GBS file. Raise DriverFailed."""
        kernel = self._kernel
        with kernel.lock, failures(f"port {port} of {fme} refused the image"):
            card, region = self._find_region(fme, port)
            afu_id = self._find_port(card, port) / "afu_id"
            state = kernel.root / MANAGERS / (region.manager or "") / "state"
            function = read_header(Path(path)).function_id
            if function is None:
                raise DriverFailed("the image does not state the function that the port would show")
            try:
                kernel.check_fault(card, Operation.PROGRAM)
            except OSError as exc:
                # EBUSY is that of a region in use (fpga_region_get), before the port is touched.
                if exc.errno in (errno.EIO, errno.ETIMEDOUT) and afu_id.is_file():
                    afu_id.unlink()
                    afu_id.mkdir()  # reads fail
                if exc.errno in _STATES:
                    state.write_text(f"{_STATES[exc.errno]}\n")
                raise
            state.write_text("operating\n")
            if afu_id.is_file():
                afu_id.write_text(f"{function}\n")

    def _find_region(self, fme: str, port: int) -> tuple[str, Region]:
        """Return the card and the region of a port. Raise DriverFailed."""
        sysfs = self._kernel.sysfs
        for card, found in read_regions(sysfs, sysfs.pci_functions()).items():
            for region in found.regions:
                if (region.fme, region.port) == (fme, port):
                    return card, region
        raise DriverFailed(f"there is no port {port} of {fme}")

    def _find_port(self, card: str, port: int) -> Path:
        """Return the folder of a port of a card: below it, or below a virtual function."""
        sysfs, root = self._kernel.sysfs, self._kernel.root
        functions = {card, *interfaces.virtual_functions(sysfs, card).values()}
        for folder in (root / REGIONS).glob("*/dfl-port.*"):
            path = folder.resolve()
            if functions & set(path.parts) and sysfs.read_int(path / "id") == port:
                return path
        raise DriverFailed(f"{card} has no port {port}")


def _error(name: str) -> DriverFailed:
    return DriverFailed(f"{name} cannot be programmed: only DFL cards are simulated")

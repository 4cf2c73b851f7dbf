# SPDX-License-Identifier: Apache-2.0
"""A replayed host: the tree of a capture, its simulated kernel, and drivers that use only these.

Only the drivers in SIMULATED run on a replayed host. For other drivers it is unknown whether they
read anything but the tree, or change the real host.
"""

import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from cyborg.core.capture.model import Capture, Fault
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.base import Driver
from cyborg.drivers.generic import PciDriver
from cyborg.drivers.gpu.nvml import GpuFacts
from cyborg.drivers.pci.hwdb import Names
from cyborg.drivers.replay.files import unpack
from cyborg.drivers.replay.kernel import SimulatedKernel
from cyborg.drivers.replay.programming import SimulatedControl
from cyborg.drivers.replay.uevents import RecordedUevents
from cyborg.drivers.replay.virtual_functions import SimulatedSriov


class RecordedNvml:
    """The answers of NVML in a capture; an implementation of ``gpu.nvml.Nvml``."""

    def __init__(self, capture: Capture) -> None:
        """Raise Invalid for answers that are malformed."""
        try:
            self._facts = {a: GpuFacts.from_dict(facts) for a, facts in capture.nvml.items()}
        except (KeyError, TypeError, ValueError) as exc:
            raise Invalid(f"nvml: {type(exc).__name__}: {exc}", field="nvml") from exc

    def read(self, address: str) -> GpuFacts | None:
        """Return the facts about a GPU; None if the capture has none."""
        return self._facts.get(address)


class ReplayedHost:
    """A capture, unpacked into a private folder, which ``close`` removes.

    Each unpacking is a boot of the host: it has a boot id of its own.
    """

    def __init__(self, capture: Capture, faults: Iterable[Fault] = ()) -> None:
        """Unpack the capture. Raise OSError, and Invalid for malformed answers of NVML."""
        self.capture = capture
        self.nvml = RecordedNvml(capture)
        self._folder = Path(tempfile.mkdtemp(prefix="cyborg-replay-"))
        # Also at the end of a process that could not start its agent.
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        try:
            unpack(capture, self._folder)
            self.boot_id = self._folder / "proc/sys/kernel/random/boot_id"
            self.boot_id.parent.mkdir(parents=True, exist_ok=True)
            self.boot_id.write_text(f"{uuid.uuid4()}\n")
        except OSError:
            self.close()
            raise
        self.sysfs_root = self._folder / "sys"
        self.kernel = SimulatedKernel(self.sysfs_root, faults)
        self.uevents = RecordedUevents(capture, self.kernel)

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        self._remove()

    def create_driver(
        self, driver: type[Driver], backend: str, options: Mapping[str, Any]
    ) -> Driver:
        """Return a driver of the replayed host. Raise DriverFailed if SIMULATED lacks its class."""
        arguments = SIMULATED.get(f"{driver.__module__}:{driver.__qualname__}")
        if arguments is None:
            raise DriverFailed(
                f"the driver {driver.name} cannot be replayed: a replay does not simulate "
                "the changes that it makes to a host"
            )
        made = driver(backend, options, self.sysfs_root, **arguments(self))
        if isinstance(made, PciDriver):
            made.set_reset(self.kernel.reset)
        return made

    def find_names(self, address: str) -> Names:
        """Return the names of a function, as the capture has them."""
        return Names(*self.capture.names.get(address, (None, None)))


Arguments = Callable[[ReplayedHost], Mapping[str, Any]]

SIMULATED: Mapping[str, Arguments] = {
    "cyborg.drivers.fake:FakeDriver": lambda host: {},
    "cyborg.drivers.generic:GenericDriver": lambda host: {
        "lookup": host.find_names,
        "set_count": SimulatedSriov(host.kernel).set_count,
    },
    "cyborg.drivers.crypto.driver:CryptoDriver": lambda host: {
        "lookup": host.find_names,
        "set_services": host.kernel.set_services,
    },
    "cyborg.drivers.gpu.driver:GpuDriver": lambda host: {
        "lookup": host.find_names,
        "control": host.kernel,
        "nvml": host.nvml,
    },
    "cyborg.drivers.fpga.driver:FpgaDriver": lambda host: {
        "lookup": host.find_names,
        "control": SimulatedControl(host.kernel),
    },
    "cyborg.drivers.nic.driver:NicDriver": lambda host: {
        "lookup": host.find_names,
        "set_count": SimulatedSriov(host.kernel).set_count,
    },
    "cyborg.drivers.nvme.driver:NvmeDriver": lambda host: {
        "lookup": host.find_names,
        "erase": host.kernel.erase,
    },
}
"""Drivers that can run on a replayed host, with their arguments: what replaces their host work."""

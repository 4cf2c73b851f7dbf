# SPDX-License-Identifier: Apache-2.0
"""A replayed host: the tree of a capture, its simulated kernel, and drivers that use only these.

The uevents of the capture are replayed at their times since the start. ``remove`` removes the
folder of the device; ``add`` restores it as it was recorded. Other actions change nothing in the
tree: what they changed on the host was not recorded.

Only the drivers in SIMULATED run on a replayed host. For other drivers it is unknown whether they
read anything but the tree, or change the real host.
"""

import shutil
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cyborg.core.capture import model
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.base import Driver
from cyborg.drivers.kernel.nvml import GpuFacts
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.pci.classes import Names
from cyborg.drivers.pci.driver import PciDriver
from cyborg.drivers.replay.fabric import SimulatedFabric, parse_partitions
from cyborg.drivers.replay.kernel import SimulatedControl, SimulatedKernel, SimulatedSriov
from cyborg.drivers.replay.recorder import unpack


class RecordedUevents:
    """The uevents of a replayed host; sources share them, so each is replayed once."""

    def __init__(
        self,
        capture: model.Capture,
        kernel: SimulatedKernel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` is monotonic, in seconds."""
        self._capture = capture
        self._kernel = kernel
        self._clock = clock
        self._begin = clock()
        self._left = sorted(capture.uevents, key=lambda event: event.seconds)

    def open(self, subsystems: Iterable[str]) -> "RecordedSource":
        """Return a source of the uevents of some subsystems, as ``NetlinkSource`` of the agent."""
        return RecordedSource(self, frozenset(subsystems))

    def replay_due(self) -> list[model.Uevent]:
        """Replay the uevents that are due, and return them."""
        with self._kernel.lock:
            elapsed = self._clock() - self._begin
            due: list[model.Uevent] = []
            while self._left and self._left[0].seconds <= elapsed:
                self._replay(self._left[0])
                due.append(self._left.pop(0))
        return due

    def seconds_left(self) -> float | None:
        """Return the seconds until the next uevent; None after the last."""
        with self._kernel.lock:
            if not self._left:
                return None
            return max(0.0, self._begin + self._left[0].seconds - self._clock())

    def _replay(self, event: model.Uevent) -> None:
        root = self._kernel.root.parent
        device = f"sys/{event.path.strip('/')}"
        physical = (root / device / "physfn").resolve()  # before a removal, which ends the link
        if event.action == "remove":
            self._kernel.remove_device(Path(root / device).resolve())
            self._kernel.count_virtual_functions(physical)
        elif event.action == "add" and not (root / device).exists():
            unpack(model.select_device(self._capture, device), root)
            self._kernel.count_virtual_functions((root / device / "physfn").resolve())


class RecordedSource:
    """Source of recorded uevents; implements ``agent.backends.uevents.EventSource``."""

    def __init__(self, events: RecordedUevents, subsystems: frozenset[str]) -> None:
        self._events = events
        self._subsystems = subsystems
        self._woken = threading.Event()

    def read(self, seconds: float | None) -> list[str]:
        """Return the subsystems of the uevents that are due; wait up to ``seconds`` for one."""
        # Without a wait if some are due already.
        due = self._events.replay_due()
        if not due:
            times = (seconds, self._events.seconds_left())
            self._woken.wait(min((t for t in times if t is not None), default=None))
            self._woken.clear()
            due = self._events.replay_due()
        return [event.subsystem for event in due if event.subsystem in self._subsystems]

    def wake(self) -> None:
        """Make ``read`` return soon. Thread-safe."""
        self._woken.set()

    def close(self) -> None:
        """Do nothing: nothing is open."""


def parse_gpus(capture: model.Capture) -> dict[str, GpuFacts]:
    """Return the answers of NVML in a capture by address. Raise Invalid if one is malformed."""
    try:
        return {address: GpuFacts.from_dict(facts) for address, facts in capture.nvml.items()}
    except (KeyError, TypeError, ValueError) as exc:
        raise Invalid(f"nvml: {type(exc).__name__}: {exc}", field="nvml") from exc


class ReplayedHost:
    """A capture, unpacked into a private folder, which ``close`` removes.

    Each unpacking is a boot of the host: it has a boot id of its own.
    """

    def __init__(self, capture: model.Capture, faults: Iterable[model.Fault] = ()) -> None:
        """Unpack the capture.

        Raise OSError, and Invalid for malformed answers of NVML or Fabric Manager.
        """
        self.capture = capture
        gpus = parse_gpus(capture)
        partitions = parse_partitions(capture)
        self.fabric = SimulatedFabric(partitions) if partitions else None
        """The fabric of the host; None if the capture has none."""
        self._folder = Path(tempfile.mkdtemp(prefix="cyborg-replay-"))
        # Also at the end of a process that could not start its agent.
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        try:
            unpack(capture, self._folder)
            # A capture has no boot id: each unpacking is a boot of the host.
            self.boot_id = self._folder / "proc/sys/kernel/random/boot_id"
            self.boot_id.parent.mkdir(parents=True, exist_ok=True)
            self.boot_id.write_text(f"{uuid.uuid4()}\n")
        except OSError:
            self.close()
            raise
        self.sysfs_root = self._folder / "sys"
        self.kernel = SimulatedKernel(self.sysfs_root, faults)
        self.uevents = RecordedUevents(capture, self.kernel)
        # Only what a HostAccess names is replaced: a driver can reach nothing else of a host.
        control = SimulatedControl(self.kernel)
        self.access = replace(
            HostAccess.of(self.sysfs_root),
            lookup=lambda address: Names(*capture.names.get(address, ())),
            nvml=gpus.get,
            reset=self.kernel.reset,
            set_count=SimulatedSriov(self.kernel).set_count,
            set_services=self.kernel.set_services,
            create_mdev=self.kernel.create,
            remove_mdev=self.kernel.remove,
            set_instances=self.kernel.set_instances,
            load_firmware=control.load_firmware,
            reconfigure=control.reconfigure,
            run_tool=control.run_tool,
            erase=self.kernel.erase,
        )

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        self._remove()

    def create_driver(
        self, driver: type[Driver], backend: str, options: Mapping[str, Any]
    ) -> Driver:
        """Return a driver of the replayed host. Raise DriverFailed if SIMULATED lacks its class."""
        if f"{driver.__module__}:{driver.__qualname__}" not in SIMULATED:
            raise DriverFailed(
                f"the driver {driver.name} cannot be replayed: a replay does not simulate "
                "the changes that it makes to a host"
            )
        # The driver fake has no hardware, and so no access to replace.
        if issubclass(driver, PciDriver):
            return driver(backend, options, self.sysfs_root, self.access)
        return driver(backend, options, self.sysfs_root)


# Drivers that can run on a replayed host: a HostAccess replaces all of their host work.
SIMULATED = frozenset(
    {
        "cyborg.drivers.fake:FakeDriver",
        "cyborg.drivers.generic:GenericDriver",
        "cyborg.drivers.crypto.driver:CryptoDriver",
        "cyborg.drivers.gpu.driver:GpuDriver",
        "cyborg.drivers.fpga.driver:FpgaDriver",
        "cyborg.drivers.nic.driver:NicDriver",
        "cyborg.drivers.nvme.driver:NvmeDriver",
    }
)

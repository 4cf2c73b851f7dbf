# SPDX-License-Identifier: Apache-2.0
"""Fatal errors of NVSwitches (SXid) in the kernel log, and the partitions that they close.

NVIDIA's Fabric Manager User Guide, "Fatal NVSwitch SXid Errors" and "Always Fatal NVSwitch SXid
Errors", says which errors are local to a link and which need a restart of the host.
``error_nvswitch.h`` and ``common_nvswitch.h`` of NVIDIA's open kernel modules have the form of a
line, such as ``nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 30 sourcetrack timeout
error``. A fatal error of a link also appears as Xid 74 or 149 of the GPU, if the host and not a
server has it; the check ``xid`` of ``pci.health`` then makes that GPU unhealthy.

The kernel does not say which GPU is at a link of a switch: the driver numbers the switches as it
finds them. NVML does not know GPUs that are bound to ``vfio-pci``. The SDK's
``fmGetNvlinkFailedDevices`` has the failures at the start of Fabric Manager, and is always empty on
H100 and later ("Getting a List of Devices with Failed NVLinks" of the guide). So an error of a link
closes each partition of several GPUs, and those of one GPU, which have no NVLink, stay open.
NVSwitches of B200 and later have no kernel driver and no SXid.
"""

import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cyborg.core.text import sanitize
from cyborg.drivers.gpu.fabric.partitions import Partition
from cyborg.drivers.kernel.log import KernelLog

_SXID = re.compile(
    r"nvidia-nvswitch\d+:? SXid \(PCI:([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])\): "
    r"(\d{1,6}), Fatal,? ?(?:Link (\d{1,3}) )?(.{0,80})"
)
# "Always Fatal NVSwitch SXid Errors", and 10003 of "Other Notable NVSwitch SXid Errors".
FABRIC_SXIDS = frozenset({10003, 12020, 22003, 22011, *range(23001, 23018)})
# The link went down. A reset of its GPU does that too, so each restart of a server may log it.
_LINK_DOWN = 20034
_MAX_FAULTS = 100


@dataclass(frozen=True, slots=True)
class SwitchFault:
    """A fatal error of the NVSwitch at a PCI address; ``link`` is None for one of the switch."""

    switch: str
    code: int
    link: int | None
    text: str

    @property
    def is_local(self) -> bool:
        """Return whether the error is limited to the partition that uses the link."""
        return self.link is not None and self.code not in FABRIC_SXIDS

    def __str__(self) -> str:
        """Return a sentence with what to do."""
        place = "" if self.link is None else f" at link {self.link}"
        remedy = "reset the GPUs" if self.is_local else "reboot the host"
        return (
            f"NVSwitch {self.switch} has the fatal SXid {self.code} ({self.text}){place}: stop the "
            f"servers and {remedy}, clear the kernel log (dmesg --clear), restart the agent"
        )


def parse_fault(text: str) -> SwitchFault | None:
    """Return the fault that a line of the kernel reports; None for any other line."""
    found = _SXID.match(text)
    if found is None:
        return None
    switch, code, link, message = found.groups()
    if int(code) == _LINK_DOWN:
        return None
    number = None if link is None else int(link)
    return SwitchFault(switch.lower(), int(code), number, sanitize(message).strip())


def find_obstacles(
    partitions: Iterable[Partition], faults: Iterable[SwitchFault]
) -> dict[int, str]:
    """Return why partitions cannot be used, by their id; the first fault of several."""
    found: dict[int, str] = {}
    # One of the whole fabric first: its remedy includes that of the others.
    for fault in sorted(faults, key=lambda fault: fault.is_local):
        for partition in partitions:
            if not fault.is_local or len(partition.modules) > 1:
                found.setdefault(partition.id, str(fault))
    return found


class SwitchLog:
    """Fatal errors of the NVSwitches since the boot, or since the log was cleared. Thread-safe."""

    def __init__(self, path: str | Path) -> None:
        """Store the path of the kernel log."""
        self._log = KernelLog(path, "SXid")
        self._lock = threading.Lock()
        self._faults: dict[tuple[str, int, int | None], SwitchFault] = {}

    def read(self) -> tuple[SwitchFault, ...]:
        """Return the faults. Warn once if the log cannot be read."""
        with self._lock:
            for text in self._log.read():
                fault = parse_fault(text)
                if fault is not None and len(self._faults) < _MAX_FAULTS:
                    self._faults.setdefault((fault.switch, fault.code, fault.link), fault)
            return tuple(self._faults.values())

# SPDX-License-Identifier: Apache-2.0
"""Reader of NVIDIA Xid errors in the kernel log.

``Documentation/ABI/testing/dev-kmsg`` of the Linux kernel describes the format of the log. Reading
it may need a privilege (``dmesg_restrict`` of ``Documentation/admin-guide/sysctl/kernel.rst``).
NVIDIA's "Xid Errors", chapter "Analyzing Xid Errors with the Xid Catalog", describes the meaning of
each Xid and the required action. An example of a line in the log is
``NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.``; the comments of
``kern_gpu_error_cont_ga100.c`` of NVIDIA's open kernel modules have such lines, and ``nverror.h``
there has the names of most codes.
"""

import os
import re
import weakref
from collections.abc import Mapping
from pathlib import Path

from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_state import HEALTHY, Measurement
from cyborg.core.log import get_logger

LOG = get_logger(__name__)

FATAL_XIDS: Mapping[int, str] = {
    46: "GPU stopped processing",
    48: "double bit ECC error",
    54: "auxiliary power is not connected",
    62: "internal micro-controller halt",
    64: "memory remapping failure",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
    156: "resource retirement event",
    158: "GPU fatal timeout",
}
"""Xids after which the GPU needs a reset, a reboot of the host, or the vendor's support.

They are those of the catalog's "Resolution Bucket (Immediate Action)" with RESET_GPU, RESTART_BM or
CHECK_MECHANICALS, and 48 and 74, whose workflows end with a reset. Excluded are Xids that a faulty
program causes (RESTART_APP: 13, 31, 43, 45), and Xids after which the GPU continues to work
(IGNORE): a remapped row (63), an error that affects only one program (94), a corrected error of
C2C (121). So is 155, which the driver also logs where a link is switched off on purpose.
"""
LINK_XIDS: Mapping[int, str] = {
    144: "SAW",
    145: "RLW",
    146: "TLW",
    147: "TREX",
    148: "NVLPW_CTRL",
    149: "NETIR",
    150: "MSE",
}
"""Xids of NVLink 5 (Blackwell) with the unit: "Fatal" or "Nonfatal" in the text says which it is,
such as ``149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 ...)``."""
LASTING_XIDS = frozenset({54})
"""Xids of the machine that no recovery of the GPU ends."""
RECOVERY_XID = 154
"""The Xid of drivers from R565 on with the required recovery action of the GPU, such as ``154, GPU
recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)``. "None" means no action
(``GPU_RECOVERY_ACTION_CHANGED`` in ``gpu.c`` of NVIDIA's open kernel modules)."""

MAX_RECORDS = 100_000  # per read of the log; the kernel's buffer holds fewer
_RECORD = 8192  # bytes: more than the maximum size of a record
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]*\): (\d+)")
_ACTION = re.compile(r"\bto 0x([0-9a-fA-F]{1,8}) \(([A-Za-z0-9 /-]{1,64})\)")
_FATAL = re.compile(r"\bFatal\b")


class XidLog:
    """Fatal Xids of each GPU since the boot, or since the log was cleared (``dmesg --clear``).

    A restarted agent reads the log again. After a reset of a GPU an operator must clear the log and
    restart the agent, unless the driver logs that the GPU recovered.
    """

    def __init__(self, path: str | Path = "/dev/kmsg") -> None:
        """Store the path; the log is opened by the first ``read``."""
        self._path = path
        self._file: int | None = None
        self._warned = False
        self._faults: dict[str, dict[int, str]] = {}  # descriptions by device and Xid

    def read(self) -> None:
        """Process the new records of the log. Warn once if the log cannot be read."""
        if self._file is None:
            self._file = self._open()
        if self._file is None:
            return
        for _ in range(MAX_RECORDS):
            failure: OSError | None = None
            try:
                record = os.read(self._file, _RECORD)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # the oldest records were overwritten; the next read skips them
            except OSError as exc:
                failure = exc
            if failure is not None:
                self._warn_once(failure)
                return
            if not record:
                return
            for line in record.decode(errors="replace").splitlines():
                self._process(line)

    def measure(self, address: str) -> Measurement:
        """Return the health of the device at a PCI address; its function number is ignored."""
        faults = self._faults.get(address.rpartition(".")[0].lower())
        if not faults:
            return HEALTHY
        reason = ", ".join(f"Xid {code} ({text})" for code, text in sorted(faults.items()))
        return Measurement(Health.UNHEALTHY, reason)

    def _open(self) -> int | None:
        failure: OSError | None = None
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as exc:
            failure = exc
        if failure is not None:
            self._warn_once(failure)
            return None
        weakref.finalize(self, os.close, file)
        try:
            # The first record after the log was cleared.
            os.lseek(file, 0, os.SEEK_DATA)
        except OSError:
            LOG.debug("Cannot seek in %s, reading it from its start", self._path)
        return file

    def _warn_once(self, exc: OSError) -> None:
        if not self._warned:
            self._warned = True
            LOG.warning("Cannot read %s, Xid errors will not be detected: %s", self._path, exc)

    def _process(self, line: str) -> None:
        head, _, text = line.partition(";")
        found = _XID.match(text)
        if found is None or not _is_from_kernel(head):
            return
        device, code = found[1].lower(), int(found[2])
        action = _ACTION.search(text) if code == RECOVERY_XID else None
        if action is not None and int(action[1], 16) == 0:
            faults = self._faults.get(device, {})
            self._faults[device] = {c: text for c, text in faults.items() if c in LASTING_XIDS}
        elif (fault := _describe(code, text, action)) is not None:
            self._faults.setdefault(device, {})[code] = fault


def _describe(code: int, text: str, action: re.Match[str] | None) -> str | None:
    """Return a description of the fault that an Xid reports; None if it reports none."""
    if action is not None:
        return f"recovery action: {action[2]}"
    if code in LINK_XIDS and _FATAL.search(text):
        return f"fatal NVLink error of {LINK_XIDS[code]}"
    return FATAL_XIDS.get(code)


def _is_from_kernel(head: str) -> bool:
    """Return whether the kernel wrote a record; records of programs have a syslog facility."""
    level = head.partition(",")[0]
    return level.isdecimal() and int(level) >> 3 == 0

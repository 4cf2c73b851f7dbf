# SPDX-License-Identifier: Apache-2.0
"""Values that the functions of Fabric Manager's SDK return, with what to do.

``nv_fm_types.h`` of nvidia-fabricmanager-dev has the values (``fmReturn_t``; later releases have
those from -11 on), and NVIDIA's Fabric Manager User Guide, "Partition Life Cycle Errors", the
meaning of those of the requests. The names of settings are those of ``fabricmanager.cfg``.
"""

from collections.abc import Mapping
from enum import IntEnum


class Code(IntEnum):
    """A returned value that this package distinguishes."""

    SUCCESS = 0
    BADPARAM = -1
    GENERIC_ERROR = -2
    NOT_SUPPORTED = -3
    UNINITIALIZED = -4
    TIMEOUT = -5
    VERSION_MISMATCH = -6
    IN_USE = -7
    NOT_CONFIGURED = -8
    CONNECTION_NOT_VALID = -9
    NVLINK_ERROR = -10
    RESOURCE_IN_USE = -12
    PARTITION_ID_IN_USE = -17
    PARTITION_ID_NOT_IN_USE = -18
    NOT_READY = -22


# Fabric Manager starts, or it was started with --restart and waits for the active partitions.
STARTING = frozenset({Code.NOT_CONFIGURED, Code.NOT_READY})
# The process of Fabric Manager ends, or is another one than before.
RESTARTED = STARTING | {Code.CONNECTION_NOT_VALID}
# The partition is active already, or a GPU of it is in another active one.
USED = frozenset({Code.IN_USE, Code.RESOURCE_IN_USE, Code.PARTITION_ID_IN_USE})
# The partition is not active, in the answer to a deactivation.
NOT_ACTIVE = frozenset({Code.UNINITIALIZED, Code.PARTITION_ID_NOT_IN_USE})

_START = (
    "is starting, or waits for the list of active partitions",
    "wait a minute; if it persists, read its log, /var/log/fabricmanager.log",
)
_MEANINGS: Mapping[int, tuple[str, str]] = {
    Code.BADPARAM: ("refuses an argument", "compare the partitions with those of fmpm -l"),
    Code.GENERIC_ERROR: ("failed for a reason of its own", "read /var/log/fabricmanager.log"),
    Code.NOT_SUPPORTED: (
        "is not in the mode for this request",
        "set FABRIC_MODE=1 for whole GPUs, or 2 for virtual functions, in fabricmanager.cfg and "
        "restart nvidia-fabricmanager while no server uses its GPUs",
    ),
    Code.UNINITIALIZED: (
        "does not serve requests at this address",
        "use the address of FM_CMD_BIND_INTERFACE or FM_CMD_UNIX_SOCKET_PATH, "
        "not that of UNIX_SOCKET_PATH",
    ),
    Code.TIMEOUT: (
        "timed out at a GPU or an NVSwitch",
        "read the Xid and SXid errors of the kernel log",
    ),
    Code.VERSION_MISMATCH: (
        "and the library have different versions",
        "install nvidia-fabricmanager and its library in the same version",
    ),
    **dict.fromkeys(USED, ("has the GPUs in an active partition", "deactivate that partition")),
    Code.PARTITION_ID_NOT_IN_USE: ("has no such active partition", "list them with fmpm -l"),
    Code.NOT_CONFIGURED: _START,
    Code.NOT_READY: _START,
    Code.CONNECTION_NOT_VALID: (
        "cannot be reached",
        "start nvidia-fabricmanager, or correct the address",
    ),
    Code.NVLINK_ERROR: (
        "could not train the NVLinks of a GPU",
        "read the Xid and SXid errors of the kernel log, and reset the GPU while no partition of "
        "it is active",
    ),
}


def explain(code: int, call: str, address: str) -> str:
    """Return a sentence about a failed call: what was wrong, and what to do."""
    reason, remedy = _MEANINGS.get(
        code, ("returned an unknown value", "read /var/log/fabricmanager.log")
    )
    name = Code(code).name if code in _MEANINGS else "unknown"
    return f"Fabric Manager at {address} {reason} ({call}: {name}, {code}): {remedy}"

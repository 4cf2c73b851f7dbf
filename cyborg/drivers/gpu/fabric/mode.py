# SPDX-License-Identifier: Apache-2.0
"""The mode of Fabric Manager, and which partitions it can activate in this mode.

NVIDIA's Fabric Manager User Guide, "Fabric Manager Config Options", describes ``FABRIC_MODE`` of
``fabricmanager.cfg``: 0 for none, 1 for partitions of whole GPUs ("shared NVSwitch"), and 2 for
partitions of virtual functions ("vGPU"). Neither the SDK nor fmpm tells the mode; an activation of
the other kind returns NOT_SUPPORTED. So the mode is read from the file, if Fabric Manager runs on
this host, and learnt from such a refusal.
"""

import ipaddress
import re
from collections.abc import Collection
from pathlib import Path

CONFIG = "/usr/share/nvidia/nvswitch/fabricmanager.cfg"
WHOLE, FUNCTIONS = 1, 2  # values of FABRIC_MODE

_MODE = re.compile(r"^[ \t]*FABRIC_MODE[ \t]*=[ \t]*([0-9])[ \t]*(?:#.*)?$", re.MULTILINE)
_NAMES = {WHOLE: "whole GPUs", FUNCTIONS: "virtual functions"}


def find_config(address: str, path: str) -> Path | None:
    """Return the configuration of the Fabric Manager at an address; None if it runs elsewhere."""
    if not address.startswith("/"):
        host = address.rpartition(":")[0].strip("[]")
        try:
            is_local = ipaddress.ip_address(host).is_loopback
        except ValueError:
            is_local = host == "localhost"
        # A file of this host says nothing about the Fabric Manager of a service VM.
        if not is_local:
            return None
    return Path(path)


def read_mode(path: Path | None) -> int | None:
    """Return the FABRIC_MODE of a configuration file; None if it is unknown."""
    if path is None:
        return None
    try:
        found = _MODE.findall(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        # Fabric Manager may be configured in another place: then only a refusal tells the mode.
        return None
    return int(found[-1]) if found else None


def find_mode_obstacles(
    mode: int | None, path: Path | None, refused: Collection[int]
) -> dict[int, str]:
    """Return why partitions cannot be activated, by the mode that they need: WHOLE or FUNCTIONS.

    ``mode`` is that of the file at ``path``, None if it is unknown. ``refused`` are the modes whose
    partitions Fabric Manager has refused to activate.
    """
    obstacles: dict[int, str] = {}
    for needed, name in _NAMES.items():
        remedy = (
            f"needs FABRIC_MODE={needed} for {name}: set it in {path or 'fabricmanager.cfg'}, and "
            "restart nvidia-fabricmanager while no server uses its GPUs"
        )
        if needed in refused:
            obstacles[needed] = f"Fabric Manager has another mode, and {remedy}, then the agent"
        if mode not in (None, needed):
            obstacles[needed] = f"Fabric Manager has FABRIC_MODE={mode}, and {remedy}"
    return obstacles

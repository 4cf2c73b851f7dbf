# SPDX-License-Identifier: Apache-2.0
"""Groups of VFIO: whether a process uses a device is found out by opening its group."""

import os
import re
from pathlib import Path

_GROUP = re.compile(r"[0-9]{1,9}")


def group_path(dev: Path, group: str | None) -> Path | None:
    """Return the device node of an IOMMU group; None if ``group`` is not the number of a group.

    ``vfio_devnode`` of ``drivers/vfio/group.c`` of Linux names it.
    """
    if group is None or not _GROUP.fullmatch(group):
        return None
    return dev / "vfio" / group


def open_group(path: Path) -> int:
    """Return a descriptor of a group; no process can begin to use its devices until it is closed.

    The kernel permits one open descriptor of a group (``drivers/vfio/vfio_main.c`` of Linux 6.1),
    and none while a device is open by its own node in ``/dev/vfio/devices``
    (``drivers/vfio/group.c`` of later versions). Raise OSError then.
    """
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)

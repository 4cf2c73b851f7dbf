# SPDX-License-Identifier: Apache-2.0
"""Scheduling and memory of the virtual functions of Intel GPUs, as ``xe`` shows them in sysfs.

``Documentation/ABI/testing/sysfs-driver-intel-xe-sriov`` of Linux describes the attributes of this
kernel driver: those of the scheduling since 6.19, those of the memory since 7.0. A physical
function has

* ``sriov_admin/.bulk_profile``: attributes whose values apply to all functions of the card, also
  to its own. Errors of a write: EINVAL for a malformed value, EPERM if the hardware does not
  support the change, EIO if the firmware refuses it;
* ``sriov_admin/vfN/profile``, N from 1: the same attributes of one virtual function. The hardware
  may round a number. A read fails with EUCLEAN if the parts of the card have different values;
* ``vram_quota`` in both folders, not in that of the physical function: the memory of a virtual
  function in bytes, on cards with memory of their own. It is not ``.bulk_profile`` that is written
  here, because that applies to all functions that the card can have, also to missing ones
  (``xe_sriov_pf_provision_bulk_apply_vram``). A new value takes the memory of the function away and
  allocates it again, rounded up; if that fails, the function has none (``pf_provision_vf_lmem``).

The firmware permits the priority ``high`` for the physical function only, so that a write of it for
all functions fails with EINVAL (``sched_priority_bulk_high_allowed``).

The attributes exist only if the driver was loaded as that of a physical function (``max_vfs`` of
``xe``). The resources of the functions, such as memory, are divided in equal parts when they are
enabled, and released when they are disabled, and so are the values of these attributes
(``xe_sriov_pf_provision.c``).
"""

import re
from collections.abc import Mapping
from pathlib import Path

from cyborg.drivers.sysfs import PCI_DEVICES, Sysfs

KERNEL_DRIVER = "xe"

PRIORITY = "sched_priority"
NUMBERS = ("exec_quantum_ms", "preempt_timeout_us")  # 0 is unlimited
PRIORITIES = ("low", "normal")  # of all functions
VRAM = "vram_quota"

# What the driver may add to the memory of a function: it rounds up to 2 MiB for each tile.
_MAX_ROUNDING = 32 << 20

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_CURRENT = re.compile(r"\[([a-z]+)\]")


def is_valid(name: object, value: object) -> bool:
    """Return whether a value can be written to the attribute with a name."""
    if not isinstance(value, str):
        return False
    if name == PRIORITY:
        return value in PRIORITIES
    return name in NUMBERS and _NUMBER.fullmatch(value) is not None


def bulk_folder(address: str) -> Path:
    """Return the folder with the attributes of all functions of a card, relative to sysfs."""
    return PCI_DEVICES / address / "sriov_admin/.bulk_profile"


def has_scheduling(sysfs: Sysfs, address: str, settings: Mapping[str, str]) -> bool:
    """Return whether the kernel driver of a card has all attributes of the settings."""
    return set(settings) <= set(sysfs.list_names(bulk_folder(address)))


def has_vram(sysfs: Sysfs, address: str) -> bool:
    """Return whether the kernel driver of a card has the attribute of the memory of functions."""
    return VRAM in sysfs.list_names(bulk_folder(address))


def read_vram(sysfs: Sysfs, address: str, number: int) -> int | None:
    """Return the memory of virtual function ``number`` in bytes; None if it is unknown."""
    return sysfs.read_int(profile_folder(address, number) / VRAM)


def is_rounded(found: int | None, wanted: int) -> bool:
    """Return whether the driver gives a function ``found`` bytes if ``wanted`` are written."""
    return found is not None and wanted <= found < wanted + _MAX_ROUNDING


def profile_folder(address: str, number: int) -> Path:
    """Return the folder with the attributes of virtual function ``number``, relative to sysfs."""
    return PCI_DEVICES / address / f"sriov_admin/vf{number}/profile"


def read(sysfs: Sysfs, address: str, number: int, name: str) -> str | None:
    """Return the value of an attribute of virtual function ``number``; None if it is unknown."""
    text = sysfs.read_text(profile_folder(address, number) / name)
    if text is None or name != PRIORITY:
        return text
    found = _CURRENT.search(text)
    return None if found is None else found[1]

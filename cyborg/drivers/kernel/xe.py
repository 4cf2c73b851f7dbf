# SPDX-License-Identifier: Apache-2.0
"""Scheduling of the virtual functions of Intel GPUs, as the kernel driver ``xe`` shows it in sysfs.

``Documentation/ABI/testing/sysfs-driver-intel-xe-sriov`` of Linux 6.19 describes the attributes. A
physical function has

* ``sriov_admin/.bulk_profile``: attributes whose values apply to all functions of the card, also
  to its own. Errors of a write: EINVAL for a malformed value, EPERM if the hardware does not
  support the change, EIO if the firmware refuses it;
* ``sriov_admin/vfN/profile``, N from 1: the same attributes of one virtual function. The hardware
  may round a number. A read fails with EUCLEAN if the parts of the card have different values.

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
PRIORITIES = ("low", "normal", "high")

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


def read(sysfs: Sysfs, address: str, number: int, name: str) -> str | None:
    """Return the value of an attribute of virtual function ``number``; None if it is unknown."""
    folder = PCI_DEVICES / address / f"sriov_admin/vf{number}/profile"
    text = sysfs.read_text(folder / name)
    if text is None or name != PRIORITY:
        return text
    found = _CURRENT.search(text)
    return None if found is None else found[1]

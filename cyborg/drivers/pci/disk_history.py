# SPDX-License-Identifier: Apache-2.0
"""Decision whether a PCI function with disks is offered: by what the disks hold, and who wrote it.

A disk with a signature may hold data of the host, so its function is not offered unless an operator
adopts it. But a server leaves signatures too, and these must not withhold the function: the server
may start again, or the disk is about to be erased. A server uses the function through VFIO. So a
function that was offered, and then bound to VFIO, has what a server left there, until its disks are
empty again. The memory of the driver keeps this.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from cyborg.core.inventory.delivery import is_vfio
from cyborg.drivers.base import Memory
from cyborg.drivers.host_use import signatures
from cyborg.drivers.host_use.signatures import DiskContents
from cyborg.drivers.sysfs import PciFunction, Sysfs

_STORAGE, _NVME = "01", "0108"  # classes: all controllers of disks, and those that are disks
_REMEDY = "erase it, for example with wipefs, or adopt the device"


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A function with disks that was offered.

    ``model`` is vendor and product, ``serial`` the serial number of an NVMe controller if known.
    ``given`` is set from the time at which it was bound to VFIO until its disks are empty.
    """

    model: str
    serial: str | None = None
    given: bool = False

    def is_same(self, other: "OfferedFunction") -> bool:
        """Return whether both may be the same function."""
        serials = {self.serial, other.serial} - {None}
        return self.model == other.model and len(serials) <= 1


def decide(
    function: PciFunction,
    serial: str | None,
    contents: DiskContents | None,
    known: OfferedFunction | None,
) -> tuple[str | None, OfferedFunction | None]:
    """Return why a function is withheld, None if it is offered, and what is known of it from now.

    ``contents`` is None if the kernel shows no disk of the function. ``known`` is the last result.
    """
    now = OfferedFunction(f"{function.vendor}:{function.product}", serial)
    if known is not None and not known.is_same(now):
        known = None
    if contents is None:
        if is_vfio(function.kernel_driver):
            return None, replace(known or now, given=True)
        # The kernel may not have read the disks yet. A virtual function may have none.
        if known is None and function.class_code.startswith(_NVME) and function.physfn is None:
            driver = function.kernel_driver or "no kernel driver"
            return (
                f"the contents of its disks are unknown while it is bound to {driver} and shows "
                "none: bind it to nvme or, if servers may overwrite the disks, to vfio-pci",
                None,
            )
        return None, known
    if contents.signature is None and contents.error is None:
        return None, replace(now, serial=serial or (known.serial if known else None))
    if known is not None and known.given:
        return None, known
    if contents.signature is not None:
        return f"{contents.signature}; {_REMEDY}", None
    return contents.error, known


class DiskHistory:
    """What a driver knows of the functions with disks; ``memory`` returns its memory."""

    def __init__(self, sysfs: Sysfs, memory: Callable[[], Memory]) -> None:
        self._sysfs = sysfs
        self._memory = memory
        self._contents: Mapping[str, DiskContents] = {}

    def read(self) -> None:
        """Read the contents of all disks; once for each discovery."""
        facts = signatures.read(self._sysfs.root)
        self._contents = signatures.contents_by_function(self._sysfs, facts)

    def find_reason(self, function: PciFunction) -> str | None:
        """Return why an offered function must be withheld for what its disks hold, or None."""
        contents = self._contents.get(function.address)
        key = f"disks {function.address}"
        stored = self._memory().get(key)
        if (contents, stored) == (None, None) and not function.class_code.startswith(_STORAGE):
            return None
        known = self._load(stored)
        reason, known = decide(function, self._read_serial(function.address), contents, known)
        self._memory().put(key, None if known is None else json.dumps(asdict(known)))
        return reason

    def _read_serial(self, address: str) -> str | None:
        folder = f"bus/pci/devices/{address}/nvme"
        names = self._sysfs.list_names(folder)
        return self._sysfs.read_text(f"{folder}/{names[0]}/serial") if names else None

    @staticmethod
    def _load(text: str | None) -> OfferedFunction | None:
        try:
            return OfferedFunction(**json.loads(text or ""))
        except (TypeError, ValueError):
            return None

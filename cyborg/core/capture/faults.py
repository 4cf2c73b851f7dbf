# SPDX-License-Identifier: Apache-2.0
"""Faults that a replayed host shows: ``ADDRESS:FAULT[=COUNT][@OPERATION]``.

``0000:3b:00.0:eio=2@erase`` lets the first two erasures of a drive fail with EIO. Without a count a
fault is permanent, and without an operation it affects each.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from cyborg.core.address import PciAddress
from cyborg.core.errors import Invalid


class FaultKind(StrEnum):
    """What goes wrong in an operation on a device."""

    EIO = "eio"
    EBUSY = "ebusy"
    STUCK_RESET = "stuck_reset"
    DISAPPEARS = "disappears"


class Operation(StrEnum):
    """Simulated host work."""

    CREATE = "create"  # of a mediated device, or of virtual functions
    REMOVE = "remove"  # of a mediated device, or of virtual functions
    ERASE = "erase"  # of a drive
    CONFIGURE = "configure"  # services of a crypto accelerator
    RESET = "reset"  # of a PCI function
    PROGRAM = "program"  # of a region of an FPGA card


_FAULT = re.compile(r"(.+):([a-z_]+)(?:=([1-9][0-9]{0,3}))?(?:@([a-z]+))?")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the device at a PCI address; ``count`` is None for a permanent one."""

    address: str
    kind: FaultKind
    count: int | None = None
    operation: Operation | None = None


def parse_fault(text: str) -> Fault:
    """Return the fault of a text. Raise Invalid."""
    expected = (
        f"{text!r} is no fault: expected ADDRESS:FAULT[=COUNT][@OPERATION], such as "
        f"0000:3b:00.0:eio=2, with a fault of {', '.join(FaultKind)} and an operation of "
        f"{', '.join(Operation)}"
    )
    match = _FAULT.fullmatch(text.strip())
    if match is None:
        raise Invalid(expected, field="replay_faults")
    address, kind, count, operation = match.groups()
    try:
        return Fault(
            str(PciAddress.parse(address)),
            FaultKind(kind),
            None if count is None else int(count),
            None if operation is None else Operation(operation),
        )
    except (Invalid, ValueError) as exc:
        raise Invalid(expected, field="replay_faults") from exc

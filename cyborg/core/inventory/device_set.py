# SPDX-License-Identifier: Apache-2.0
"""Device sets: devices of one host that are allocated together.

A set is a deployable without handles of its own: its members are handles of other deployables,
which are allocated only as parts of sets. Sets of one host may overlap, as the NVLink partitions of
eight GPUs do. A handle has one owner, whatever set it was allocated through.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import not_

from cyborg.core.codec import Serializable, wire
from cyborg.core.errors import Invalid
from cyborg.core.text import sanitize
from cyborg.core.validation import check_integer, check_text, find_duplicate

# As many as Fabric Manager has in one partition (``FM_MAX_NUM_GPUS`` of ``nv_fm_types.h``).
MAX_MEMBERS = 16
_MAX_ADDRESS = 120
_MAX_TEXT = 255


class SetKind(StrEnum):
    """What the members of a set have in common."""

    FABRIC = "fabric"  # a partition of NVIDIA Fabric Manager
    NVLINK = "nvlink"  # NVLink bridges connect each member with each other one
    PCIE = "pcie"  # the members are below one PCIe switch
    NUMA = "numa"  # the members are at one NUMA node


class OfferMode(StrEnum):
    """Which sets of a host are offered at the same time."""

    DISJOINT = "disjoint"  # only sets without a common member
    ALL = "all"  # each set whose members are free


class OfferState(StrEnum):
    """State of the offer of a set in Placement; None in the database for other deployables."""

    OFFERED = "offered"
    ALLOCATED = "allocated"  # offered, and all members have an owner through the set
    # All units are being reserved. A server may have been allocated the set before.
    WITHDRAWING = "withdrawing"
    WITHHELD = "withheld"  # all units are reserved, and no consumer had an allocation then


# End of an obstacle that another layout of the device at its start removes.
ANOTHER_LAYOUT = "apply another layout"

# The offers with which Placement has not all units of a set reserved.
UNRESERVED = frozenset({OfferState.OFFERED, OfferState.ALLOCATED})


class Activation(StrEnum):
    """Whether a partition of a fabric is active on its host."""

    INACTIVE = "inactive"
    OWN = "own"  # active, and the agent has activated it
    FOREIGN = "foreign"  # active, and another program has activated it


@dataclass(frozen=True, slots=True, order=True)
class SetMember(Serializable):
    """One member: the addresses of a device, of its deployable and of the attach handle."""

    device: str
    deployable: str
    handle: str

    def __post_init__(self) -> None:
        for name in ("device", "deployable", "handle"):
            check_text(f"{name} address of a member", getattr(self, name), _MAX_ADDRESS)


@dataclass(frozen=True, slots=True)
class DeviceSet(Serializable):
    """The members of a set, in the order of their fabric, and how the set is offered.

    ``mode`` is that of the source that found the set. ``wanted`` is the number of offered sets, by
    their size, that the conductor keeps if it can among the hosts of a ``group``; an empty group is
    the host alone. A set with an ``obstacle``, a sentence, cannot be used now, whatever the states
    of its members.
    """

    kind: SetKind
    members: tuple[SetMember, ...]
    mode: OfferMode = OfferMode.DISJOINT
    group: str = field(default="", metadata=wire(omit=not_))
    wanted: Mapping[str, int] = field(default_factory=dict, metadata=wire(omit=not_))
    obstacle: str | None = field(default=None, metadata=wire(omit=not_))

    def __post_init__(self) -> None:
        if not 1 <= len(self.members) <= MAX_MEMBERS:
            raise Invalid(
                f"a device set has {len(self.members)} members, expected 1 to {MAX_MEMBERS}",
                field="members",
            )
        if (twice := find_duplicate(self.members)) is not None:
            raise Invalid(f"a device set has the member {twice.handle} twice", field="members")
        if self.group:
            check_text("group of a device set", self.group, _MAX_TEXT)
        for size, count in self.wanted.items():
            if size not in _SIZES:
                raise Invalid(
                    f"wanted: found the size {size!r}, expected 1 to {MAX_MEMBERS}", field="wanted"
                )
            check_integer("wanted", count, subject=f"sets of {size}")
        if self.obstacle is not None:
            object.__setattr__(self, "obstacle", sanitize(self.obstacle, _MAX_TEXT) or None)

    @property
    def size(self) -> int:
        """Return the number of members."""
        return len(self.members)


def is_removed_by_layout(obstacle: str, device: str) -> bool:
    """Return whether an obstacle is the present layout of the device with this address."""
    return obstacle.startswith(f"device {device} ") and obstacle.endswith(ANOTHER_LAYOUT)


_SIZES = frozenset(str(size) for size in range(1, MAX_MEMBERS + 1))

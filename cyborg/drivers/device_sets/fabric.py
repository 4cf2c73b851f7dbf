# SPDX-License-Identifier: Apache-2.0
"""Partitions of an NVLink fabric, and the client that activates them.

NVIDIA's Fabric Manager User Guide describes the partitions in the chapters about the models "shared
NVSwitch" and "vGPU". GPUs of one guest have NVLink only if they are exactly one active partition.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cyborg.core.codec import Serializable


@dataclass(frozen=True, slots=True)
class Partition(Serializable):
    """A partition that the system supports.

    ``modules`` are the module ids of its GPUs in the order of the fabric; NVML has the same ids
    (``nvmlDeviceGetModuleId``). ``links`` is the smallest number of NVLinks that a GPU of the
    partition can use now, ``max_links`` the number without failures, and ``line_rate_mbps`` the
    rate of one link in megabytes per second; each is 0 if it is unknown.
    """

    id: int
    modules: tuple[int, ...]
    is_active: bool = False
    links: int = 0
    max_links: int = 0
    line_rate_mbps: int = 0


@dataclass(frozen=True, slots=True)
class FabricState:
    """The partitions now. ``problem`` says why none can be activated and has a remedy, or is None.

    With a problem ``partitions`` are those of the last answer, if any. ``obstacles`` has the
    partitions that cannot be activated, by their id with the reason.
    """

    partitions: tuple[Partition, ...] = ()
    problem: str | None = None
    obstacles: Mapping[int, str] = field(default_factory=dict)


class Fabric(Protocol):
    """Client of the program that manages the fabric.

    It is thread-safe, and each call takes a limited time.
    """

    def read(self) -> FabricState:
        """Return the partitions; raise nothing, a failure is the problem of the state."""

    def activate(self, number: int, functions: Sequence[str] = ()) -> None:
        """Activate a partition, also one that is active already with the same GPUs.

        ``functions`` are the PCI addresses of one virtual function of each GPU, in the order of the
        partition; it is empty for whole GPUs. Raise DriverFailed, with the partition in the way if
        an active one has one of its GPUs.
        """

    def deactivate(self, number: int) -> None:
        """Deactivate a partition, also one that is inactive. Raise DriverFailed."""

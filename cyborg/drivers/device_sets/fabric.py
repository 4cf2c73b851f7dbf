# SPDX-License-Identifier: Apache-2.0
"""Partitions of an NVLink fabric, and the client that activates them.

NVIDIA's Fabric Manager User Guide describes the partitions in the chapters about the models "shared
NVSwitch" and "vGPU". GPUs of one guest have NVLink only if they are exactly one active partition.
"""

from collections.abc import Sequence
from typing import Protocol

from cyborg.drivers.gpu.fabric.partitions import FabricState, Partition

__all__ = ["Fabric", "FabricState", "Partition"]


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

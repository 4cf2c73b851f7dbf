# SPDX-License-Identifier: Apache-2.0
"""The simulated Fabric Manager of a replayed host: the partitions of its capture, in memory.

It has the rules of NVIDIA's Fabric Manager User Guide that a server can notice: a GPU is in one
active partition at most, and a partition that is active already can be activated again. Links never
fail. A new replay has the states of the capture, as after a boot of the host.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

from cyborg.core.capture.model import Capture
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.validation import find_duplicate
from cyborg.drivers.gpu.fabric.partitions import (
    MAX_PARTITIONS,
    FabricState,
    Partition,
    find_overlapping,
)

# Key of the partitions in ``Capture.fabric``.
PARTITIONS = "partitions"


def dump_partitions(partitions: Iterable[Partition]) -> dict[str, object]:
    """Return partitions as a capture has them."""
    return {PARTITIONS: [partition.to_dict() for partition in partitions]}


def parse_partitions(capture: Capture) -> tuple[Partition, ...]:
    """Return the partitions in a capture, none without a fabric. Raise Invalid."""
    if not capture.fabric:
        return ()
    try:
        found = tuple(Partition.from_dict(body) for body in capture.fabric[PARTITIONS])
    except (KeyError, TypeError, ValueError) as exc:
        raise Invalid(f"fabric: {type(exc).__name__}: {exc}", field="fabric") from exc
    if len(found) > MAX_PARTITIONS:
        raise Invalid(f"fabric: more than {MAX_PARTITIONS} partitions", field="fabric")
    if (twice := find_duplicate([partition.id for partition in found])) is not None:
        raise Invalid(f"fabric: partition {twice} is listed twice", field="fabric")
    return found


class SimulatedFabric:
    """Partitions in memory; implements ``drivers.device_sets.fabric.Fabric``."""

    def __init__(self, partitions: Iterable[Partition]) -> None:
        self._lock = threading.Lock()
        self._partitions = {partition.id: partition for partition in partitions}
        self._own: set[int] = set()

    def read(self) -> FabricState:
        """Return the partitions."""
        with self._lock:
            return FabricState(tuple(self._partitions.values()), own=frozenset(self._own))

    def activate(self, number: int, functions: Sequence[str] = ()) -> None:
        """Activate a partition. Raise DriverFailed if another active one has one of its GPUs."""
        with self._lock:
            partition = self._find(number)
            if functions and len(functions) != len(partition.modules):
                raise DriverFailed(
                    f"partition {number} has {len(partition.modules)} GPUs, found "
                    f"{len(functions)} virtual functions"
                )
            if others := find_overlapping(self._partitions.values(), partition):
                raise DriverFailed(
                    f"partition {number} cannot be activated: partition {others[0].id} is active "
                    "and has one of its GPUs"
                )
            self._partitions[number] = replace(partition, is_active=True)
            self._own.add(number)

    def deactivate(self, number: int) -> None:
        """Deactivate a partition. Raise DriverFailed if it does not exist."""
        with self._lock:
            self._partitions[number] = replace(self._find(number), is_active=False)
            self._own.discard(number)

    def _find(self, number: int) -> Partition:
        try:
            return self._partitions[number]
        except KeyError:
            raise DriverFailed(f"the fabric has no partition {number}") from None

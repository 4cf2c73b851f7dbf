# SPDX-License-Identifier: Apache-2.0
"""Fabric partitions, the list of them, and comparisons.

NVIDIA's Fabric Manager User Guide describes them, in "GPU Partitions" those of each baseboard. They
are fixed and overlap, and two active partitions have no common GPU. A GPU is named by its module
id, which Fabric Manager calls ``physicalId``; on baseboards of H100 and later it knows neither uuid
nor PCI address of a GPU, so these are not read on any.

A baseboard of A100 has a rule of its own: Fabric Manager trains the NVLinks of a GPU when it
activates a partition, and a reset of the GPU after that leaves them down. So a GPU is prepared,
which may reset it, before its partition is activated, and wiped after the partition was
deactivated. H100 and later train their links in hardware after each reset ("Initializing NVSwitch
and NVLink" of the guide).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cyborg.core.codec import Serializable, as_list
from cyborg.core.inventory.activations import PartitionUse
from cyborg.core.inventory.device_set import Activation
from cyborg.core.validation import find_duplicate, integer

# FM_MAX_FABRIC_PARTITIONS and FM_MAX_NUM_GPUS of ``nv_fm_types.h``.
MAX_PARTITIONS = 64
MAX_GPUS = 16


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
    partitions that cannot be activated, by their id with the reason. ``own`` are the ids of the
    partitions that this client has activated and that were not inactive since; other active ones
    are those of other programs. ``mode_obstacles`` has why partitions cannot be activated in the
    mode of the fabric, by the mode that they need.
    """

    partitions: tuple[Partition, ...] = ()
    problem: str | None = None
    obstacles: Mapping[int, str] = field(default_factory=dict)
    own: frozenset[int] = frozenset()
    mode_obstacles: Mapping[int, str] = field(default_factory=dict)

    def activation(self, partition: Partition) -> Activation:
        """Return whether a partition of the state is active, and who has activated it."""
        if not partition.is_active:
            return Activation.INACTIVE
        return Activation.OWN if partition.id in self.own else Activation.FOREIGN


def parse_partitions(body: Any) -> tuple[Partition, ...]:
    """Parse the list of partitions in the form of ``fmpm -l``, ordered by id.

    Raise KeyError, TypeError or ValueError if it is malformed. ``fmpm.cpp`` of NVIDIA's
    Fabric-Manager-Client has the names of the form, which are those of ``nv_fm_types.h``.
    """
    partitions = sorted(
        (_parse_partition(item) for item in as_list(body["partitionInfo"])), key=lambda p: p.id
    )
    if (twice := find_duplicate([p.id for p in partitions])) is not None:
        raise ValueError(f"partition {twice} is listed twice")
    return tuple(partitions)


def _parse_partition(body: Any) -> Partition:
    """Return a partition; its links and their speed are those of the GPU with the fewest."""
    gpus: Sequence[Any] = as_list(body["gpuInfo"])
    number, count = integer(body["partitionId"]), integer(body["numGpus"])
    modules = tuple(integer(gpu["physicalId"]) for gpu in gpus)
    if count != len(gpus) or not 1 <= count <= MAX_GPUS or len(set(modules)) != count:
        raise ValueError(f"partition {number} has {count} GPUs, and the modules {modules}")

    def smallest(name: str) -> int:
        return min(integer(gpu[name]) for gpu in gpus)

    return Partition(
        id=number,
        modules=modules,
        is_active=integer(body["isActive"]) != 0,
        links=smallest("numNvLinksAvailable"),
        max_links=smallest("maxNumNvLinks"),
        line_rate_mbps=smallest("nvlinkLineRateMBps"),
    )


def find_overlapping(partitions: Iterable[Partition], partition: Partition) -> list[Partition]:
    """Return the other active partitions that have a GPU of this partition."""
    return [
        other
        for other in partitions
        if other.is_active
        and other.id != partition.id
        and not set(other.modules).isdisjoint(partition.modules)
    ]


def find_foreign_obstacles(state: FabricState) -> dict[int, str]:
    """Return the partitions with a GPU of a partition that another program has activated.

    They cannot be activated: the reasons are by the id of the partition. The active partition
    itself is among them.
    """
    foreign = [p for p in state.partitions if state.activation(p) is Activation.FOREIGN]
    return _find_obstacles(
        state,
        foreign,
        lambda number: (
            f"another program activated partition {number}: stop the guest that uses it, and "
            f"deactivate it (fmpm -d {number})"
        ),
    )


def find_unused_obstacles(
    state: FabricState, uses: Mapping[int, PartitionUse | None]
) -> dict[int, str]:
    """Return the partitions with a GPU of an active one that cannot be deactivated now.

    ``uses`` has those that this client has activated and that no request has, by id, with None for
    one that the conductor does not know. The reasons are by the id of the partition.
    """
    active = [p for p in state.partitions if p.id in uses and state.activation(p) is Activation.OWN]

    def explain(number: int) -> str:
        active = f"partition {number} is active without a request, and"
        if uses[number] is PartitionUse.OVERLAPPED:
            return (
                f"{active} a device of it is in use: when the device is free it is deactivated "
                "(cyborg audit shows it)"
            )
        return (
            f"{active} its set lacks a device or is not known: deactivate it while no guest has "
            f"its GPUs (fmpm -d {number})"
        )

    return _find_obstacles(state, active, explain)


def _find_obstacles(
    state: FabricState, active: Iterable[Partition], explain: Callable[[int], str]
) -> dict[int, str]:
    """Return the partitions with a GPU of one of these, with the last reason, by their id."""
    return {
        partition.id: explain(blocking.id)
        for blocking in active
        for partition in state.partitions
        if not set(partition.modules).isdisjoint(blocking.modules)
    }

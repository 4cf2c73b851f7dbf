# SPDX-License-Identifier: Apache-2.0
"""The Fabric Manager of a host: its partitions, and which of them are active.

NVIDIA's Fabric Manager User Guide describes the requests in "Fabric Manager SDK", and in
"Resiliency" a start with ``--restart``: Fabric Manager refuses all requests until it has the list
of the active partitions, within 60 seconds, and then routes only these. So the last known active
partitions are kept in the memory of the driver. They include those that others activated, such as
NVIDIA's hook for libvirt, because a partition that is missing in the list loses its links under a
running server. Without a last known state, no list is sent. A state that cannot be written closes
the fabric: after a restart of the agent the list would be an older one.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cyborg.core.address import PciAddress
from cyborg.core.codec import Serializable
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.log import get_logger
from cyborg.drivers.base import Memory, load_record
from cyborg.drivers.gpu.fabric.codes import NOT_ACTIVE, RESTARTED, STARTING, USED, Code
from cyborg.drivers.gpu.fabric.mode import FUNCTIONS, WHOLE, find_mode_obstacles, read_mode
from cyborg.drivers.gpu.fabric.partitions import FabricState, Partition, find_overlapping
from cyborg.drivers.gpu.fabric.requests import FabricRequests, RequestFailed
from cyborg.drivers.gpu.fabric.switches import SwitchLog, find_obstacles

LOG = get_logger(__name__)

# Each operation makes at most so many requests, each within its timeout.
_REQUESTS = 4
# Seconds in which an activation without an answer may still complete. Later, the partition counts
# as that of another program: otherwise one that such a program activates would be deactivated.
LATE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class _Record(Serializable):
    """The last known partitions, and the virtual functions with which they were activated by id.

    ``own`` are the ids of the partitions that were activated here and that were active in each list
    since: what activates one after that may be another program. ``pending`` has the requests to
    activate an own partition since which no list had it as active: the time in seconds since 1970,
    by the id. Such a partition stays an own one for LATE_SECONDS.
    """

    partitions: tuple[Partition, ...]
    functions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    own: tuple[int, ...] = ()
    pending: Mapping[str, float] = field(default_factory=dict)

    def with_own(self, number: int, is_own: bool) -> "_Record":
        others = {*self.own} - {number}
        return replace(self, own=tuple(sorted(others | {number} if is_own else others)))

    def with_active(self, number: int, is_active: bool, functions: Sequence[str]) -> "_Record":
        others = {key: names for key, names in self.functions.items() if key != str(number)}
        return replace(
            self.with_own(number, is_own=is_active),
            partitions=tuple(
                replace(p, is_active=is_active) if p.id == number else p for p in self.partitions
            ),
            functions={**others, str(number): tuple(functions)} if functions else others,
            pending={key: at for key, at in self.pending.items() if key != str(number)},
        )

    def with_list(self, partitions: tuple[Partition, ...], now: float) -> "_Record":
        """Return the record after a list of the partitions at a time."""
        active = {str(p.id) for p in partitions if p.is_active}
        in_time = {key: at for key, at in self.pending.items() if 0 <= now - at < LATE_SECONDS}
        own = {str(number) for number in self.own} & ((active - set(self.pending)) | set(in_time))
        # Fabric Manager does not show the functions, also not those of a late activation.
        kept = active | set(in_time)
        return replace(
            self,
            partitions=partitions,
            functions={key: names for key, names in self.functions.items() if key in kept},
            own=tuple(number for number in self.own if str(number) in own),
            pending={key: at for key, at in in_time.items() if key not in active},
        )


class FabricManager:
    """Client of the Fabric Manager of a host. Thread-safe."""

    def __init__(
        self,
        requests: FabricRequests,
        memory: Callable[[], Memory],
        kernel_log: Path | None = None,
        config: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``memory`` returns the memory of the driver, which keeps the last known state.

        Errors of NVSwitches are read from ``kernel_log``, the mode from ``config``, the file of
        Fabric Manager; None reads none. ``clock`` returns the seconds since 1970: the memory may be
        that of a former process.
        """
        self._requests = requests
        self._memory = memory
        self._switches = None if kernel_log is None else SwitchLog(kernel_log)
        self._config = config
        self._clock = clock
        # Modes whose partitions were refused since Fabric Manager was last seen to start.
        self._refused: set[int] = set()
        self._key = f"fabric:{requests.address}"
        self._lock = threading.Lock()  # one operation at a time, or the record would be outdated

    def read(self) -> FabricState:
        """Return the state of the fabric; a failure is its ``problem``.

        A Fabric Manager that waits for the active partitions gets them. It waits for 60 seconds, so
        call this more often than that.
        """
        problem = None
        try:
            with self._locked():
                record = self._record(self._list())
                # ``_list`` has stored it. Again, to know whether it is durable: if not, this is the
                # problem of the fabric. There is nothing to undo.
                self._store_durably(record, previous=record)
        except DriverFailed as exc:
            problem = exc.message
            # Only a Fabric Manager that is away or starts can have another mode than before.
            if isinstance(exc, RequestFailed) and exc.returned in RESTARTED:
                self._refused.clear()
        known = self._load() or _Record(())
        faults = () if self._switches is None else self._switches.read()
        obstacles = find_obstacles(known.partitions, faults)
        mode = read_mode(self._config)
        return FabricState(
            known.partitions,
            problem,
            obstacles,
            own=frozenset(known.own),
            mode_obstacles=find_mode_obstacles(mode, self._config, tuple(self._refused)),
        )

    def activate(self, number: int, functions: Sequence[str] = ()) -> None:
        """Activate the partition with this id; do nothing if it is active.

        ``functions`` are the PCI addresses of virtual functions, one for each GPU in the order of
        the partition; they must be the same each time, or a suspended server cannot resume. Raise
        DriverFailed if the partition does not exist, a GPU of it is in another active partition,
        the partition is active with other functions, or Fabric Manager fails.

        After a timeout the partition may become active later: within LATE_SECONDS it is an own one.
        """
        addresses = _parse(functions)
        with self._locked():
            partitions = self._list()
            partition = _find(partitions, number)
            if addresses and len(addresses) != len(partition.modules):
                raise DriverFailed(
                    f"partition {number} has {len(partition.modules)} GPUs and needs a virtual "
                    f"function of each, found {len(addresses)}"
                )
            record = self._record(partitions)
            if partition.is_active:
                self._check_functions(record, number, addresses)
                self._store_durably(record.with_own(number, is_own=True), previous=record)
                return
            # Before the request: if the agent ends in between, the list after a restart of Fabric
            # Manager has the partition. One that is active needlessly is found, a missing one cut.
            requested = replace(
                record.with_active(number, is_active=True, functions=addresses),
                pending={**record.pending, str(number): self._clock()},
            )
            self._store_durably(requested, previous=record)
            try:
                self._requests.activate(number, addresses)
            except RequestFailed as exc:
                if exc.returned == Code.NOT_SUPPORTED:
                    self._refused.add(FUNCTIONS if addresses else WHOLE)
                    self._store(record)
                    raise
                if exc.returned not in USED:
                    # The effect is unknown: if the partition becomes active, it is an own one, with
                    # these functions.
                    self._store(replace(requested, partitions=record.partitions))
                    raise
                # A refused request has no effect: ``_take_active`` finds out what is active.
                self._store(record)
                self._take_active(number, addresses, exc)
                return
            # Need not be durable: the next list does the same, if it comes in time.
            self._store(record.with_active(number, is_active=True, functions=addresses))
        LOG.info("Fabric partition %d activated for GPUs %s", number, _modules(partition))

    def deactivate(self, number: int) -> None:
        """Deactivate the partition with this id; do nothing if it is inactive or does not exist.

        No server may use its GPUs. Raise DriverFailed if Fabric Manager fails, or another program
        has activated the partition.
        """
        with self._locked():
            partitions = self._list()
            record = self._record(partitions)
            is_active = any(p.id == number and p.is_active for p in partitions)
            is_own = number in record.own
            if is_active and not is_own:
                # Such as after an activation that failed because the partition was active already.
                # The guest of the other program would lose its links.
                raise DriverFailed(
                    f"partition {number} is not deactivated: another program activated it; stop "
                    f"the guest that uses it, and deactivate it with fmpm -d {number}"
                )
            if not is_own:
                return
            try:
                # Also if it is listed as inactive: an activation that timed out may still come.
                self._requests.deactivate(number)
            except RequestFailed as exc:
                if exc.returned not in NOT_ACTIVE:
                    raise
                if str(number) in record.pending:
                    # The activation may still complete: then the partition must be an own one.
                    return
                # Another client was first.
            # Need not be durable: a partition that is active needlessly is found.
            self._store(record.with_active(number, is_active=False, functions=()))
        LOG.info("Fabric partition %d deactivated", number)

    def set_activated(self, ids: Sequence[int]) -> None:
        """Send the ids of all active partitions to a Fabric Manager that waits for them.

        Raise DriverFailed if it fails, or does not wait. ``read`` does this by itself.
        """
        with self._locked():
            self._requests.set_activated(sorted(set(ids)))

    def _list(self) -> tuple[Partition, ...]:
        """Return the partitions, and store them."""
        try:
            partitions = self._requests.list_partitions()
        except RequestFailed as exc:
            record = self._load()
            if exc.returned not in STARTING or record is None:
                raise
            active = [p.id for p in record.partitions if p.is_active]
            try:
                self._requests.set_activated(active)
            except RequestFailed:
                raise exc from None  # it starts, and has no use for the list
            self._refused.clear()
            LOG.info("Fabric Manager was restarted and got the active partitions %s", active)
            partitions = self._requests.list_partitions()
        self._store(self._record(partitions))
        return partitions

    def _take_active(self, number: int, functions: Sequence[str], exc: RequestFailed) -> None:
        """Record a partition as own if it is active although its activation was refused.

        Otherwise raise DriverFailed with the reason, or the error ``exc`` of the activation.
        """
        partitions = self._list()
        partition = _find(partitions, number)
        if partition.is_active:
            # By an earlier request of this agent that timed out, or by another client: in both
            # cases the server that has all its GPUs is the one of this request.
            record = self._record(partitions)
            self._check_functions(record, number, functions)
            self._store(record.with_own(number, is_own=True))
            return
        if others := find_overlapping(partitions, partition):
            found = ", ".join(f"{other.id} (GPUs {_modules(other)})" for other in others)
            raise DriverFailed(
                f"partition {number} (GPUs {_modules(partition)}) overlaps the active partition "
                f"{found}: stop its server and deactivate it"
            ) from exc
        raise exc

    def _check_functions(self, record: _Record, number: int, functions: Sequence[str]) -> None:
        # Fabric Manager does not say with which functions a partition is active.
        known = record.functions.get(str(number), ())
        if functions and known != tuple(functions):
            raise DriverFailed(
                f"partition {number} is active with the virtual functions "
                f"{', '.join(known) or 'of another client'}, expected {', '.join(functions)}: stop "
                "its server and deactivate it"
            )

    def _record(self, partitions: tuple[Partition, ...]) -> _Record:
        """Return the record after a list of the partitions."""
        return (self._load() or _Record(())).with_list(partitions, self._clock())

    def _load(self) -> _Record | None:
        return load_record(_Record, self._memory().get(self._key))

    def _store(self, record: _Record) -> bool:
        """Store a record; return whether a restart of the agent keeps it."""
        return self._memory().put(self._key, json.dumps(record.to_dict()))

    def _store_durably(self, record: _Record, previous: _Record) -> None:
        """Store a record. If a restart of the agent would lose it, undo it: raise DriverFailed."""
        if not self._store(record):
            self._store(previous)
            raise DriverFailed(
                "the active partitions cannot be recorded, which a restarted Fabric Manager needs: "
                "free space in the state_path of the agent, and make it writable"
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=_REQUESTS * self._requests.timeout):
            raise DriverFailed(
                f"Fabric Manager at {self._requests.address} has not completed earlier requests: "
                "read /var/log/fabricmanager.log"
            )
        try:
            yield
        finally:
            self._lock.release()


def _find(partitions: Sequence[Partition], number: int) -> Partition:
    for partition in partitions:
        if partition.id == number:
            return partition
    known = ", ".join(str(partition.id) for partition in partitions)
    raise DriverFailed(
        f"Fabric Manager has no partition {number}, found {known or 'none'}: on A100 it removes "
        "those of a failed GPU"
    )


def _parse(functions: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(str(PciAddress.parse(function)) for function in functions)
    except Invalid as exc:
        raise DriverFailed(exc.message) from exc


def _modules(partition: Partition) -> str:
    return " ".join(map(str, partition.modules))

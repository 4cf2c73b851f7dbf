# SPDX-License-Identifier: Apache-2.0
"""Facts of NVML about GPUs: when a card is read, and what is known of it at other times.

NVML opens a card, and the kernel driver initialises a card that nobody else has open, which takes
seconds. A discovery of many cards would take longer than it may: it tries cards for SPAN only, and
the next one first tries those that were not tried for the longest time. A job that changes a card
holds its lock: meanwhile only its own thread reads the card, as the facts of a half-changed card
would stay. What was not read is what is known from before. A card of which nothing is known is not
offered as a whole before somebody has tried to read it, unless there is no NVML to read it with.
"""

import contextlib
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import NOT_OFFERED, Device
from cyborg.core.log import get_logger
from cyborg.drivers.base import Memory, load_record
from cyborg.drivers.gpu.card_locks import is_locked_here, locked_if_free, locked_once
from cyborg.drivers.kernel.nvml import (
    KERNEL_DRIVER,
    NVIDIA,
    GpuFacts,
    MigMode,
    ReadFacts,
    ReadMigMode,
    is_known,
)
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.sysfs import PCI_DEVICES, PciFunction, Sysfs

LOG = get_logger(__name__)

SPAN = 5.0  # seconds after which a discovery reads no further card

# Why a card is not offered about which nothing is known yet.
UNREAD = "its MIG mode and NVLinks were not read yet: a next discovery reads them"


def is_shown_unread(device: Device) -> bool:
    """Return whether a device is a card that is not offered because it was not read yet."""
    return device.vendor_board_info.get(NOT_OFFERED) == UNREAD


class ReadAttempts:
    """When somebody last tried to read each card, and which cards a thread may try now.

    With a ``span`` in seconds, this is the time of a discovery: it belongs to its thread. Another
    thread has none: it reads only cards that it has locked. ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, span: float | None = None
    ) -> None:
        self._clock = clock
        self._span = span
        self._last: dict[str, float] = {}  # by address
        self._own = threading.local()

    def begin(self) -> None:
        """Begin a discovery in this thread."""
        self._own.end = self._clock() + (self._span or 0.0)
        self._own.has_tried, self._own.failed = False, set[str]()

    def may_try(self, address: str) -> bool:
        """Return whether this thread may try a card: at least one in each discovery.

        A card that could not be read is not tried again in the same discovery.
        """
        if self._span is None:
            return True
        end = getattr(self._own, "end", None)
        # Without an end this thread is in no discovery.
        if end is None or address in self._own.failed:
            return False
        if self._own.has_tried and self._clock() >= end:
            return False
        self._own.has_tried = True
        return True

    def add(self, address: str) -> None:
        """Record that this thread tries a card now."""
        self._last[address] = self._clock()

    def drop(self, address: str) -> None:
        """Drop what is known of a card that was removed."""
        self._last.pop(address, None)

    def add_failure(self, address: str) -> None:
        """Record that this thread could not read a card."""
        getattr(self._own, "failed", set[str]()).add(address)

    def last(self, address: str) -> float:
        """Return when somebody last tried a card; minus infinity if nobody has."""
        return self._last.get(address, -math.inf)


class FactsReader:
    """Reader that reads the facts about each GPU once while its kernel driver is bound.

    While a server uses a GPU, NVML does not show the GPU. The reader then returns the last facts,
    also after a restart of the agent, and until a discovery has had time to read the GPU: their
    limits hold for a GPU that servers share. A GPU with an owner that is bound again, because the
    server is stopped, is not opened: the server may start.

    NVML may list the types and profiles of the current MIG mode only. If ``keeps_types`` is True,
    the facts also have those of the other mode, from the last time that the GPU was in it.
    """

    def __init__(
        self,
        read_facts: ReadFacts,
        is_readable: Callable[[str], bool] = lambda address: True,
        has_owner: Callable[[str], bool] = lambda address: False,
        attempts: ReadAttempts | None = None,
        has_nvml: Callable[[], bool] = lambda: True,
        read_mig_mode: ReadMigMode = lambda address: None,
    ) -> None:
        """``is_readable`` returns whether NVML shows the GPU at an address now.

        ``has_owner`` returns whether a server has it as a whole. ``attempts`` limit which cards
        this thread may read that it has not locked; by default it may read each one. ``has_nvml``
        returns whether NVML is installed. ``read_mig_mode`` is asked if not all facts can be read.
        """
        self.keeps_types = False
        self._read_facts = read_facts
        self._is_readable = is_readable
        self._has_owner = has_owner
        self._attempts = attempts or ReadAttempts()
        self._has_nvml = has_nvml
        self._read_mig_mode = read_mig_mode
        self._logged: set[tuple[str, str]] = set()  # errors by address
        # By address and product id, as the sets of cards below.
        self._facts: dict[tuple[str, str], GpuFacts] = {}
        self._tried: set[tuple[str, str]] = set()
        self._lock = threading.Lock()  # of the next three; not held while a card is read
        self._current: set[tuple[str, str]] = set()  # read since they were bound
        self._forgotten: set[str] = set()  # addresses
        self._generations: Counter[str] = Counter()  # by address; a newer one outdates a reading

    def read(self, card: PciFunction, memory: Memory) -> GpuFacts:
        """Return the facts about a card; a card of another vendor has no facts.

        They are those from before if the card is due, and cannot be read now.
        """
        return self.find(card, memory) or GpuFacts()

    def find(self, card: PciFunction, memory: Memory) -> GpuFacts | None:
        """Do the same as ``read``; return None for a card that was not read yet.

        That is one that is due, of which nothing is known, and that nobody has tried to read since
        the agent started, although NVML is installed.
        """
        if card.vendor != NVIDIA or card.physfn is not None:
            return GpuFacts()
        key = card.address, card.product
        is_unread = False
        if card.kernel_driver != KERNEL_DRIVER:
            self._outdate(card.address)
        elif self._is_due(key):
            # Asked first: another thread can read the card after the facts are loaded below.
            never_tried = key not in self._tried
            is_unread = not self._try(card, memory) and never_tried
        facts = self._facts.get(key)
        if facts is None:
            # Another thread may have read the card since.
            facts = self._facts.setdefault(key, self._load_last(memory, _name_of(card)))
        is_nothing_known = facts == GpuFacts()
        return None if is_unread and is_nothing_known and self._has_nvml() else facts

    def read_again(self, card: PciFunction, memory: Memory) -> GpuFacts:
        """Read a card also if it is not due; call this with the card locked.

        Raise DriverFailed if NVML is installed and should know the card, but cannot read it.
        """
        self.forget(card.address)
        if is_known(card) and not self._read_locked(card, memory) and self._has_nvml():
            raise DriverFailed(
                f"NVML cannot read {card.address}, so its modes and GPU instances are unknown: see "
                "the log of the agent, and try again"
            )
        return self.read(card, memory)

    def _try(self, card: PciFunction, memory: Memory) -> bool:
        """Try to read a card, unless a job of another thread changes it or the time is over.

        Return whether it was tried, or is not due any more.
        """
        if is_locked_here(card.address):
            self._read_locked(card, memory)
            return True
        with locked_if_free(card.address) as acquired:
            # A server may have got the card since the question before the lock.
            if acquired and not self._is_due((card.address, card.product)):
                return True
            may_try = acquired and self._attempts.may_try(card.address)
            if may_try:
                self._read_locked(card, memory)
            return may_try

    def _read_locked(self, card: PciFunction, memory: Memory) -> bool:
        """Read a card that this thread has locked, and store the facts.

        Return whether all could be read. Otherwise only the MIG mode is stored, if NVML shows it.
        """
        self._attempts.add(card.address)
        is_read = False
        with self.errors_logged(card.address):
            is_read = self._read_all(card, memory)
        if not is_read:
            self._attempts.add_failure(card.address)
            # A card in MIG mode must not be offered as a whole, whatever else is unknown.
            with self.errors_logged(card.address):
                if (mode := self._read_mig_mode(card.address)) is not None:
                    self.store_mode(card, mode, memory)
        # Only with the result: until then the card is unread for other threads.
        self._tried.add((card.address, card.product))
        return is_read

    @contextlib.contextmanager
    def errors_logged(self, address: str) -> Iterator[None]:
        """Suppress each error of a reading of a card; log each different one once."""
        # One card must not fail a discovery of all, nor a change of a layout that has succeeded.
        try:
            yield
        except Exception as exc:  # noqa: BLE001  whatever the library answers
            error = f"{type(exc).__name__}: {exc}"
            if (address, error) not in self._logged:
                self._logged.add((address, error))
                LOG.warning(
                    "Cannot read the facts about the GPU, the last known ones hold: %s",
                    error,
                    device=address,
                )

    def _read_all(self, card: PciFunction, memory: Memory) -> bool:
        """Read a card, and store the facts; return whether NVML shows it."""
        key, name = (card.address, card.product), _name_of(card)
        generation = self._generations[card.address]
        facts = self._read_facts(card.address)
        if facts is None:
            return False
        facts = self._keep_links(facts, self._facts.get(key) or _load(memory, name))
        if self.keeps_types and facts.mig is not None:
            # Each mode has its own record, with the types of that mode only.
            memory.put(f"{name} {facts.mig}", json.dumps(facts.to_dict()))
            other_mode = "disabled" if facts.in_mig_mode else "enabled"
            facts = _add_types(facts, _load(memory, f"{name} {other_mode}"))
        self._facts[key] = facts
        with self._lock:
            # Facts that are outdated already are kept too, being newer than the previous ones, but
            # the card stays due.
            if self._generations[card.address] == generation:
                self._current.add(key)
                self._forgotten.discard(card.address)
        memory.put(name, json.dumps(facts.to_dict()))
        return True

    def store_mode(self, card: PciFunction, mode: MigMode, memory: Memory) -> None:
        """Change the last known facts about a card to a MIG mode; call this with the card locked.

        A card that is due stays due.
        """
        key, name = (card.address, card.product), _name_of(card)
        facts = self._facts.get(key) or self._load_last(memory, name)
        if facts.mig != mode.mig:
            # A switch of the mode removes the GPU instances; which ones exist since is unknown.
            facts = replace(facts, mig=mode.mig, mig_instances={})
        self._facts[key] = facts = replace(facts, mig_pending=mode.is_pending)
        memory.put(name, json.dumps(facts.to_dict()))

    def is_due(self, card: PciFunction) -> bool:
        """Return whether the facts about a card that NVML knows are not current."""
        return is_known(card) and self._is_due((card.address, card.product))

    def is_asked_for(self, card: PciFunction) -> bool:
        """Return whether ``read`` or ``find`` was called for a card."""
        return (card.address, card.product) in self._facts

    def _is_due(self, key: tuple[str, str]) -> bool:
        address = key[0]
        if key in self._current:
            return False
        return address in self._forgotten or not self._has_owner(address)

    def _load_last(self, memory: Memory, name: str) -> GpuFacts:
        """Return the stored facts about a card that cannot be read."""
        found = _load(memory, name)
        if self.keeps_types and found.mig is not None:
            for mode in (found.mig, "disabled" if found.in_mig_mode else "enabled"):
                found = _add_types(found, _load(memory, f"{name} {mode}"))
        return found

    def _keep_links(self, facts: GpuFacts, previous: GpuFacts) -> GpuFacts:
        """Return the facts with the previous NVLinks to GPUs that NVML does not show now."""
        if facts.uuid != previous.uuid:
            return facts  # another card in the slot
        # The link to a GPU that a server uses is down as seen from here, and the bridge is there.
        hidden = {
            address: count
            for address, count in previous.nvlinks.items()
            if not self._is_readable(address)
        }
        speed = facts.nvlink_speed or (previous.nvlink_speed if hidden else None)
        links = dict(sorted({**hidden, **facts.nvlinks}.items()))
        return replace(facts, nvlinks=links, nvlink_speed=speed)

    def forget(self, address: str) -> None:
        """Make the next call of ``read`` read a card again, because its facts have changed.

        What another thread reads during this call may be from before the change: it does not count.
        """
        self._outdate(address, is_forgotten=True)

    def expire(self, address: str) -> None:
        """Do the same as ``forget``, but do not read a card that gets an owner before that."""
        self._outdate(address, is_forgotten=False)

    def drop(self, address: str) -> None:
        """Drop what is known of a card that was removed; another one in its slot is due."""
        self.expire(address)
        self._attempts.drop(address)
        for key in [key for key in tuple(self._facts) if key[0] == address]:
            self._tried.discard(key)
            self._facts.pop(key, None)

    def _outdate(self, address: str, *, is_forgotten: bool | None = None) -> None:
        """Make the facts about a card outdated, also those that another thread reads now.

        ``is_forgotten`` is whether it is read although it has an owner; None changes nothing here.
        """
        with self._lock:
            self._generations[address] += 1
            self._current = {key for key in self._current if key[0] != address}
            if is_forgotten:
                self._forgotten.add(address)
            elif is_forgotten is not None:
                self._forgotten.discard(address)


class CardFacts:
    """Facts about the cards of a backend; ``memory`` returns the memory of the driver.

    ``has_owner`` returns whether a server has a card as a whole.
    """

    def __init__(
        self,
        sysfs: Sysfs,
        access: HostAccess,
        memory: Callable[[], Memory],
        has_owner: Callable[[str], bool],
    ) -> None:
        self._sysfs = sysfs
        self._memory = memory
        self.attempts = ReadAttempts(access.clock, SPAN)
        self.reader = FactsReader(
            access.nvml,
            self._is_readable,
            has_owner,
            self.attempts,
            access.has_nvml,
            access.mig_mode,
        )
        self.forget, self.expire = self.reader.forget, self.reader.expire
        # Identity of the first virtual function of each card at the last look, None without any.
        self._functions: dict[str, int | None] = {}
        # Identities of each card, and of the link to its kernel driver, at the last look.
        self._identities: dict[str, tuple[int | None, int | None]] = {}

    def read(self, card: PciFunction) -> GpuFacts:
        """Return the last known facts about a card; read it before if it is due."""
        return self.reader.read(card, self._memory())

    def find(self, card: PciFunction) -> GpuFacts | None:
        """Do the same as ``read``; return None for a card that was not read yet."""
        return self.reader.find(card, self._memory())

    def store_mode(self, card: PciFunction, mode: MigMode) -> None:
        """Change the facts about a card to a MIG mode; call this with the card locked."""
        self.reader.store_mode(card, mode, self._memory())

    def read_address(self, address: str) -> GpuFacts:
        """Return the facts about the card at an address; no facts if it is absent."""
        card = self._sysfs.pci_function(address)
        return GpuFacts() if card is None else self.read(card)

    def read_again(self, address: str) -> GpuFacts:
        """Do the same as ``read_address``, but read the card also if it is not due.

        Call this with the card locked. Raise DriverFailed if NVML cannot read it.
        """
        card = self._sysfs.pci_function(address)
        return GpuFacts() if card is None else self.reader.read_again(card, self._memory())

    def read_waiting(self, address: str) -> None:
        """Read the card at an address if it is due; wait for its lock.

        Raise DriverFailed if a job does not release the lock in time.
        """
        card = self._sysfs.pci_function(address)
        if card is not None and self.reader.is_due(card):
            with locked_once(address):
                self.read(card)

    def drop_replaced(self, functions: Sequence[PciFunction]) -> None:
        """Drop cards that were removed or replaced since the last call.

        Expire those whose kernel driver was bound again: this can change facts, such as ECC.
        """
        identities = {
            f.address: (
                self._sysfs.identity(PCI_DEVICES / f.address),
                self._sysfs.identity(PCI_DEVICES / f.address / "driver", of_link=True),
            )
            for f in functions
            if f.vendor == NVIDIA and f.physfn is None
        }
        for address, (previous_device, previous_driver) in self._identities.items():
            device, driver = identities.get(address, (None, None))
            if device != previous_device:
                self.reader.drop(address)
                self._functions.pop(address, None)
            elif driver != previous_driver:
                self.expire(address)
        self._identities = identities

    def forget_outdated(self, address: str) -> None:
        """Forget a card whose virtual functions are not those of the last call."""
        # Another program that enables SR-IOV clears the heterogeneous mode.
        functions_id = self._sysfs.identity(PCI_DEVICES / address / "virtfn0")
        if self._functions.setdefault(address, functions_id) != functions_id:
            self._functions[address] = functions_id
            self.forget(address)

    def _is_readable(self, address: str) -> bool:
        function = self._sysfs.pci_function(address)
        return function is not None and is_known(function)


def _name_of(card: PciFunction) -> str:
    return f"gpu {card.address} {card.product}"


def _load(memory: Memory, name: str) -> GpuFacts:
    return load_record(GpuFacts, memory.get(name)) or GpuFacts()


def _add_types(facts: GpuFacts, others: GpuFacts) -> GpuFacts:
    """Return the facts with types of vGPUs and profiles that only the other facts have."""
    return replace(
        facts,
        max_vgpus={**others.max_vgpus, **facts.max_vgpus},
        mig_profiles={**others.mig_profiles, **facts.mig_profiles},
        vgpu_profiles={**others.vgpu_profiles, **facts.vgpu_profiles},
        vgpus_per_instance={**others.vgpus_per_instance, **facts.vgpus_per_instance},
        vgpu_names={**others.vgpu_names, **facts.vgpu_names},
        vgpu_memory={**others.vgpu_memory, **facts.vgpu_memory},
    )

# SPDX-License-Identifier: Apache-2.0
"""The MIG mode of whole cards, which other programs (``nvidia-smi -mig 1``) can switch.

Only NVML tells the mode: ``/proc/driver/nvidia/capabilities/gpuN/mig`` exists in both modes
(``osRmCapRegisterGpu`` of ``os.c`` of NVIDIA's open kernel modules), and has entries for GPU
instances only. NVML opens the card, and libvirt cannot unbind it from its kernel driver meanwhile,
as it does at each start of a server that has the card. So the mode is read at a discovery for cards
without an owner only, under the lock of the card, which a preparation for a server takes too. It is
read at most once a minute: the kernel driver initialises a card that nobody else has open, which
takes seconds, and each start of a server triggers a discovery. Modes and facts have the same time
in a discovery (``facts``), and the next one continues. A preparation reads the mode in any case.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import Memory
from cyborg.drivers.gpu.card_locks import locked, locked_if_free
from cyborg.drivers.gpu.facts import UNREAD, CardFacts
from cyborg.drivers.gpu.vgpu_records import make_storage_error
from cyborg.drivers.host_use import domains
from cyborg.drivers.host_use.domains import ReadDomains
from cyborg.drivers.kernel.nvml import GpuFacts, is_known
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.sysfs import PciFunction, Sysfs

INTERVAL = 60.0  # seconds between two readings of the mode of a card

_ENABLED = "it is in MIG mode, in which it is no whole card"
_PENDING = "a change of its MIG mode is pending, which a reset for a server would apply"


class WholeCards:
    """Records about which whole cards servers have.

    ``memory`` returns the memory of the driver, and ``read_domains`` the function that reads the
    domains of libvirt.
    """

    def __init__(
        self, memory: Callable[[], Memory], sysfs: Sysfs, read_domains: Callable[[], ReadDomains]
    ) -> None:
        self._memory = memory
        self._sysfs = sysfs
        self._read_domains = read_domains

    def has_owner(self, card: str) -> bool:
        """Return whether a card was prepared for a server, and not released since then."""
        return self._memory().get(_key(card)) is not None

    @contextlib.contextmanager
    def add_owner(self, card: str) -> Iterator[None]:
        """Lock a card for the checks before a server gets it; record this if they succeed.

        Wait for a discovery that reads the card. Raise DriverFailed, before the checks, if a job
        changes the card, and after them if a restart of the agent would lose the record.
        """
        with locked(card):
            # A record that a lost release has left would keep the mode from being read ever again.
            if self.has_owner(card) and self._is_free(card):
                self.remove_owner(card)
            had_owner = self.has_owner(card)
            yield
            if not self._memory().put(_key(card), "1"):
                if not had_owner:
                    self.remove_owner(card)
                raise make_storage_error(card)

    def remove_owner(self, card: str) -> None:
        """Record that no server has a card; call this with the card locked."""
        self._memory().put(_key(card), None)

    def _is_free(self, card: str) -> bool:
        """Return whether a card is bound to its kernel driver, and no domain of libvirt has it."""
        function = self._sysfs.pci_function(card)
        if function is None or not is_known(function):
            return False
        read = partial(self._read_domains(), fresh=True)
        return card not in domains.find_used(self._sysfs.root, read, [function])


class MigModes:
    """The MIG modes of the cards of a backend.

    ``may_be_whole`` returns whether the backend offers a card as a whole, unless there is a reason
    against it.
    """

    def __init__(
        self,
        facts: CardFacts,
        access: HostAccess,
        owners: WholeCards,
        may_be_whole: Callable[[PciFunction], bool],
    ) -> None:
        self._facts = facts
        self._access = access
        self._owners = owners
        self._may_be_whole = may_be_whole
        self._due: dict[str, float] = {}  # when to read the mode of a card again

    def refresh(
        self,
        functions: Sequence[PciFunction],
        is_shared: Callable[[PciFunction], bool],
        find_domains: Callable[[Sequence[PciFunction]], Collection[str]],
    ) -> None:
        """Read the cards whose facts are not current, and the modes of whole cards.

        Read the facts again that say another mode. Skip cards that a job changes now; for modes
        also those with an owner, those that domains have, as ``find_domains`` returns them, and
        those whose mode was read less than INTERVAL ago. Try each card once, the one first that was
        not tried for the longest time: one that cannot be read takes its turn as the others do.
        Cards that several servers share (``is_shared``) come before the modes of whole cards.
        """
        self._facts.drop_replaced(functions)
        now = self._access.clock()
        known = [card for card in functions if is_known(card)]
        whole = [card for card in known if self._may_be_whole(card)]
        # Those whose INTERVAL is over; libvirt is read only if there are any.
        outdated = [card for card in whole if self._due.get(card.address, now) <= now]
        in_domains = set(find_domains(outdated) if outdated else ())
        mode_due = {card.address for card in outdated} - in_domains
        shared = {f.physfn or f.address for f in functions if is_shared(f)}
        offered = shared | {card.address for card in whole}
        reader, attempts = self._facts.reader, self._facts.attempts
        attempts.begin()  # not before: libvirt may have taken the time

        def is_due(card: PciFunction) -> bool:
            is_needed = card.address in offered or reader.is_asked_for(card)
            return card.address in mode_due or (is_needed and reader.is_due(card))

        cards = list(filter(is_due, known))
        # A shared card first among those that were tried at the same time: False is before True.
        cards.sort(key=lambda card: (attempts.last(card.address), card.address not in shared))
        for card in cards:
            with locked_if_free(card.address) as acquired:
                # Again, with the lock: a job that had it may have read the card, or given it away.
                reads_mode = card.address in mode_due and not self._owners.has_owner(card.address)
                facts_due = reader.is_due(card)
                if not acquired or not (reads_mode or facts_due):
                    continue
                if not attempts.may_try(card.address):
                    return  # the time is over: the next discovery continues
                facts = self._facts.read(card)
                if reads_mode:
                    self._due[card.address] = now + INTERVAL
                    # A card that was due was opened just now, and its facts have the mode.
                    if not facts_due:
                        self._check_mode(card, facts)

    def _check_mode(self, card: PciFunction, known: GpuFacts) -> None:
        """Read the facts about a card again if its mode is not the known one."""
        self._facts.attempts.add(card.address)
        if known.mig is None:
            return  # a card without MIG is not opened again
        with self._facts.reader.errors_logged(card.address):
            found = self._access.mig_mode(card.address)
            if found is not None and found != (known.mig, known.mig_pending):
                # First, because all facts may not be readable.
                self._facts.store_mode(card, found)
                self._facts.expire(card.address)
                self._facts.read(card)  # now, with the card locked

    def find_used(
        self,
        functions: Mapping[str, PciFunction],
        has_layouts: Callable[[str], bool],
    ) -> dict[str, str]:
        """Return the cards that are no whole ones because of their MIG mode: a reason by address.

        ``has_layouts`` returns whether layouts switch the mode of the card at an address.
        """
        reasons: dict[str, str] = {}
        for card in filter(self._may_be_whole, functions.values()):
            facts = self._facts.find(card)
            if facts is None:
                reasons[card.address] = UNREAD
            elif facts.in_mig_mode or facts.mig_pending:
                state = _ENABLED if facts.in_mig_mode else _PENDING
                reasons[card.address] = f"{state}: {_find_remedy(card, has_layouts(card.address))}"
        return reasons


def is_whole(item: WorkItem) -> bool:
    """Return whether the handle of a work item is a whole card."""
    return item.handle == item.device


def _find_remedy(card: PciFunction, has_layouts: bool) -> str:
    remedy = "disable the MIG mode (nvidia-smi -mig 0)"
    if has_layouts:
        return f"apply the layout whole, or a mix, or {remedy}"
    # The last known mode of a card that cannot be read may have changed, as by a boot of the host.
    return remedy if is_known(card) else f"bind it to nvidia once, and {remedy} if it is enabled"


def _key(card: str) -> str:
    return f"whole {card}"

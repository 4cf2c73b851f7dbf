# SPDX-License-Identifier: Apache-2.0
"""The PCI functions of this host that guests have without an ARQ, for the drivers of all backends.

``core.inventory.functions`` decides.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cyborg.agent.state_file import StateFile
from cyborg.core import errors, log
from cyborg.core.inventory import functions as guest_functions
from cyborg.drivers.host_use.domains import DomainFacts
from cyborg.rpc.contract import ConductorAPI
from cyborg.threads import calls, failures, periodic

LOG = log.get_logger(__name__)

# Seconds for which facts are kept: the backends of an agent discover at different times.
MAX_AGE = 30.0
# Seconds until the owners of known functions are asked for again.
RECHECK = 300.0
# Seconds for an answer of a conductor.
MAX_SECONDS = 5.0
FIRST_RETRY, LAST_RETRY = 2.0, 60.0  # seconds until a read and a question are repeated
# Remark of the backends; it is the same on identical hosts, so it has no error.
UNREAD = (
    "the domains of libvirt cannot be read, so devices of unknown guests may be offered: see the "
    "log of the agent; set [libvirt] read_domains = false on a host without libvirt"
)


class RecordFile:
    """File with what is known of the guests, which the restarted agent reads."""

    def __init__(self, path: Path) -> None:
        """Read the file. A missing or malformed file has no records."""
        self._file = StateFile(
            path,
            _load_records,
            description="The list of guests",
            consequence="a device of a stopped server that was released may be withheld",
        )
        self.records = self._file.read() or {}

    def store(self, records: Mapping[str, guest_functions.GuestRecord]) -> None:
        """Write the records if they differ from the written ones, or could not be written."""
        if records == self.records and self._file.is_written:
            return
        self.records = dict(records)
        self._file.try_write(
            {
                uuid: {
                    "name": record.name,
                    "owned": sorted(record.owned),
                    "foreign": sorted(record.foreign),
                }
                for uuid, record in self.records.items()
            }
        )


def _load_records(data: Any) -> dict[str, guest_functions.GuestRecord]:
    return {
        str(uuid): guest_functions.GuestRecord(
            str(record["name"]), _addresses(record["owned"]), _addresses(record["foreign"])
        )
        for uuid, record in data.items()
    }


def _addresses(value: Any) -> frozenset[str]:
    """Return a list of texts as a set. Raise TypeError for any other value."""
    # frozenset() of a text would be its letters.
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise TypeError("expected a list of texts")
    return frozenset(value)


# A discovery waits for a read of the guests and for the answer of a conductor: seconds at most,
# because each has a timeout, and while a call hangs, further ones fail at once. The thread repeats
# both while the guests cannot be read, or the owner of a function is unknown, and then starts a
# discovery. Meanwhile what is known of the guests stays, and the functions of unknown guests are
# offered: a host without a working libvirt must not lose all its devices.
@dataclass(eq=False)
class FunctionUsers(periodic.LoopThread):
    """Reader of the functions that guests have without an ARQ. Thread-safe.

    ``rediscover`` is called when the owners of functions have become known. It is for all backends:
    one may have discovered before another one learnt the owners.

    ``read_guests`` may raise any error of ``core.errors``, and takes a limited time.
    """

    host: str
    conductor: ConductorAPI
    read_guests: Callable[[], Sequence[guest_functions.Guest]]
    file: RecordFile
    rediscover: Callable[[], object]
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    max_seconds: float = MAX_SECONDS

    def __post_init__(self) -> None:
        super().__init__("function-users", run_at_start=False)
        self._calls = calls.TimedCalls("conductor", self.max_seconds)
        self._lock = threading.Lock()
        self._read_at = self._recheck_at = float("-inf")
        self._facts = DomainFacts()
        self._unanswered: dict[str, str] = {}  # guests by functions that run without an answer
        # Whether the facts are incomplete, and a discovery that has got them must be repeated.
        self._guests_unread = False
        self._owner_unknown = False
        self._needs_discovery = False
        self._backoff = failures.Backoff(FIRST_RETRY, LAST_RETRY)
        self._owner_log = failures.RateLimitedLogger(self.clock, LOG)

    def read(self, *, fresh: bool = False) -> DomainFacts:
        """Return the functions that guests have without an ARQ; they are at most MAX_AGE old.

        With ``fresh``, they are of now, and so are the owners of the functions of running guests.
        Then also return the functions of running guests for which the conductor gives no answer:
        this caller is about to change devices, and can wait.
        """
        with self._lock:
            if fresh or self.clock() >= self._read_at + MAX_AGE:
                self._update(recheck=fresh)
            if self._is_incomplete and not self._needs_discovery:
                self._needs_discovery = True
                self.wake()
            if fresh:
                return replace(self._facts, users={**self._unanswered, **self._facts.users})
            return self._facts

    def run_once(self) -> float | None:
        """Read the guests again while the facts are incomplete, then start a discovery.

        Return the seconds until the next call; None if there is none until a ``read`` needs it.
        """
        with self._lock:
            if not self._needs_discovery:
                return None
            # A discovery may just have read the guests.
            if self._is_incomplete and self.clock() >= self._read_at + FIRST_RETRY:
                self._update()
            if self._is_incomplete:
                return self._backoff.next_delay()
            self._needs_discovery = False
        self._backoff.reset()
        self.rediscover()
        return None

    @property
    def _is_incomplete(self) -> bool:
        return self._guests_unread or self._owner_unknown

    def _update(self, *, recheck: bool = False) -> None:
        """Read the guests and replace the facts; ``recheck`` asks for known owners again."""
        guests = self._list_guests()
        if guests is not None:
            self._decide(guests, recheck=recheck or self.clock() >= self._recheck_at)
        self._facts = DomainFacts(
            guest_functions.GuestDecision(self.file.records).withheld,
            remarks=(UNREAD,) if self._guests_unread else (),
        )
        # After the read, however long it took: the age counts from its end, or a slow libvirt would
        # be read without a pause.
        self._read_at = self.clock()

    def _decide(self, guests: Sequence[guest_functions.Guest], *, recheck: bool) -> None:
        """Store what is known of the guests from now."""
        records = self.file.records
        questions = guest_functions.list_questions(guests, records, recheck=recheck)
        owners = self._ask(questions)
        self._unanswered = {
            address: guest.name
            for guest in guests
            for address in guest.running
            if (guest.uuid, address) not in owners
        }
        all_answered = len(owners) == len(questions)
        if recheck and all_answered:
            self._recheck_at = self.clock() + RECHECK
        decision = guest_functions.decide(guests, records, owners)
        withheld_before = guest_functions.GuestDecision(records).withheld
        if decision.withheld.keys() - withheld_before.keys():
            # The ARQs of these functions may have ended together with their guests, after the
            # guests were listed. Read again, so that a device is withheld only if its guest is
            # still there without an ARQ.
            present = self._list_guests()
            if present is None:
                return
            decision = guest_functions.decide(present, records, owners)
        self.file.store(decision.records)
        self._owner_unknown = decision.unknown

    def _list_guests(self) -> Sequence[guest_functions.Guest] | None:
        """Return the guests, None if they cannot be read."""
        try:
            guests = self.read_guests()
        except errors.CyborgError as exc:
            if not self._guests_unread:  # once, as the host may have no libvirt
                LOG.warning(
                    "Cannot read the guests of this host, devices of unknown guests may be "
                    "offered: %s; set [libvirt] read_domains = false on a host without libvirt",
                    exc.message,
                    host=self.host,
                )
            self._guests_unread = True
            return None
        if self._guests_unread:
            LOG.info("The guests of this host can be read again", host=self.host)
        self._guests_unread = False
        return guests

    def _ask(self, questions: Sequence[tuple[str, str]]) -> guest_functions.Owners:
        """Return the owners of functions, as far as a conductor answers."""
        if not questions:
            return {}
        # By uuid of the guest and address, as the questions.
        owners: dict[tuple[str, str], guest_functions.FunctionOwner | None] = {}
        try:
            for begin in range(0, len(questions), guest_functions.MAX_FUNCTIONS):
                batch = questions[begin : begin + guest_functions.MAX_FUNCTIONS]
                functions = [{"instance": uuid, "address": address} for uuid, address in batch]
                call = partial(self.conductor.find_function_owners, self.host, functions)
                answer = self._calls.run(call)["owners"]
                batch_owners = [
                    None if value is None else guest_functions.FunctionOwner(value)
                    for value in answer
                ]
                owners |= dict(zip(batch, batch_owners, strict=True))
        except errors.CyborgError as exc:
            failure = exc.message
        except (KeyError, TypeError, ValueError) as exc:
            failure = f"malformed answer: {type(exc).__name__} {exc}"
        else:
            self._owner_log.recovered("Asking for the owners of devices of guests")
            return owners
        self._owner_log.warn(
            "Cannot ask the conductor for the owners of %d devices that guests have, retrying: %s",
            len(questions) - len(owners),
            failure,
        )
        return owners

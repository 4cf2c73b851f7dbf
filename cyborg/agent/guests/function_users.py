# SPDX-License-Identifier: Apache-2.0
"""The PCI functions of this host that guests have without an ARQ, for the drivers of all backends.

``core.inventory.guest_functions`` decides. A discovery waits for a read of the guests and for the
answer of a conductor: seconds at most, because each has a timeout, and while a call hangs, further
ones fail at once. A thread repeats the question while the owner of a function is unknown.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cyborg.agent import atomic_file
from cyborg.agent.guests.timed_calls import TimedCalls
from cyborg.core.errors import CyborgError
from cyborg.core.inventory.guest_functions import (
    FunctionOwner,
    Guest,
    GuestRecord,
    Owners,
    decide,
    list_questions,
)
from cyborg.core.log import get_logger
from cyborg.drivers.host_use.domains import DomainFacts
from cyborg.rpc.contract import ConductorAPI
from cyborg.threads.backoff import Backoff
from cyborg.threads.loop import LoopThread
from cyborg.threads.rate_limited_log import RateLimitedLogger

LOG = get_logger(__name__)

MAX_AGE = 1.0
"""Seconds for which facts are kept: the backends of an agent discover at about the same time."""
RECHECK = 300.0
"""Seconds until the owners of functions of running servers are asked for again."""
MAX_SECONDS = 5.0
"""Seconds for an answer of a conductor."""
FIRST_RETRY, LAST_RETRY = 2.0, 60.0  # seconds until a question is repeated


class RecordFile:
    """File with what is known of the guests, which the restarted agent reads."""

    def __init__(self, path: Path) -> None:
        """Read the file. A missing or malformed file has no records."""
        self._path = path
        self._is_written = True
        self.records = self._read()

    def store(self, records: Mapping[str, GuestRecord]) -> None:
        """Write the records if they differ from the written ones, or could not be written."""
        if records == self.records and self._is_written:
            return
        self.records = dict(records)
        body = {
            uuid: {
                "name": record.name,
                "owned": sorted(record.owned),
                "foreign": sorted(record.foreign),
            }
            for uuid, record in self.records.items()
        }
        was_written = self._is_written
        try:
            atomic_file.atomic_write(self._path, json.dumps(body).encode())
        except OSError as exc:
            self._is_written, error = False, str(exc)
        else:
            self._is_written = True
            return
        if was_written:
            LOG.warning("Cannot write %s, a restart loses its changes: %s", self._path, error)

    def _read(self) -> dict[str, GuestRecord]:
        failure: Exception
        try:
            body: Any = json.loads(self._path.read_bytes())
            return {
                str(uuid): GuestRecord(
                    str(record["name"]), _addresses(record["owned"]), _addresses(record["foreign"])
                )
                for uuid, record in body.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as exc:
            failure = exc
        consequence = "a device of a stopped server that was released may be withheld"
        atomic_file.quarantine(self._path, failure, "The list of guests", consequence)
        return {}


def _addresses(value: Any) -> frozenset[str]:
    """Return a list of texts as a set. Raise TypeError for any other value."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise TypeError("expected a list of texts")
    return frozenset(value)


class FunctionUsers(LoopThread):
    """Reader of the functions that guests have without an ARQ. Thread-safe."""

    def __init__(
        self,
        host: str,
        conductor: ConductorAPI,
        read_guests: Callable[[], Sequence[Guest]],
        file: RecordFile,
        rediscover: Callable[[], object],
        *,
        clock: Callable[[], float] = time.monotonic,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        """``rediscover`` is called when the owners of functions have become known.

        ``read_guests`` may raise any error of ``core.errors``, and takes a limited time.
        """
        super().__init__("function-users", run_at_start=False)
        self._host = host
        self._conductor = conductor
        self._read_guests = read_guests
        self._file = file
        self._rediscover = rediscover
        self._clock = clock
        self._calls = TimedCalls("conductor", max_seconds)
        self._lock = threading.Lock()
        self._end = float("-inf")  # of the present facts
        self._facts = DomainFacts()
        self._guests: Sequence[Guest] | None = None
        self._recheck_at = float("-inf")
        self._is_unknown = False  # the owner of a function
        self._needs_discovery = False  # a discovery was told the unknown owner
        self._backoff = Backoff(FIRST_RETRY, LAST_RETRY)
        self._is_failure_logged = False  # of a read: once, as the host may have no libvirt
        self._owner_log = RateLimitedLogger(clock, LOG)

    def read(self, *, fresh: bool = False) -> DomainFacts:
        """Return the functions that guests have without an ARQ; they are at most MAX_AGE old."""
        with self._lock:
            if fresh or self._clock() >= self._end:
                self._update()
            if self._is_unknown and not self._needs_discovery:
                self._needs_discovery = True
                self.wake()
            return self._facts

    def run_once(self) -> float | None:
        """Repeat the question for unknown owners; return the seconds until the next one."""
        with self._lock:
            if not self._needs_discovery:
                return None
            if self._is_unknown and self._clock() >= self._end:
                self._update()
            self._needs_discovery = self._is_unknown
            if self._needs_discovery:
                return self._backoff.next_delay()
        self._backoff.reset()
        # Each backend: one may have discovered before another one learnt the owners.
        self._rediscover()
        return None

    def _update(self) -> None:
        self._list_guests()
        records = self._file.records
        # Guests that were never listed, as libvirt does not answer, keep their last record.
        if self._guests is not None:
            is_due = self._clock() >= self._recheck_at
            owners = self._ask(list_questions(self._guests, records, all_running=is_due))
            if is_due and owners is not None:
                self._recheck_at = self._clock() + RECHECK
            decision = decide(self._guests, records, owners)
            self._file.store(decision.records)
            self._is_unknown = decision.unknown
            users = decision.withheld
        else:
            users = {a: r.name for r in records.values() for a in sorted(r.foreign)}
        self._facts = DomainFacts(users)
        self._end = self._clock() + MAX_AGE

    def _list_guests(self) -> None:
        try:
            self._guests = self._read_guests()
        except CyborgError as exc:
            failure = exc.message
        else:
            if self._is_failure_logged:
                LOG.info("The guests of this host can be read again", host=self._host)
            self._is_failure_logged = False
            return
        if not self._is_failure_logged:
            LOG.warning(
                "Cannot read the guests of this host, devices of unknown guests may be offered: %s;"
                " set [libvirt] read_domains = false on a host without libvirt",
                failure,
                host=self._host,
            )
        self._is_failure_logged = True

    def _ask(self, questions: Sequence[tuple[str, str]]) -> Owners | None:
        """Return the owners of functions; None if no conductor answers."""
        if not questions:
            return {}
        functions = [{"instance": uuid, "address": address} for uuid, address in questions]
        try:
            answer = self._calls.run(
                lambda: self._conductor.find_function_owners(self._host, functions)
            )
            owners = [None if value is None else FunctionOwner(value) for value in answer["owners"]]
            found = dict(zip(questions, owners, strict=True))
        except CyborgError as exc:
            failure = exc.message
        except (KeyError, TypeError, ValueError) as exc:
            failure = f"malformed answer: {type(exc).__name__} {exc}"
        else:
            self._owner_log.recovered("Asking for the owners of devices of guests")
            return found
        self._owner_log.warn(
            "Cannot ask the conductor for the owners of %d devices that guests have, retrying: %s",
            len(questions),
            failure,
        )
        return None

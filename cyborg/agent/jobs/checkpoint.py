# SPDX-License-Identifier: Apache-2.0
"""State of each job, and outcomes that no conductor has accepted yet, in files of the agent.

A job is recorded as ``started`` before the driver is called and as ``completed`` or ``failed``
after the call, so that a repeated request does not run the job again. A reboot undoes all
preparation of devices, so the entries of an older boot are discarded.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar
from uuid import uuid4

from cyborg.agent.state_file import StateFile
from cyborg.core import codec, errors, log

LOG = log.get_logger(__name__)

BOOT_ID = "/proc/sys/kernel/random/boot_id"
RETENTION = 86400.0  # seconds for which ended jobs are kept
MAX_ENTRIES = 4096  # jobs that are kept


class CheckpointState(StrEnum):
    """State of a job."""

    STARTED = "started"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"  # it must not start


@dataclass(frozen=True, slots=True)
class CheckpointEntry(codec.Serializable):
    """State of one job. ``at`` is the time of its last change, in seconds since 1970."""

    kind: str
    state: CheckpointState
    error: str | None
    at: float


class Checkpoint:
    """Store of the entries, in memory and in a file. Thread-safe."""

    def __init__(
        self, path: Path, boot_id: str | Path = BOOT_ID, now: Callable[[], float] = time.time
    ) -> None:
        """Read the checkpoint file, and the boot id of the host from the file ``boot_id``.

        A malformed checkpoint file is quarantined, with a warning.
        """
        self._file = StateFile(
            path,
            _load_jobs,
            description="The checkpoint",
            consequence="ended jobs run again if the conductor requests them again",
        )
        self._now = now
        self._boot_id = read_boot_id(boot_id)
        self._lock = threading.Lock()  # of the entries
        # Not one lock for both: a write waits for the disk, and the status of a job must not.
        self._file_lock = threading.Lock()  # of the file
        self._change_count = 0
        self._written_count = 0  # how many changes are in the file
        self._entries = self._read()

    def get(self, job: str) -> CheckpointEntry | None:
        """Return the entry of a job, or None."""
        with self._lock:
            return self._entries.get(job)

    def record(self, job: str, kind: str, state: CheckpointState, error: str | None = None) -> None:
        """Set the state of a job in memory; ``flush`` writes it."""
        with self._lock:
            self._entries[job] = CheckpointEntry(kind, state, error, self._now())
            self._change_count += 1

    def flush(self) -> None:
        """Write all earlier changes to the file. Raise OSError."""
        with self._lock:
            target = self._change_count
        with self._file_lock:
            # Another thread wrote these changes while this one waited.
            if self._written_count >= target:
                return
            with self._lock:
                self._entries = _pruned(self._entries, self._now())
                changes, entries = self._change_count, dict(self._entries)
            jobs = {job: entry.to_dict() for job, entry in entries.items()}
            self._file.write({"boot_id": self._boot_id, "jobs": jobs})
            self._written_count = changes

    def _read(self) -> dict[str, CheckpointEntry]:
        """Return the jobs of the file by uuid; none after a reboot of the host."""
        boot_id, jobs = self._file.read() or (self._boot_id, {})
        # A reboot has undone what the jobs prepared, so that none of them may count as done.
        if boot_id != self._boot_id:
            LOG.info(
                "Host rebooted, discarding %d jobs of %s; the conductor will request open jobs "
                "again",
                len(jobs),
                self._file.path,
            )
            return {}
        return jobs


def _load_jobs(data: Any) -> tuple[str, dict[str, CheckpointEntry]]:
    """Return the boot in which the jobs ran, and the jobs."""
    jobs = {str(job): CheckpointEntry.from_dict(entry) for job, entry in data["jobs"].items()}
    return data["boot_id"], jobs


def read_boot_id(path: str | Path = BOOT_ID) -> str:
    """Return the boot id of the host, or a random one, with a warning, if it cannot be read."""
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as exc:
        LOG.warning("Cannot read the host's boot id, assuming a reboot: %s", exc)
        return str(uuid4())


def _pruned(entries: Mapping[str, CheckpointEntry], now: float) -> dict[str, CheckpointEntry]:
    """Remove jobs that ended long ago and, above the limit, the oldest; return the others.

    Jobs in state STARTED are removed last.
    """
    kept = {
        job: entry
        for job, entry in entries.items()
        if entry.state is CheckpointState.STARTED or entry.at > now - RETENTION
    }
    if len(kept) > MAX_ENTRIES:
        # A job in progress keeps its entry: without it a repeated request would start it again.
        ranked = sorted(
            kept, key=lambda job: (kept[job].state is CheckpointState.STARTED, kept[job].at)
        )
        for job in ranked[: len(kept) - MAX_ENTRIES]:
            del kept[job]
    return kept


# Maximum of open or undelivered jobs, and of backends of discoveries; more requests are refused. No
# outcome is dropped instead, because the conductor waits for each.
MAX_PENDING = 1024

# Errors that a retry would get again; not TimedOut and Unavailable, because another conductor may
# accept the outcome.
REFUSALS = (errors.Invalid, errors.NotFound, errors.Forbidden, errors.Conflict, errors.Stale)

K = TypeVar("K")
V = TypeVar("V")


@dataclass(eq=False)
class Outcomes(Generic[K, V]):
    """Undelivered outcomes, the oldest first, at most one for each key. Thread-safe.

    ``subject`` is the name of a log field, such as ``job``.

    ``subject_of`` returns the value of this field for a key, by default the key.
    """

    subject: str
    subject_of: Callable[[K], str] = str

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[K, V] = {}
        self._logged: set[K] = set()  # keys whose failure was logged; only of ``deliver``

    def __len__(self) -> int:
        with self._lock:
            return len(self._pending)

    def put(self, key: K, outcome: V) -> None:
        """Store an outcome until it is delivered; replace an undelivered one with the same key."""
        with self._lock:
            # Removed first, so that the new outcome is the youngest.
            self._pending.pop(key, None)
            self._pending[key] = outcome

    def pending(self) -> list[tuple[K, V]]:
        """Return the undelivered outcomes with their keys."""
        with self._lock:
            return list(self._pending.items())

    def deliver(self, pending: Sequence[tuple[K, V]], send: Callable[[K, V], None]) -> None:
        """Send each outcome once; remove those that were accepted or permanently refused.

        If ``send`` raises Unavailable, or an exception that is not a CyborgError, raise it and send
        no more outcomes. After any other error, send the other outcomes. Outcomes that failed or
        were not sent stay for the next call.
        """
        for key, outcome in pending:
            fields: dict[str, Any] = {self.subject: self.subject_of(key)}
            try:
                send(key, outcome)
            except errors.Unavailable:
                raise
            except REFUSALS as exc:
                # Removed below, as an accepted one: a retry would be refused again.
                LOG.warning(
                    "Conductor rejected an outcome, discarding it: %s", exc.message, **fields
                )
            except errors.CyborgError as exc:
                if key not in self._logged:
                    LOG.warning(
                        "Conductor failed to process an outcome, retrying: %s",
                        exc.message,
                        **fields,
                    )
                self._logged.add(key)
                continue
            self._logged.discard(key)
            with self._lock:
                # A newer outcome of the same key may have been added meanwhile; it is undelivered.
                if self._pending.get(key) is outcome:
                    del self._pending[key]

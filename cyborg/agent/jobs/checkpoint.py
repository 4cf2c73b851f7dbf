# SPDX-License-Identifier: Apache-2.0
"""State of each job, in a file that a restarted agent reads, unless the host has rebooted.

A job is recorded as ``started`` before the driver is called and as ``completed`` or ``failed``
after the call, so that a repeated request does not run the job again. A reboot undoes all
preparation of devices, so the entries of an older boot are discarded.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from uuid import uuid4

from cyborg.agent import atomic_file
from cyborg.core.codec import Serializable
from cyborg.core.log import get_logger

LOG = get_logger(__name__)

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
class CheckpointEntry(Serializable):
    """State of one job. ``at`` is the time of its last change, in seconds since 1970."""

    kind: str
    state: CheckpointState
    error: str | None
    at: float


class Checkpoint:
    """Store of the entries, in memory and in a file. Thread-safe."""

    def __init__(
        self,
        path: Path,
        boot_id: str | Path = BOOT_ID,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Read the checkpoint file, and the boot id of the host from the file ``boot_id``.

        A malformed checkpoint file is quarantined, with a warning.
        """
        self._path = path
        self._now = now
        self._boot_id = read_boot_id(boot_id)
        self._lock = threading.Lock()  # of the entries
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
            self._write(entries)
            self._written_count = changes

    def _write(self, entries: Mapping[str, CheckpointEntry]) -> None:
        jobs = {job: entry.to_dict() for job, entry in entries.items()}
        body = json.dumps({"boot_id": self._boot_id, "jobs": jobs})
        atomic_file.atomic_write(self._path, body.encode())

    def _read(self) -> dict[str, CheckpointEntry]:
        failure: Exception | None
        try:
            body = json.loads(self._path.read_bytes())
            file_boot_id = body["boot_id"]
            jobs = {
                str(job): CheckpointEntry.from_dict(entry) for job, entry in body["jobs"].items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as exc:
            failure = exc
        else:
            failure = None
        if failure is not None:
            consequence = "ended jobs run again if the conductor requests them again"
            atomic_file.quarantine(self._path, failure, "The checkpoint", consequence)
            return {}
        if file_boot_id != self._boot_id:
            LOG.info(
                "Host rebooted, discarding %d jobs of %s; the conductor will request open jobs "
                "again",
                len(jobs),
                self._path,
            )
            return {}
        return jobs


def read_boot_id(path: str | Path = BOOT_ID) -> str:
    """Return the boot id of the host, or a random one, with a warning, if it cannot be read."""
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as exc:
        error = str(exc)
    LOG.warning("Cannot read the host's boot id, assuming a reboot: %s", error)
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
        ranked = sorted(
            kept, key=lambda job: (kept[job].state is CheckpointState.STARTED, kept[job].at)
        )
        for job in ranked[: len(kept) - MAX_ENTRIES]:
            del kept[job]
    return kept

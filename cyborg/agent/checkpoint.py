# SPDX-License-Identifier: Apache-2.0
"""What the agent did of each job, in a file that survives the agent but not a boot of the host.

A job is ``started`` in the file before a driver acts and ``completed`` or ``failed`` after it, so
that whoever asks again is answered without doing the work again. After a boot nothing of what was
prepared is there any more, and all that the file says is void.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from oslo_log import log

from cyborg.agent import durable

LOG = log.getLogger(__name__)

BOOT_ID = "/proc/sys/kernel/random/boot_id"
KEEP = 86400.0  # seconds for which jobs that have ended are remembered
MOST = 4096  # jobs that are remembered


class Step(StrEnum):
    """How far a job is."""

    STARTED = "started"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"  # it must not begin


@dataclass(frozen=True, slots=True)
class Entry:
    """One job. ``at`` is when it came to this step, in seconds since 1970."""

    kind: str
    state: Step
    error: str | None
    at: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"kind": self.kind, "state": str(self.state), "error": self.error, "at": self.at}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        """Read plain values. Raises KeyError, TypeError or ValueError."""
        error = body["error"]
        return cls(
            kind=str(body["kind"]),
            state=Step(body["state"]),
            error=None if error is None else str(error),
            at=float(body["at"]),
        )


class Checkpoint:
    """The entries, in memory and in the file. Any thread may call it."""

    def __init__(
        self,
        path: Path,
        boot_id: str | Path = BOOT_ID,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Read what the last life of the agent left; ``boot_id`` is the file that names the boot.

        A file that cannot be used is put aside, with a warning.
        """
        self._path = path
        self._now = now
        self._boot = boot(boot_id)
        self._lock = threading.Lock()  # of the entries
        self._disk = threading.Lock()  # of the file
        self._changes = 0
        self._written = 0  # how many changes the file has
        self._entries = self._read()

    def get(self, job: str) -> Entry | None:
        """Return what is known of a job."""
        with self._lock:
            return self._entries.get(job)

    def note(self, job: str, kind: str, state: Step, error: str | None = None) -> None:
        """Remember how far a job is; the file has it after ``flush``."""
        with self._lock:
            self._entries[job] = Entry(kind, state, error, self._now())
            self._changes += 1

    def flush(self) -> None:
        """Return when the file has all that was noted before. Raises OSError."""
        with self._lock:
            wanted = self._changes
        with self._disk:
            # Whoever wrote while we waited wrote ours too.
            if self._written >= wanted:
                return
            with self._lock:
                self._entries = _pruned(self._entries, self._now())
                changes, entries = self._changes, dict(self._entries)
            self._write(entries)
            self._written = changes

    def _write(self, entries: Mapping[str, Entry]) -> None:
        jobs = {job: entry.to_dict() for job, entry in entries.items()}
        body = json.dumps({"boot_id": self._boot, "jobs": jobs})
        durable.write(self._path, body.encode())

    def _read(self) -> dict[str, Entry]:
        try:
            body = json.loads(self._path.read_bytes())
            before = body["boot_id"]
            jobs = {str(job): Entry.from_dict(entry) for job, entry in body["jobs"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as bad:
            then = "jobs that had ended are done again if the conductor asks"
            durable.put_aside(self._path, bad, "The check-point", then)
            return {}
        if before != self._boot:
            LOG.info("The host has booted: %d jobs of %s are void", len(jobs), self._path)
            return {}
        return jobs


def boot(path: str | Path = BOOT_ID) -> str:
    """Return what tells this boot of the host from another."""
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as bad:
        LOG.warning("The host's boot id cannot be read, as if it had booted just now: %s", bad)
        return str(uuid4())


def _pruned(entries: Mapping[str, Entry], now: float) -> dict[str, Entry]:
    """Forget what ended long ago, and beyond the bound the oldest: what began last of all."""
    kept = {
        job: entry
        for job, entry in entries.items()
        if entry.state is Step.STARTED or entry.at > now - KEEP
    }
    if len(kept) > MOST:
        ranked = sorted(kept, key=lambda job: (kept[job].state is Step.STARTED, kept[job].at))
        for job in ranked[: len(kept) - MOST]:
            del kept[job]
    return kept

# SPDX-License-Identifier: Apache-2.0
"""The agent's state files: JSON that a restarted agent reads, whatever happened at the last write.

::

    {"version": 1, "checksum": "<SHA-256 of data>", "data": ...}

A file is replaced as a whole, so that after a crash it has the complete old or new content. A file
that cannot be read is moved aside.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from cyborg.core.log import get_logger

LOG = get_logger(__name__)

VERSION = 1

T = TypeVar("T")


@dataclass(eq=False)
class StateFile(Generic[T]):
    """A state file of one kind. Not thread-safe.

    ``load`` converts the stored data; it may raise anything that wrong JSON makes it raise.

    ``description`` and ``consequence`` are for the log line about a damaged file.
    """

    path: Path
    load: Callable[[Any], T]
    _: KW_ONLY
    description: str
    consequence: str

    def __post_init__(self) -> None:
        self.is_written = True
        """Whether the last ``try_write`` was successful."""

    def read(self) -> T | None:
        """Return the loaded data; None if there is no file, or after moving aside a damaged one."""
        try:
            return self.load(_unwrap(json.loads(self.path.read_bytes())))
        except FileNotFoundError:
            return None
        except (OSError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as exc:
            # All that wrong content makes json and ``load`` raise, not only ValueError.
            self._quarantine(exc)
            return None

    def write(self, data: Any) -> None:
        """Replace the file. Raise OSError."""
        checksum = _compute_checksum(data)
        body = json.dumps({"version": VERSION, "checksum": checksum, "data": data})
        atomic_write(self.path, body.encode())

    def try_write(self, data: Any) -> bool:
        """Replace the file; return success. Only the first of several failures is logged."""
        try:
            self.write(data)
        except OSError as exc:
            if self.is_written:
                LOG.warning("Cannot write %s, a restart loses its changes: %s", self.path, exc)
            self.is_written = False
        else:
            self.is_written = True
        return self.is_written

    def _quarantine(self, exc: Exception) -> None:
        """Rename a damaged file; log the reason and the consequence."""
        # Kept, not deleted: an operator may want to look into it.
        aside = self.path.with_name(f"{self.path.name}.broken")
        LOG.warning(
            "%s %s cannot be used (%s: %s) and is moved to %s; %s",
            self.description,
            self.path,
            type(exc).__name__,
            exc,
            aside,
            self.consequence,
        )
        try:
            self.path.replace(aside)
        except OSError as rename_error:
            LOG.warning(
                "Cannot rename the damaged file %s, it stays until the next write: %s",
                self.path,
                rename_error,
            )


def _unwrap(body: Any) -> Any:
    """Return the data of a file. Raise ValueError for another version or a wrong checksum."""
    # Files that were written before the version was stored have the data alone.
    if not isinstance(body, dict) or "checksum" not in body:
        return body
    # An older agent, after a downgrade, must not guess what a newer one has stored.
    if body["version"] != VERSION:
        raise ValueError(f"version {body['version']!r}, this agent reads version {VERSION}")
    # The file system may lose a part, or somebody edit one: half a list of jobs is worse than none.
    if body["checksum"] != _compute_checksum(body["data"]):
        raise ValueError("the checksum does not match")
    return body["data"]


def _compute_checksum(data: Any) -> str:
    # Sorted: the order of the keys is not part of the data.
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def atomic_write(path: Path, body: bytes) -> None:
    """Replace a file: after a crash it has the complete old or new content. Raise OSError."""
    # In the same folder: a rename is atomic only within a file system.
    folder, new = path.parent, path.with_name(f"{path.name}.new")
    # The files name instances and devices of tenants, which other users of the host must not see.
    os.makedirs(folder, mode=0o700, exist_ok=True)
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        left = memoryview(body)
        while left:
            left = left[os.write(file, left) :]
        # Before the rename: it could reach the disk first, and a crash would leave an empty file.
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(new, path)
    # The rename itself is in the folder: without this a crash may bring back the old file.
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


# Texts of one driver; the oldest one is dropped for another.
MAX_TEXTS = 1024

MAX_TEXT = 65536  # characters of a key or a text


class MemoryFile:
    """The texts of all drivers of a host; the file is read at the first use."""

    def __init__(self, path: Path) -> None:
        self.file = StateFile(
            path,
            _load_texts,
            description="The memory of the drivers",
            consequence="drivers do not know what they stored, such as capacities of drives",
        )
        # One for all drivers: each change writes the texts of all.
        self.lock = threading.Lock()
        self._texts: dict[str, dict[str, str]] | None = None  # by driver and key

    def of(self, driver: str) -> "DriverMemory":
        """Return the memory of a driver."""
        return DriverMemory(self, driver)

    def texts(self) -> dict[str, dict[str, str]]:
        """Return the texts by driver and key, to be changed under the lock."""
        if self._texts is None:
            self._texts = self.file.read() or {}
        return self._texts


def _load_texts(data: Any) -> dict[str, dict[str, str]]:
    return {
        str(driver): {str(key): str(text) for key, text in texts.items()}
        for driver, texts in data.items()
    }


@dataclass(frozen=True, slots=True)
class DriverMemory:
    """The memory of one driver. Thread-safe."""

    memory: MemoryFile
    driver: str

    def get(self, key: str) -> str | None:
        """Return the text of a key; None if it is unknown."""
        with self.memory.lock:
            return self.memory.texts().get(self.driver, {}).get(key)

    def put(self, key: str, text: str | None) -> bool:
        """Store the text of a key, or remove it; write the file if that changes it.

        Return whether a restart keeps the change. If the file cannot be written, log a warning; the
        next call writes it again. Raise ValueError for a text that is too long.
        """
        if max(len(key), len(text or "")) > MAX_TEXT:
            raise ValueError(f"a key or its text has more than {MAX_TEXT} characters: {key[:40]!r}")
        with self.memory.lock:
            texts = self.memory.texts().setdefault(self.driver, {})
            # Drivers store at each discovery what they know already: that must not cost a write.
            if texts.get(key) == text and self.memory.file.is_written:
                return True
            # Removed first, so that a text that changes becomes the youngest.
            texts.pop(key, None)
            if text is not None:
                texts[key] = text
            # A driver with a mistake must not fill the disk; a dict keeps the order of insertion.
            while len(texts) > MAX_TEXTS:
                del texts[next(iter(texts))]
            return self.memory.file.try_write(self.memory.texts())

# SPDX-License-Identifier: Apache-2.0
"""Memories of the drivers of a host, in one file that survives a restart of the agent."""

import json
import threading
from pathlib import Path
from typing import Any

from cyborg.agent import atomic_file
from cyborg.core.log import get_logger

LOG = get_logger(__name__)

MAX_TEXTS = 1024
"""Texts of one backend; the oldest one is dropped for another."""

MAX_TEXT = 1024  # characters of a key or a text


class MemoryFile:
    """The texts of all backends of a host. Thread-safe; the file is read at the first use."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._texts: dict[str, dict[str, str]] | None = None  # by backend and key
        self._unwritten = False

    def of(self, backend: str) -> "BackendMemory":
        """Return the memory of a backend."""
        return BackendMemory(self, backend)

    def get(self, backend: str, key: str) -> str | None:
        """Return a text; None if it is unknown."""
        with self._lock:
            return self._loaded().get(backend, {}).get(key)

    def put(self, backend: str, key: str, text: str) -> None:
        """Store a text, and write the file if the text is new.

        Raise ValueError for a text that is too long. If the file cannot be written, log a warning;
        the next call writes it again.
        """
        if max(len(key), len(text)) > MAX_TEXT:
            raise ValueError(f"a driver may store {MAX_TEXT} characters: {key[:40]!r}")
        error: str | None = None
        with self._lock:
            texts = self._loaded().setdefault(backend, {})
            if texts.get(key) == text and not self._unwritten:
                return
            texts.pop(key, None)
            texts[key] = text
            while len(texts) > MAX_TEXTS:
                del texts[next(iter(texts))]
            first = not self._unwritten
            try:
                atomic_file.atomic_write(self._path, json.dumps(self._texts).encode())
            except OSError as exc:
                self._unwritten, error = True, str(exc)
            else:
                self._unwritten = False
        if error is not None and first:
            LOG.warning("Cannot write %s, a restart forgets it: %s", self._path, error)

    def _loaded(self) -> dict[str, dict[str, str]]:
        if self._texts is None:
            self._texts = self._read()
        return self._texts

    def _read(self) -> dict[str, dict[str, str]]:
        failure: Exception
        try:
            body: Any = json.loads(self._path.read_bytes())
            return {
                str(backend): {str(key): str(text) for key, text in texts.items()}
                for backend, texts in body.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as exc:
            failure = exc
        consequence = "drivers do not know what they stored, such as capacities of drives"
        atomic_file.quarantine(self._path, failure, "The memory of the drivers", consequence)
        return {}


class BackendMemory:
    """The memory of one backend, for its driver."""

    def __init__(self, file: MemoryFile, backend: str) -> None:
        self._file = file
        self._backend = backend

    def get(self, key: str) -> str | None:
        """Return the text of a key; None if it is unknown."""
        return self._file.get(self._backend, key)

    def put(self, key: str, text: str) -> None:
        """Store the text of a key."""
        self._file.put(self._backend, key, text)

# SPDX-License-Identifier: Apache-2.0
"""Texts that the drivers of a host store, in one file that survives a restart of the agent."""

import threading
from pathlib import Path
from typing import Any

from cyborg.agent.state_file import StateFile

MAX_TEXTS = 1024
"""Texts of one driver; the oldest one is dropped for another."""

MAX_TEXT = 65536  # characters of a key or a text


class MemoryFile:
    """The texts of all drivers of a host. Thread-safe; the file is read at the first use."""

    def __init__(self, path: Path) -> None:
        self._file = StateFile(
            path,
            _load_texts,
            description="The memory of the drivers",
            consequence="drivers do not know what they stored, such as capacities of drives",
        )
        self._lock = threading.Lock()
        self._texts: dict[str, dict[str, str]] | None = None  # by driver and key

    def of(self, driver: str) -> "DriverMemory":
        """Return the memory of a driver."""
        return DriverMemory(self, driver)

    def get(self, driver: str, key: str) -> str | None:
        """Return a text; None if it is unknown."""
        with self._lock:
            return self._loaded().get(driver, {}).get(key)

    def put(self, driver: str, key: str, text: str | None) -> bool:
        """Store or remove a text, and write the file if that changes it.

        Return whether the file has the change. If it cannot be written, log a warning; the next
        call writes it again. Raise ValueError for a text that is too long.
        """
        if max(len(key), len(text or "")) > MAX_TEXT:
            raise ValueError(f"a key or its text has more than {MAX_TEXT} characters: {key[:40]!r}")
        with self._lock:
            texts = self._loaded().setdefault(driver, {})
            # Drivers store at each discovery what they know already: that must not cost a write.
            if texts.get(key) == text and self._file.is_written:
                return True
            texts.pop(key, None)
            if text is not None:
                texts[key] = text
            # A driver with a mistake must not fill the disk; a dict keeps the order of insertion.
            while len(texts) > MAX_TEXTS:
                del texts[next(iter(texts))]
            return self._file.try_write(self._texts)

    def _loaded(self) -> dict[str, dict[str, str]]:
        if self._texts is None:
            self._texts = self._file.read() or {}
        return self._texts


def _load_texts(data: Any) -> dict[str, dict[str, str]]:
    return {
        str(driver): {str(key): str(text) for key, text in texts.items()}
        for driver, texts in data.items()
    }


class DriverMemory:
    """The memory of one driver."""

    def __init__(self, file: MemoryFile, driver: str) -> None:
        self._file = file
        self._driver = driver

    def get(self, key: str) -> str | None:
        """Return the text of a key; None if it is unknown."""
        return self._file.get(self._driver, key)

    def put(self, key: str, text: str | None) -> bool:
        """Store the text of a key; None removes the key. Return whether a restart keeps it."""
        return self._file.put(self._driver, key, text)

# SPDX-License-Identifier: Apache-2.0
"""Records of the images that the driver has loaded; the kernel has no such records.

They are in the memory of the driver, one text for each card. A record is trusted only until the
host reboots, and only while the region has the same identity and shows the same function id. The
record of a region is removed before the region is changed, so that a crash leaves no wrong record.
"""

import errno
import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from cyborg.core.log import get_logger
from cyborg.drivers.base import Memory
from cyborg.drivers.fpga.regions import Region

LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """Record of the image in a region.

    ``function_id`` is the function id in the properties of the image, and ``shown`` the function id
    that the kernel showed after the image was loaded. ``identity`` is the identity of the region.
    ``given`` is True while a server may use the card as a whole and can load other images.
    """

    image: str
    function_id: str | None
    boot_id: str
    identity: int
    shown: str | None
    given: bool = False

    def is_trusted(self, region: Region, boot_id: str | None) -> bool:
        """Return whether the region still has the recorded image."""
        return (
            self.boot_id == boot_id
            and self.identity == region.identity
            and self.shown == region.function_id
        )


# One for all stores: a backend and its successor have one memory, and may have the same card.
_LOCK = threading.Lock()


class RecordStore:
    """Store of the records, by card and number of the region. Thread-safe."""

    def __init__(self, memory: Callable[[], Memory]) -> None:
        """``memory`` returns the memory of the driver, which the agent sets later."""
        self._memory = memory
        self._lock = _LOCK

    def get(self, card: str, number: int) -> Record | None:
        """Return the record of a region, trusted or not."""
        with self._lock:
            return self._read(card).get(str(number))

    def put(self, card: str, number: int, record: Record) -> None:
        """Store the record of a region. Raise OSError."""
        with self._lock:
            self._write(card, {**self._read(card), str(number): record})

    def forget(self, card: str, number: int) -> None:
        """Remove the record of a region. Raise OSError."""
        with self._lock:
            self._update(card, lambda key, record: None if key == str(number) else record)

    def mark_given(self, card: str) -> None:
        """Mark the records of a card before a server gets the card as a whole. Raise OSError."""
        with self._lock:
            self._update(card, lambda key, record: replace(record, given=True))

    def forget_given(self, card: str) -> None:
        """Remove the marked records of a card that a server has released. Raise OSError."""
        with self._lock:
            self._update(card, lambda key, record: None if record.given else record)

    def _update(self, card: str, change: Callable[[str, Record], Record | None]) -> None:
        found = self._read(card)
        changed = {key: change(key, record) for key, record in found.items()}
        # Written also without a change: an earlier call may have failed to write its change.
        self._write(card, {k: record for k, record in changed.items() if record is not None})

    def _read(self, card: str) -> dict[str, Record]:
        text = self._memory().get(_key(card))
        if text is None:
            return {}
        try:
            body: Any = json.loads(text)
            return {str(number): Record(**fields) for number, fields in body.items()}
        except (ValueError, TypeError, AttributeError) as exc:
            error = str(exc)
        LOG.warning(
            "Records of loaded images cannot be read, the images of the card count as unknown: %s",
            error,
            device=card,
        )
        return {}

    def _write(self, card: str, records: dict[str, Record]) -> None:
        body = {number: asdict(record) for number, record in records.items()}
        if not self._memory().put(_key(card), json.dumps(body) if body else None):
            raise OSError(errno.EIO, "the memory of the drivers cannot be written")


def _key(card: str) -> str:
    return f"images {card}"

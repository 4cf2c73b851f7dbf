# SPDX-License-Identifier: Apache-2.0
"""Events of the custody log of a device: who held its handles, what was loaded, how it was cleaned.

A handle is named by its uuid and by the addresses of the handle and its deployable, because a
record outlives the rows that it names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cyborg.core.described_enum import DescribedEnum

MAX_ERROR = 1000
"""Characters of an error text in a record."""


class Event(DescribedEnum):
    """Events of a custody log."""

    DEVICE_ADDED = "device_added", "A host reported the device for the first time, or again."
    DEVICE_REMOVED = "device_removed", "The host no longer reports the device."
    BACKEND_CHANGED = "backend_changed", "Another backend reports the device."
    CLAIMED = "claimed", "A handle was assigned to an ARQ."
    ASSIGNED = "assigned", "The ARQ, which owned the handle under a lease, got its instance."
    PREPARED = "prepared", "The host has prepared the handle; the ARQ is bound."
    RELEASED = "released", "The ARQ no longer owns the handle."
    CLEANED = "cleaned", "The host has cleaned the handle."
    CLEANING_FAILED = "cleaning_failed", "The host failed to clean the handle; it is retried."
    CLEANING_ABANDONED = "cleaning_abandoned", "The handle was removed without cleaning."
    PROGRAMMED = "programmed", "The host has loaded an image."
    PROGRAM_FAILED = "program_failed", "The host failed to load an image."
    PARTITIONED = "partitioned", "The host has applied a layout."
    PARTITION_FAILED = "partition_failed", "The host failed to apply a layout."
    SIGNATURES_REMOVED = "signatures_removed", "An operator has given up the key."


@dataclass(frozen=True, slots=True)
class Entry:
    """An event to record: the uuid of its device, the host, and the details of the event.

    ``details`` has texts, integers, booleans, None, and objects of texts only, since each database
    must return exactly what was hashed.
    """

    device: str
    host: str
    event: Event
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """A recorded event.

    ``time`` is naive UTC. ``sequence`` counts the records of the device from 1.
    """

    uuid: str
    device: str
    sequence: int
    time: datetime
    host: str
    event: str
    details: Mapping[str, Any]

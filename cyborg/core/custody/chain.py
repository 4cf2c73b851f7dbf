# SPDX-License-Identifier: Apache-2.0
"""Hash chain of the custody log of a device: compute the hashes, and check stored ones.

The hash of a record is SHA-256 over the record and the hash of the previous record of the device.
So a record that is changed, removed or moved breaks the chain, unless all later hashes and the tip
of the chain are changed, too.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cyborg.core.custody.record import Record


@dataclass(frozen=True, slots=True)
class Link:
    """Position in a chain: the sequence number of a record, and its hash."""

    sequence: int
    hash: str


START = Link(0, "0" * 64)
"""The position before the first record of a device."""


@dataclass(frozen=True, slots=True)
class SealedRecord:
    """A record with its stored hash."""

    record: Record
    hash: str


@dataclass(frozen=True, slots=True)
class Fault:
    """The first wrong record of a chain: its sequence number, and what is wrong."""

    sequence: int
    explanation: str


def serialize(record: Record, previous_hash: str) -> bytes:
    """Return the canonical bytes of a record: JSON in ASCII, with sorted keys, without blanks.

    The time is ISO 8601 with six digits of fraction, without a time zone; it is UTC.
    """
    values = {
        "uuid": record.uuid,
        "device": record.device,
        "sequence": record.sequence,
        "time": record.time.isoformat(timespec="microseconds"),
        "host": record.host,
        "event": str(record.event),
        # A stored value that was changed by hand may be any JSON value.
        "details": dict(d) if isinstance(d := record.details, Mapping) else d,
        "previous": previous_hash,
    }
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def compute_hash(record: Record, previous_hash: str) -> str:
    """Return the hash of a record in hexadecimal; ``previous_hash`` is the previous record's."""
    return hashlib.sha256(serialize(record, previous_hash)).hexdigest()


def check_records(previous: Link, records: Iterable[SealedRecord]) -> Link | Fault:
    """Check consecutive records that follow ``previous``; return the last position, or a fault.

    A chain is checked in pages: the result for one page is the position before the next page.
    """
    position = previous
    for sealed in records:
        record, expected = sealed.record, position.sequence + 1
        if record.sequence != expected:
            return Fault(
                expected,
                f"record {expected} is missing, or was moved: the next one is {record.sequence}",
            )
        digest = compute_hash(record, position.hash)
        if digest != sealed.hash:
            return Fault(
                expected,
                f"the stored hash of record {expected} is {sealed.hash}, but its content and the "
                f"record before it give {digest}",
            )
        position = Link(expected, digest)
    return position


def check_tip(reached: Link, tip: Link) -> Fault | None:
    """Compare the last checked position with the stored tip of the chain; return a fault, or None.

    Records at the end of the chain were removed if ``reached`` is before the tip.
    """
    if reached.sequence < tip.sequence:
        first = reached.sequence + 1
        return Fault(first, f"records {first} to {tip.sequence} at the end are missing")
    if reached.sequence > tip.sequence:
        first = tip.sequence + 1
        return Fault(first, f"records from {first} on are after the stored end of the chain")
    if reached.hash != tip.hash:
        return Fault(
            tip.sequence,
            f"record {tip.sequence} has the hash {reached.hash}, but the stored end of the chain "
            f"has {tip.hash}",
        )
    return None

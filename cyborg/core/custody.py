# SPDX-License-Identifier: Apache-2.0
"""Custody log of a device: its events, their hash chain, and the keys that sign it.

The events say who held the handles of a device, what was loaded, and how it was cleaned.

Conductors sign what they write. A signature is HMAC-SHA-256 under a key that is not in the
database: ``ID:HEX`` with the id of the key. Whoever can write to the database but has no key can
compute hashes, and no signatures.

A handle is named by its uuid and by the addresses of the handle and its deployable, because a
record outlives the rows that it names.

The hash of a record is SHA-256 over the record and the hash of the previous record of the device.
So a record that is changed, removed or moved breaks the chain, unless all later hashes and the tip
of the chain are changed, too. The signatures of the head of the chain, and of the records that are
not in the chain yet, show what was not written by a conductor. An anchor, which was kept outside of
the database, shows that the chain is not an older one, nor another one.

``verify`` is the one check of a log, for the audit and for the command line.
"""

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from cyborg.core.errors import Invalid
from cyborg.core.text import DescribedEnum

MIN_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys by their ids: the first one signs, all check. Without keys nothing is signed."""

    secrets: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def sign(self, data: bytes) -> str | None:
        """Return the signature of ``data`` under the first key, None without keys."""
        # In the order of the file. The other keys stay to check what was signed before.
        for key_id, secret in self.secrets.items():
            return f"{key_id}:{_compute(secret, data)}"
        return None

    def find_fault(self, data: bytes, signature: str | None) -> str | None:
        """Return why ``signature`` does not prove that a conductor wrote ``data``, else None."""
        if signature is None:
            return "it has no signature" if self.secrets else None
        key_id, _, code = signature.partition(":")
        if (secret := self.secrets.get(key_id)) is None:
            return f"its signature is of the key {key_id[:16]!r}, which is not in the key file"
        # In constant time: the duration must not show how much of a forged code is right.
        if not hmac.compare_digest(_compute(secret, data).encode(), code.encode()):
            return "its signature does not fit it"
        return None


NO_KEYS = Keys()


def parse_keys(text: str) -> Keys:
    """Return the keys of a key file: one in hexadecimal in each line; ``#`` begins a comment.

    Raise Invalid with the number of the line; the message has no part of a key.
    """
    secrets: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (word := line.partition("#")[0].strip()):
            continue
        try:
            secret = bytes.fromhex(word)
        except ValueError:
            secret = b""  # too short: refused below
        if len(secret) < MIN_KEY_BYTES:
            raise Invalid(
                f"line {number} is not a key: expected {2 * MIN_KEY_BYTES} or more hexadecimal "
                "digits, such as 'openssl rand -hex 32' prints"
            )
        # The id is derived, so that a key file needs no names.
        secrets[hashlib.sha256(b"custody key id" + secret).hexdigest()[:8]] = secret
    if not secrets:
        raise Invalid("there is no key in it")
    return Keys(secrets)


def _compute(secret: bytes, data: bytes) -> str:
    return hmac.digest(secret, data, hashlib.sha256).hex()


# Characters of an error text in a record.
MAX_ERROR = 1000


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


@dataclass(frozen=True, slots=True)
class Link:
    """Position in a chain: the sequence number of a record, and its hash."""

    sequence: int
    hash: str


# The position before the first record of a device.
START = Link(0, "0" * 64)


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
    # The first fault ends the check: the hashes after it follow from a record that is wrong.
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


@dataclass(frozen=True, slots=True)
class Head:
    """The ends of the chain of a device, and their signature.

    ``tip`` is the last record, ``base`` the last one that was deleted after its retention.
    """

    device: str
    tip: Link
    base: Link
    signature: str | None


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record that is not in a chain yet, with its signature; its sequence number is 0."""

    record: Record
    signature: str | None


@dataclass(frozen=True, slots=True)
class Log:
    """What was read of a custody log, in this order: ``before``, ``records``, ``after``.

    ``before`` and ``after`` are the head of the chain, which moves while the records are read: they
    are None if there is none. ``records`` are those of the chain in the order of their numbers,
    ``new`` those that are not in it yet, in the order of their creation.
    """

    before: Head | None
    records: Iterable[SealedRecord]
    after: Head | None
    new: Iterable[NewRecord] = ()


def serialize_head(device: str, tip: Link, base: Link) -> bytes:
    """Return the bytes of a head that its signature is computed of."""
    ends = [tip.sequence, tip.hash, base.sequence, base.hash]
    return json.dumps({"device": device, "head": ends}, sort_keys=True).encode()


def serialize_progress(device: str, reached: Link) -> bytes:
    """Return the bytes of the record that an audit has reached, for its signature."""
    position = [reached.sequence, reached.hash]
    return json.dumps({"device": device, "reached": position}, sort_keys=True).encode()


def serialize_new(record: Record) -> bytes:
    """Return the bytes of a record that is not in a chain yet, for its signature."""
    return serialize(record, "")


def find_head_fault(head: Head, keys: Keys) -> str | None:
    """Return why a head was not written by a conductor, None if it was."""
    return keys.find_fault(serialize_head(head.device, head.tip, head.base), head.signature)


class Verification(NamedTuple):
    """The last record of a chain that was checked, and the first fault of its log."""

    reached: Link
    fault: Fault | None


def verify(
    log: Log,
    keys: Keys | None,
    *,
    anchor: Link | None = None,
    start: Link | None = None,
    complete: bool = True,
) -> Verification:
    """Check a log up to its first fault.

    Without ``keys`` (None) no signature is checked; with NO_KEYS a signed head is a fault.
    ``anchor`` is a record that the chain had before. ``start`` is a record up to which the chain
    was checked; the records begin after it. If not ``complete``, the log has only the next records
    of the chain.
    """
    before, after = log.before, log.after
    if after is None:
        return Verification(START, _find_fault_without_head(log, keys, anchor))
    if fault := _find_fault_of_heads(log, keys):
        return Verification(START, fault)
    # The head moves while the records are read, by new records and by deletions: those after the
    # later base and up to the earlier tip must be there.
    base = after.base
    tip = before.tip if before else START
    first_base = before.base if before else START
    # The numbers of records, in order: up to first_base none may be there, up to base they were
    # deleted meanwhile, up to tip all must be there, up to after.tip they were sealed meanwhile.
    position = start if start is not None and base.sequence < start.sequence else base
    for sealed in log.records:
        sequence = sealed.record.sequence
        if sequence > tip.sequence:
            # Beyond the chain. A record that is missing before it is the first fault.
            if complete and sequence > after.tip.sequence:
                fault = check_tip(position, tip)
                fault = fault or check_tip(Link(sequence, sealed.hash), after.tip)
                return Verification(position, fault)
            continue  # sealed meanwhile: the next check reads it
        if sequence <= first_base.sequence:
            text = (
                f"there is a record {sequence}, but the chain begins after record "
                f"{first_base.sequence}"
            )
            return Verification(position, Fault(sequence, text))
        if sequence <= base.sequence:
            continue
        result = _check_next(position, sealed)
        if isinstance(result, Fault):
            return Verification(position, result)
        position = result
        if anchor is not None and anchor.sequence == position.sequence and anchor != position:
            return Verification(position, _differs(anchor, position))
    fault = check_tip(position, tip) if complete else None
    fault = fault or _find_fault_of_anchor(anchor, base, after.tip)
    fault = fault or find_forged(log.new, keys, after.tip.sequence + 1)
    return Verification(position, fault)


def find_forged(records: Iterable[NewRecord], keys: Keys | None, sequence: int) -> Fault | None:
    """Return a fault at ``sequence`` for the first record that no conductor wrote, else None."""
    # A conductor without keys signs no record: nothing distinguishes a forged one.
    if keys is None or not keys.secrets:
        return None
    for new in records:
        if reason := keys.find_fault(serialize_new(new.record), new.signature):
            return Fault(
                sequence,
                f"record {new.record.uuid}, which is not in the chain yet, is not one that a "
                f"conductor wrote: {reason}",
            )
    return None


def parse_anchors(text: str) -> dict[str, Link]:
    """Return the anchors of a file by the uuid of their device. Raise Invalid."""
    try:
        document = json.loads(text)
        return {
            str(device): Link(int(chain["sequence"]), str(chain["hash"]))
            for device, chain in document["chains"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise Invalid(
            'expected a JSON object with "chains", which has "sequence" and "hash" by uuid of the '
            "device"
        ) from exc


def format_anchors(tips: Mapping[str, Link]) -> dict[str, Any]:
    """Return the anchors of devices as a JSON object."""
    return {
        device: {"sequence": tip.sequence, "hash": tip.hash} for device, tip in sorted(tips.items())
    }


def _check_next(position: Link, sealed: SealedRecord) -> Link | Fault:
    """Return the position of a record that follows another one, or its fault."""
    result = check_records(position, [sealed])
    is_first = isinstance(result, Link) and result.sequence == 1
    if is_first and sealed.record.event != Event.DEVICE_ADDED:
        return _first_is_not(sealed.record)
    return result


def _find_fault_of_heads(log: Log, keys: Keys | None) -> Fault | None:
    """Return the fault of a head that no conductor wrote, None if both are valid."""
    for head in (log.before, log.after):
        if head and keys is not None and (reason := find_head_fault(head, keys)):
            return Fault(
                head.tip.sequence,
                f"the ends of the chain, up to record {head.tip.sequence}, are not those that a "
                f"conductor wrote: {reason}",
            )
    return None


def _find_fault_without_head(log: Log, keys: Keys | None, anchor: Link | None) -> Fault | None:
    """Return the fault of a log without a head; None if all its records are new and valid."""
    for sealed in log.records:  # the first one is the fault
        return Fault(
            sealed.record.sequence,
            "its records are in a chain, but its row in custody_heads is missing, or has another "
            "host",
        )
    new = list(log.new)
    if not new:
        return Fault(1, "all its records and its row in custody_heads are missing")
    if anchor is not None and anchor.sequence:
        return Fault(1, f"the chain is missing, but the anchor has its record {anchor.sequence}")
    fault = find_forged(new, keys, 1)
    if fault is None and new[0].record.event != Event.DEVICE_ADDED:
        return _first_is_not(new[0].record)
    return fault


def _find_fault_of_anchor(anchor: Link | None, base: Link, tip: Link) -> Fault | None:
    """Return the fault of a chain with these ends that cannot have the record ``anchor``."""
    # A record before the base was deleted after its retention: there is nothing to compare.
    if anchor is None or anchor.sequence < base.sequence:
        return None
    if anchor.sequence > tip.sequence:
        return Fault(
            tip.sequence + 1,
            f"the chain ends with record {tip.sequence}, but the anchor has its record "
            f"{anchor.sequence}: records were removed, or the whole chain was replaced",
        )
    if anchor.sequence == base.sequence and anchor != base:
        return _differs(anchor, base)
    return None


def _differs(anchor: Link, found: Link) -> Fault:
    return Fault(
        anchor.sequence,
        f"record {anchor.sequence} has the hash {found.hash}, but the anchor has {anchor.hash}",
    )


def _first_is_not(record: Record) -> Fault:
    return Fault(
        1,
        f"its first record is {record.event}, not {Event.DEVICE_ADDED}: the records before it are "
        "missing",
    )

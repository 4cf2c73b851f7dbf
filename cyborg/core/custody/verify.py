# SPDX-License-Identifier: Apache-2.0
"""Verification of the custody log of a device: one for the audit and for the command line.

The hashes of a chain show a change of one record. The signatures of its head, and of the records
that are not in the chain yet, show what was not written by a conductor. An anchor, which was kept
outside of the database, shows that the chain is not an older one, nor another one.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cyborg.core.custody.record import (
    START,
    Event,
    Fault,
    Keys,
    Link,
    Record,
    SealedRecord,
    check_records,
    check_tip,
    serialize,
)
from cyborg.core.errors import Invalid


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


def verify(
    log: Log,
    keys: Keys | None,
    *,
    anchor: Link | None = None,
    start: Link | None = None,
    complete: bool = True,
) -> tuple[Link, Fault | None]:
    """Return the last record of the chain that was checked, and the first fault of a log.

    Without ``keys`` (None) no signature is checked; with NO_KEYS a signature is a fault. ``anchor``
    is a record that the chain had before. ``start`` is a record up to which the chain was checked;
    the records begin after it. If not ``complete``, the log has only the next records of the chain.
    """
    before, after = log.before, log.after
    if after is None:
        return START, _find_fault_without_head(log, keys, anchor)
    for head in (before, after):
        if head and keys is not None and (reason := find_head_fault(head, keys)):
            return START, Fault(
                head.tip.sequence,
                f"the ends of the chain, up to record {head.tip.sequence}, are not those that a "
                f"conductor wrote: {reason}",
            )
    # The head moves while the records are read: records up to the earlier tip must be there, and
    # records after the later base.
    base, tip = after.base, before.tip if before else START
    first_base = before.base if before else START
    position = start if start is not None and base.sequence < start.sequence else base
    for sealed in log.records:
        sequence = sealed.record.sequence
        if sequence > tip.sequence:
            if complete and sequence > after.tip.sequence:
                fault = check_tip(position, tip)
                return position, fault or check_tip(Link(sequence, sealed.hash), after.tip)
            continue  # sealed meanwhile
        if sequence <= first_base.sequence:
            return position, Fault(
                sequence,
                f"there is a record {sequence}, but the chain begins after record "
                f"{first_base.sequence}",
            )
        if sequence <= base.sequence:
            continue  # deleted meanwhile
        result = check_records(position, [sealed])
        if isinstance(result, Fault):
            return position, result
        if sequence == 1 and sealed.record.event != Event.DEVICE_ADDED:
            return position, _first_is_not(sealed.record)
        position = result
        if anchor is not None and anchor.sequence == position.sequence and anchor != position:
            return position, _differs(anchor, position)
    fault = check_tip(position, tip) if complete else None
    fault = fault or _find_fault_of_anchor(anchor, base, after.tip)
    return position, fault or find_forged(log.new, keys, after.tip.sequence + 1)


def find_forged(records: Iterable[NewRecord], keys: Keys | None, sequence: int) -> Fault | None:
    """Return a fault at ``sequence`` for the first record that no conductor wrote, else None."""
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


def _find_fault_without_head(log: Log, keys: Keys | None, anchor: Link | None) -> Fault | None:
    for sealed in log.records:
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

# SPDX-License-Identifier: Apache-2.0
"""Verification of a log whose head moves meanwhile, and comparison with an anchor."""

from dataclasses import replace
from datetime import datetime

import pytest

from cyborg.core.custody import (
    NO_KEYS,
    START,
    Head,
    Keys,
    Link,
    Log,
    NewRecord,
    Record,
    SealedRecord,
    compute_hash,
    format_anchors,
    parse_anchors,
    parse_keys,
    serialize_head,
    serialize_new,
    verify,
)
from cyborg.core.errors import Invalid

DEVICE = "6d3f3dd2-2d1f-4f2e-9c07-3b5b1f2c1a01"
KEYS = parse_keys(f"# present\n{'ab' * 32}\n{'cd' * 40} # former\n")


def make_chain(number: int) -> tuple[list[SealedRecord], list[Link]]:
    """Return records 1 to ``number``, and the links from START on."""
    links, records = [START], []
    for sequence in range(1, number + 1):
        event = "claimed" if sequence > 1 else "device_added"
        record = Record(f"r{sequence}", DEVICE, sequence, datetime(2026, 1, 2), "h", event, {})
        links.append(Link(sequence, compute_hash(record, links[-1].hash)))
        records.append(SealedRecord(record, links[-1].hash))
    return records, links


RECORDS, LINKS = make_chain(6)


def head(tip: int, base: int = 0, keys: Keys = KEYS) -> Head:
    signature = keys.sign(serialize_head(DEVICE, LINKS[tip], LINKS[base]))
    return Head(DEVICE, LINKS[tip], LINKS[base], signature)


def test_log_that_changes_while_it_is_read_has_no_fault() -> None:
    # Record 6 is sealed, and records 1 and 2 are deleted, after the head was read first.
    for records in (RECORDS, RECORDS[2:], RECORDS[:5], RECORDS[1:5]):
        log = Log(head(5), records, head(6, 2))
        assert verify(log, KEYS) == (LINKS[5], None)
    assert verify(Log(None, RECORDS[:1], head(1)), KEYS)[1] is None


def test_signature_of_a_former_key_is_accepted() -> None:
    former = Keys(dict(list(KEYS.secrets.items())[1:]))
    assert verify(Log(head(6, keys=former), RECORDS, head(6)), KEYS)[1] is None
    fault = verify(Log(head(6), RECORDS, head(6)), former)[1]
    assert fault is not None
    assert "not in the key file" in fault.explanation


def test_missing_signature_is_a_fault_only_with_keys() -> None:
    plain = head(6, keys=NO_KEYS)
    log = Log(plain, RECORDS, plain)
    assert plain.signature is None
    assert [verify(log, keys)[1] is None for keys in (None, NO_KEYS, KEYS)] == [True, True, False]
    signed = Log(head(6), RECORDS, head(6))
    assert [verify(signed, keys)[1] is None for keys in (None, NO_KEYS, KEYS)] == [
        True,
        False,
        True,
    ]


def test_signature_of_another_record_is_a_fault() -> None:
    record = replace(RECORDS[2].record, sequence=0)
    signature = KEYS.sign(serialize_new(record))
    good, forged = (NewRecord(one, signature) for one in (record, replace(record, host="x")))
    assert verify(Log(head(6), RECORDS, head(6), [good]), KEYS)[1] is None
    fault = verify(Log(head(6), RECORDS, head(6), [good, forged]), KEYS)[1]
    assert fault is not None
    assert fault.sequence == 7


@pytest.mark.parametrize(
    ("anchor", "found"),
    [
        (LINKS[6], False),
        (LINKS[4], False),
        (LINKS[2], False),
        (LINKS[1], False),  # deleted after its retention: it proves nothing
        (Link(1, "0" * 64), False),
        (Link(2, "0" * 64), True),
        (Link(4, "0" * 64), True),
        (Link(7, "0" * 64), True),
    ],
)
def test_anchor_is_compared(anchor: Link, found: bool) -> None:
    log = Log(head(6, 2), RECORDS[2:], head(6, 2))
    assert (verify(log, KEYS, anchor=anchor)[1] is not None) == found


def test_anchors_are_read_back() -> None:
    text = f'{{"chains": {format_anchors({DEVICE: LINKS[3]})}}}'.replace("'", '"')
    assert parse_anchors(text) == {DEVICE: LINKS[3]}
    for wrong in ("", "[]", "{}", '{"chains": {"d": {"sequence": "x", "hash": "y"}}}'):
        with pytest.raises(Invalid, match="chains"):
            parse_anchors(wrong)

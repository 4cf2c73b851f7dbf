# SPDX-License-Identifier: Apache-2.0
"""The hash chain of a custody log: any change of stored records is found."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.custody import (
    START,
    Event,
    Fault,
    Link,
    Record,
    SealedRecord,
    check_records,
    check_tip,
    compute_hash,
    serialize,
)

DEVICE = "6d3f3dd2-2d1f-4f2e-9c07-3b5b1f2c1a01"
BEGIN = datetime(2026, 1, 2, 3, 4, 5)

texts = st.text(max_size=8)
details = st.dictionaries(
    texts,
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | texts
    | st.dictionaries(texts, texts, max_size=2),
    max_size=3,
)
events = st.tuples(st.sampled_from(list(Event)), details, st.integers(0, 10**12))


def seal(drawn: Sequence[tuple[Event, Mapping[str, object], int]]) -> list[SealedRecord]:
    """Return a chain of records with these events, details and times in microseconds."""
    position, chain = START, []
    for event, detail, microseconds in drawn:
        sequence = position.sequence + 1
        time = BEGIN + timedelta(microseconds=microseconds)
        record = Record(f"uuid-{sequence}", DEVICE, sequence, time, "h", event, detail)
        position = Link(sequence, compute_hash(record, position.hash))
        chain.append(SealedRecord(record, position.hash))
    return chain


def tip_of(chain: list[SealedRecord]) -> Link:
    """Return the position of the last record."""
    return Link(chain[-1].record.sequence, chain[-1].hash)


def find_fault(chain: list[SealedRecord], tip: Link, page_size: int = 3) -> Fault | None:
    """Check a chain in pages, as an audit does."""
    position = START
    for first in range(0, len(chain), page_size):
        result = check_records(position, chain[first : first + page_size])
        if isinstance(result, Fault):
            return result
        position = result
    return check_tip(position, tip)


chains = st.lists(events, min_size=1, max_size=12).map(seal)


@given(chains, st.integers(1, 5))
def test_check_records_unchanged_chain_has_no_fault(
    chain: list[SealedRecord], page_size: int
) -> None:
    assert find_fault(chain, tip_of(chain), page_size) is None


@given(chains, st.data())
def test_check_records_changed_record_is_the_fault(
    chain: list[SealedRecord], data: st.DataObject
) -> None:
    tip, index = tip_of(chain), data.draw(st.integers(0, len(chain) - 1))
    record = chain[index].record
    changed = data.draw(
        st.sampled_from(
            [
                replace(record, uuid=record.uuid + "x"),
                replace(record, device=record.device + "x"),
                replace(record, time=record.time + timedelta(microseconds=1)),
                replace(record, host=record.host + "x"),
                replace(record, event=record.event + "x"),
                replace(record, details={**record.details, "more than drawn": 1}),
            ]
        )
    )
    chain[index] = SealedRecord(changed, chain[index].hash)
    fault = find_fault(chain, tip)
    assert fault is not None
    assert fault.sequence == index + 1


@given(chains, st.data())
def test_check_records_forged_hash_is_found_at_the_next_record_or_the_tip(
    chain: list[SealedRecord], data: st.DataObject
) -> None:
    tip, index = tip_of(chain), data.draw(st.integers(0, len(chain) - 1))
    previous = chain[index - 1].hash if index else START.hash
    forged = replace(chain[index].record, host="elsewhere")
    chain[index] = SealedRecord(forged, compute_hash(forged, previous))
    fault = find_fault(chain, tip)
    assert fault is not None
    assert fault.sequence == min(index + 2, tip.sequence)


@given(chains, st.data())
def test_check_records_removed_record_is_the_fault(
    chain: list[SealedRecord], data: st.DataObject
) -> None:
    tip, index = tip_of(chain), data.draw(st.integers(0, len(chain) - 1))
    del chain[index]
    fault = find_fault(chain, tip)
    assert fault is not None
    assert fault.sequence == index + 1


@given(chains, st.data())
def test_check_records_other_order_is_found(chain: list[SealedRecord], data: st.DataObject) -> None:
    tip, order = tip_of(chain), data.draw(st.permutations(range(len(chain))))
    moved = [chain[index] for index in order]
    assert (find_fault(moved, tip) is None) == (list(order) == sorted(order))


@given(chains, st.data())
def test_check_records_renumbered_after_removal_is_found(
    chain: list[SealedRecord], data: st.DataObject
) -> None:
    tip, index = tip_of(chain), data.draw(st.integers(0, len(chain) - 1))
    del chain[index]
    renumbered = [
        SealedRecord(replace(sealed.record, sequence=number), sealed.hash)
        for number, sealed in enumerate(chain, 1)
    ]
    assert find_fault(renumbered, tip) is not None


@given(chains)
def test_check_records_appended_record_is_found(chain: list[SealedRecord]) -> None:
    tip = tip_of(chain)
    record = replace(chain[-1].record, sequence=tip.sequence + 1)
    appended = SealedRecord(record, compute_hash(record, tip.hash))
    fault = find_fault([*chain, appended], tip)
    assert fault is not None
    assert fault.sequence == tip.sequence + 1


@given(chains, st.data())
def test_check_records_from_the_last_removed_record_has_no_fault(
    chain: list[SealedRecord], data: st.DataObject
) -> None:
    removed = data.draw(st.integers(0, len(chain)))
    base = tip_of(chain[:removed]) if removed else START
    result = check_records(base, chain[removed:])
    assert isinstance(result, Link)
    assert check_tip(result, tip_of(chain)) is None


def test_serialize_is_stable() -> None:
    # Written out: a change of the form would break every stored chain.
    record = Record("u", "d", 7, BEGIN, "höst", Event.CLAIMED, {"b": None, "a": {"k": "v"}})
    assert serialize(record, "00") == (
        b'{"details":{"a":{"k":"v"},"b":null},"device":"d","event":"claimed","host":"h\\u00f6st",'
        b'"previous":"00","sequence":7,"time":"2026-01-02T03:04:05.000000","uuid":"u"}'
    )


def test_check_tip_names_missing_records() -> None:
    fault = check_tip(Link(3, "a"), Link(5, "b"))
    assert fault == Fault(4, "records 4 to 5 at the end are missing")

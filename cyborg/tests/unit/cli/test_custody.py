# SPDX-License-Identifier: Apache-2.0
"""``device-custody --verify`` computes the hashes of a log again, whatever the service says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

import pytest

from cyborg.cli import custody
from cyborg.cli.common.rest import CommandError, RestClient
from cyborg.core.custody import START, Record, compute_hash

DEVICE = "6d3f3dd2-2d1f-4f2e-9c07-3b5b1f2c1a01"
PATH = f"/devices/{DEVICE}/custody"


@dataclass
class LogDouble:
    """Double of a REST client whose service has one custody log; ``chains`` are its answers."""

    rows: list[dict[str, Any]]
    chains: list[dict[str, Any] | None] = field(default_factory=list)

    def call(self, method: str, path: str, *, params: Mapping[str, Any]) -> dict[str, Any]:
        assert (method, path, params) == ("GET", PATH, {"limit": 1})
        return {"custody": self.rows[:1], "chain": self.chains.pop(0)}

    def list_all(self, path: str, key: str) -> list[dict[str, Any]]:
        assert (path, key) == (PATH, "custody")
        return self.rows


def make_rows(number: int) -> list[dict[str, Any]]:
    """Return the rows of a log as the service shows them; the last one is not sealed."""
    rows: list[dict[str, Any]] = []
    previous = START.hash
    for sequence in range(1, number + 1):
        microsecond = 120_000 if sequence % 2 else 0  # the service omits a fraction of 0
        time = datetime(2026, 1, 2, 3, 4, sequence, microsecond)
        event = "claimed" if sequence > 1 else "device_added"
        record = Record(str(sequence), DEVICE, sequence, time, "c1", event, {"ü": sequence})
        previous = compute_hash(record, previous)
        rows.append(
            {
                "uuid": record.uuid,
                "device_uuid": DEVICE,
                "hostname": "c1",
                "event": event,
                "recorded_at": f"{time.isoformat()}+00:00",
                "details": record.details,
                "sequence": sequence,
                "hash": previous,
            }
        )
    return [*rows, {**rows[-1], "uuid": "new", "sequence": None, "hash": None}]


def make_chain(rows: list[dict[str, Any]], last: int, base: int = 0) -> dict[str, Any]:
    """Return the ends of a chain after ``last`` records, of which ``base`` were deleted."""
    return {
        "sequence": last,
        "hash": rows[last - 1]["hash"],
        "base_sequence": base,
        "base_hash": rows[base - 1]["hash"] if base else START.hash,
    }


def verify(rows: list[dict[str, Any]], *chains: dict[str, Any] | None) -> str:
    return custody.verify_log(cast(RestClient, LogDouble(rows, list(chains))), DEVICE)[0]


def test_verify_unchanged_log_names_the_last_hash() -> None:
    rows = make_rows(4)
    chain = make_chain(rows, 4)
    assert verify(rows, chain, chain) == (
        f"records 1 to 4 are unchanged; the last hash is {rows[3]['hash']}\n"
        "not proved: that a conductor wrote them (the conductors have no key)\n"
    )


def test_verify_log_without_sealed_records_says_so() -> None:
    (_, new) = make_rows(1)
    assert verify([new], None, None) == "no record is in the chain yet\n"
    assert verify([new], None, make_chain(make_rows(1), 1)).startswith("records 1 to 0 are")


def test_verify_ignores_changes_at_the_ends_while_pages_are_read() -> None:
    rows = make_rows(5)
    message = verify(rows[1:], make_chain(rows, 4), make_chain(rows, 5, base=2))
    assert message.startswith("records 3 to 4 are unchanged")


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (1, {"details": {"ü": 9}}),
        (0, {"event": "released"}),
        (2, {"recorded_at": "2026-01-02T03:04:59+00:00"}),
        (3, {"hostname": "c2"}),
        (3, {"hash": "0" * 64}),
    ],
)
def test_verify_changed_record_is_named(index: int, change: dict[str, Any]) -> None:
    rows = make_rows(4)
    chain = make_chain(rows, 4)
    rows[index] = rows[index] | change
    with pytest.raises(CommandError, match=f"the chain is broken: .*record {index + 1} "):
        verify(rows, chain, chain)


@pytest.mark.parametrize("index", range(4))
def test_verify_removed_record_is_named(index: int) -> None:
    rows = make_rows(4)
    chain = make_chain(rows, 4)
    del rows[index]
    with pytest.raises(CommandError, match=f"records? {index + 1} .*missing"):
        verify(rows, chain, chain)


def test_details_begin_with_the_handle_and_omit_columns_and_empty_values() -> None:
    details: dict[str, Any] = {
        "handle": "uuid",
        "handle_address": "0000:01:00.0",
        "arq": "uuid",
        "instance": None,
        "accel": {},
        "reason": "deleted",
        "error": "it\x1b[31m broke",
    }
    cell = custody.show_details(details)
    assert cell.human_readable() == "0000:01:00.0, error=it [31m broke, reason=deleted"
    assert cell.machine_readable() == details

# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.drivers import registry
from cyborg.core.drivers.registry import DriverEntry, Option, Support
from cyborg.core.errors import Invalid
from cyborg.core.inventory import report

ENTRY = DriverEntry(
    "acme",
    "1.2",
    "GPU",
    Support.EXPERIMENTAL,
    ("measures",),
    (Option("cards", "list", ["a"], "Which."),),
)
ENTRIES = st.lists(
    st.builds(
        DriverEntry,
        name=st.text("abc", min_size=1, max_size=8),
        version=st.none() | st.text("0123.", min_size=1),
        support=st.sampled_from(Support),
        error=st.none() | st.text("abc ", min_size=1).map(str.strip),
    ),
    unique_by=lambda entry: entry.name,
)


@given(ENTRIES, st.randoms())
def test_dump_load_round_trip_ignores_order(entries: list[DriverEntry], order: Any) -> None:
    mixed = list(entries)
    order.shuffle(mixed)
    assert registry.load(registry.dump(mixed)) == tuple(sorted(entries, key=lambda e: e.name))
    assert registry.fingerprint(mixed) == registry.fingerprint(entries)


def test_fingerprint_covers_each_field() -> None:
    others = [
        DriverEntry("acme"),
        DriverEntry("acme", "1.2"),
        DriverEntry("acme", error="ImportError: x"),
        ENTRY,
    ]
    assert len({registry.fingerprint([entry]) for entry in others}) == len(others)
    assert registry.load(registry.dump([ENTRY])) == (ENTRY,)


@pytest.mark.parametrize(
    "body",
    [
        {},
        ["acme"],
        [{}],
        [{"name": ""}],
        [{"name": "a\nb"}],
        [{"name": "a"}, {"name": "a"}],
        [{"name": "a", "options": {}}],
        [{"name": "a", "options": [{"name": "x", "kind": "odd", "help": ""}]}],
        [{"name": f"d{n}"} for n in range(257)],
    ],
)
def test_load_malformed_drivers_is_rejected(body: Any) -> None:
    with pytest.raises((Invalid, KeyError, TypeError, ValueError, AttributeError)):
        registry.load(body)


def test_load_unknown_values_of_newer_agent_are_accepted() -> None:
    (entry,) = registry.load([{"name": "a", "support": "certified", "colour": "red"}])
    assert entry == DriverEntry("a")


def test_drivers_are_part_of_host_digest() -> None:
    none = report.digest([], [])
    assert report.digest([], [], drivers=None) == none
    assert (
        len({none, report.digest([], [], drivers=[]), report.digest([], [], drivers=[ENTRY])}) == 3
    )

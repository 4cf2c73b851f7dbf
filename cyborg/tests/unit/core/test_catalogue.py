# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core import catalogue, wire
from cyborg.core.catalogue import Entry, Support
from cyborg.core.errors import Invalid
from cyborg.core.option import Option

ENTRY = Entry(
    "acme",
    "1.2",
    "GPU",
    Support.EXPERIMENTAL,
    ("measures",),
    (Option("cards", "list", ["a"], "Which."),),
)
ENTRIES = st.lists(
    st.builds(
        Entry,
        name=st.text("abc", min_size=1, max_size=8),
        version=st.none() | st.text("0123.", min_size=1),
        support=st.sampled_from(Support),
        error=st.none() | st.text("abc ", min_size=1).map(str.strip),
    ),
    unique_by=lambda entry: entry.name,
)


@given(ENTRIES, st.randoms())
def test_there_and_back_in_any_order(entries: list[Entry], order: Any) -> None:
    mixed = list(entries)
    order.shuffle(mixed)
    assert catalogue.load(catalogue.dump(mixed)) == tuple(sorted(entries, key=lambda e: e.name))
    assert catalogue.fingerprint(mixed) == catalogue.fingerprint(entries)


def test_each_fact_shows_in_the_fingerprint() -> None:
    others = [Entry("acme"), Entry("acme", "1.2"), Entry("acme", error="ImportError: x"), ENTRY]
    assert len({catalogue.fingerprint([one]) for one in others}) == len(others)
    assert catalogue.load(catalogue.dump([ENTRY])) == (ENTRY,)


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
def test_wrong_catalogues(body: Any) -> None:
    with pytest.raises((Invalid, KeyError, TypeError, ValueError, AttributeError)):
        catalogue.load(body)


def test_a_newer_agents_words() -> None:
    (entry,) = catalogue.load([{"name": "a", "support": "certified", "colour": "red"}])
    assert entry == Entry("a")


def test_it_is_part_of_a_hosts_digest() -> None:
    none = wire.digest([], [])
    assert wire.digest([], [], drivers=None) == none
    assert len({none, wire.digest([], [], drivers=[]), wire.digest([], [], drivers=[ENTRY])}) == 3

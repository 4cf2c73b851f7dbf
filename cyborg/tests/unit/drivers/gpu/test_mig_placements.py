# SPDX-License-Identifier: Apache-2.0
"""Placements of GPU instances on a card with 80 GB."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.drivers.kernel.mig_placements import Placement, place

POSSIBLE = {
    profile: [Placement(start, size) for start in starts]
    for profile, size, starts in (
        ("1g.10gb", 1, range(7)),
        ("1g.20gb", 2, (0, 2, 4, 6)),
        ("2g.20gb", 2, (0, 2, 4)),
        ("3g.40gb", 4, (0, 4)),
        ("4g.40gb", 4, (0,)),
        ("7g.80gb", 8, (0,)),
    )
}


@pytest.mark.parametrize(
    ("instances", "fits"),
    [
        ({}, True),
        ({"1g.10gb": 7}, True),
        ({"1g.10gb": 8}, False),
        ({"3g.40gb": 1, "1g.10gb": 4}, True),
        ({"3g.40gb": 1, "1g.10gb": 5}, False),
        ({"3g.40gb": 2, "1g.10gb": 1}, False),
        ({"4g.40gb": 1, "3g.40gb": 1}, True),
        ({"4g.40gb": 1, "2g.20gb": 1, "1g.20gb": 1}, True),
        ({"2g.20gb": 3, "1g.20gb": 1}, True),
        ({"7g.80gb": 1, "1g.10gb": 1}, False),
    ],
)
def test_place_finds_placements_if_the_instances_fit(
    instances: Mapping[str, int], fits: bool
) -> None:
    assert (place(instances, POSSIBLE) is not None) is fits


@given(
    st.lists(
        st.sampled_from([(name, spot) for name, spots in POSSIBLE.items() for spot in spots]),
        max_size=20,
    )
)
def test_place_finds_what_was_placed_before(wanted: list[tuple[str, Placement]]) -> None:
    """Instances that were put where there is room fit, in each order."""
    used, instances = set[int](), dict[str, int]()
    for name, (start, size) in wanted:
        slices = set(range(start, start + size))
        if not slices & used:
            used |= slices
            instances[name] = instances.get(name, 0) + 1
    placed = place(instances, POSSIBLE)
    assert placed is not None
    taken = [n for _, (start, size) in placed for n in range(start, start + size)]
    assert len(set(taken)) == len(taken)
    assert sorted(name for name, _ in placed) == sorted(
        n for n, k in instances.items() for _ in range(k)
    )
    assert all(spot in POSSIBLE[name] for name, spot in placed)

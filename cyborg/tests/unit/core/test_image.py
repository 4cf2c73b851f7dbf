# SPDX-License-Identifier: Apache-2.0
"""Decisions about images: what is parsed, and which files a full cache loses."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.errors import Invalid
from cyborg.core.image import CachedFile, parse_metadata, plan_evictions

UUID = "4d5b0d6a-8f8c-4f67-9f4e-3f2d1c0b9a87"

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=5,
)
files = st.lists(
    st.builds(CachedFile, st.uuids().map(str), st.integers(0, 100), st.integers(), st.booleans()),
    unique_by=lambda file: file.uuid,
)


@given(
    st.dictionaries(
        st.sampled_from(["id", "size", "status", "owner", "os_hash_value", "custom"]), json_values
    )
    | json_values
)
def test_parse_metadata_accepts_or_raises_invalid(body: Any) -> None:
    try:
        image = parse_metadata(body)
    except Invalid:
        return
    assert all(isinstance(value, str) for value in image.properties.values())
    assert image.size is None or image.size >= 0


def test_parse_metadata_separates_properties_from_attributes() -> None:
    body = {"id": UUID, "name": "n", "tags": ["t"], "stores": "a,b", "os_distro": "x", "odd": 5}
    image = parse_metadata(body)
    assert image.properties == {"os_distro": "x"}
    assert (image.size, image.digest, image.status) == (None, None, "unknown")


@given(files, st.integers(-10, 500))
def test_plan_evictions_frees_enough_of_the_oldest_unused(
    cached: list[CachedFile], to_free: int
) -> None:
    plan = plan_evictions(cached, to_free)
    unused = [file for file in cached if not file.in_use]
    if plan is None:
        assert sum(file.size for file in unused) < to_free
        return
    removed = [file for file in cached if file.uuid in plan]
    assert not any(file.in_use for file in removed)
    assert sum(file.size for file in removed) >= to_free
    kept = [file for file in unused if file not in removed]
    assert all(old.used_at <= new.used_at for old in removed for new in kept)
    # Without the last one there is not enough room.
    assert not removed or sum(file.size for file in removed if file.uuid != plan[-1]) < to_free


@pytest.mark.parametrize("to_free", [0, -5])
def test_plan_evictions_with_enough_room_removes_nothing(to_free: int) -> None:
    assert plan_evictions([CachedFile(UUID, 5, 0, False)], to_free) == []

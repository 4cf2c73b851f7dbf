# SPDX-License-Identifier: Apache-2.0
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.driver import common, driver_uuid, near, newest, version_of


@given(st.text(), st.text())
def test_a_name_has_one_uuid(one: str, other: str) -> None:
    assert UUID(driver_uuid(one)).version == 5
    assert (driver_uuid(one) == driver_uuid(other)) == (one == other)


def test_the_uuid_is_the_same_in_every_release() -> None:
    assert driver_uuid("generic") == "237256f6-ccb8-5134-9832-841a098557d7"


@pytest.mark.parametrize(
    "versions", [None, "1", [], {}, {"drivers": None}, {"drivers": ["fake"]}, {"drivers": {}}]
)
def test_an_agent_that_tells_no_version(versions: Any) -> None:
    assert version_of("fake", versions) is None


def test_the_version_that_an_agent_tells() -> None:
    assert version_of("fake", {"drivers": {"fake": "7", "other": "8"}}) == "7"
    assert version_of("fake", {"drivers": {"fake": 7}}) is None


def test_a_version_is_common_or_none() -> None:
    assert common(["1", "1"]) == "1"
    assert common(["1", "2"]) is None
    assert common(["1", None]) is None
    assert common([]) is None


def test_near_names() -> None:
    assert near("genric", ["fake", "generic"]) == ["generic"]
    assert near("x" * 5000, ["fake"]) == []


@pytest.mark.parametrize(
    ("versions", "first"),
    [
        (["1.9", "1.10", "1.8"], "1.10"),
        ([None, "0.1"], "0.1"),
        (["dev", None], "dev"),
        (["2", "2.0", "1." + "9" * 5000], "2.0"),
        ([], None),
    ],
)
def test_the_newest_version(versions: list[str | None], first: str | None) -> None:
    found = newest([{"version": version} for version in versions])
    assert (None if found is None else found["version"]) == first

# SPDX-License-Identifier: Apache-2.0
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.drivers.registry import (
    closest_names,
    common_version,
    describe_unknown,
    driver_uuid,
    newest_row,
    version_of,
)


@given(st.text(), st.text())
def test_driver_uuid_is_unique_by_name(left: str, right: str) -> None:
    assert UUID(driver_uuid(left)).version == 5
    assert (driver_uuid(left) == driver_uuid(right)) == (left == right)


def test_driver_uuid_is_stable() -> None:
    assert driver_uuid("generic") == "237256f6-ccb8-5134-9832-841a098557d7"


@pytest.mark.parametrize(
    "versions", [None, "1", [], {}, {"drivers": None}, {"drivers": ["fake"]}, {"drivers": {}}]
)
def test_version_of_without_version_is_none(versions: Any) -> None:
    assert version_of("fake", versions) is None


def test_version_of_heartbeat() -> None:
    assert version_of("fake", {"drivers": {"fake": "7", "other": "8"}}) == "7"
    assert version_of("fake", {"drivers": {"fake": 7}}) is None


def test_common_version() -> None:
    assert common_version(["1", "1"]) == "1"
    assert common_version(["1", "2"]) is None
    assert common_version(["1", None]) is None
    assert common_version([]) is None


def test_closest_names_and_format_hint() -> None:
    assert closest_names("genric", ["fake", "generic"]) == ["generic"]
    assert closest_names("x" * 5000, ["fake"]) == []


def test_describe_unknown_names_counterpart_of_reference_driver() -> None:
    assert describe_unknown("genric", ["generic"]).endswith("; did you mean generic?")
    assert describe_unknown("intel_qat_driver", ["crypto"]) == (
        "no agent has a driver 'intel_qat_driver', which is a driver of OpenStack Cyborg and is "
        "the driver 'crypto' here; convert the configuration file with cyborg-status convert-config"
    )


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
def test_newest_row(versions: list[str | None], first: str | None) -> None:
    row = newest_row([{"version": version} for version in versions])
    assert (None if row is None else row["version"]) == first

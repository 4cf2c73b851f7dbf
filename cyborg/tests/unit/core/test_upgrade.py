# SPDX-License-Identifier: Apache-2.0
"""Decisions of a rolling upgrade."""

import pytest

from cyborg.core.upgrade import (
    Daemon,
    Migration,
    check_pin,
    find_blockers,
    find_lowest,
    split_contracts,
)

E1, E2 = Migration("e1"), Migration("e2")
C1, C2 = Migration("c1", contracts=True), Migration("c2", contracts=True)


@pytest.mark.parametrize(
    ("missing", "count"),
    [
        ([], 0),
        ([E1], 1),
        ([E1, C1], 1),
        ([C1, C2], 0),
        # An expand migration builds on the contract migration before it.
        ([E1, C1, E2, C2], 3),
        ([C1, E2], 2),
    ],
)
def test_split_contracts_leaves_the_last_ones(missing: list[Migration], count: int) -> None:
    assert split_contracts(missing) == (missing[:count], missing[count:])


def test_find_blockers_names_users_of_the_database_without_the_schema() -> None:
    old = Daemon("cyborg-conductor", "a", schema="e1")
    silent = Daemon("cyborg-api", "b")
    daemons = [old, silent, Daemon("cyborg-api", "a", schema="c1"), Daemon("cyborg-agent", "h")]
    assert find_blockers(daemons, {"c1", "e2"}) == [old, silent]
    assert str(old) == "cyborg-conductor of host a"


def test_find_lowest_compares_numbers() -> None:
    assert find_lowest(["1.10", "1.9", None, "odd"]) == "1.9"
    assert find_lowest([None, "odd"]) is None


@pytest.mark.parametrize(
    ("pin", "lowest"), [(None, None), (None, "1.2"), ("1.1", "1.1"), ("1.1", None), ("1.2", "1.2")]
)
def test_check_pin_accepts_the_lowest_version(pin: str | None, lowest: str | None) -> None:
    assert check_pin("conductor", "1.2", pin, lowest) is None


@pytest.mark.parametrize(
    ("pin", "lowest", "text", "is_failure"),
    [
        (None, "1.1", "set [upgrade_levels] conductor = 1.1", False),
        ("1.2", "1.1", "set it to 1.1", True),
        ("1.1", "1.2", "remove it", False),
        ("1.1", "1.3", "remove it", False),
        ("2.0", "1.2", "no daemon starts", True),
    ],
)
def test_check_pin_names_the_remedy(
    pin: str | None, lowest: str, text: str, is_failure: bool
) -> None:
    found = check_pin("conductor", "1.2", pin, lowest)
    assert found is not None
    assert text in found.text
    assert found.is_failure is is_failure


def test_check_pin_leaves_another_major_version_to_the_check_of_daemons() -> None:
    assert check_pin("agent", "2.0", None, "1.3") is None

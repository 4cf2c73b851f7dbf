# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from cyborg.core.errors import Invalid
from cyborg.core.validation import MAX_GENERATION, check_integer, check_optional_text, check_text

HUGE = pytest.param(10**5000, id="huge")  # Python refuses to convert it to text


@pytest.mark.parametrize("value", ["a", "é b", "x" * 8])
def test_check_text_returns_the_value(value: str) -> None:
    assert check_text("name", value, 8) == value
    assert check_optional_text("name", value) == value


@pytest.mark.parametrize(
    "value", ["", "x" * 9, "a\nb", "a\0", "\ud800", None, 1, b"a", ["a"], HUGE]
)
def test_check_text_names_the_field(value: Any) -> None:
    with pytest.raises(Invalid, match=r"^name: invalid value .* 1 to 8 printable") as raised:
        check_text("name", value, 8)
    assert raised.value.details["field"] == "name"


def test_check_text_with_line_ends_needs_another_character() -> None:
    assert check_text("text", "a\nb", allowed="\n") == "a\nb"
    for value in ("\n", "a\tb"):
        with pytest.raises(Invalid):
            check_text("text", value, allowed="\n")


def test_check_text_names_the_subject() -> None:
    with pytest.raises(Invalid, match=r"^host name: invalid value") as raised:
        check_text("identity", "", subject="host name")
    assert raised.value.details["field"] == "identity"


def test_check_optional_text_accepts_none() -> None:
    assert check_optional_text("name", None) is None


@pytest.mark.parametrize("value", [0, 5])
def test_check_integer_returns_the_value(value: int) -> None:
    assert check_integer("count", value, 5) == value


@pytest.mark.parametrize("value", [-1, 6, 1.0, True, "1", None, HUGE])
def test_check_integer_names_the_field_and_range(value: Any) -> None:
    with pytest.raises(Invalid, match=r"^count: invalid value .* from 0 to 5$") as raised:
        check_integer("count", value, 5)
    assert raised.value.details["field"] == "count"


def test_check_integer_is_exact_in_any_json_parser() -> None:
    assert check_integer("generation", MAX_GENERATION) == MAX_GENERATION
    with pytest.raises(Invalid):
        check_integer("generation", MAX_GENERATION + 1)

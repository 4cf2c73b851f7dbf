# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core import option
from cyborg.core.errors import Invalid
from cyborg.core.option import Kind, Option


def made(kind: Kind) -> Option:
    return Option("thing", kind, None, "A thing.")


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        ("str", "x", "x"),
        ("int", "7", 7),
        ("int", 7, 7),
        ("float", "0.5", 0.5),
        ("float", 1, 1.0),
        ("bool", "Yes", True),
        ("bool", False, False),
        ("bool", "off", False),
        ("list", "a, b,,c", ["a", "b", "c"]),
        ("list", ["a"], ["a"]),
        ("multi", "a,b", ["a,b"]),
        ("multi", ["a", "b"], ["a", "b"]),
    ],
)
def test_values(kind: Kind, value: Any, read: Any) -> None:
    assert option.parse(made(kind), value) == read


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("str", 7),
        ("str", "a\nb"),
        ("str", "x" * 5000),
        ("int", "x"),
        ("int", True),
        ("int", 1.5),
        ("float", "nan"),
        ("float", [1]),
        ("bool", "perhaps"),
        ("bool", 1),
        ("list", {"a": 1}),
        ("list", [1]),
        ("multi", ["x"] * 300),
    ],
)
def test_wrong_values(kind: Kind, value: Any) -> None:
    with pytest.raises(Invalid, match=f"thing: found .* expected a value of type {kind}"):
        option.parse(made(kind), value)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.sampled_from(["str", "int", "float", "bool", "list", "multi"]), ANYTHING)
def test_whatever_comes_is_read_or_refused(kind: Kind, value: Any) -> None:
    try:
        read = option.parse(made(kind), value)
    except Invalid:
        return
    assert option.parse(made(kind), read) == read, "what was read is read the same again"


def test_an_unknown_name() -> None:
    with pytest.raises(Invalid, match="no option 'tihng'; did you mean thing"):
        option.parse_all([made("int")], {"tihng": 1})
    with pytest.raises(Invalid, match="must be an object"):
        option.parse_all([made("int")], [1])
    assert option.parse_all([made("int")], {"thing": "1"}) == {"thing": 1}


@given(st.sampled_from(["str", "int", "float", "bool", "list", "multi"]))
def test_there_and_back(kind: Kind) -> None:
    default = ["a"] if kind in option.LISTS else "a"
    one = Option("thing", kind, default, "A thing.")
    assert option.load(one.to_dict()) == one
    with pytest.raises(ValueError, match="unknown kind"):
        option.load({**one.to_dict(), "kind": "dict"})

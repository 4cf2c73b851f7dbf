# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.drivers import registry
from cyborg.core.drivers.registry import Kind, Option
from cyborg.core.errors import Invalid


def make_option(kind: Kind) -> Option:
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
def test_parse_value_valid(kind: Kind, value: Any, read: Any) -> None:
    assert registry.parse_value(make_option(kind), value) == read


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
def test_parse_value_wrong_type_is_rejected(kind: Kind, value: Any) -> None:
    with pytest.raises(Invalid, match=f"thing: found .* expected a value of type {kind}"):
        registry.parse_value(make_option(kind), value)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.sampled_from(["str", "int", "float", "bool", "list", "multi"]), ANYTHING)
def test_parse_value_any_json_gives_value_or_invalid(kind: Kind, value: Any) -> None:
    try:
        read = registry.parse_value(make_option(kind), value)
    except Invalid:
        return
    assert registry.parse_value(make_option(kind), read) == read, (
        "what was read is read the same again"
    )


def test_parse_values_unknown_option_suggests_names() -> None:
    with pytest.raises(Invalid, match="no option 'tihng'; did you mean thing"):
        registry.parse_values([make_option("int")], {"tihng": 1})
    with pytest.raises(Invalid, match="must be an object"):
        registry.parse_values([make_option("int")], [1])
    assert registry.parse_values([make_option("int")], {"thing": "1"}) == {"thing": 1}


@given(st.sampled_from(["str", "int", "float", "bool", "list", "multi"]))
def test_round_trip(kind: Kind) -> None:
    default = ["a"] if kind in registry.LISTS else "a"
    option = Option("thing", kind, default, "A thing.")
    assert Option.from_dict(option.to_dict()) == option
    with pytest.raises(ValueError, match="unknown kind"):
        Option.from_dict({**option.to_dict(), "kind": "dict"})


def test_host_only_option_is_refused_from_the_api() -> None:
    path = Option("path", "str", "", "Where.", host_only=True)
    for value in ("/etc/shadow", "", None):
        with pytest.raises(Invalid, match="path: can only be set in the configuration file") as exc:
            registry.parse_values([path], {"path": value})
        assert exc.value.details["option"] == "path"
    with pytest.raises(Invalid, match="path: can only be set"):
        registry.parse_values([path], {"path": "/etc/shadow"}, unset=True)
    assert registry.parse_values([path], {"path": None}, unset=True) == {"path": None}


def test_secret_option_must_be_host_only() -> None:
    with pytest.raises(ValueError, match="'token' is secret, and must be host_only"):
        Option("token", "str", "", "A token.", secret=True)
    token = Option("token", "str", "", "A token.", host_only=True, secret=True)
    assert Option.from_dict(token.to_dict()) == token

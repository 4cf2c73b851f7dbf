# SPDX-License-Identifier: Apache-2.0
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import not_
from typing import Any, Literal

import pytest

from cyborg.core.codec import Serializable, wire


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Part(Serializable):
    name: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Thing(Serializable):
    title: str
    count: int
    colour: Colour | None = None
    parts: tuple[Part, ...] = ()
    colours: frozenset[Colour] = field(default=frozenset(), metadata=wire(required=True))
    names: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    by_name: Mapping[str, Part] = field(default_factory=dict)
    kind: Literal["a", "b"] = "a"
    data: Any = None
    hidden: bool = field(default=False, metadata=wire(omit=not_))
    text: str = field(default="", metadata=wire(dump=str.upper, load=lambda value: value.lower()))


THING = Thing(
    "t",
    2,
    Colour.RED,
    (Part("p", 2.5),),
    frozenset({Colour.RED, Colour.BLUE}),
    ("x",),
    {"k": "v"},
    {"q": Part("q")},
    "b",
    {"list": [1, None]},
    True,
    "low",
)
BODY = {
    "title": "t",
    "count": 2,
    "colour": "red",
    "parts": [{"name": "p", "weight": 2.5}],
    "colours": ["blue", "red"],
    "names": ["x"],
    "labels": {"k": "v"},
    "by_name": {"q": {"name": "q", "weight": 1.0}},
    "kind": "b",
    "data": {"list": [1, None]},
    "hidden": True,
    "text": "LOW",
}


def test_dump_and_load_follow_annotations_and_exceptions() -> None:
    assert THING.to_dict() == BODY
    assert Thing.from_dict({**BODY, "unknown": 1}) == THING


def test_missing_keys_get_defaults_unless_required() -> None:
    minimal = {"title": "t", "count": 0, "colours": []}
    assert Thing.from_dict(minimal) == Thing("t", 0)
    assert "hidden" not in Thing("t", 0).to_dict()
    for key in minimal:
        with pytest.raises(KeyError):
            Thing.from_dict({k: v for k, v in minimal.items() if k != key})


@pytest.mark.parametrize(
    "change",
    [
        {"title": 1},
        {"count": "1"},
        {"count": True},
        {"colour": "green"},
        {"parts": {"name": "p"}},
        {"parts": ["p"]},
        {"parts": [{"name": "p", "weight": "heavy"}]},
        {"colours": "red"},
        {"names": "x"},
        {"names": [None]},
        {"labels": [["k", "v"]]},
        {"labels": {"k": 1}},
        {"kind": 1},
        {"hidden": "true"},
    ],
    ids=str,
)
def test_wrong_types_are_rejected(change: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Thing.from_dict({**BODY, **change})


@pytest.mark.parametrize("body", [None, [], "text", 1], ids=str)
def test_anything_but_an_object_is_rejected(body: Any) -> None:
    with pytest.raises(TypeError, match="expected an object"):
        Thing.from_dict(body)

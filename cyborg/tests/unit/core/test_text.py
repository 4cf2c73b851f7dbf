# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from cyborg.core.text import abbreviate, join_limited


@pytest.mark.parametrize(
    ("texts", "total", "expected"),
    [
        ([], None, ""),
        (["a"], None, "a"),
        (["a", "b"], None, "a, b"),
        (["a", "b", "c"], None, "a, b, 1 more"),
        (["a", "b", "c", "d"], None, "a, b, 2 more"),
        (["a", "b"], 12, "a, b, 10 more"),
        # A total that was counted before the texts were read can be too small.
        (["a", "b", "c"], 1, "a, b, 1 more"),
    ],
)
def test_join_limited_counts_omitted(texts: list[str], total: int | None, expected: str) -> None:
    assert join_limited(texts, 2, total) == expected


def test_join_limited_separates_count_like_texts() -> None:
    assert join_limited(["h1: no", "h2: no"], 1, separator="; ") == "h1: no; 1 more"


def test_join_limited_names_what_it_omits() -> None:
    assert join_limited(["a", "b", "c"], 1, nouns="hosts") == "a, 2 more hosts"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("x" * 61, "x" * 60),
        (None, "None"),
        (-(2**256) + 1, str(-(2**256) + 1)[:60]),
        (2**256, "int"),
        pytest.param(10**5000, "int", id="huge"),
        pytest.param(-(10**5000), "int", id="huge negative"),
        pytest.param([10**5000], "list", id="list"),
        ({}, "dict"),
    ],
)
def test_abbreviate_shows_the_type_of_what_may_be_large(value: Any, expected: str) -> None:
    assert abbreviate(value) == expected

# SPDX-License-Identifier: Apache-2.0
"""The examples of the API reference are what the service answers, and its document can be used."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import schemathesis

from cyborg.tests.fixtures.reference.generator import load_generator
from cyborg.tests.fixtures.reference.scenario import record_examples


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_generator()


def find_differences(expected: Any, actual: Any, place: str = "") -> list[str]:
    """Return the places where two examples have another shape; null has any shape."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        names = {*expected, *actual}
        found = [f"{place}: {sorted(names)}"] if expected.keys() != actual.keys() else []
        return found + [
            difference
            for name in expected.keys() & actual.keys()
            for difference in find_differences(expected[name], actual[name], f"{place}.{name}")
        ]
    if isinstance(expected, list) and isinstance(actual, list):
        found = [] if len(expected) == len(actual) else [f"{place}: {len(actual)} items"]
        pairs = zip(expected, actual, strict=False)
        return found + [
            difference
            for number, pair in enumerate(pairs)
            for difference in find_differences(*pair, f"{place}[{number}]")
        ]
    if expected is None or actual is None or type(expected) is type(actual):
        return []
    return [f"{place}: {type(actual).__name__} instead of {type(expected).__name__}"]


@pytest.mark.matrix
def test_examples_are_those_of_the_service(tool: ModuleType, tmp_path: Path) -> None:
    committed = json.loads(tool.EXAMPLES.read_text(encoding="utf-8"))
    recorded = record_examples(tmp_path, tool.make_document())
    differences = find_differences(committed, recorded)
    assert differences == [], "run tools/dev reference"
    for operation, example in committed["operations"].items():
        actual = recorded["operations"][operation]["response"]["status"]
        assert actual == example["response"]["status"], operation


def test_another_shape_is_a_difference() -> None:
    example = {"a": [{"b": 1, "c": None}], "d": "x"}
    assert find_differences(example, {"a": [{"b": 2, "c": "y"}], "d": "z"}) == []
    for other in (
        {"a": [{"b": "1", "c": None}], "d": "x"},
        {"a": [{"b": 1}], "d": "x"},
        {"a": [], "d": "x"},
        {"a": [{"b": 1, "c": None}]},
    ):
        assert len(find_differences(example, other)) == 1


def test_schemathesis_accepts_the_committed_document(tool: ModuleType) -> None:
    document = json.loads(tool.DOCUMENT.read_text(encoding="utf-8"))
    schema = schemathesis.openapi.from_dict(document)
    results: Iterator[Any] = schema.get_all_operations()
    operations = [result.ok() for result in results]
    assert len(operations) == sum(map(len, document["paths"].values()))

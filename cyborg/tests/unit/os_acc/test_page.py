# SPDX-License-Identifier: Apache-2.0
"""The page on this library: its example works, and its tables are complete."""

import doctest
import re
from importlib import metadata
from pathlib import Path

import pytest

import cyborg
from cyborg import os_acc
from cyborg.os_acc.plugin import NAMESPACE

PAGE = Path(cyborg.__file__).parents[1] / "doc" / "source" / "contributor" / "os_acc.rst"


def test_example_of_the_page_works() -> None:
    results = doctest.testfile(
        str(PAGE), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE, encoding="utf-8"
    )
    assert (results.failed, results.attempted > 15) == (0, True)


@pytest.mark.static
def test_page_has_each_public_name() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in os_acc.__all__ if f"``{name}``" not in text] == []


@pytest.mark.static
def test_page_has_each_plugin() -> None:
    text = PAGE.read_text(encoding="utf-8")
    entries = metadata.distribution("cyborg").entry_points.select(group=NAMESPACE)
    documented = set(re.findall(r"^``([A-Z_]+)`` +``(\w+)`` ", text, re.MULTILINE))
    assert documented == {(entry.name.upper(), entry.name) for entry in entries}

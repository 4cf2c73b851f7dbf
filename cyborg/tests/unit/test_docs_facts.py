# SPDX-License-Identifier: Apache-2.0
"""The page of facts names each driver module that relies on one, and the source that it names."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import cyborg

pytestmark = pytest.mark.static

DRIVERS = Path(cyborg.__file__).parent / "drivers"
PAGE = DRIVERS.parents[1] / "doc" / "source" / "contributor" / "facts.rst"
MAX_ROWS = 120
HEADER = ["Fact", "Module", "Source"]
# Paths below these folders, or relative to the root of sysfs.
FOREIGN = re.compile(r"/(?:sys|proc|dev)/|(?:bus|class|dev|fs|kernel|module)/\w")
# Modules of Python for what a kernel, a library or a file format lays out.
BINARY = {"ctypes", "fcntl", "struct"}
LITERAL = re.compile(r"``([^`]+)``")


@dataclass(frozen=True)
class Row:
    """A fact with the modules that rely on it and its sources, as the page writes them."""

    fact: str
    modules: tuple[str, ...]
    sources: tuple[str, ...]


def parse_rows(text: str) -> list[Row]:
    """Return the rows of the tables of a page."""
    rows: list[Row] = []
    for body in re.findall(r"\.\. list-table::\n((?:   .*\n|\n)+)", text + "\n"):
        _, *table = re.split(r"^   \* - ", body, flags=re.MULTILINE)
        cells = [
            [" ".join(cell.split()) for cell in re.split(r"^     - ", row, flags=re.MULTILINE)]
            for row in table
        ]
        assert cells[0] == HEADER
        for fact, modules, sources in cells[1:]:
            rows.append(Row(fact, *(tuple(LITERAL.findall(cell)) for cell in (modules, sources))))
    return rows


def relies_on_facts(text: str) -> bool:
    """Return whether a module has a path of the kernel, or lays out binary data."""
    tree = ast.parse(text)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and BINARY & {alias.name for alias in node.names}:
            return True
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and id(node) not in docs and FOREIGN.match(value):
            return True
    return False


def read_modules() -> Mapping[str, str]:
    """Return the texts of the modules of the drivers by name, such as ``host_use.disks``."""
    found = {
        ".".join(path.relative_to(DRIVERS).with_suffix("").parts).removesuffix(".__init__"): path
        for path in DRIVERS.rglob("*.py")
        if "replay" not in path.relative_to(DRIVERS).parts
    }
    return {name: path.read_text(encoding="utf-8") for name, path in found.items()}


MODULES = read_modules()
ROWS = parse_rows(PAGE.read_text(encoding="utf-8"))
NAMED = {module for row in ROWS for module in row.modules}


def test_facts_are_short_enough_to_be_reviewed() -> None:
    assert 80 < len(ROWS) <= MAX_ROWS
    assert len({row.fact for row in ROWS}) == len(ROWS)


@pytest.mark.slow
def test_facts_name_each_module_that_relies_on_one() -> None:
    needed = {name for name, text in MODULES.items() if relies_on_facts(text)}
    assert len(needed) > 20
    assert sorted(needed - NAMED) == []


def test_facts_name_modules_that_exist() -> None:
    assert sorted(NAMED - set(MODULES)) == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.fact[:40])
def test_module_names_the_source_of_its_fact(row: Row) -> None:
    """The last part of a path is enough: a docstring may name the folder once for several files."""
    names = {source.rpartition("/")[2] for source in row.sources}
    assert names
    assert row.modules
    assert [m for m in row.modules if not any(name in MODULES[m] for name in names)] == []
    assert [name for name in names if not any(name in MODULES[m] for m in row.modules)] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('X = Path("/sys/class/net")', True),
        ('X = f"class/net/{name}"', True),
        ("import struct", True),
        ('"""Reads /sys/class/net."""', False),
        ('X = Path("/sys")', False),
        ('X = "class"', False),
    ],
)
def test_relies_on_facts(text: str, expected: bool) -> None:
    assert relies_on_facts(text) is expected

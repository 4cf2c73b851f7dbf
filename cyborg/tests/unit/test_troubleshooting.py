# SPDX-License-Identifier: Apache-2.0
"""The page about symptoms quotes messages of the code, and commands that exist."""

import ast
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import cyborg
from cyborg.cli import app

pytestmark = pytest.mark.static

PACKAGE = Path(cyborg.__file__).parent
PAGE = PACKAGE.parent / "doc/source/admin/troubleshooting.rst"
ENTRY = re.compile(r"^``(?P<symptom>.+)``\n(?P<body>(?:    .*\n)+)", re.MULTILINE)
COMMAND = re.compile(r"``cyborg ([a-z-]+)([^`]*)``")
ELLIPSIS = "..."


def entries() -> dict[str, str]:
    """Return the text of each entry by its symptom."""
    return {match["symptom"]: match["body"] for match in ENTRY.finditer(PAGE.read_text())}


def read_messages(path: Path) -> Iterator[str]:
    """Yield the strings of a module; a value that is inserted into one is ``...``."""
    others: set[int] = set()  # parts of f-strings, and docstrings
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr):
            others.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            others.update(id(value) for value in node.values)
            yield "".join(
                str(value.value) if isinstance(value, ast.Constant) else ELLIPSIS
                for value in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in others
        ):
            yield re.sub(r"%[-+0-9.]*[sdgfr]", ELLIPSIS, node.value)


@pytest.mark.slow
def test_symptoms_are_messages_of_the_code() -> None:
    sources = [path for path in PACKAGE.rglob("*.py") if "tests" not in path.parts]
    text = "\n".join(" ".join(m.split()) for path in sources for m in read_messages(path))
    assert [symptom for symptom in entries() if symptom not in text] == []


def test_read_messages_marks_values_and_omits_docstrings(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '''"""A docstring."""\nlog("%s took %.1f s " "in all", f"host {name} is up")\n'''
    )
    assert set(read_messages(module)) == {"... took ... s in all", "host ... is up"}


def test_each_entry_says_what_to_look_at_the_cause_and_the_remedy() -> None:
    found = entries()
    assert 25 <= len(found) <= 45
    for symptom, body in found.items():
        fields = re.findall(r"^    :(\w+): \S", body, re.MULTILINE)
        assert fields == ["Look", "Cause", "Remedy"], symptom


def test_commands_exist_with_their_options() -> None:
    commands = {entry.name: entry for entry in metadata.entry_points(group="cyborg.cli")}
    calls = COMMAND.findall(" ".join(PAGE.read_text().split()))
    assert len(calls) > 40
    client = app.CyborgApp([])
    for name, arguments in calls:
        parser = commands[name].load()(client, None).get_parser(name)
        options = {option for action in parser._actions for option in action.option_strings}
        assert set(re.findall(r"--[a-z-]+", arguments)) <= options, (name, arguments)

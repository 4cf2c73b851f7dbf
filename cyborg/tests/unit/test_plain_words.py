# SPDX-License-Identifier: Apache-2.0
"""Code and documentation use the terms of the field: few of the words in plain_words.toml.

A share above its limit fails the test, which then prints each place with what to write instead.
test_architecture.py checks the number of modules of a folder.
"""

import ast
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import cyborg

pytestmark = pytest.mark.static

PACKAGE = Path(cyborg.__file__).parent
DOC = PACKAGE.parent / "doc" / "source"
LISTS: Mapping[str, Mapping[str, str]] = tomllib.loads(
    Path(__file__).with_name("plain_words.toml").read_text(encoding="utf-8")
)
PROSE = re.compile(rf"\b(?:{'|'.join(map(re.escape, LISTS['prose']))})\b", re.IGNORECASE)
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
TEST = re.compile(r"^[ \t]*def (test_\w+)\(", re.MULTILINE)
MIN_WORDS = 4  # of a line of documentation: shorter ones are headings and table borders
# Percent of the places with such a word, and how many places there are at least: without the
# second number, a collector that finds nothing would pass.
LIMITS = {
    "docstrings": (1.5, 1500),
    "identifiers": (0.5, 10000),
    "messages": (1.0, 500),
    "documentation": (1.0, 2000),
    "test names": (1.0, 1000),
}


@dataclass
class Tally:
    """The number of places of one kind, and those with a word of the lists."""

    places: int = 0
    findings: list[str] = field(default_factory=list)

    def add(self, place: str, text: str, words: Mapping[str, str]) -> None:
        """Count one place; ``words`` maps each listed word in the text to its replacement."""
        self.places += 1
        for word, replacement in words.items():
            self.findings.append(f"{place}: {word!r} -> {replacement}: {text[:70]!r}")

    @property
    def share(self) -> float:
        """Return the findings in percent of the places."""
        return 100 * len(self.findings) / max(1, self.places)


def find_in_prose(text: str) -> dict[str, str]:
    """Return the words of the list that a text contains, with their replacements."""
    words = {match.group().lower() for match in PROSE.finditer(" ".join(text.split()))}
    return {word: LISTS["prose"][word] for word in sorted(words)}


def find_in_name(name: str) -> dict[str, str]:
    """Return the words of the lists that an identifier is or contains, with replacements."""
    whole = name.strip("_").lower()
    words = {part: LISTS["parts"][part] for part in split_name(name) if part in LISTS["parts"]}
    return words | ({whole: LISTS["names"][whole]} if whole in LISTS["names"] else {})


def split_name(name: str) -> list[str]:
    """Return the parts of a snake_case or CamelCase name in lower case."""
    return [part.lower() for part in PARTS.findall(name)]


@functools.cache
def tallies() -> Mapping[str, Tally]:
    """Read every file once and return the tally of each kind."""
    tally_by_kind = {kind: Tally() for kind in LIMITS}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        file_name = str(path.relative_to(PACKAGE.parent))
        source = path.read_text(encoding="utf-8")
        if parts[0] == "tests":
            add_tests(tally_by_kind, file_name, source)
        else:
            add_code(tally_by_kind, file_name, ast.parse(source))
    for path in sorted(DOC.rglob("*.rst")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            if len(line.split()) >= MIN_WORDS:
                place = f"{path.relative_to(PACKAGE.parent)}:{number}"
                tally_by_kind["documentation"].add(place, line.strip(), find_in_prose(line))
    return tally_by_kind


def add_tests(totals: Mapping[str, Tally], place: str, source: str) -> None:
    """Count the names of the tests of a file, which a pattern finds faster than a parser."""
    for match in TEST.finditer(source):
        text = match[1].replace("_", " ")
        line = source.count("\n", 0, match.start()) + 1
        totals["test names"].add(f"{place}:{line}", text, find_in_prose(text))


def add_code(totals: Mapping[str, Tally], place: str, tree: ast.Module) -> None:
    """Count the docstrings, identifiers and messages of a file."""
    for node in ast.walk(tree):
        line = f"{place}:{getattr(node, 'lineno', 1)}"
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
            text := ast.get_docstring(node)
        ):
            totals["docstrings"].add(line, text, find_in_prose(text))
        for name in new_names(node):
            totals["identifiers"].add(line, name, find_in_name(name))
        if text := message(node):
            totals["messages"].add(line, text, find_in_prose(text))


def new_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node introduces, without those of Python's data model."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
            pass
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            pass
        case ast.ExceptHandler(name=str(name)):
            pass
        case _:
            return
    if not name.startswith("__"):
        yield name


def message(node: ast.AST) -> str | None:
    """Return the text of a log call, of a raised exception or of an option's help, else None."""
    match node:
        case ast.Call(func=ast.Attribute(attr=method), args=[first, *_]) if method in LOG_METHODS:
            return constant_text(first)
        case ast.Raise(exc=ast.Call(args=[first, *_])):
            return constant_text(first)
        case ast.keyword(arg="help", value=value):
            return constant_text(value)
    return None


def constant_text(node: ast.AST) -> str | None:
    """Return the constant parts of a string of several words; None if it is none."""
    pieces = [
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    text = " ".join(pieces)
    return text if " " in text.strip() else None


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIMITS)
def test_words_are_plain(kind: str) -> None:
    limit, least = LIMITS[kind]
    tally = tallies()[kind]
    assert tally.places >= least
    heading = f"{tally.share:.2f} % of {tally.places} {kind}, at most {limit} % are allowed"
    assert tally.share <= limit, "\n".join([heading, *tally.findings])


@pytest.mark.parametrize("word", LISTS["prose"])
def test_word_of_the_list_is_found_in_a_text(word: str) -> None:
    assert word in find_in_prose(f"The host {word.title()}\n the agent.")
    assert find_in_prose(f"The x{word}x agent.") == {}


@pytest.mark.parametrize("word", LISTS["parts"])
def test_part_of_the_list_is_found_in_a_name(word: str) -> None:
    for name in (word, f"_{word}", f"host_{word}", f"{word}_host", f"Host{word.title()}"):
        assert word in find_in_name(name), name
    assert find_in_name(f"x{word}x") == {}


def test_name_of_the_list_is_found_only_as_a_whole() -> None:
    for name in LISTS["names"]:
        assert name in find_in_name(f"_{name}")
        assert find_in_name(f"{name}_host") == {}, name


def test_message_is_log_text_raised_text_or_help() -> None:
    code = """
LOG.warning("Device %s is " + "removed", device)
raise Invalid(f"the name {name} is empty") from exc
FloatOpt("x", help="Seconds to wait.")
print("not a message")
LOG.info("word")
"""
    texts = [text for node in ast.walk(ast.parse(code)) if (text := message(node))]
    assert sorted(texts) == ["Device %s is  removed", "Seconds to wait.", "the name   is empty"]

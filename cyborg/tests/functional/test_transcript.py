# SPDX-License-Identifier: Apache-2.0
"""The check of executed pages: accepted and rejected output."""

import os
from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine.shell import shell
from cyborg.tests.fixtures.machine.transcript import PlaceholderMap, follow, parse

PAGE = """\
Title
=====

Words, and a command:

.. code-block:: console

   $ A=one; printf '%s\\n' \\
       "$A  two"
   one two
   $ echo $A

   one
   $ ls /none-such
   ls: ...none-such...
   $ echo $?
   2

.. code-block:: text

   $ not a command
"""
ONE, OTHER = "a0000000-0000-4000-8000-00000000000a", "a0000000-0000-4000-8000-00000000000b"
THIRD = "a0000000-0000-4000-8000-00000000000c"


def execute(text: str, folder: Path, patience: float = 20.0) -> None:
    with shell(folder, {"PATH": os.environ["PATH"], "LC_ALL": "C"}, patience) as session:
        follow(parse(text), "page.rst", session)


def test_parse_returns_the_steps_of_a_page() -> None:
    steps = parse(PAGE)
    assert [(step.section, step.line, step.command) for step in steps] == [
        ("Title", 8, "A=one; printf '%s\\n' \"$A  two\""),
        ("Title", 11, "echo $A"),
        ("Title", 14, "ls /none-such"),
        ("Title", 16, "echo $?"),
    ]
    assert [step.expected for step in steps][:2] == ["one two\n", "one\n"]
    with pytest.raises(ValueError, match="line 3: output without a command"):
        parse(".. code-block:: console\n\n   lost\n")


def test_parse_returns_the_events_of_a_page() -> None:
    text = "Title\n=====\n\n.. test: event one\n\n.. code-block:: console\n\n   $ two\n   three\n"
    found = [(step.section, step.command, step.expected) for step in parse(text)]
    assert found == [("Title", "event one", ""), ("Title", "two", "three\n")]


def test_follow_accepts_matching_output(tmp_path: Path) -> None:
    execute(PAGE, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "   one two\n",
            "   one three\n",
            r"page.rst, line 8: A=one.*expected\none three\n.*one  two",
        ),
        ("   $ echo $A\n\n   one\n", "   $ echo $A\n", "line 11: echo .A\n"),
        ("   $ echo $?\n   2\n", "   $ echo $?\n   0\n", "line 16: echo"),
        ("   $ echo $?\n   2\n", "   $ true\n", "line 14: ls /none-such\nfailed, and no echo"),
        ("   $ echo $?\n   2\n", "", "line 14: ls /none-such\nfailed at the end"),
        ("   $ echo $A\n", "   $ if\n", "line 11: if\n.*syntax error"),
    ],
)
def test_follow_rejects_different_output(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert PAGE.count(old) == 1
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        execute(PAGE.replace(old, new), tmp_path)


@pytest.mark.parametrize(("command", "patience"), [("sleep 60", 0.2), ("exit 3", 20.0)])
def test_command_that_ends_the_shell_raises_timeout(
    tmp_path: Path, command: str, patience: float
) -> None:
    with pytest.raises(TimeoutError, match=command):
        execute(f".. code-block:: console\n\n   $ {command}\n", tmp_path, patience)


def test_command_does_not_read_the_shells_input(tmp_path: Path) -> None:
    execute(".. code-block:: console\n\n   $ cat\n   $ echo still here\n   still here\n", tmp_path)


@pytest.mark.parametrize(
    ("expected", "actual", "agrees"),
    [
        ("a   b\n", "a b", True),
        ("a b", "ab", False),
        ("a ... b", "a b", True),
        ("a ... b", "a\nx\nb\n", True),
        ("a ... b", "a x", False),
        ("...\nb", "b", True),
        ("| 1.5 (x) |", "| 1.5 (x) |", True),
        ("1.5", "105", False),
        ("at 2026-11-21T15:45:13.899184+00:00", "at 2027-01-01T00:00:00+00:00", True),
        ("at 2026-11-21T15:45:13.899184+00:00", "at noon", False),
        (f"{ONE} is {ONE}", f"{OTHER} is {OTHER}", True),
        (f"{ONE} is {ONE}", f"{ONE} is {OTHER}", False),
        (f"{ONE} and {OTHER}", f"{OTHER} and {ONE}", True),
        (f"{ONE} and {OTHER}", f"{THIRD} and {THIRD}", False),
        ("at 2026-11-21T15:45:13Z", "at 2027-01-01T00:00:00Z", True),
        ("| b0000000 |", "| c0ffee00 |", True),
        ("| b0000000 |", "| compute1 |", False),
        ("b0000000 b0000000", "c0ffee00 c0ffee01", False),
        (f"a0000000 is {ONE}", f"c0ffee00 is {OTHER}", False),
        (f"a0000000 is {ONE}", f"a0000000 is {OTHER}", True),
    ],
)
def test_placeholders_match_expected_output(expected: str, actual: str, agrees: bool) -> None:
    assert PlaceholderMap().matches(expected, actual) == agrees


def test_uuid_placeholder_is_consistent_across_the_page() -> None:
    meaning = PlaceholderMap()
    assert meaning.matches(ONE, OTHER)
    assert meaning.matches(f"again {ONE}", f"again {OTHER}")
    assert not meaning.matches(ONE, THIRD)
    assert not meaning.matches(THIRD, OTHER)


def test_short_uuid_is_the_prefix_of_the_full_uuid() -> None:
    meaning = PlaceholderMap()
    assert meaning.matches(ONE, "c0ffee00-0000-4000-8000-00000000000a")
    assert meaning.matches("| a0000000 |", "| c0ffee00 |")
    assert not meaning.matches("| a0000000 |", "| c0ffee01 |")
    assert meaning.matches("| 0badcafe |", "| c0ffee01 |")
    uuid = "0badcafe-0000-4000-8000-00000000000a"
    assert not meaning.matches(uuid, "c0ffee02-0000-4000-8000-00000000000a")
    assert meaning.matches(uuid, "c0ffee01-0000-4000-8000-00000000000a")

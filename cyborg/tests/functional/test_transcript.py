# SPDX-License-Identifier: Apache-2.0
"""What the check of executed pages takes, and what it does not."""

import os
from pathlib import Path

import pytest

from cyborg.fixtures.shell import shell
from cyborg.fixtures.transcript import Meaning, follow, parse

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
    with shell(folder, {"PATH": os.environ["PATH"], "LC_ALL": "C"}, patience) as its:
        follow(parse(text), "page.rst", its)


def test_a_page_is_read() -> None:
    found = parse(PAGE)
    assert [(step.section, step.line, step.command) for step in found] == [
        ("Title", 8, "A=one; printf '%s\\n' \"$A  two\""),
        ("Title", 11, "echo $A"),
        ("Title", 14, "ls /none-such"),
        ("Title", 16, "echo $?"),
    ]
    assert [step.expected for step in found][:2] == ["one two\n", "one\n"]
    with pytest.raises(ValueError, match="line 3: no command prints this"):
        parse(".. code-block:: console\n\n   lost\n")


def test_a_page_that_tells_the_truth(tmp_path: Path) -> None:
    execute(PAGE, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
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
def test_a_page_that_does_not(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert PAGE.count(old) == 1
    with pytest.raises(AssertionError, match=f"(?s){said}"):
        execute(PAGE.replace(old, new), tmp_path)


@pytest.mark.parametrize(("command", "patience"), [("sleep 60", 0.2), ("exit 3", 20.0)])
def test_a_command_that_takes_the_shell_away(tmp_path: Path, command: str, patience: float) -> None:
    with pytest.raises(TimeoutError, match=command):
        execute(f".. code-block:: console\n\n   $ {command}\n", tmp_path, patience)


def test_a_command_reads_nothing_of_the_shells(tmp_path: Path) -> None:
    execute(".. code-block:: console\n\n   $ cat\n   $ echo still here\n   still here\n", tmp_path)


@pytest.mark.parametrize(
    ("expected", "got", "agrees"),
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
    ],
)
def test_what_agrees(expected: str, got: str, agrees: bool) -> None:
    assert Meaning().agrees(expected, got) == agrees


def test_a_uuid_means_the_same_throughout() -> None:
    meaning = Meaning()
    assert meaning.agrees(ONE, OTHER)
    assert meaning.agrees(f"again {ONE}", f"again {OTHER}")
    assert not meaning.agrees(ONE, THIRD)
    assert not meaning.agrees(THIRD, OTHER)

# SPDX-License-Identifier: Apache-2.0
import io

import pytest

from cyborg.cli.commands import ALIASES, COMMANDS, CommandManager, write_screen

MAX_LINES, MAX_WIDTH = 50, 80


@pytest.fixture
def screen() -> str:
    out = io.StringIO()
    write_screen(out)
    return out.getvalue()


def test_screen_fits_a_terminal(screen: str) -> None:
    lines = screen.splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= MAX_WIDTH


def test_screen_has_every_command_in_a_form_that_is_accepted(screen: str) -> None:
    manager = CommandManager("cyborg.cli", convert_underscores=False)
    shown = set()
    for line in screen.splitlines():
        if not line.startswith("  "):
            continue
        typed = line[2:].partition("  ")[0].split()
        nouns, verbs = typed[:-1], typed[-1].split("|")
        for verb in verbs:
            _, name, rest = manager.find_command([*nouns, *verb.split("-", 1)])
            assert not rest
            shown.add(name)
    assert shown == set(COMMANDS)


def test_spellings_of_openstack_are_no_names_of_other_commands() -> None:
    for alias, name in ALIASES.items():
        assert alias not in COMMANDS or alias == name

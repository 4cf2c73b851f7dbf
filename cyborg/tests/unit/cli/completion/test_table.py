# SPDX-License-Identifier: Apache-2.0
"""What can be typed after ``cyborg``."""

import argparse
from collections.abc import Mapping

import pytest

from cyborg.cli import app
from cyborg.cli.commands import ALIASES
from cyborg.cli.completion.command import CompletionTable, build_table, read_parsers


@pytest.fixture(scope="module")
def application() -> app.CyborgApp:
    return app.CyborgApp(["--os-auth-type", "none"])


@pytest.fixture(scope="module")
def table(application: app.CyborgApp) -> CompletionTable:
    return build_table(read_parsers(application), ALIASES)


def test_table_has_each_command(table: CompletionTable, application: app.CyborgApp) -> None:
    names = {name for name, _ in application.command_manager}
    assert {"device-list", "top", "complete", "help"} <= names
    assert set(table.words[""]) >= names
    assert set(table.options) == {"", *names}


def test_each_spelling_runs_the_command_that_is_completed(
    table: CompletionTable, application: app.CyborgApp
) -> None:
    spellings: Mapping[str, str] = table.commands
    assert len(spellings) > 130
    for path, name in spellings.items():
        manager = application.command_manager
        found, expected = manager.find_command(path.split()), manager.find_command([name])
        assert (found[0], found[2]) == (expected[0], []), path


def test_words_lead_to_commands_only(table: CompletionTable) -> None:
    for path, words in table.words.items():
        for word in words:
            longer = f"{path} {word}".strip()
            assert longer in table.words or longer in table.commands


def test_table_has_options_with_values_and_descriptions(table: CompletionTable) -> None:
    options = table.options["device-list"]
    assert options["--host"] == "only the devices of this host"
    assert options["--long"].startswith("show all fields")
    assert table.values["device-list", "--host"] == []
    assert table.values["device-list", "--status"] == ["enabled", "maintaining"]
    assert ("device-list", "--long") not in table.values
    assert table.words[""]["device-list"] == "List devices and whether they are schedulable"
    assert "--os-cloud" in table.options[""]


def test_words_of_spaces_and_of_other_orders_are_offered(table: CompletionTable) -> None:
    assert {"install", "list", "show", "uninstall", "update"} == set(table.words["driver"])
    assert table.commands["service discover"] == "discover-services"
    assert table.commands["device context list"] == "device-context-list"


def test_hidden_options_are_not_offered() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seen", help="100%% seen, %(default)s by default", default=3, type=int)
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    table = build_table({"": ("", parser)}, {})
    assert table.options == {"": {"--seen": "100% seen, 3 by default"}}

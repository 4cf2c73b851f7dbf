# SPDX-License-Identifier: Apache-2.0
"""``cyborg complete``: what can be typed after ``cyborg``, as a script of a shell.

A *path* is the words of a command that are typed so far, joined by spaces: ``device list`` and
``device-list`` lead to the same command. The name of no command is empty: it has the global
options.
"""

import argparse
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from cliff import command

from cyborg.cli.commands import ALIASES

# Maximum number of characters of a description.
MAX_HELP = 70
# The description and the parser of each command.
Parsers = Mapping[str, tuple[str, argparse.ArgumentParser]]


@dataclass(frozen=True, slots=True)
class CompletionTable:
    """``words`` has the next words of a path, each with a description.

    ``commands`` has the name of the command of a path. ``options`` has the options of a command
    with their descriptions, ``values`` the values of an option, by command and option: an empty
    list for any value, and no entry for an option without a value.
    """

    words: dict[str, dict[str, str]] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    options: dict[str, dict[str, str]] = field(default_factory=dict)
    values: dict[tuple[str, str], Sequence[str]] = field(default_factory=dict)


def build_table(parsers: Parsers, aliases: Mapping[str, str]) -> CompletionTable:
    """Return what can be typed; ``parsers`` has the global options under an empty name.

    ``aliases`` are further spellings of commands.
    """
    table = CompletionTable()
    names = [name for name in sorted(parsers) if name]
    nouns = {name.partition("-")[0] for name in names}
    for name in names:
        command_help, _ = parsers[name]
        for words in _spellings(name, nouns, aliases):
            for number, word in enumerate(words):
                path = " ".join(words[:number])
                is_last = number == len(words) - 1
                description = command_help if is_last else ""
                next_words = table.words.setdefault(path, {})
                # A word can end one command and begin others: the description stays.
                next_words[word] = description or next_words.get(word, "")
            table.commands[" ".join(words)] = name
    for name, (_, parser) in parsers.items():
        table.options[name] = {}
        for option, description, values in _options(parser):
            table.options[name][option] = description
            if values is not None:
                table.values[name, option] = values
    return table


def first_sentence(text: str) -> str:
    """Return the first sentence of a description, shortened.

    >>> first_sentence("List devices. With --long all fields.")
    'List devices'
    """
    sentence = " ".join(text.split()).partition(". ")[0].rstrip(".")
    return sentence if len(sentence) <= MAX_HELP else sentence[: MAX_HELP - 1] + "…"


def _spellings(
    name: str, nouns: Iterable[str], aliases: Mapping[str, str]
) -> Iterator[Sequence[str]]:
    """Yield the command with dashes, with spaces, and with its last word first if it is a noun."""
    yield (name,)
    words = name.split("-")
    yield words
    if len(words) > 1 and words[-1] in nouns:
        yield [words[-1], *words[:-1]]
    yield from (alias.split("-") for alias, target in aliases.items() if target == name)


def _options(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, str, Sequence[str] | None]]:
    """Yield each option, its description, and its values: None for a flag, empty for any value."""
    for action in parser._actions:
        if action.help is argparse.SUPPRESS:
            continue
        help_text = parser._get_formatter()._expand_help(action) if action.help else ""
        values = None if action.nargs == 0 else [str(choice) for choice in action.choices or ()]
        for option in action.option_strings:
            yield option, first_sentence(help_text), values


HEADER = "# Completion of cyborg for {0}, written by: cyborg complete {0}\n"


def write_bash(table: CompletionTable) -> str:
    """Return the script for bash, without descriptions."""
    data = _arrays(table, declare="declare -gA", entry="[{}]={}")
    return HEADER.format("bash") + data + _function("cyborg.bash")


def write_zsh(table: CompletionTable) -> str:
    """Return the script for zsh, also as a file of its function path."""
    help_texts = {
        f"{path} {word}": text
        for described in (table.words, table.options)
        for path, words in described.items()
        for word, text in words.items()
        if text
    }
    form = {"declare": "typeset -gA", "entry": "{} {}"}
    data = _arrays(table, **form) + _array("_cyborg_help", help_texts, **form)
    return "#compdef cyborg\n" + HEADER.format("zsh") + data + _function("cyborg.zsh")


def write_fish(table: CompletionTable) -> str:
    """Return the script for fish."""
    return HEADER.format("fish") + _fish_data(table) + _function("cyborg.fish")


WRITERS: Mapping[str, Callable[[CompletionTable], str]] = {
    "bash": write_bash,
    "fish": write_fish,
    "zsh": write_zsh,
}


def _function(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _arrays(table: CompletionTable, *, declare: str, entry: str) -> str:
    """Return the arrays of a table; ``declare`` and ``entry`` are those of ``_array``."""
    arrays = {
        "_cyborg_words": {path: " ".join(words) for path, words in table.words.items()},
        "_cyborg_commands": table.commands,
        "_cyborg_options": {name: " ".join(options) for name, options in table.options.items()},
        "_cyborg_values": {
            f"{name} {option}": " ".join(values) for (name, option), values in table.values.items()
        },
    }
    return "".join(
        _array(name, values, declare=declare, entry=entry) for name, values in arrays.items()
    )


def _array(name: str, values: Mapping[str, str], *, declare: str, entry: str) -> str:
    """Return an array; ``declare`` begins it, and ``entry`` formats a quoted key and its value."""
    # A key must not be empty in bash, so that each begins with a slash.
    lines = (
        f"    {entry.format(shlex.quote('/' + key), shlex.quote(value))}\n"
        for key, value in values.items()
    )
    return f"{declare} {name}=(\n{''.join(lines)})\n"


def _fish_data(table: CompletionTable) -> str:
    """Return one list of lines: the kind, ``|``, a key, ``|`` and a value.

    The kinds are p for a path with its command, w for the next word after a path, o for an option
    of a command, v for an option that has a value, and c for a choice of values.
    """
    lines = [
        *(("p", path, name) for path, name in table.commands.items()),
        *(("p", path, "") for path in table.words if path and path not in table.commands),
        *(("v", f"{name} {option}", "") for name, option in table.values),
        *(
            ("c", f"{name} {option}", value)
            for (name, option), values in table.values.items()
            for value in values
        ),
        *_described("w", table.words),
        *_described("o", table.options),
    ]
    quoted = (_quote_fish(f"{kind}|{key}|{value}") for kind, key, value in lines)
    return "set -g __cyborg_data" + "".join(f" \\\n    {line}" for line in quoted) + "\n"


def _described(kind: str, words: Mapping[str, Mapping[str, str]]) -> Iterable[tuple[str, str, str]]:
    for path, described in words.items():
        for word, text in described.items():
            yield kind, path, f"{word}\t{text}"


def _quote_fish(text: str) -> str:
    # The two escapes that fish knows in single quotes.
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


class Complete(command.Command):
    """Print a script for a shell that completes commands, options and their values."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the argument."""
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "shell",
            nargs="?",
            default="bash",
            choices=sorted(WRITERS),
            help="the shell, bash by default",
        )
        return parser

    def take_action(self, args: argparse.Namespace) -> None:
        """Print the script."""
        table = build_table(read_parsers(self.app), ALIASES)
        self.app.stdout.write(WRITERS[args.shell](table))


def read_parsers(app: Any) -> Parsers:
    """Return the parsers of all commands of an application, and of its global options."""
    parsers = {"": ("", app.parser)}
    for name, entry in app.command_manager:
        factory = entry.load()
        parser = factory(app, None).get_parser(f"{app.NAME} {name}")
        parsers[name] = (first_sentence(parser.description or factory.__doc__ or ""), parser)
    return parsers

# SPDX-License-Identifier: Apache-2.0
"""What can be typed after ``cyborg``: the words of commands, options and their values.

A *path* is the words of a command that are typed so far, joined by spaces: ``device list`` and
``device-list`` lead to the same command. The name of no command is empty: it has the global
options.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

MAX_HELP = 70
"""Maximum number of characters of a description."""
Parsers = Mapping[str, tuple[str, argparse.ArgumentParser]]
"""The description and the parser of each command."""


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
        for words in _spellings(name, nouns, aliases):
            for number, word in enumerate(words):
                path = " ".join(words[:number])
                is_last = number == len(words) - 1
                description = parsers[name][0] if is_last else ""
                known = table.words.setdefault(path, {})
                known[word] = description or known.get(word, "")
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

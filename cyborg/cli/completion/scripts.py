# SPDX-License-Identifier: Apache-2.0
"""A completion table as a script of a shell: its data, followed by the function of the shell."""

import shlex
from collections.abc import Callable, Iterable, Mapping
from importlib import resources

from cyborg.cli.completion.table import CompletionTable

HEADER = "# Completion of cyborg for {0}, written by: cyborg complete {0}\n"


def write_bash(table: CompletionTable) -> str:
    """Return the script for bash, without descriptions."""
    data = _arrays(table, "declare -gA", "[{}]={}")
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
    data = _arrays(table, "typeset -gA", "{} {}")
    data += _array("typeset -gA", "_cyborg_help", "{} {}", help_texts)
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


def _arrays(table: CompletionTable, declare: str, entry: str) -> str:
    arrays = {
        "_cyborg_words": {path: " ".join(words) for path, words in table.words.items()},
        "_cyborg_commands": table.commands,
        "_cyborg_options": {name: " ".join(options) for name, options in table.options.items()},
        "_cyborg_values": {
            f"{name} {option}": " ".join(values) for (name, option), values in table.values.items()
        },
    }
    return "".join(_array(declare, name, entry, values) for name, values in arrays.items())


def _array(declare: str, name: str, entry: str, values: Mapping[str, str]) -> str:
    # A key must not be empty in bash, so that each begins with a slash.
    lines = (
        f"    {entry.format(shlex.quote('/' + key), shlex.quote(value))}\n"
        for key, value in values.items()
    )
    return f"{declare} {name}=(\n{''.join(lines)})\n"


def _fish_data(table: CompletionTable) -> str:
    """Return one list; the first letter of a line is its kind, followed by ``|`` and the key."""
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
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"

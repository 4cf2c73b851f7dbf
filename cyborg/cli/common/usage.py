# SPDX-License-Identifier: Apache-2.0
"""Errors of the command line: what is wrong in one line, then an example of the command.

Such a message repeats words of the command line, and a misspelt option is no reason to show the
token behind it: ``find_secrets`` and ``RedactedStream`` hide it.
"""

import argparse
import difflib
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TextIO

# Values of arguments in examples, by the name of the argument.
EXAMPLES = {
    "accelerator": "3f2a1b4c",
    "address": "0000:3b:00.0",
    "backend": "generic",
    "context": "my-context",
    "device": "compute-1/0000:3b:00.0",
    "driver": "generic",
    "driver_id": "generic",
    "epoch": "1",
    "function": "crypto.ipsec",
    "group": "resources:FPGA=1",
    "host": "compute-1",
    "hosts": "compute-1",
    "instance": "6f1c9c0e-5d5b-4c53-9d2f-1f4f6d3a7b10",
    "interval": "2",
    "key": "rack",
    "layout": "sym",
    "mapping": "0=6c155174-66c1-5c23-9533-74b609447dff",
    "name": "my-name",
    "profile": "my-profile",
    "provider": "6c155174-66c1-5c23-9533-74b609447dff",
    "resources": "FPGA:1",
    "service": "compute-1/cyborg-agent",
    "until": "+2h",
    "value": "b12",
    "watch": "2",
    "within": "600",
}

DEFAULT_EXAMPLE = "3f2a1b4c"
HIDDEN = "***"
# Parts of the names of such options, misspelt ones included.
_SECRET = re.compile(r"--?[A-Za-z][\w-]*(?:tok|pas|secret|credential)[\w-]*", re.IGNORECASE)
_UNKNOWN = "unrecognized arguments: "
_ARGUMENT = re.compile(r"argument (-[^\s/:]+)")


def shorten_errors(parser: argparse.ArgumentParser) -> None:
    """Let a parser print its errors in two lines, instead of the usage of all options."""
    parser.error = functools.partial(_fail, parser)  # type: ignore[method-assign]


def _fail(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    if message.startswith(_UNKNOWN):
        message += _suggest(parser, message.removeprefix(_UNKNOWN).split()[0])
    parser.exit(2, f"{parser.prog}: {message}\nExample: {format_example(parser, message)}\n")


def _suggest(parser: argparse.ArgumentParser, word: str) -> str:
    """Return the end of the message for an unknown option."""
    known = [name for action in parser._actions for name in action.option_strings]
    name = word.partition("=")[0]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7) if name[:1] == "-" else []
    return f"; did you mean {near[0]}?" if near else f"; {parser.prog} --help lists the options"


def format_example(parser: argparse.ArgumentParser, message: str = "") -> str:
    """Return a correct command: what is mandatory, and the option that a message names."""
    named = _ARGUMENT.search(message)
    return " ".join([parser.prog, *_words(parser, named[1] if named else "")])


def _words(parser: argparse.ArgumentParser, named: str) -> Iterator[str]:
    for action in parser._actions:
        is_named = named in action.option_strings
        # An example shows what is mandatory; what may be left out would make it long.
        if not action.option_strings and action.nargs not in ("?", "*"):
            yield _value(action)
        elif action.option_strings and (action.required or is_named):
            yield action.option_strings[-1]
            if action.nargs != 0:
                yield _value(action)


def _value(action: Any) -> str:
    if action.choices:
        return str(next(iter(action.choices)))
    if action.type is int:
        return "1"
    return EXAMPLES.get(action.dest, DEFAULT_EXAMPLE if not action.option_strings else "VALUE")


def find_secrets(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the values of options that are secret by their names."""
    for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, separator, value = word.partition("=")
        if _SECRET.fullmatch(name) and (secret := value if separator else following):
            yield secret


class RedactedStream:
    """A text stream that replaces secrets in what is written to another stream."""

    def __init__(self, stream: TextIO, secrets: Sequence[str]) -> None:
        self._stream = stream
        # The longest first: a secret can begin with another one.
        words = "|".join(re.escape(secret) for secret in sorted(secrets, key=len, reverse=True))
        # Whole words: a short secret must not blank parts of others.
        self._pattern = re.compile(rf"(?<![\w-])(?:{words})(?![\w-])")

    def write(self, text: str) -> int:
        """Write a text without the secrets."""
        return self._stream.write(self._pattern.sub(HIDDEN, text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

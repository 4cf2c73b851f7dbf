# SPDX-License-Identifier: Apache-2.0
"""Secrets of the command line, hidden in messages about its errors.

Such a message repeats words of the command line, and a misspelt option is no reason to show the
token behind it.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

HIDDEN = "***"
# Parts of the names of such options, misspelt ones included.
_SECRET = re.compile(r"--?[A-Za-z][\w-]*(?:tok|pas|secret|credential)[\w-]*", re.IGNORECASE)


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
        words = "|".join(re.escape(secret) for secret in sorted(secrets, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<![\w-])(?:{words})(?![\w-])")

    def write(self, text: str) -> int:
        """Write a text without the secrets."""
        return self._stream.write(self._pattern.sub(HIDDEN, text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

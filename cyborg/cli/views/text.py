# SPDX-License-Identifier: Apache-2.0
"""Lines of styled text of a given width, in Unicode or ASCII, and their output."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from cyborg.cli.common.base import argument
from cyborg.cli.terminal.tables import is_terminal

if TYPE_CHECKING:
    from rich.text import Text

# Width of output that is not a terminal, in characters.
DEFAULT_WIDTH = 100
MIN_WIDTH, MAX_WIDTH = 20, 200

# A text, or a text and its style.
Part = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of a view. ``bar`` has those of owned, dirty, unavailable and free handles.

    ``tree`` has the branch of an element, the branch of the last one, and what is below each.
    """

    bar: str
    ellipsis: str
    tree: tuple[str, str, str, str]


UNICODE = Glyphs("█▒░·", "…", ("├─ ", "└─ ", "│  ", "   "))
ASCII = Glyphs("#%=.", "~", ("|- ", "`- ", "|  ", "   "))


@dataclass(frozen=True, slots=True)
class Canvas:
    """The width of an output in columns, and its characters."""

    width: int
    glyphs: Glyphs

    def build_line(self, *parts: Part) -> "Text":
        """Return a line of at most the width; a longer one ends with an ellipsis."""
        from rich.text import Text

        # Cut at the end: rich would wrap, and the lines of a view are counted.
        text = Text(no_wrap=True)
        for part in parts:
            content, style = (part, "") if isinstance(part, str) else part
            text.append(self._clean(content), style)
        text.rstrip()
        if text.cell_len > self.width:
            ellipsis = self.glyphs.ellipsis
            text.truncate(max(0, self.width - len(ellipsis)), overflow="crop")
            text.append(ellipsis)
        return text

    def build_flow(self, label: str, items: Iterable[Part]) -> list["Text"]:
        """Return a label and items in as many lines as needed; the other lines are indented."""
        from rich.cells import cell_len

        lines: list[list[Part]] = [[(label, "bold")]]
        used = cell_len(label)
        for item in items:
            length = cell_len(item if isinstance(item, str) else item[0])
            if used + 2 + length > self.width:
                lines.append([])
                used = 0
            lines[-1] += ["  ", item]
            used += 2 + length
        return [self.build_line(*parts) for parts in lines]

    def limit_lines(
        self, lines: Sequence["Text"], number: int, total: int, nouns: str
    ) -> list["Text"]:
        """Return up to ``number`` lines; the last one says how many of ``total`` are not shown."""
        total = max(total, len(lines))
        if len(lines) == total <= number:
            return list(lines)
        shown = max(0, min(len(lines), number - 1))
        return [*lines[:shown], self.build_line((f"  {total - shown} more {nouns}", "dim"))]

    def _clean(self, text: str) -> str:
        """Return a text without control characters; with ASCII, others become question marks."""
        shown = "".join(c if c.isprintable() else " " for c in text)
        is_unicode = self.glyphs is UNICODE
        return shown if is_unicode else shown.encode("ascii", "replace").decode("ascii")


def make_canvas(stream: TextIO) -> Canvas:
    """Return the width of an output and the characters that its encoding has.

    The width is that of the terminal, DEFAULT_WIDTH for other output, within the limits. An output
    without an encoding has all characters.
    """
    try:
        width = os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except (OSError, ValueError, AttributeError):
        width = DEFAULT_WIDTH
    glyphs = UNICODE
    try:
        "".join((UNICODE.bar, UNICODE.ellipsis, *UNICODE.tree)).encode(
            getattr(stream, "encoding", None) or "utf-8"
        )
    except (UnicodeError, LookupError):
        glyphs = ASCII
    return Canvas(max(MIN_WIDTH, min(width, MAX_WIDTH)), glyphs)


def format_age(seconds: float) -> str:
    """Return a duration with one unit.

    >>> [format_age(seconds) for seconds in (-1, 59, 60, 7200, 172800)]
    ['0 s', '59 s', '1 min', '2 h', '2 d']
    """
    whole = max(0, int(seconds))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if whole >= size:
            return f"{whole // size} {unit}"
    return f"{whole} s"


FORMAT = argument(
    "-f",
    "--format",
    choices=("text", "json"),
    default="text",
    help="format of the output, text by default; json prints once",
)


def write_lines(stdout: TextIO, lines: Iterable["Text"]) -> None:
    """Write lines, on a terminal with styles."""
    from rich.console import Console

    # A pipe or a file gets no styles.
    if not is_terminal(stdout):
        stdout.writelines(f"{line.plain}\n" for line in lines)
        return
    console = Console(file=stdout, force_terminal=True, width=make_canvas(stdout).width, height=100)
    for line in lines:
        console.print(line, soft_wrap=True, end="\n")

# SPDX-License-Identifier: Apache-2.0
"""Printing of a view once: styled on a terminal, plain elsewhere."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from cyborg.cli.common.base import argument
from cyborg.cli.terminal.tables import is_terminal
from cyborg.cli.views.text import Glyphs, choose_glyphs, output_width

if TYPE_CHECKING:
    from rich.text import Text

FORMAT = argument(
    "-f",
    "--format",
    choices=("text", "json"),
    default="text",
    help="format of the output, text by default; json prints once",
)


def size_of(stdout: TextIO) -> tuple[int, Glyphs]:
    """Return the width and the characters for an output."""
    return output_width(stdout), choose_glyphs(stdout)


def write_lines(stdout: TextIO, lines: Iterable["Text"]) -> None:
    """Write lines, on a terminal with styles."""
    from rich.console import Console

    if not is_terminal(stdout):
        stdout.writelines(f"{line.plain}\n" for line in lines)
        return
    console = Console(file=stdout, force_terminal=True, width=output_width(stdout), height=100)
    for line in lines:
        console.print(line, soft_wrap=True, end="\n")

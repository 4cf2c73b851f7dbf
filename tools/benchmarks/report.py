# SPDX-License-Identifier: Apache-2.0
"""Results as tables in text and reStructuredText, the description of the machine, progress."""

import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Results = dict[str, Any]


class Table(NamedTuple):
    """A table; all cells are text."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def make_table(title: str, columns: Mapping[str, str], records: Iterable[Results]) -> Table:
    """Return the table of records; a column is a heading and the format of its cells."""
    rows = [[text.format_map(record) for text in columns.values()] for record in records]
    return Table(title, list(columns), rows)


def make_record_table(title: str, rows: Mapping[str, str], record: Results) -> Table:
    """Return the table of one record; a row is a name and the format of its value."""
    values = [[name, text.format_map(record)] for name, text in rows.items()]
    return Table(title, ["Figure", "Value"], values)


def render_text(tables: Iterable[Table]) -> Iterator[str]:
    """Yield the lines of tables."""
    for title, head, rows in tables:
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        yield from ("", title)
        for row in (head, *rows):
            yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def render_rst(tables: Iterable[Table]) -> Iterator[str]:
    """Yield the lines of tables as reStructuredText."""
    for title, head, rows in tables:
        yield from ("", f".. list-table:: {title}", "   :header-rows: 1", "")
        for row in (head, *rows):
            yield from (f"   {'  -' if n else '* -'} {cell}" for n, cell in enumerate(row))


def describe_machine() -> Results:
    """Return the description of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processors": len(os.sched_getaffinity(0)),
        "model": models[0] if models else "unknown",
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def summarize_machine(machine: Results) -> str:
    """Return the description of the machine as text."""
    return f"{machine['processors']} processors ({machine['model']}), Python {machine['python']}"


def say(line: str) -> None:
    """Print a progress message on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)

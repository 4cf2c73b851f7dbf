# SPDX-License-Identifier: Apache-2.0
"""What the commands for operators share: their output, and what they require of the database."""

import sys
import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from cyborg.core.errors import Conflict, Unavailable
from cyborg.db import errors, migrate
from cyborg.threads.failures import Backoff


def write_line(line: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(f"{line}\n")
    # Into a pipe Python writes blocks: the progress of hours of work would come at its end.
    sys.stdout.flush()


def write_table(
    header: Sequence[str], rows: Sequence[Sequence[Any]], *, numbers: bool = False
) -> None:
    """Write a table; with ``numbers``, all columns but the first are aligned to the right.

    Otherwise a line separates the header.
    """
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if not numbers:
        cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        shown = [
            cell.rjust(width) if numbers and index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        write_line("  ".join(shown).rstrip())


def add_format(parser: Any) -> None:
    """Add the option for the format of the result."""
    parser.add_argument(
        "-f", "--format", choices=("table", "json"), default="table", help="format of the result"
    )


def require_schema(engine: sa.Engine, name: str) -> None:
    """Raise Conflict if a database, called ``name`` in the message, is not upgraded.

    Contract migrations may remain: this release works before and after them.
    """
    pending = migrate.find_pending(engine)
    if pending.required:
        raise Conflict(
            f"the {name} is at revision {pending.current or 'none'}, expected at least "
            f"{pending.required[-1].revision}: run 'cyborg-dbsync upgrade' first"
        )


def wait_for_database(engine: sa.Engine, seconds: float) -> None:
    """Wait until the database responds; raise Unavailable if it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    backoff = Backoff(initial=0.5, maximum=10.0)
    while True:
        try:
            with errors.translate(), engine.connect():
                return
        except Unavailable as exc:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise
            write_line(f"{exc}; waiting up to {remaining:.0f} s more")
            time.sleep(min(backoff.next_delay(), remaining))

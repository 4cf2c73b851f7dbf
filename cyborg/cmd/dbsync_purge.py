# SPDX-License-Identifier: Apache-2.0
"""``cyborg-dbsync purge``: delete old rows in batches, while the service runs.

The sweeps of the conductors do the same by the options of [conductor]. This command is for a
database that has grown before, or whose rows an operator wants to keep for a shorter time.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from cyborg.cmd.common import add_format, require_head, write_line
from cyborg.db import errors
from cyborg.db.old_rows import KINDS
from cyborg.db.unit_of_work import UnitOfWork

NAMED_ONLY = ("services", "tombstones")
"""Kinds that are deleted only if they are named: an operator may still need them."""

DEFAULT_KINDS = tuple(kind for kind in KINDS if kind not in NAMED_ONLY)
PROGRESS_INTERVAL = 5.0  # seconds between two lines of progress
MAX_BATCH_SIZE = 10_000
MAX_FAILURES = 3  # batches in a row that deleted nothing
_PAUSE = threading.Event()  # never set


@dataclass(slots=True)
class PurgeResult:
    """Numbers of old rows of a kind: found before the purge, and deleted."""

    kind: str
    found: int
    deleted: int = 0


def add_parser(parsers: Any) -> None:
    """Add the command to those of ``cyborg-dbsync``."""
    parser = parsers.add_parser("purge", help="delete old rows in batches")
    parser.add_argument(
        "--older-than", required=True, type=_parse_days, metavar="DAYS", help="age in days, from 1"
    )
    parser.add_argument(
        "--kind",
        action="append",
        choices=sorted(KINDS),
        help=f"only these rows; by default all except {' and '.join(NAMED_ONLY)}",
    )
    parser.add_argument(
        "--max-rows", type=_parse_count, metavar="N", help="delete at most N rows of each kind"
    )
    parser.add_argument(
        "--batch-size",
        type=_parse_count,
        default=1000,
        metavar="N",
        help=f"rows of one transaction, at most {MAX_BATCH_SIZE} (1000)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only count the rows")
    add_format(parser)
    parser.set_defaults(run=_run)


def _run(engine: sa.Engine, conf: Any) -> None:
    """Purge, and print the numbers of rows. Raise Conflict for another revision."""
    arguments = conf.verb
    require_head(engine, "database")
    with errors.translate():
        results = purge(
            UnitOfWork(engine),
            arguments.kind or DEFAULT_KINDS,
            timedelta(days=arguments.older_than),
            batch_size=min(arguments.batch_size, MAX_BATCH_SIZE),
            max_rows=arguments.max_rows,
            dry_run=arguments.dry_run,
        )
    if arguments.format == "json":
        rows = {row.kind: {"found": row.found, "deleted": row.deleted} for row in results}
        write_line(json.dumps(rows, indent=2))
        return
    write_line(f"{'old rows':<14}{'found':>12}{'deleted':>12}")
    for result in results:
        write_line(f"{result.kind:<14}{result.found:>12}{result.deleted:>12}")


def purge(
    uow: UnitOfWork,
    kinds: Sequence[str],
    age: timedelta,
    *,
    batch_size: int,
    max_rows: int | None = None,
    dry_run: bool = False,
    pause: Callable[[float], object] = _PAUSE.wait,
    clock: Callable[[], float] = time.monotonic,
) -> list[PurgeResult]:
    """Delete the rows of these kinds that are older than ``age``; return the numbers of each kind.

    A batch is one transaction, after which ``pause`` waits as long as the batch took. An
    interrupted purge keeps what it has deleted. Progress is written to standard error.
    """
    cutoff = uow.clock() - age
    results = []
    for kind in dict.fromkeys(kinds):
        rows = KINDS[kind]
        found = uow.run(lambda tx, rows=rows: rows.count(tx, cutoff))  # type: ignore[misc]
        result = PurgeResult(kind, found)
        results.append(result)
        limit = 0 if dry_run else found if max_rows is None else min(found, max_rows)
        shown_at, failures = clock(), 0
        while result.deleted < limit:
            size = min(batch_size, limit - result.deleted)
            began = clock()
            deleted = uow.run(lambda tx, rows=rows, size=size: rows.purge(tx, cutoff, size))  # type: ignore[misc]
            result.deleted += deleted
            # A conductor may have deleted the same rows at the same time, but hardly each time.
            failures = 0 if deleted else failures + 1
            if failures == MAX_FAILURES:
                break
            now = clock()
            if now - shown_at > PROGRESS_INTERVAL:
                sys.stderr.write(f"{kind}: {result.deleted} of {limit} deleted\n")
                shown_at = now
            # The service runs: the purge uses the database for at most half of the time.
            pause(now - began)
    return results


def _parse_days(text: str) -> int:
    days = int(text)
    if not 1 <= days <= 36500:
        raise ValueError
    return days


def _parse_count(text: str) -> int:
    if (count := int(text)) < 1:
        raise ValueError
    return count

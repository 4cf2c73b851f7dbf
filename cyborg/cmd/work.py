# SPDX-License-Identifier: Apache-2.0
"""``cyborg-status work``: what the conductors put right by themselves, and what waits.

Exit status 0: nothing needs anybody; 1: a line that is marked does; 2: the database cannot be read.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from oslo_config import cfg
from oslo_utils import timeutils

from cyborg.conductor.metrics import look
from cyborg.core.errors import CyborgError
from cyborg.core.states import RequestState
from cyborg.db import trouble
from cyborg.db.read.totals import Totals
from cyborg.db.reader import Reader


@dataclass(frozen=True, slots=True)
class Waiting:
    """One thing that waits: how many of it, for how long the oldest, and whether to look at it."""

    what: str
    count: int
    oldest_seconds: int | None = None
    look: bool = False


def main(conf: cfg.ConfigOpts, argv: Sequence[str]) -> int:
    """Read the command line with options that are registered; return the exit status."""
    conf.register_cli_opt(cfg.SubCommandOpt("command", handler=_verbs))
    conf(list(argv), project="cyborg", prog="cyborg-status", version=metadata.version("cyborg"))
    try:
        reader = Reader(conf)
        try:
            found, now = look(conf, reader, timeutils.utcnow), timeutils.utcnow()
        finally:
            reader.close()
    except CyborgError as bad:
        sys.stderr.write(f"cyborg-status: {bad.message}\n")
        return 2
    except trouble.FAILURES as bad:
        sys.stderr.write(f"cyborg-status: the database refused: {trouble.reason(bad)}\n")
        return 2
    lines = list(waiting(conf, found, now))
    done = [{**row, "last_at": _iso(row["last_at"])} for row in found.deeds]
    if conf.command.format == "json":
        plain = {"done": done, "waiting": [asdict(line) for line in lines]}
        sys.stdout.write(json.dumps(plain, indent=2) + "\n")
    else:
        _show(done, lines)
    return int(any(line.look for line in lines))


def waiting(conf: cfg.ConfigOpts, found: Totals, now: datetime) -> Iterator[Waiting]:
    """Tell everything that waits, in a fixed order; what there is none of, too."""

    def age(since: datetime | None) -> int | None:
        return None if since is None else max(0, int((now - since).total_seconds()))

    ours = conf.conductor
    started = age(found.oldest_bind_started)
    # By then a conductor should have undone it, or another one taken it over.
    late = started is not None and started > ours.prepare_timeout + 2 * ours.lease
    count = found.requests.get(RequestState.BIND_STARTED, 0)
    yield Waiting("requests in BindStarted", count, started, late)
    lost = found.orphans_suspected
    yield Waiting("requests without an allocation (orphans?)", lost, look=lost > 0)
    yield Waiting("requests whose instance's project is unknown", found.owners_unknown)
    yield Waiting("handles to be cleaned", found.handles.get("dirty", 0))
    for row in found.outbox:
        what = f"messages {row['kind']}, {row['state']}"
        yield Waiting(what, row["count"], age(row["oldest"]), row["state"] == "dead")
    for row in found.jobs:
        yield Waiting(f"jobs {row['kind']}, open", row["count"], age(row["oldest"]))
        if row["overdue"]:
            yield Waiting(f"jobs {row['kind']}, past their deadline", row["overdue"], look=True)
    yield Waiting("providers stale", found.providers_stale, age(found.oldest_stale))
    refused = found.providers_failing
    yield Waiting("providers that are refused", refused, look=refused > 0)
    for (binary, state), count in sorted(found.services.items()):
        if state != "up":
            yield Waiting(f"services {binary}, {state}", count, look=state == "down")


def _verbs(parsers: Any) -> None:
    parsers.add_parser("upgrade", help="'upgrade check': can this release be started here")
    parser = parsers.add_parser("work", help="what the conductors put right, and what waits")
    parser.add_argument("-f", "--format", choices=("table", "json"), default="table")


def _iso(moment: datetime) -> str:
    return moment.replace(microsecond=0, tzinfo=UTC).isoformat()


def _show(done: Sequence[dict[str, Any]], lines: Sequence[Waiting]) -> None:
    _table(("Done", "Count", "Last"), [(row["kind"], row["count"], row["last_at"]) for row in done])
    sys.stdout.write("\n")
    _table(
        ("Waiting", "Count", "Oldest", "Look"),
        [
            (
                line.what,
                line.count,
                "" if line.oldest_seconds is None else f"{line.oldest_seconds} s",
                "!" if line.look else "",
            )
            for line in lines
        ],
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    cells = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(head))]
    for n, row in enumerate(cells):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")
        if not n:
            sys.stdout.write("  ".join("-" * width for width in widths) + "\n")

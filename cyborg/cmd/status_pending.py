# SPDX-License-Identifier: Apache-2.0
"""``cyborg-status pending``: the self-heal actions of the conductors, and pending work.

Exit status 0: no item needs attention; 1: marked items need attention; 2: the database cannot be
read.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib import metadata
from typing import Any

from oslo_config import cfg

from cyborg.cmd.common import write_line, write_table
from cyborg.conductor.metrics import read_totals
from cyborg.core.binding.states import ArqState
from cyborg.core.errors import CyborgError
from cyborg.core.text import to_iso, to_text
from cyborg.db import engine, errors
from cyborg.db.totals.read import Counts, Totals, count


@dataclass(frozen=True, slots=True)
class PendingItem:
    """A kind of pending work: name, count, age of the oldest item, whether it needs attention."""

    name: str
    count: int
    oldest_seconds: int | None = None
    needs_attention: bool = False


def main(conf: cfg.ConfigOpts, argv: Sequence[str]) -> int:
    """Run the command with a configuration whose options are registered; return the exit status."""
    conf.register_cli_opt(cfg.SubCommandOpt("command", handler=_verbs))
    conf(list(argv), project="cyborg", prog="cyborg-status", version=metadata.version("cyborg"))
    try:
        with closing(engine.Reader(conf)) as reader:
            with reader.connect() as connection:
                counts = count(connection)
            now = reader.clock()
            # Without the connection above: it reads with one of its own.
            totals = read_totals(reader, now)
    except CyborgError as exc:
        sys.stderr.write(f"cyborg-status: {exc.message}\n")
        return 2
    except errors.FAILURES as exc:
        sys.stderr.write(f"cyborg-status: database error: {errors.reason(exc)}\n")
        return 2
    items = list(pending_items(conf, counts, totals, now))
    actions = [{**row, "last_at": to_iso(row["last_at"])} for row in totals.self_heal_actions]
    if conf.command.format == "json":
        document = {"actions": actions, "pending": [asdict(item) for item in items]}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        _print_tables(actions, items)
    return int(any(item.needs_attention for item in items))


def pending_items(
    conf: cfg.ConfigOpts, counts: Counts, totals: Totals, now: datetime
) -> Iterator[PendingItem]:
    """Yield the items of pending work in a fixed order.

    Messages, jobs and services give an item only if there are some; other items may have count 0.
    """

    def age(since: datetime | None) -> int | None:
        return None if since is None else max(0, int((now - since).total_seconds()))

    options = conf.conductor
    started = age(totals.oldest_bind_started)
    # After this time, a conductor should have rolled the bind back, or another one taken it over.
    late = started is not None and started > options.prepare_timeout + 2 * options.lease_timeout
    binding = counts.arqs.get(ArqState.BIND_STARTED, 0)
    yield PendingItem("requests in BindStarted", binding, started, needs_attention=late)
    orphans = counts.orphans_suspected
    yield PendingItem(
        "requests without an allocation (orphans?)", orphans, needs_attention=orphans > 0
    )
    yield PendingItem("requests whose instance's project is unknown", counts.owners_unverified)
    yield PendingItem("handles to be cleaned", counts.count_handles("dirty"))
    for messages in totals.outbox:
        yield PendingItem(
            f"messages {messages['kind']}, {messages['state']}",
            messages["count"],
            age(messages["oldest"]),
            needs_attention=messages["state"] == "dead",
        )
    for jobs in totals.jobs:
        yield PendingItem(f"jobs {jobs['kind']}, open", jobs["count"], age(jobs["oldest"]))
        if jobs["overdue"]:
            name = f"jobs {jobs['kind']}, past their deadline"
            yield PendingItem(name, jobs["overdue"], needs_attention=True)
    yield PendingItem("providers stale", totals.providers_stale, age(totals.oldest_stale))
    failing = totals.providers_failing
    yield PendingItem("providers whose publishing failed", failing, needs_attention=failing > 0)
    for (binary, state), number in sorted(totals.services.items()):
        if state != "up":
            yield PendingItem(
                f"services {binary}, {state}", number, needs_attention=state == "down"
            )


def _verbs(parsers: Any) -> None:
    # These two are only for the help: their own commands parse them.
    parsers.add_parser("upgrade", help="'upgrade check': check the prerequisites of this release")
    parsers.add_parser("convert-config", help="convert a file of OpenStack Cyborg")
    parser = parsers.add_parser("pending", help="show self-heal actions and pending work")
    parser.add_argument("-f", "--format", choices=("table", "json"), default="table")


def _print_tables(actions: Sequence[dict[str, Any]], items: Sequence[PendingItem]) -> None:
    rows = [(row["kind"], row["count"], to_text(row["last_at"])) for row in actions]
    write_table(("Action", "Count", "Last"), rows)
    write_line("")
    write_table(
        ("Item", "Count", "Oldest", "Attention"),
        [
            (
                item.name,
                item.count,
                "" if item.oldest_seconds is None else f"{item.oldest_seconds} s",
                "!" if item.needs_attention else "",
            )
            for item in items
        ],
    )

# SPDX-License-Identifier: Apache-2.0
"""``cyborg-dbsync import``: take over a database of OpenStack Cyborg."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from cyborg.cmd.common import require_schema, write_line, write_table
from cyborg.core.errors import Conflict, Invalid
from cyborg.core.migration import host_plan, import_plan
from cyborg.core.migration.import_plan import Drop, HostImport, UnknownUse, find_unserved_names
from cyborg.core.text import abbreviate
from cyborg.db import errors, unit_of_work
from cyborg.db.reference import reader, writer

# Characters of a reason below the table; ``-f json`` has all of it.
MAX_REASON = 160

# Dropped objects that are named below the table; ``-f json`` has all of them.
MAX_DROPS = 50


@dataclass(slots=True)
class ImportReport:
    """What an import has found, taken and dropped, as numbers by kind."""

    revision: str
    hosts: int = 0
    found: Counter[str] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)
    drops: list[Drop] = field(default_factory=list)
    # By the name of a device profile: the names that no device will have, with what to do.
    unserved: dict[str, Mapping[str, str]] = field(default_factory=dict)
    unknown_uses: list[UnknownUse] = field(default_factory=list)

    def present(self, kind: str) -> int:
        """Return how many objects had been taken by an earlier import."""
        return self.found[kind] - self.taken[kind] - self.dropped(kind)

    def dropped(self, kind: str) -> int:
        """Return how many objects are not taken."""
        return sum(drop.kind == kind for drop in self.drops)

    def check(self, planned: Mapping[str, int]) -> None:
        """Raise Conflict unless each row is planned to be taken, or dropped."""
        for kind in import_plan.KINDS:
            taken, dropped = planned.get(kind, 0), self.dropped(kind)
            if self.found[kind] != taken + dropped:
                raise Conflict(
                    f"the source has {self.found[kind]} rows of kind {kind}, of which {taken} are "
                    f"taken and {dropped} dropped: it was changed meanwhile. Stop the former "
                    "services and import again"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "revision": self.revision,
            "hosts": self.hosts,
            "objects": {
                kind: {
                    "found": self.found[kind],
                    "taken": self.taken[kind],
                    "present": self.present(kind),
                    "dropped": self.dropped(kind),
                }
                for kind in import_plan.KINDS
            },
            "dropped": [asdict(drop) for drop in self.drops],
            "unserved_profiles": [
                {"name": name, "missing": dict(missing)} for name, missing in self.unserved.items()
            ],
            "servers_of_unknown_devices": [asdict(use) for use in self.unknown_uses],
        }


def run(
    engine: sa.Engine, source_url: str, release: int | None, *, dry_run: bool, as_json: bool
) -> None:
    """Import a database and print what was taken.

    ``release`` is that of ``[conductor] reference_traits``, None for none.

    Raise Invalid for a URL that cannot be used, NotFound and Conflict for a source or a target that
    cannot be imported, and Unavailable if a database does not answer.
    """
    require_schema(engine, "target")
    source = _make_source(source_url)
    try:
        # Without options: these may differ for the same database.
        if source.url.set(query={}) == engine.url.set(query={}):
            raise Invalid("--from is the database of this service; expected the former one")
        with errors.translate(), source.connect() as connection:
            # Standard output must have nothing but the JSON document.
            progress = (lambda *_: None) if as_json else _show_progress
            report = import_database(connection, engine, progress, release, dry_run=dry_run)
    finally:
        source.dispose()
    if as_json:
        write_line(json.dumps(report.to_dict(), indent=2))
    else:
        _print_table(report, dry_run=dry_run)


def import_database(
    connection: sa.Connection,
    engine: sa.Engine,
    progress: Callable[[int, int, str], None],
    release: int | None = None,
    *,
    dry_run: bool,
) -> ImportReport:
    """Import the database of a connection, each host in a transaction of its own.

    ``progress`` is called before each host with its number, the number of hosts and its name. An
    import that was interrupted is continued by another one. With ``dry_run`` every transaction is
    rolled back.
    """
    uow = unit_of_work.UnitOfWork(engine)
    report = ImportReport(reader.check_revision(connection), found=reader.count_rows(connection))
    profile_rows, malformed = reader.read_profiles(connection)
    profiles, drops = import_plan.plan_profiles(profile_rows)
    planned = Counter({import_plan.PROFILE: len(profiles)})
    report.drops += [*malformed, *drops]
    # Before the hosts, whose requests refer to profiles.
    profile_ids = _write(
        uow,
        lambda tx: writer.write_profiles(tx, list(profiles.values())),
        report,
        dry_run=dry_run,
    )
    planner = host_plan.ImportPlanner(profiles)
    offered_names: set[str] = set()
    hosts = reader.read_hosts(connection)
    report.hosts = len(hosts)
    for number, (host, device_ids) in enumerate(hosts.items(), 1):
        progress(number, len(hosts), host)
        plan = planner.plan(host, reader.read_host(connection, device_ids))
        planned += plan.count_taken()
        offered_names |= plan.find_names()
        report.drops += plan.drops
        report.unknown_uses += plan.unknown_uses
        now = uow.clock()

        def work(tx: sa.Connection, plan: HostImport = plan, now: datetime = now) -> Any:
            ids = profile_ids
            if dry_run:
                # The profiles of the source were rolled back: they are inserted again.
                ids, _ = writer.write_profiles(tx, list(profiles.values()))
            return None, writer.write_host(tx, plan, ids, now)

        try:
            _write(uow, work, report, dry_run=dry_run)
        except errors.FAILURES as exc:
            raise Conflict(
                f"host {host} cannot be imported, and the hosts after it are not: the database "
                f"refuses its rows: {errors.reason(exc)}"
            ) from exc
    # Rows without a host are dropped, but counted: the report has each row of the source.
    plan = planner.plan("", reader.read_orphans(connection))
    report.drops += plan.drops
    report.unknown_uses += plan.unknown_uses
    # After all hosts: a source that is still in use shows by numbers that do not add up.
    report.check(planned)
    report.unserved = {
        profile.name: missing
        for profile in profiles.values()
        if (missing := find_unserved_names(profile.groups, offered_names, (), release))
    }
    return report


class _RolledBack(Exception):
    """The end of a transaction of a dry run; it has the result."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def _write(
    uow: unit_of_work.UnitOfWork,
    work: Callable[[sa.Connection], tuple[Any, Counter[str]]],
    report: ImportReport,
    *,
    dry_run: bool,
) -> Any:
    """Run a transaction and return its value; in a dry run roll it back.

    ``work`` returns the value, and the numbers of new objects, which are added to the report.
    """

    def run_and_roll_back(tx: sa.Connection) -> None:
        raise _RolledBack(work(tx))

    if dry_run:
        try:
            uow.run_once(run_and_roll_back)
        except _RolledBack as exc:
            value, counts = exc.result
    else:
        value, counts = uow.run(work)
    report.taken.update(counts)
    return value


def _make_source(text: str) -> sa.Engine:
    try:
        url = sa.make_url(text)
        # Without options of ours: the engine only reads, one statement after another.
        return sa.create_engine(url, poolclass=sa.NullPool)
    except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ImportError) as exc:
        raise Invalid(
            "--from is no URL of a database such as mysql+pymysql://user:password@host/cyborg: "
            f"{exc}"
        ) from exc


def _print_table(report: ImportReport, *, dry_run: bool) -> None:
    """Print the numbers by kind, then what is dropped or needs the operator."""
    verb = "would be taken" if dry_run else "taken"
    header = ("object", "found", verb, "there already", "dropped")
    rows = [
        (kind, report.found[kind], report.taken[kind], report.present(kind), report.dropped(kind))
        for kind in import_plan.KINDS
    ]
    write_table(header, rows, numbers=True)
    for drop in report.drops[:MAX_DROPS]:
        write_line(f"dropped {drop.kind} {drop.name}: {abbreviate(drop.reason, MAX_REASON)}")
    if (more := len(report.drops) - MAX_DROPS) > 0:
        write_line(f"{more} more dropped objects: -f json names all")
    for profile, missing in report.unserved.items():
        for name, remedy in missing.items():
            write_line(f"device profile {profile}: no device will have {name}: {remedy}")
    if report.unknown_uses:
        write_line(
            "servers whose devices are not known: stop or shelve them before the agents start"
        )
    for use in report.unknown_uses:
        write_line(
            f"host {use.host or 'unknown'}, device {use.address or 'unknown'}, server "
            f"{use.instance or 'unknown'} (request {use.arq})"
        )


def _show_progress(number: int, total: int, host: str) -> None:
    if number in (1, total) or number % 100 == 0:
        write_line(f"host {number} of {total}: {host}")

# SPDX-License-Identifier: Apache-2.0
"""``cyborg-dbsync``: upgrade the database to the schema of this release, or show its revision.

``upgrade`` leaves the contract migrations, which remove what daemons of the former release use, to
``contract``: see ``cyborg.db.migrate``.

``import`` takes over a database of OpenStack Cyborg: see ``cyborg.cmd.dbsync_import``. ``purge``
deletes old rows in batches, while the service runs. The sweeps of the conductors do the same by the
options of [conductor]. The command is for a database that has grown before, or whose rows an
operator wants to keep for a shorter time.

``sign-custody`` signs custody logs that were written without the present key. Conductors accept
only what has a signature of one of their keys. An operator who sets, or has lost, the key decides
with this command that the present logs, as far as their hashes fit, are genuine. One who gives up
the key removes all signatures; each log then has an event that says so.
"""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg

from cyborg import conf as options
from cyborg.cmd import configuration, dbsync_import
from cyborg.cmd.common import add_format, require_schema, wait_for_database, write_line
from cyborg.conf.options import reference_release
from cyborg.core.custody import Entry, Event, Log, SealedRecord, serialize_new, verify
from cyborg.core.errors import Conflict, CyborgError, Misconfigured
from cyborg.db import errors, migrate, old_rows, unit_of_work
from cyborg.db.custody import chains, read
from cyborg.db.custody import write as custody
from cyborg.db.engine import make_engine

WAIT = cfg.FloatOpt(
    "wait", default=60.0, min=0.0, help="Seconds to wait for a database that does not respond."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 1 with the reason on stderr."""
    verbs = cfg.SubCommandOpt("verb", handler=_verbs)
    try:
        conf = configuration.configure("cyborg-dbsync", options.DBSYNC_GROUPS, argv, (WAIT, verbs))
        if not conf.debug:
            # Their log lines would duplicate the output of this command.
            for name in ("alembic", "oslo_db"):
                logging.getLogger(name).setLevel(logging.ERROR)
        # Without statement timeouts: a migration of a large table can take long.
        engine = make_engine(conf, bounded=False)
        try:
            # In containers the database often starts at the same time.
            wait_for_database(engine, conf.wait)
            conf.verb.run(engine, conf)
        finally:
            engine.dispose()
    except (CyborgError, cfg.Error) as error:
        # The message of our own error often lacks that of the database driver.
        reason = errors.reason(error)
        details = "" if reason == str(error) else f": {reason}"
        sys.stderr.write(f"cyborg-dbsync: {error}{details}\n")
        return 1
    except errors.FAILURES as error:
        sys.stderr.write(f"cyborg-dbsync: database error: {errors.reason(error)}\n")
        return 1
    return 0


def _verbs(parsers: Any) -> None:
    """Add the parsers of all verbs; each sets ``run``, called with engine and configuration."""
    parser = parsers.add_parser("upgrade", help="apply the missing migrations")
    parser.add_argument("revision", nargs="?", default="head", help="target revision (head)")
    _add_offline(parser)
    parser.set_defaults(
        run=lambda engine, conf: migrate.upgrade(
            engine, conf.verb.revision, report=write_line, is_alone=conf.verb.offline
        )
    )
    parser = parsers.add_parser(
        "contract", help="apply the contract migrations that upgrade has left"
    )
    _add_offline(parser)
    parser.set_defaults(
        run=lambda engine, conf: migrate.contract(
            engine, report=write_line, is_alone=conf.verb.offline
        )
    )
    parser = parsers.add_parser("version", help="show the revision of the database")
    parser.set_defaults(run=lambda engine, conf: _version(engine))
    parser = parsers.add_parser(
        "stamp", help="set the revision of the database without a migration"
    )
    parser.add_argument("revision")
    parser.set_defaults(
        run=lambda engine, conf: migrate.stamp(engine, conf.verb.revision, report=write_line)
    )
    parser = parsers.add_parser("import", help="take over a database of OpenStack Cyborg")
    parser.add_argument(
        "--from", required=True, dest="source", metavar="URL", help="URL of the former database"
    )
    parser.add_argument("--dry-run", action="store_true", help="only show what would be taken")
    add_format(parser)
    parser.set_defaults(
        run=lambda engine, conf: dbsync_import.run(
            custody.attach(engine, custody.load(conf)),
            conf.verb.source,
            reference_release(conf),
            dry_run=conf.verb.dry_run,
            as_json=conf.verb.format == "json",
        )
    )
    _add_purge(parsers)
    _add_sign_custody(parsers)


def _add_offline(parser: Any) -> None:
    parser.add_argument(
        "--offline",
        action="store_true",
        help="no conductor and no API of an older release runs, or will run again",
    )


def _version(engine: sa.Engine) -> None:
    current, head = migrate.version(engine), migrate.head()
    if current == head:
        write_line(f"{current} (head)")
        return
    remain = ""
    # A newer release may have upgraded the database: its revision is shown all the same.
    if migrate.is_known(current) and not migrate.find_pending(engine).required:
        remain = "contract migrations remain, "
    write_line(f"{current or 'none'} ({remain}head is {head})")


# Kinds that are deleted only if they are named: an operator may still need them.
NAMED_ONLY = ("services", "tombstones")

DEFAULT_KINDS = tuple(kind for kind in old_rows.KINDS if kind not in NAMED_ONLY)
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


def _add_purge(parsers: Any) -> None:
    parser = parsers.add_parser("purge", help="delete old rows in batches")
    parser.add_argument(
        "--older-than", required=True, type=_parse_days, metavar="DAYS", help="age in days, from 1"
    )
    parser.add_argument(
        "--kind",
        action="append",
        choices=sorted(old_rows.KINDS),
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
    parser.set_defaults(run=_run_purge)


def _run_purge(engine: sa.Engine, conf: Any) -> None:
    """Purge, and print the numbers of rows. Raise Conflict for another revision."""
    arguments = conf.verb
    require_schema(engine, "database")
    with errors.translate():
        results = purge(
            unit_of_work.UnitOfWork(engine),
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
    uow: unit_of_work.UnitOfWork,
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
    # One time for all batches: otherwise the purge would follow the rows that get old meanwhile.
    cutoff = uow.clock() - age
    results = []
    # An operator may name a kind twice.
    for kind in dict.fromkeys(kinds):
        kind_rows = old_rows.KINDS[kind]
        found = uow.run(partial(kind_rows.count, cutoff=cutoff))
        result = PurgeResult(kind, found)
        results.append(result)
        limit = found if max_rows is None else min(found, max_rows)
        if dry_run:
            limit = 0
        shown_at, empty_batches = clock(), 0
        while result.deleted < limit:
            size = min(batch_size, limit - result.deleted)
            began = clock()
            deleted = uow.run(partial(kind_rows.purge, cutoff=cutoff, limit=size))
            result.deleted += deleted
            # A conductor may have deleted the same rows at the same time, but hardly each time.
            empty_batches = 0 if deleted else empty_batches + 1
            if empty_batches == MAX_FAILURES:
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


PAGE_SIZE = 500  # records, and heads, that are read together


@dataclass(slots=True)
class SignResult:
    """Numbers of chains and of new records that were signed, and why others were not."""

    chains: int = 0
    records: int = 0
    refused: list[str] = field(default_factory=list)

    def add(self, other: "SignResult") -> None:
        """Add the numbers of one transaction."""
        self.chains += other.chains
        self.records += other.records
        self.refused += other.refused


def _add_sign_custody(parsers: Any) -> None:
    parser = parsers.add_parser(
        "sign-custody", help="sign custody logs that were written without the key"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--replace", action="store_true", help="also those with a signature that does not fit"
    )
    group.add_argument(
        "--remove",
        action="store_true",
        help="remove all signatures, for conductors without a key, and record this in each log",
    )
    parser.set_defaults(run=_run_sign_custody)


def _run_sign_custody(engine: sa.Engine, conf: Any) -> None:
    """Sign all chains and new records, or remove the signatures."""
    keys = custody.load(conf)
    if conf.verb.remove:
        # Conductors that still have the key would refuse what has no signature.
        if keys.secrets:
            raise Misconfigured(
                "[conductor] custody_key_file is set, expected none: remove it from the "
                "configuration of all conductors, and restart them",
                option="[conductor] custody_key_file",
            )
        with errors.translate():
            result = remove_signatures(unit_of_work.UnitOfWork(engine))
        sys.stdout.write(
            f"removed the signatures of {result.chains} chains and {result.records} new records: "
            "nothing proves now that conductors wrote them\n"
        )
        return
    if not keys.secrets:
        raise Misconfigured(
            "[conductor] custody_key_file is not set: there is no key to sign with",
            option="[conductor] custody_key_file",
        )
    with errors.translate():
        uow = unit_of_work.UnitOfWork(custody.attach(engine, keys))
        result = sign_custody(uow, replace=conf.verb.replace)
    sys.stdout.write(f"signed {result.chains} chains and {result.records} new records\n")
    for line in result.refused:
        sys.stdout.write(f"not signed: {line}\n")
    if result.refused:
        raise Conflict(f"{len(result.refused)} chains or records were not signed")


def sign_custody(uow: unit_of_work.UnitOfWork, *, replace: bool) -> SignResult:
    """Sign the chains whose hashes fit, and the new records, that have no signature.

    With ``replace`` also those that have a signature which does not fit, or of an unknown key.
    """
    result = SignResult()
    after = ""
    while uuids := uow.run(partial(chains.next_devices, after=after, limit=PAGE_SIZE)):
        for uuid in uuids:
            result.add(uow.run(partial(_sign_chain, uuid=uuid, replace=replace)))
        after = uuids[-1]
    last_id = 0
    while rows := uow.run(partial(chains.new_records_after, last=last_id, limit=PAGE_SIZE)):
        result.add(uow.run(partial(_sign_new, rows=rows, replace=replace)))
        # By id, since signing does not take a record out of the list.
        last_id = rows[-1]["id"]
    return result


def remove_signatures(uow: unit_of_work.UnitOfWork) -> SignResult:
    """Remove the signatures of all chains and new records; record it in each of these chains."""
    result, after = SignResult(records=uow.run(chains.remove_new_signatures)), ""
    while removed := uow.run(partial(_remove_page, after=after, now=uow.clock())):
        result.chains += len(removed)
        after = removed[-1].device
    return result


def _remove_page(tx: sa.Connection, after: str, now: datetime) -> list[chains.Chain]:
    """Remove the signatures of the next chains, and record it; return the chains."""
    removed = chains.remove_signatures(tx, after, PAGE_SIZE)
    entries = [Entry(item.device, item.host, Event.SIGNATURES_REMOVED, {}) for item in removed]
    custody.add(tx, entries, now)
    return removed


def _sign_new(
    tx: sa.Connection, rows: Sequence[chains.UnsealedRow], *, replace: bool
) -> SignResult:
    """Sign new records that have no signature that fits."""
    keys = custody.keys_of(tx)
    refused: list[str] = []
    signatures: dict[int, str] = {}
    for row in rows:
        data = serialize_new(read.to_record(row))
        if (reason := keys.find_fault(data, row["signature"])) is None:
            continue
        if row["signature"] is not None and not replace:
            refused.append(f"record {row['uuid']}: {reason} (see --replace)")
        else:
            # Not empty: without keys the command does not get here.
            signatures[row["id"]] = keys.sign(data) or ""
    chains.save_signatures(tx, signatures)
    return SignResult(records=len(signatures), refused=refused)


def _sign_chain(tx: sa.Connection, uuid: str, *, replace: bool) -> SignResult:
    """Sign the chain of a device if it has no signature that fits."""
    # Conductors lock a head while they add to the chain; without waiting for them, one busy
    # chain does not hold up the others.
    locked = chains.lock_heads(tx, [uuid])
    if not locked:
        return _refuse(uuid, "its head is locked by another transaction: try again")
    (head,) = locked
    if (reason := chains.find_fault(tx, head)) is None:
        return SignResult()
    if head["signature"] is not None and not replace:
        return _refuse(uuid, f"{reason} (see --replace)")
    ends = read.to_head(head)
    # Equal heads: the lock keeps the chain as it is. Without keys: only the hashes must fit.
    log = Log(before=ends, records=_read(tx, uuid), after=ends)
    fault = verify(log, keys=None).fault
    if fault is not None:
        return _refuse(uuid, fault.explanation)
    chains.sign_head(tx, head)
    return SignResult(chains=1)


def _refuse(device: str, reason: str) -> SignResult:
    return SignResult(refused=[f"device {device}: {reason}"])


def _read(tx: sa.Connection, uuid: str) -> Iterator[SealedRecord]:
    after: int | None = None
    while page := read.sealed_after(tx, uuid, after, PAGE_SIZE):
        yield from page
        after = page[-1].record.sequence

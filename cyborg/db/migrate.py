# SPDX-License-Identifier: Apache-2.0
"""Schema migrations: upgrade a database to the schema of this release.

The migration scripts are part of the package. A lock in the database prevents two concurrent
upgrades: a named lock on MariaDB, MySQL and PostgreSQL, the write transaction on SQLite.

A migration with ``phase = "contract"`` removes what a former release uses. ``upgrade`` leaves those
at the end of the list to ``contract``, so that daemons of both releases can use the database
meanwhile. Either runs a contract migration only if no conductor and no API needs what it removes,
according to the last heartbeats.
"""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError

from cyborg.core.errors import Conflict, Invalid
from cyborg.core.text import join_limited
from cyborg.core.upgrade import SCHEMA, Daemon, Migration, find_blockers, split_contracts
from cyborg.db import errors, migrations
from cyborg.db.schema import services

# Callback that gets each progress line of an upgrade.
Report = Callable[[str], object]

# Alembic's ``op`` and ``context`` are global to the process.
_ALEMBIC = threading.Lock()
_SCRIPTS_DIR = str(Path(migrations.__file__).parent)

# Seconds to wait for another upgrade of the same database.
LOCK_SECONDS = 300

# The value of ``phase`` in a migration that removes something.
CONTRACT = "contract"

MAX_NAMED = 5  # daemons that one message names


@dataclass(frozen=True, slots=True)
class Pending:
    """Migrations that a database lacks, oldest first: those of ``upgrade``, then of ``contract``.

    ``current`` is the revision of the database. ``blockers`` are the daemons because of which the
    first contract migration cannot run yet.
    """

    current: str | None
    required: Sequence[Migration]
    contracts: Sequence[Migration]
    blockers: Sequence[Daemon] = ()


def _quiet(line: str) -> None:
    pass


def head() -> str:
    """Return the revision of this release's schema."""
    return _scripts().get_current_head() or ""


def version(engine: sa.Engine) -> str | None:
    """Return the database's revision, None if it has none. Raise Unavailable."""
    with errors.translate(), engine.connect() as connection:
        return _current(connection)


def is_known(revision: str | None) -> bool:
    """Return whether this release knows a revision, or there is none."""
    return revision is None or _find(_scripts(), revision) is not None


def find_pending(engine: sa.Engine) -> Pending:
    """Return the migrations that a database lacks. Raise Conflict and Unavailable."""
    scripts = _scripts()
    with errors.translate(), engine.connect() as connection:
        pending = _find_pending(scripts, connection, _resolve(scripts, "head"))
        if not pending.contracts:
            return pending
        supporting = _find_supporting(scripts, pending.contracts[0].revision)
        blockers = find_blockers(read_daemons(connection), supporting)
    return Pending(pending.current, pending.required, pending.contracts, blockers)


def requires_upgrade(engine: sa.Engine) -> bool:
    """Return whether this release cannot work with the database. Raise Unavailable."""
    try:
        return bool(find_pending(engine).required)
    except Conflict:
        return False  # a newer release has upgraded it


def read_daemons(connection: sa.Connection) -> list[Daemon]:
    """Return all daemons that have sent a heartbeat, by host."""
    query = sa.select(services.c.binary, services.c.host, services.c.versions)
    found = connection.execute(query.order_by(services.c.host, services.c.binary))
    return [
        Daemon(row.binary, row.host, _text(row.versions, "rpc"), _text(row.versions, SCHEMA))
        for row in found
    ]


def upgrade(
    engine: sa.Engine, revision: str = "head", report: Report = _quiet, *, is_alone: bool = False
) -> str:
    """Run the migrations up to a revision; return this revision.

    "head" leaves the last contract migrations to ``contract``. ``report`` is called with each line
    of the progress. ``is_alone``: no other process uses the database, whatever its heartbeats say.

    Do nothing if the database is at this revision or a later one. Raise Invalid for an unknown
    revision, Conflict if a newer release upgraded the database, a daemon needs what a migration
    removes, or another upgrade does not end, and Unavailable if the database is down.
    """
    scripts = _scripts()
    goal = _resolve(scripts, revision)
    return _run(engine, scripts, goal, report, leaves=revision == "head", is_alone=is_alone)


def contract(engine: sa.Engine, report: Report = _quiet, *, is_alone: bool = False) -> str:
    """Run the contract migrations that ``upgrade`` has left; return the revision.

    ``is_alone`` is that of ``upgrade``. Raise Conflict if the database lacks other migrations, and
    the errors of ``upgrade``.
    """
    scripts = _scripts()
    goal = _resolve(scripts, "head")
    with errors.translate(), engine.connect() as connection:
        pending = _find_pending(scripts, connection, goal)
    if pending.required:
        raise Conflict(
            f"the database is at revision {pending.current or 'none'}: run 'cyborg-dbsync upgrade' "
            "first"
        )
    return _run(engine, scripts, goal, report, is_alone=is_alone)


def _run(
    engine: sa.Engine,
    scripts: ScriptDirectory,
    goal: str,
    report: Report,
    *,
    leaves: bool = False,
    is_alone: bool = False,
) -> str:
    """Run the migrations up to a revision; ``leaves``: but for the contract migrations at the end.

    Return the revision that was reached.
    """

    def find_steps(connection: sa.Connection) -> tuple[Sequence[Migration], str, int]:
        """Return the migrations to run, the revision after them, and how many remain."""
        pending = _find_pending(scripts, connection, goal)
        # In a new database no daemon has worked.
        if not leaves or pending.current is None or not pending.contracts:
            return [*pending.required, *pending.contracts], goal, 0
        end = pending.required[-1].revision if pending.required else pending.current
        return pending.required, end, len(pending.contracts)

    with errors.translate():
        with engine.connect() as connection:
            steps, end, num_remaining = find_steps(connection)
        if steps:
            with _upgrade_lock(engine, report), engine.begin() as connection:
                # Read again under the lock: another upgrade may have just ended.
                steps, end, num_remaining = find_steps(connection)
                if not is_alone:
                    _check_blockers(scripts, connection, steps)
                if steps:
                    report(f"{len(steps)} migration(s) to run.")
                    with _ALEMBIC:
                        command.upgrade(_config(connection, report), end)
    report(f"The database is at {end}" + ("." if steps else " or later: nothing to do."))
    if num_remaining:
        report(
            f"{num_remaining} contract migration(s) remain: run 'cyborg-dbsync contract' when all "
            "daemons have this release."
        )
    return end


def _check_blockers(
    scripts: ScriptDirectory, connection: sa.Connection, steps: Sequence[Migration]
) -> None:
    """Raise Conflict if a daemon uses what one of the migrations removes."""
    # No guard in the migration itself: DDL is not part of a transaction on MariaDB.
    if _current(connection) is None or not any(step.contracts for step in steps):
        return
    daemons = read_daemons(connection)
    for step in (step for step in steps if step.contracts):
        if blockers := find_blockers(daemons, _find_supporting(scripts, step.revision)):
            raise Conflict(
                f"migration {step.revision} removes what daemons of an older release use: "
                f"{join_limited(list(map(str, blockers)), MAX_NAMED)}. Upgrade them, or remove "
                "those that left with 'cyborg service-delete', and retry; with all conductors and "
                "APIs stopped, use --offline"
            )


def stamp(engine: sa.Engine, revision: str, report: Report = _quiet) -> str:
    """Record that the database is at a revision, without running migrations; return it.

    This is for a database whose tables were created in another way. Raise the errors of
    ``upgrade``.
    """
    scripts = _scripts()
    goal = _resolve(scripts, revision)
    with errors.translate(), _upgrade_lock(engine, report), engine.begin() as connection, _ALEMBIC:
        # ``purge`` also replaces a revision that this release does not know.
        command.stamp(_config(connection, report), goal, purge=True)
    report(f"The database is marked as being at {goal}.")
    return goal


def _scripts() -> ScriptDirectory:
    return ScriptDirectory(_SCRIPTS_DIR)


def _current(connection: sa.Connection) -> str | None:
    found: str | None = MigrationContext.configure(connection).get_current_revision()
    return found


def _resolve(scripts: ScriptDirectory, revision: str) -> str:
    found = _find(scripts, revision)
    if found is None:
        revisions = ", ".join(script.revision for script in scripts.walk_revisions())
        raise Invalid(
            f"unknown revision {revision!r}, expected head or one of {revisions}", field="revision"
        )
    return found


def _find(scripts: ScriptDirectory, revision: str) -> str | None:
    try:
        found = scripts.get_revision(revision) if revision else None
    except CommandError:
        return None
    return None if found is None else str(found.revision)


def _find_pending(scripts: ScriptDirectory, connection: sa.Connection, goal: str) -> Pending:
    """Return the migrations from the revision of a database to ``goal``.

    There are none if ``goal`` is not newer. Raise Conflict.
    """
    current = _current(connection)
    if current is not None and _find(scripts, current) is None:
        raise Conflict(
            f"database revision {current} is unknown to this release: a newer release upgraded the "
            "database. A migration cannot be undone: install that release again, or restore the "
            "backup that was made before the upgrade"
        )
    # Not by comparing revisions: they are random, and only the scripts have an order.
    passed = (
        {script.revision for script in scripts.iterate_revisions(current, "base")}
        if current is not None
        else frozenset()
    )
    missing = [
        Migration(script.revision, getattr(script.module, "phase", None) == CONTRACT)
        for script in scripts.iterate_revisions(goal, "base")
        if script.revision not in passed
    ]
    required, contracts = split_contracts(missing[::-1])
    return Pending(current, required, contracts)


def _find_supporting(scripts: ScriptDirectory, revision: str) -> frozenset[str]:
    """Return the revisions from this one on: their releases do without what it removes."""
    later = scripts.iterate_revisions("head", revision)
    return frozenset(script.revision for script in later) | {revision}


def _text(versions: Any, key: str) -> str | None:
    value = versions.get(key) if isinstance(versions, dict) else None
    return None if value is None else str(value)


def _config(connection: sa.Connection, report: Report) -> Config:
    # ``migrations/env.py`` reads the callback and the connection from the attributes.
    def applied(step: Any, **options: Any) -> None:
        if step.is_upgrade and not step.is_stamp:
            report(f"Done: {step.up_revision_id}, {step.up_revision.doc}")

    config = Config()
    # ConfigParser would read a per cent sign in the path as a reference.
    config.set_main_option("script_location", _SCRIPTS_DIR.replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes.update(connection=connection, applied=applied)
    return config


@contextlib.contextmanager
def _upgrade_lock(engine: sa.Engine, report: Report) -> Iterator[None]:
    """Hold the database's lock for upgrades, on a connection without a transaction."""
    if engine.dialect.name == "sqlite":
        yield
        return
    name_hash = hashlib.sha256(f"cyborg-dbsync {engine.url.database}".encode())
    with engine.connect() as raw:
        connection = raw.execution_options(isolation_level="AUTOCOMMIT")
        try:
            if engine.dialect.name == "postgresql":
                # PostgreSQL's advisory locks are 64-bit numbers and belong to one database.
                number = int.from_bytes(name_hash.digest()[:8], "big", signed=True)
                key = sa.literal(number, sa.BigInteger)
                connection.execute(sa.text(f"SET lock_timeout = '{LOCK_SECONDS}s'"))
                try_lock = sa.func.pg_try_advisory_lock(key)
                wait_lock = sa.func.pg_advisory_lock(key)
            else:
                # MySQL's locks have names of up to 64 characters and belong to the whole server.
                name = name_hash.hexdigest()
                try_lock = sa.func.get_lock(name, 0)
                wait_lock = sa.func.get_lock(name, LOCK_SECONDS)
            if not connection.scalar(sa.select(try_lock)):
                report("Waiting for another upgrade of this database.")
                if not _wait_for_lock(connection, wait_lock):
                    raise Conflict(
                        f"another upgrade of this database did not end in {LOCK_SECONDS} s, retry"
                    )
            yield
        finally:
            # Closing the connection releases the lock in every case.
            connection.invalidate()


def _wait_for_lock(connection: sa.Connection, wait_lock: sa.Function[Any]) -> bool:
    """Wait for the lock and return whether it was acquired."""
    # At the lock timeout MySQL returns 0, and PostgreSQL fails with a transient error. NULL is an
    # error of GET_LOCK, as when an administrator kills the statement. With the lock MySQL returns
    # 1, and PostgreSQL the void value, an empty text.
    try:
        return connection.scalar(sa.select(wait_lock)) not in (0, None)
    except errors.FAILURES as error:
        if errors.is_transient(error):
            return False
        raise

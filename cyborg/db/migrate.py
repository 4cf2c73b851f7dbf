# SPDX-License-Identifier: Apache-2.0
"""Schema migrations: upgrade a database to the schema of this release.

The migration scripts are part of the package. A lock in the database prevents two concurrent
upgrades: a named lock on MariaDB, MySQL and PostgreSQL, the write transaction on SQLite.
"""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError

from cyborg.core.errors import Conflict, Invalid
from cyborg.db import errors, migrations

# Callback that gets each progress line of an upgrade.
Report = Callable[[str], object]

# Alembic's ``op`` and ``context`` are global to the process.
_ALEMBIC = threading.Lock()
_SCRIPTS_DIR = str(Path(migrations.__file__).parent)

# Seconds to wait for another upgrade of the same database.
LOCK_SECONDS = 300


def _quiet(line: str) -> None:
    pass


def head() -> str:
    """Return the revision of this release's schema."""
    return _scripts().get_current_head() or ""


def version(engine: sa.Engine) -> str | None:
    """Return the database's revision, None if it has none. Raise Unavailable."""
    with errors.translate(), engine.connect() as connection:
        return _current(connection)


def upgrade(engine: sa.Engine, revision: str = "head", report: Report = _quiet) -> str:
    """Run the migrations up to a revision; return this revision.

    ``report`` is called with each line of the progress.

    Do nothing if the database is at this revision or a later one. Raise Invalid for an unknown
    revision, Conflict if a newer release upgraded the database or another upgrade does not end,
    and Unavailable if the database is down.
    """
    scripts = _scripts()
    goal = _resolve(scripts, revision)
    with errors.translate():
        with engine.connect() as connection:
            if not _missing(scripts, _current(connection), goal):
                report(f"The database is at {goal} or later: nothing to do.")
                return goal
        with _upgrade_lock(engine, report), engine.begin() as connection:
            # Read again under the lock: another upgrade may have just ended.
            steps = _missing(scripts, _current(connection), goal)
            report(f"{len(steps)} migration(s) to run.")
            with _ALEMBIC:
                command.upgrade(_config(connection, report), goal)
    report(f"The database is at {goal}.")
    return goal


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


def _missing(scripts: ScriptDirectory, current: str | None, goal: str) -> list[str]:
    """Return the revisions to run, newest first, to upgrade from ``current`` to ``goal``.

    Return none if ``goal`` is not newer than ``current``.
    """
    if current is None:
        return [script.revision for script in scripts.iterate_revisions(goal, "base")]
    if _find(scripts, current) is None:
        raise Conflict(
            f"database revision {current} is unknown to this release: a newer release upgraded the "
            "database. A migration cannot be undone: install that release again, or restore the "
            "backup that was made before the upgrade"
        )
    # Not by comparing revisions: they are random, and only the scripts have an order.
    passed = {script.revision for script in scripts.iterate_revisions(current, "base")}
    steps = (script.revision for script in scripts.iterate_revisions(goal, "base"))
    return [step for step in steps if step not in passed]


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

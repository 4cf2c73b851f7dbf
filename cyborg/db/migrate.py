# SPDX-License-Identifier: Apache-2.0
"""Bringing a database to the schema of this release, one step after another.

The steps are packaged with the code, so that no file outside of it is needed. Two upgrades of one
database at once are kept apart by the database: a named lock on MariaDB, MySQL and PostgreSQL, the
write transaction on SQLite.
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
from cyborg.db import migrations, trouble

Report = Callable[[str], object]
"""Takes a line that tells how far an upgrade is."""

# What a step calls (``op``, ``context``) is one for the whole process.
_ALEMBIC = threading.Lock()
_HOME = str(Path(migrations.__file__).parent)

LOCK_SECONDS = 300
"""How long an upgrade waits for another one on the same database."""


def _quiet(line: str) -> None:
    pass


def head() -> str:
    """Return the revision of this release's schema."""
    return _scripts().get_current_head() or ""


def version(engine: sa.Engine) -> str | None:
    """Return the revision that the database is at, None if it has none; raises Unavailable."""
    with trouble.explained(), engine.connect() as connection:
        return _current(connection)


def upgrade(engine: sa.Engine, revision: str = "head", report: Report = _quiet) -> str:
    """Take the steps up to a revision and return it; ``report`` gets a line for each.

    Does nothing, and fast, when the database is there or further. Raises Invalid for a revision
    that is none of ours, Conflict when a newer release made the database or another upgrade does
    not end, Unavailable when the database is away.
    """
    scripts = _scripts()
    goal = _resolve(scripts, revision)
    with trouble.explained():
        with engine.connect() as connection:
            if not _missing(scripts, _current(connection), goal):
                report(f"The database is at {goal} or further: nothing to do.")
                return goal
        with _alone(engine, report), engine.begin() as connection:
            # Again, now that nobody else is at it.
            steps = _missing(scripts, _current(connection), goal)
            report(f"{len(steps)} step(s) to take.")
            with _ALEMBIC:
                command.upgrade(_config(connection, report), goal)
    report(f"The database is at {goal}.")
    return goal


def stamp(engine: sa.Engine, revision: str, report: Report = _quiet) -> str:
    """Write down that the database is at a revision, without taking any step; return it.

    For a database whose tables were made in another way. Raises as ``upgrade`` does.
    """
    scripts = _scripts()
    goal = _resolve(scripts, revision)
    with trouble.explained(), _alone(engine, report), engine.begin() as connection, _ALEMBIC:
        # Also from a revision that this release does not know: that is what it is for.
        command.stamp(_config(connection, report), goal, purge=True)
    report(f"The database is marked as being at {goal}.")
    return goal


def _scripts() -> ScriptDirectory:
    return ScriptDirectory(_HOME)


def _current(connection: sa.Connection) -> str | None:
    found: str | None = MigrationContext.configure(connection).get_current_revision()
    return found


def _resolve(scripts: ScriptDirectory, revision: str) -> str:
    found = _find(scripts, revision)
    if found is None:
        known = ", ".join(script.revision for script in scripts.walk_revisions())
        raise Invalid(
            f"{revision!r} is no revision: expected head or one of {known}", field="revision"
        )
    return found


def _find(scripts: ScriptDirectory, revision: str) -> str | None:
    try:
        found = scripts.get_revision(revision) if revision else None
    except CommandError:
        return None
    return None if found is None else str(found.revision)


def _missing(scripts: ScriptDirectory, current: str | None, goal: str) -> list[str]:
    """Return the steps, last first, from one revision to another; none when it is past it."""
    if current is None:
        return [script.revision for script in scripts.iterate_revisions(goal, "base")]
    if _find(scripts, current) is None:
        raise Conflict(
            f"the database is at revision {current}, which this release does not know: a newer "
            "release has upgraded it"
        )
    passed = {script.revision for script in scripts.iterate_revisions(current, "base")}
    steps = (script.revision for script in scripts.iterate_revisions(goal, "base"))
    return [step for step in steps if step not in passed]


def _config(connection: sa.Connection, report: Report) -> Config:
    def applied(step: Any, **more: Any) -> None:
        if step.is_upgrade and not step.is_stamp:
            report(f"Done: {step.up_revision_id}, {step.up_revision.doc}")

    config = Config()
    # ConfigParser would read a per cent sign in the path as a reference.
    config.set_main_option("script_location", _HOME.replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes.update(connection=connection, applied=applied)
    return config


@contextlib.contextmanager
def _alone(engine: sa.Engine, report: Report) -> Iterator[None]:
    """Hold the database's lock for upgrades, on a connection that no transaction can spoil."""
    if engine.dialect.name == "sqlite":
        yield
        return
    name = hashlib.sha256(f"cyborg-dbsync {engine.url.database}".encode())
    with engine.connect() as plain:
        connection = plain.execution_options(isolation_level="AUTOCOMMIT")
        try:
            if engine.dialect.name == "postgresql":
                # Its locks have numbers of 64 bits and belong to one database.
                number = int.from_bytes(name.digest()[:8], "big", signed=True)
                key = sa.literal(number, sa.BigInteger)
                connection.execute(sa.text(f"SET lock_timeout = '{LOCK_SECONDS}s'"))
                take, wait = sa.func.pg_try_advisory_lock(key), sa.func.pg_advisory_lock(key)
            else:
                # Its locks have names of at most 64 characters and belong to the whole server.
                text = name.hexdigest()
                take, wait = sa.func.get_lock(text, 0), sa.func.get_lock(text, LOCK_SECONDS)
            if not connection.scalar(sa.select(take)):
                report("Another upgrade of this database is at work: waiting for it.")
                if not _got(connection, wait):
                    raise Conflict("another upgrade of this database does not come to its end")
            yield
        finally:
            # The lock goes with the connection, whatever has happened to it.
            connection.invalidate()


def _got(connection: sa.Connection, wait: sa.Function[Any]) -> bool:
    """Wait for the lock and tell whether it is ours: PostgreSQL says so by raising nothing."""
    try:
        return connection.scalar(sa.select(wait)) != 0
    except trouble.FAILURES as error:
        if trouble.is_transient(error):
            return False
        raise

# SPDX-License-Identifier: Apache-2.0
"""Expand and contract migrations: which run, and which wait for daemons of a former release."""

import contextlib
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Conflict, Unavailable
from cyborg.core.upgrade import SCHEMA
from cyborg.db import engine as engines
from cyborg.db import migrate, schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import SERVERS, engine_of, fresh_database
from cyborg.tests.fixtures.upgrade import compatibility
from cyborg.tests.fixtures.upgrade.next_release import CONTRACTION, EXPANSION, add_migrations

NOW = datetime(2026, 1, 1)


@pytest.fixture
def following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next release follow: it adds the column ``note`` of services, and drops another."""
    folder = tmp_path / "migrations"
    shutil.copytree(Path(migrate.__file__).parent / "migrations", folder)
    add_migrations(folder / "versions", schema.REVISION)
    monkeypatch.setattr(migrate, "_SCRIPTS_DIR", str(folder))


def add_daemon(engine: sa.Engine, binary: str, revision: str | None) -> None:
    versions = {} if revision is None else {SCHEMA: revision}
    values = {"host": "h", "epoch": "e", "status": "READY", "versions": versions}
    times = {"started_at": NOW, **rows.heartbeat(NOW)}
    rows.insert(engine, schema.services, binary=binary, **values, **times)


def columns(engine: sa.Engine) -> set[str]:
    return {column["name"] for column in sa.inspect(engine).get_columns("services")}


def test_revision_of_the_schema_is_that_of_the_last_migration() -> None:
    assert migrate.head() == schema.REVISION


@pytest.fixture
def upgraded(tmp_path: Path) -> Iterator[sa.Engine]:
    """Yield an engine of a database of this release on SQLite, which the test may change."""
    with engine_of(f"sqlite:///{tmp_path}/cyborg.db") as engine:
        migrate.upgrade(engine)
        yield engine


@pytest.mark.usefixtures("following")
def test_new_database_gets_all_migrations(empty_engine: sa.Engine) -> None:
    assert migrate.upgrade(empty_engine) == CONTRACTION
    assert not migrate.find_pending(empty_engine).contracts


def test_upgrade_that_another_one_overtakes_reports_its_end(
    upgraded: sa.Engine, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue("following")
    lock = migrate._upgrade_lock

    @contextlib.contextmanager
    def overtaken(engine: sa.Engine, report: migrate.Report) -> Iterator[None]:
        monkeypatch.setattr(migrate, "_upgrade_lock", lock)
        migrate.upgrade(engine)
        migrate.contract(engine)
        with lock(engine, report):
            yield

    monkeypatch.setattr(migrate, "_upgrade_lock", overtaken)
    lines: list[str] = []
    assert migrate.upgrade(upgraded, report=lines.append) == CONTRACTION
    assert lines[-1] == f"The database is at {CONTRACTION} or later: nothing to do."


def test_upgrade_leaves_the_contract_migration(
    empty_engine: sa.Engine, request: pytest.FixtureRequest
) -> None:
    engine = empty_engine
    migrate.upgrade(engine)
    request.getfixturevalue("following")
    lines: list[str] = []
    assert migrate.upgrade(engine, report=lines.append) == EXPANSION
    assert [line for line in lines if "1 contract migration(s) remain" in line] == [lines[-1]]
    assert {"note", "endpoint"} <= columns(engine)
    assert migrate.upgrade(engine, report=lines.append) == EXPANSION
    assert "nothing to do" in lines[-2]
    pending = migrate.find_pending(engine)
    assert [step.revision for step in pending.contracts] == [CONTRACTION]
    assert pending.blockers == []
    assert migrate.contract(engine) == CONTRACTION
    assert "endpoint" not in columns(engine)
    assert migrate.contract(engine) == CONTRACTION


def test_daemon_waits_for_the_migrations_that_it_requires(
    upgraded: sa.Engine, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.check(upgraded, migrate.requires_upgrade)
    request.getfixturevalue("following")
    monkeypatch.setattr(engines, "REVISION", CONTRACTION)
    with pytest.raises(Unavailable, match=f"{schema.REVISION}, .* run 'cyborg-dbsync upgrade'"):
        engines.check(upgraded, migrate.requires_upgrade)
    migrate.upgrade(upgraded)
    engines.check(upgraded, migrate.requires_upgrade)
    migrate.contract(upgraded)
    engines.check(upgraded, migrate.requires_upgrade)
    with upgraded.begin() as tx:
        tx.execute(sa.text(f"UPDATE {engines.REVISIONS} SET version_num = 'of a newer release'"))
    engines.check(upgraded, migrate.requires_upgrade)


@pytest.mark.parametrize("binary", ["cyborg-conductor", "cyborg-api"])
@pytest.mark.parametrize("revision", [schema.REVISION, None, "unknown"])
def test_contract_waits_for_a_daemon_of_the_former_release(
    upgraded: sa.Engine, request: pytest.FixtureRequest, binary: str, revision: str | None
) -> None:
    request.getfixturevalue("following")
    migrate.upgrade(upgraded)
    add_daemon(upgraded, "cyborg-agent", None)
    add_daemon(upgraded, binary, revision)
    for _ in range(2):
        with pytest.raises(Conflict, match=f"{binary} of host h"):
            migrate.contract(upgraded)
        # A revision that is named gets no other treatment.
        with pytest.raises(Conflict, match=f"{binary} of host h"):
            migrate.upgrade(upgraded, CONTRACTION)
    assert [str(row) for row in migrate.find_pending(upgraded).blockers] == [f"{binary} of host h"]
    assert "endpoint" in columns(upgraded)
    with upgraded.begin() as tx:
        known = {SCHEMA: CONTRACTION}
        change = sa.update(schema.services).where(schema.services.c.binary == binary)
        tx.execute(change.values(versions=known))
    assert migrate.contract(upgraded) == CONTRACTION


def test_contract_before_an_expand_migration_waits_too(
    upgraded: sa.Engine, request: pytest.FixtureRequest
) -> None:
    """A release may be skipped only when no daemon runs."""
    request.getfixturevalue("following")
    folder = Path(migrate._SCRIPTS_DIR) / "versions"
    later = (folder / "v900_note.py").read_text().replace(schema.REVISION, CONTRACTION)
    later = later.replace(EXPANSION, "e0000000000d").replace("note", "later")
    (folder / "v902_later.py").write_text(later)
    add_daemon(upgraded, "cyborg-conductor", schema.REVISION)
    with pytest.raises(Conflict, match="cyborg-conductor of host h"):
        migrate.upgrade(upgraded)
    assert "note" not in columns(upgraded)
    with pytest.raises(Conflict, match="run 'cyborg-dbsync upgrade' first"):
        migrate.contract(upgraded)
    # The stand-alone service has stopped what sent the heartbeat.
    assert migrate.upgrade(upgraded, is_alone=True) == "e0000000000d"
    assert {"note", "later"} <= columns(upgraded)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["sqlite", *(pytest.param(kind, marks=pytest.mark.services) for kind in SERVERS)]
)
def test_expand_migrations_remove_nothing(kind: str, tmp_path: Path) -> None:
    """Conductors of the former release work with the new schema."""
    scripts = list(migrate._scripts().walk_revisions())[::-1]
    with fresh_database(kind, tmp_path) as url, engine_of(url) as engine:
        former: compatibility.Tables = {}
        for script in scripts:
            migrate.upgrade(engine, script.revision)
            present = compatibility.reflect(engine)
            if getattr(script.module, "phase", None) != migrate.CONTRACT:
                breaks = compatibility.find_schema_breaks(former, present)
                assert breaks == [], script.path
            former = present


def test_unknown_phase_of_a_migration_is_found() -> None:
    """A misspelled phase would let the migration run while the former release works."""
    for script in migrate._scripts().walk_revisions():
        assert getattr(script.module, "phase", "expand") in ("expand", migrate.CONTRACT)

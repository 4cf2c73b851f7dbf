# SPDX-License-Identifier: Apache-2.0
"""Tests of migrations: they create the tables of the schema, on every database."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.dialects import mysql

from cyborg.core.errors import Conflict, Invalid
from cyborg.db import migrate, schema
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.databases import SERVERS, engine_of, fresh_database

HEAD = migrate.head()


def _same_type(
    context: Any, reflected: Any, column: Any, actual: Any, expected: Any
) -> bool | None:
    # MariaDB keeps JSON as LONGTEXT with a check that the text is JSON.
    if isinstance(expected, sa.JSON) and isinstance(actual, mysql.LONGTEXT):
        return False
    return None


def _tables(engine: sa.Engine) -> dict[str, Any]:
    """Return the reflected tables of a database."""
    inspector = sa.inspect(engine)

    def stable(rows: list[Any]) -> list[str]:
        return sorted(repr(sorted(row.items(), key=str)) for row in rows)

    return {
        name: {
            "columns": [
                {**column, "type": repr(column["type"])} for column in inspector.get_columns(name)
            ],
            "primary": inspector.get_pk_constraint(name),
            "unique": stable(inspector.get_unique_constraints(name)),
            "indexes": stable(inspector.get_indexes(name)),
            "references": stable(inspector.get_foreign_keys(name)),
            "checks": stable(inspector.get_check_constraints(name)),
            "options": inspector.get_table_options(name),
        }
        for name in sorted(inspector.get_table_names())
        if name != "alembic_version"
    }


@pytest.mark.slow
def test_upgrade_matches_the_models(empty_engine: sa.Engine) -> None:
    migrate.upgrade(empty_engine)
    with empty_engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": _same_type, "compare_server_default": True}
        )
        assert compare_metadata(context, schema.metadata) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["sqlite", *(pytest.param(kind, marks=pytest.mark.services) for kind in SERVERS)]
)
def test_upgrade_and_create_all_give_equal_tables(kind: str, tmp_path: Any) -> None:
    with (
        fresh_database(kind, tmp_path) as first_url,
        fresh_database(kind, tmp_path) as second_url,
        engine_of(first_url) as migrated,
        engine_of(second_url) as created,
    ):
        migrate.upgrade(migrated)
        schema.metadata.create_all(created)
        left, right = _tables(migrated), _tables(created)
    assert left.keys() == right.keys()
    for name, facts in left.items():
        assert facts == right[name], name


def test_second_upgrade_does_nothing_in_two_statements(empty_engine: sa.Engine) -> None:
    lines: list[str] = []
    assert migrate.version(empty_engine) is None
    assert migrate.upgrade(empty_engine, report=lines.append) == HEAD
    assert any(HEAD in line and "Done" in line for line in lines)
    assert migrate.version(empty_engine) == HEAD
    with count_statements(empty_engine) as count:
        assert migrate.upgrade(empty_engine, report=lines.append) == HEAD
    assert len(count) <= 2, count.statements
    assert "nothing to do" in lines[-1]


def test_concurrent_upgrades_run_each_migration_once(empty_engine: sa.Engine) -> None:
    lines: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(migrate.upgrade, empty_engine, report=lines.append) for _ in range(2)
        ]
    assert [future.result() for future in futures] == [HEAD, HEAD]
    assert len([line for line in lines if line.startswith("Done")]) == 1


def test_killed_wait_for_the_lock_does_not_have_it(sqlite_engine: sa.Engine) -> None:
    with sqlite_engine.connect() as connection:
        assert not migrate._wait_for_lock(connection, sa.func.nullif(1, 1))
        assert migrate._wait_for_lock(connection, sa.func.nullif(1, 0))


def test_failed_migration_releases_the_lock(empty_engine: sa.Engine) -> None:
    with empty_engine.begin() as tx:
        tx.execute(sa.text("CREATE TABLE services (id INTEGER)"))
    with pytest.raises(Exception, match="services"):
        migrate.upgrade(empty_engine)
    with empty_engine.begin() as tx:
        left = sa.MetaData()
        left.reflect(tx)
        left.drop_all(tx)
    assert migrate.upgrade(empty_engine) == HEAD


def test_stamp_runs_no_migration(empty_engine: sa.Engine) -> None:
    assert migrate.stamp(empty_engine, "head") == HEAD
    assert migrate.version(empty_engine) == HEAD
    assert sa.inspect(empty_engine).get_table_names() == ["alembic_version"]


def test_upgrade_of_a_newer_database_is_rejected(sqlite_engine: sa.Engine) -> None:
    migrate.stamp(sqlite_engine, HEAD)
    with sqlite_engine.begin() as tx:
        tx.execute(sa.text("UPDATE alembic_version SET version_num = 'ffffffffffff'"))
    with pytest.raises(Conflict, match="newer release"):
        migrate.upgrade(sqlite_engine)
    assert migrate.version(sqlite_engine) == "ffffffffffff"
    assert migrate.stamp(sqlite_engine, HEAD) == HEAD


@pytest.mark.parametrize("revision", ["nope", "", "base", "-1", "+1", "0" * 300])
def test_unknown_revision_is_rejected(sqlite_engine: sa.Engine, revision: str) -> None:
    for verb in (migrate.upgrade, migrate.stamp):
        with pytest.raises(Invalid, match="expected head or one of") as raised:
            verb(sqlite_engine, revision)
        assert raised.value.details["field"] == "revision"
    assert sa.inspect(sqlite_engine).has_table("alembic_version") is False

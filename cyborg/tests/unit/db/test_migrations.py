# SPDX-License-Identifier: Apache-2.0
"""The steps lead to the tables that the code describes, on every database."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.dialects import mysql

from cyborg.core.errors import Conflict, Invalid
from cyborg.db import migrate, schema
from cyborg.db.counting import counting
from cyborg.fixtures.databases import SERVERS, engine_of, fresh_database

HEAD = migrate.head()


def _same_type(context: Any, reflected: Any, column: Any, found: Any, wanted: Any) -> bool | None:
    # MariaDB keeps JSON as LONGTEXT with a check that the text is JSON.
    if isinstance(wanted, sa.JSON) and isinstance(found, mysql.LONGTEXT):
        return False
    return None


def _tables(engine: sa.Engine) -> dict[str, Any]:
    """Return everything that a database knows of our tables."""
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


def test_alembic_sees_no_difference(empty_engine: sa.Engine) -> None:
    migrate.upgrade(empty_engine)
    with empty_engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": _same_type, "compare_server_default": True}
        )
        assert compare_metadata(context, schema.metadata) == []


@pytest.mark.parametrize(
    "kind", ["sqlite", *(pytest.param(kind, marks=pytest.mark.services) for kind in SERVERS)]
)
def test_steps_make_what_the_models_make(kind: str, tmp_path: Any) -> None:
    with (
        fresh_database(kind, tmp_path) as one,
        fresh_database(kind, tmp_path) as other,
        engine_of(one) as stepped,
        engine_of(other) as made,
    ):
        migrate.upgrade(stepped)
        schema.metadata.create_all(made)
        left, right = _tables(stepped), _tables(made)
    assert left.keys() == right.keys()
    for name, facts in left.items():
        assert facts == right[name], name


def test_a_second_upgrade_does_nothing_in_two_statements(empty_engine: sa.Engine) -> None:
    lines: list[str] = []
    assert migrate.version(empty_engine) is None
    assert migrate.upgrade(empty_engine, report=lines.append) == HEAD
    assert any(HEAD in line and "Done" in line for line in lines)
    assert migrate.version(empty_engine) == HEAD
    with counting(empty_engine) as count:
        assert migrate.upgrade(empty_engine, report=lines.append) == HEAD
    assert len(count) <= 2, count.statements
    assert "nothing to do" in lines[-1]


def test_two_upgrades_at_once_do_the_work_once(empty_engine: sa.Engine) -> None:
    lines: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(migrate.upgrade, empty_engine, report=lines.append) for _ in range(2)]
    assert [end.result() for end in ends] == [HEAD, HEAD]
    assert len([line for line in lines if line.startswith("Done")]) == 1


def test_a_failed_step_leaves_no_lock(empty_engine: sa.Engine) -> None:
    with empty_engine.begin() as tx:
        tx.execute(sa.text("CREATE TABLE services (id INTEGER)"))
    with pytest.raises(Exception, match="services"):
        migrate.upgrade(empty_engine)
    with empty_engine.begin() as tx:
        left = sa.MetaData()
        left.reflect(tx)
        left.drop_all(tx)
    assert migrate.upgrade(empty_engine) == HEAD


def test_a_stamp_takes_no_step(empty_engine: sa.Engine) -> None:
    assert migrate.stamp(empty_engine, "head") == HEAD
    assert migrate.version(empty_engine) == HEAD
    assert sa.inspect(empty_engine).get_table_names() == ["alembic_version"]


def test_a_database_of_a_newer_release_is_left_alone(sqlite_engine: sa.Engine) -> None:
    migrate.stamp(sqlite_engine, HEAD)
    with sqlite_engine.begin() as tx:
        tx.execute(sa.text("UPDATE alembic_version SET version_num = 'ffffffffffff'"))
    with pytest.raises(Conflict, match="newer release"):
        migrate.upgrade(sqlite_engine)
    assert migrate.version(sqlite_engine) == "ffffffffffff"
    assert migrate.stamp(sqlite_engine, HEAD) == HEAD


@pytest.mark.parametrize("revision", ["nope", "", "base", "-1", "+1", "0" * 300])
def test_an_unknown_revision_is_refused(sqlite_engine: sa.Engine, revision: str) -> None:
    for verb in (migrate.upgrade, migrate.stamp):
        with pytest.raises(Invalid, match="expected head or one of") as refused:
            verb(sqlite_engine, revision)
        assert refused.value.details["field"] == "revision"
    assert sa.inspect(sqlite_engine).has_table("alembic_version") is False

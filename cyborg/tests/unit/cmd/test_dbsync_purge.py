# SPDX-License-Identifier: Apache-2.0
"""``cyborg-dbsync purge``: which rows it deletes, in which batches, and its output."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.cmd import dbsync
from cyborg.db import schema
from cyborg.db.old_rows import KINDS
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows

MONTH = timedelta(days=30)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[tuple[sa.Engine, Path]]:
    """Yield the engine and the configuration file of a database with old rows."""
    url = f"sqlite:///{tmp_path / 'cyborg.sqlite'}"
    file = tmp_path / "cyborg.conf"
    file.write_text(f"[database]\nconnection = {url}\n")
    assert dbsync.main(["--config-file", str(file), "upgrade"]) == 0
    engine = sa.create_engine(url)
    fill(engine)
    yield engine, file
    engine.dispose()


def fill(engine: sa.Engine, count: int = 5) -> None:
    """Insert ``count`` old jobs, old discoveries and old tombstones, and one new job."""
    long_ago = timeutils.utcnow() - 2 * MONTH
    job: dict[str, Any] = {"kind": "release", "host": "h", "subject": "s", "arguments": {}}
    job["state"] = "done"
    for number in range(count):
        rows.insert(engine, schema.jobs, **job, next_try_at=long_ago)
        rows.insert_discovery(engine, (f"h{number}", "b", "DONE"), created_at=long_ago)
        rows.insert(
            engine,
            schema.device_tombstones,
            host="h",
            address=str(number),
            status="enabled",
            deployables={},
            created_at=long_ago,
        )
    rows.insert(engine, schema.jobs, **job, next_try_at=timeutils.utcnow())


def count(engine: sa.Engine, table: sa.Table) -> int:
    return len(rows.read(engine, table))


def run(file: Path, *words: str, code: int = 0) -> None:
    assert dbsync.main(["--config-file", str(file), "purge", *words]) == code


@pytest.mark.slow
def test_rows_of_the_default_kinds_are_deleted(
    database: tuple[sa.Engine, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    engine, file = database
    capsys.readouterr()
    run(file, "--older-than", "30", "--batch-size", "2", "-f", "json")
    found = json.loads(capsys.readouterr().out)
    assert found.pop("jobs") == found.pop("discoveries") == {"found": 5, "deleted": 5}
    assert set(found) == {"audits", "dead-letters", "call-records"}
    assert all(numbers == {"found": 0, "deleted": 0} for numbers in found.values())
    assert count(engine, schema.jobs) == 1
    assert count(engine, schema.discoveries) == 0
    # The tombstones keep which handles are dirty: they are deleted only by name.
    assert count(engine, schema.device_tombstones) == 5
    run(file, "--older-than", "30", "--kind", "tombstones")
    assert count(engine, schema.device_tombstones) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split() for line in out] == [
        ["old", "rows", "found", "deleted"],
        ["tombstones", "5", "5"],
    ]


@pytest.mark.slow
def test_dry_run_and_limits_delete_no_more(
    database: tuple[sa.Engine, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    engine, file = database
    capsys.readouterr()
    run(file, "--older-than", "30", "--dry-run", "-f", "json")
    assert json.loads(capsys.readouterr().out)["jobs"] == {"found": 5, "deleted": 0}
    run(file, "--older-than", "90", "-f", "json")
    assert json.loads(capsys.readouterr().out)["jobs"] == {"found": 0, "deleted": 0}
    assert count(engine, schema.jobs) == 6
    run(file, "--older-than", "30", "--kind", "jobs", "--max-rows", "3", "--batch-size", "2")
    assert count(engine, schema.jobs) == 3
    assert count(engine, schema.discoveries) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--older-than", "0"),
        ("--older-than", "soon"),
        ("--older-than", "30", "--kind", "custody"),
        ("--older-than", "30", "--batch-size", "0"),
    ],
)
def test_invalid_arguments_delete_nothing(
    database: tuple[sa.Engine, Path], words: tuple[str, ...]
) -> None:
    engine, file = database
    with pytest.raises(SystemExit):
        run(file, *words)
    assert count(engine, schema.jobs) == 6


def test_database_of_another_revision_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cyborg.conf"
    file.write_text(f"[database]\nconnection = sqlite:///{tmp_path / 'cyborg.sqlite'}\n")
    run(file, "--older-than", "30", code=1)
    assert "run 'cyborg-dbsync upgrade' first" in capsys.readouterr().err


def test_purge_pauses_as_long_as_each_batch_took(
    sqlite_engine: sa.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(sqlite_engine)
    moments = iter(range(0, 600, 4))
    pauses: list[float] = []
    (result,) = dbsync.purge(
        UnitOfWork(sqlite_engine),
        ["jobs", "jobs"],
        MONTH,
        batch_size=2,
        pause=pauses.append,
        clock=lambda: float(next(moments)),
    )
    assert (result.found, result.deleted) == (5, 5)
    assert pauses == [4.0, 4.0, 4.0]
    assert "jobs: 2 of 5 deleted\n" in capsys.readouterr().err


def test_rows_that_the_conductors_delete_meanwhile_end_the_purge(
    sqlite_engine: sa.Engine,
) -> None:
    fill(sqlite_engine)
    uow = UnitOfWork(sqlite_engine)

    def delete_the_rest(_: float) -> None:
        uow.run(lambda tx: KINDS["jobs"].purge(tx, timeutils.utcnow() - MONTH, 100))

    (result,) = dbsync.purge(uow, ["jobs"], MONTH, batch_size=2, pause=delete_the_rest)
    assert (result.found, result.deleted) == (5, 2)

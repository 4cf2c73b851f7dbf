# SPDX-License-Identifier: Apache-2.0
"""Counts that a conductor stores for all processes."""

import itertools
from datetime import timedelta

import pytest
import sqlalchemy as sa

from cyborg.conductor.common.counts import CountRecorder
from cyborg.db import schema
from cyborg.db.engine import Reader
from cyborg.db.totals import cache
from cyborg.db.totals import read as totals
from cyborg.db.totals import write as store
from cyborg.db.totals.cache import MAX_AGE, CountCache
from cyborg.db.totals.read import Counts, HandleUse, SetKey, StoredCounts
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements

SECONDS = 2.0  # of a count


def make_recorder(engine: sa.Engine) -> CountRecorder:
    """Return a recorder whose counts take SECONDS."""
    seconds = itertools.count(0.0, SECONDS)
    return CountRecorder(UnitOfWork(engine), lambda: next(seconds))


def find_stored(engine: sa.Engine) -> StoredCounts | None:
    with engine.connect() as connection:
        return totals.find_stored(connection)


def set_age(engine: sa.Engine, seconds: float) -> None:
    """Make the stored counts older than some seconds, by any clock."""
    (row,) = rows.read(engine, schema.object_counts)
    # Another clock that follows that of the database can be milliseconds behind.
    moment = UnitOfWork(engine).clock() - timedelta(seconds=seconds + 1)
    rows.update(engine, schema.object_counts, row["id"], counted_at=moment)


def test_counts_are_stored_and_counted_again_when_they_are_old(engine: sa.Engine) -> None:
    recorder = make_recorder(engine)
    rows.insert_card(engine, handles=3)
    assert find_stored(engine) is None
    assert recorder.run_once() == 1
    assert recorder.run_once() == 0
    stored = find_stored(engine)
    assert stored is not None
    with engine.connect() as connection:
        assert (stored.counts, stored.seconds) == (totals.count(connection), SECONDS)
    rows.insert_card(engine, address="0000:02:00.0", handles=1)
    set_age(engine, 100 * SECONDS)
    assert make_recorder(engine).run_once() == 1
    stored = find_stored(engine)
    assert stored is not None
    assert stored.counts.count_handles("free") == 4


def test_new_process_uses_stored_counts_and_reads_no_other_table(
    sqlite_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows.insert_card(sqlite_engine, handles=3)
    make_recorder(sqlite_engine).run_once()
    set_age(sqlite_engine, 60)
    reader = Reader(sqlite_engine)
    reader.clock.refresh()
    assert CountCache(reader).read()[1] == 0, "a small cloud is counted at once"
    monkeypatch.setattr(cache, "MIN_STORED_HANDLES", 3)
    with count_statements(sqlite_engine) as counted:
        counts, age = CountCache(reader).read()
    assert counts.count_handles("free") == 3
    assert 59 < age < 120
    assert len(counted) == 1
    # Counts of a conductor that has stopped long ago are not used.
    set_age(sqlite_engine, 2 * MAX_AGE)
    assert CountCache(reader).read()[1] == 0


def test_older_counts_and_those_of_another_release_are_not_used(sqlite_engine: sa.Engine) -> None:
    make_recorder(sqlite_engine).run_once()
    stored = find_stored(sqlite_engine)
    assert stored is not None
    older = stored._replace(counted_at=stored.counted_at - timedelta(seconds=1), seconds=9.0)
    UnitOfWork(sqlite_engine).run(lambda tx: store.save_counts(tx, older))
    assert find_stored(sqlite_engine) == stored
    (row,) = rows.read(sqlite_engine, schema.object_counts)
    rows.update(sqlite_engine, schema.object_counts, row["id"], counts={"arqs": {}})
    assert find_stored(sqlite_engine) is None


def test_stored_counts_are_equal_to_the_counted_ones(sqlite_engine: sa.Engine) -> None:
    counts = Counts(
        arqs={"Bound": 3},
        orphans_suspected=1,
        owners_unverified=2,
        device_contexts={"bound": 1},
        attachments={"attached": 4},
        successors={"waiting": 1},
        handles={HandleUse("FPGA", "free"): 5},
        handles_undeliverable={"FPGA": 1},
        devices={("enabled", "ok"): 6},
        devices_undeliverable=1,
        device_sets={SetKey("nvlink", 4, "offered"): 2},
        providers=7,
    )
    uow = UnitOfWork(sqlite_engine)
    stored = StoredCounts(counts, uow.clock(), SECONDS)
    uow.run(lambda tx: store.save_counts(tx, stored))
    assert find_stored(sqlite_engine) == stored

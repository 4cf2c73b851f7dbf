# SPDX-License-Identifier: Apache-2.0
"""Statements that each change many rows, on each kind of database."""

import itertools
from datetime import datetime
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.db import bulk, schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements

TEXTS = ("", "a'b\"c\\d", "%s :rows $.id {}", "ä€😀", "line\nline\ttab", "null", "17", "x" * 255)
MOMENT = datetime(2026, 4, 1, 2, 3, 4, 567890)


def test_update_writes_each_row_in_one_statement(engine: sa.Engine) -> None:
    cards = [rows.insert_card(engine, address=f"0000:{n:02x}:00.0") for n in range(40)]
    ids = [row["id"] for row in rows.read(engine, schema.devices)]
    values: list[dict[str, Any]] = [
        {
            "id": id_,
            "model": text,
            "std_board_info": {"text": text, "list": [1, None, True, {"a": 0.5}]},
            "numa_node": number,
            "serial": serial,
            "health_reason": text,
            "health_since": moment,
            "draining": number == 1,
            "job_failures": None if serial is None else [{"text": text}],
            "retry_at": moment,
        }
        for id_, text, number, serial, moment in zip(
            ids,
            itertools.cycle(TEXTS),
            itertools.cycle([0, 1, -3]),
            itertools.cycle([None, "s"]),
            itertools.cycle([MOMENT, datetime(2026, 4, 1)]),
            strict=False,
        )
    ]
    with count_statements(engine) as counted, engine.begin() as tx:
        bulk.update(tx, schema.devices, values)
    assert (len(counted), len(values)) == (1, len(cards))
    found = {row["id"]: row for row in rows.read(engine, schema.devices)}
    for each in values:
        assert {key: found[each["id"]][key] for key in each} == each
        assert found[each["id"]]["updated_at"] is not None


def test_update_changes_no_other_row(engine: sa.Engine) -> None:
    rows.insert_card(engine)
    rows.insert_card(engine, address="0000:02:00.0", model="other")
    first, second = rows.read(engine, schema.devices)
    with engine.begin() as tx:
        bulk.update(tx, schema.devices, [{"id": first["id"], "model": "new"}])
        bulk.update(tx, schema.devices, [])
    assert rows.read(engine, schema.devices)[1] == second
    assert rows.read(engine, schema.devices)[0]["model"] == "new"


def test_value_that_does_not_fit_is_an_error(engine: sa.Engine) -> None:
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no maximum length of a text")
    rows.insert_card(engine)
    (device,) = rows.read(engine, schema.devices)
    with (
        pytest.raises(Exception, match=r"(?i)long|convert|cast|range|truncat"),
        engine.begin() as tx,
    ):
        bulk.update(tx, schema.devices, [{"id": device["id"], "model": "x" * 256}])
    assert rows.read(engine, schema.devices) == [device]


def test_many_rows_need_few_statements(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MAX_ROWS", 4)
    for n in range(9):
        rows.insert_card(engine, address=f"0000:{n:02x}:00.0")
    values = [
        {"id": row["id"], "numa_node": row["id"]} for row in rows.read(engine, schema.devices)
    ]
    with count_statements(engine) as counted, engine.begin() as tx:
        bulk.update(tx, schema.devices, values)
    assert len(counted) == 3
    assert all(row["numa_node"] == row["id"] for row in rows.read(engine, schema.devices))


def count_inserts(tx: sa.Connection) -> int:
    """Return the INSERT statements that MariaDB has executed in this session."""
    rows_ = tx.exec_driver_sql("SHOW SESSION STATUS LIKE 'Com_insert%%'").all()
    return sum(int(value) for _, value in rows_)


def test_insert_writes_each_row_with_the_defaults(engine: sa.Engine) -> None:
    rows.insert_card(engine, handles=0)
    values: list[dict[str, Any]] = [
        {
            "uuid": f"{number:036}",
            "deployable_id": 1,
            "address": text[:100],
            "type": "TEST_PCI",
            "info": {"text": text, "list": [number, None, True]},
        }
        for number, text in enumerate(TEXTS)
    ]
    with engine.begin() as tx:
        bulk.insert(tx, schema.attach_handles, values)
        bulk.insert(tx, schema.attach_handles, [{**values[0], "uuid": "u", "address": "one"}])
        bulk.insert(tx, schema.attach_handles, [])
    found = rows.read(engine, schema.attach_handles)
    assert [{key: row[key] for key in values[0]} for row in found[:-1]] == values
    assert [row["id"] for row in found] == sorted(row["id"] for row in found)
    assert {row["draining"] for row in found} == {False}
    assert {row["arq_id"] for row in found} == {None}
    assert None not in {row["created_at"] for row in found}


@pytest.mark.services
@pytest.mark.parametrize("database_kind", ["mysql"], indirect=True)
def test_insert_is_one_statement_for_the_server(engine: sa.Engine) -> None:
    rows.insert_card(engine, handles=0)
    with engine.begin() as tx:
        before = count_inserts(tx)
        row = {"deployable_id": 1, "type": "TEST_PCI", "info": {}}
        values = [{**row, "uuid": f"{n:036}", "address": f"{n:04}"} for n in range(300)]
        bulk.insert(tx, schema.attach_handles, values)
        assert count_inserts(tx) - before == 1

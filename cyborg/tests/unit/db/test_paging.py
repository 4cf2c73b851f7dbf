# SPDX-License-Identifier: Apache-2.0
"""Tests of pagination: every row once, in any order, despite concurrent changes."""

import random
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Invalid
from cyborg.db import paging, schema
from cyborg.db.binding import read as arqs
from cyborg.db.contexts import read as device_contexts
from cyborg.db.deployables import attributes
from cyborg.db.deployables import read as deployables
from cyborg.db.devices import read as devices
from cyborg.db.engine import Reader
from cyborg.db.paging import Page
from cyborg.db.profiles import read as profiles
from cyborg.db.services import read as services
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements

RESOURCES = (services, devices, deployables, attributes, profiles, arqs)
HOSTS = (None, "b", "a", "b", None, "c", "a")


def _read_all_pages(engine: sa.Engine, resource: Any, limit: int, **page: Any) -> list[str]:
    uuids: list[str] = []
    with Reader(engine).connect() as connection:
        while True:
            marker = uuids[-1] if uuids else None
            page_rows = resource.find(connection, page=Page(limit=limit, marker=marker, **page))
            uuids.extend(row["uuid"] for row in page_rows)
            if len(page_rows) < limit:
                return uuids


def _insert_arqs(engine: sa.Engine) -> None:
    profile = rows.insert_profile(engine)
    for host in HOSTS:
        rows.insert_arq(engine, profile, hostname=host, state=random.choice(["Initial", "Bound"]))


@pytest.mark.parametrize("sort_dir", ["asc", "desc"])
def test_pages_concatenate_to_the_list(engine: sa.Engine, sort_dir: str) -> None:
    _insert_arqs(engine)
    for key in (None, *arqs.SORTABLE):
        page: dict[str, Any] = {"sort_key": key, "sort_dir": sort_dir}
        with Reader(engine).connect() as connection:
            all_arqs = arqs.find(connection, page=Page(**page))
        assert len(all_arqs) == 7
        for limit in (1, 2, 3, 7):
            assert _read_all_pages(engine, arqs, limit, **page) == [
                row["uuid"] for row in all_arqs
            ], key


def test_sort_key_puts_nulls_first(engine: sa.Engine) -> None:
    for host in HOSTS:
        values = {"state": "unbound", "groups": [], "config_data": {}}
        rows.insert(engine, schema.device_contexts, hostname=host, **values)
    with Reader(engine).connect() as connection:
        ascending = device_contexts.find(connection, page=Page(sort_key="hostname"))
        descending = device_contexts.find(
            connection, page=Page(sort_key="hostname", sort_dir="desc")
        )
    assert [row["hostname"] for row in ascending] == [None, None, "a", "a", "b", "b", "c"]
    uuids = [row["uuid"] for row in ascending]
    assert [row["uuid"] for row in descending] == uuids[::-1]
    for limit in (1, 2, 3):
        assert _read_all_pages(engine, device_contexts, limit, sort_key="hostname") == uuids
        down = _read_all_pages(engine, device_contexts, limit, sort_key="hostname", sort_dir="desc")
        assert down == uuids[::-1]


def test_added_and_deleted_rows_shift_no_page(engine: sa.Engine) -> None:
    for name in "abcd":
        rows.insert_profile(engine, name)
    with Reader(engine).connect() as connection:
        first = profiles.find(connection, page=Page(limit=2, sort_key="name"))
    with engine.begin() as tx:
        table = schema.device_profiles
        tx.execute(sa.delete(table).where(table.c.name == "a"))
    rows.insert_profile(engine, "aa")
    with Reader(engine).connect() as connection:
        page = Page(limit=2, sort_key="name", marker=first[-1]["uuid"])
        assert [row["name"] for row in profiles.find(connection, page=page)] == ["c", "d"]


def test_find_without_a_page_is_in_the_order_of_creation(sqlite_engine: sa.Engine) -> None:
    with sqlite_engine.begin() as tx:
        tx.execute(
            sa.insert(schema.device_profiles),
            [{"uuid": f"u{n}", "name": f"n{5000 - n}", "groups": []} for n in range(5000)],
        )
    with Reader(sqlite_engine).connect() as connection:
        result = profiles.find(connection)
    assert [row["uuid"] for row in result] == [f"u{n}" for n in range(5000)]


@pytest.mark.parametrize(
    "resource", RESOURCES, ids=lambda resource: resource.__name__.rpartition(".")[2]
)
def test_every_resource_supports_pages(sqlite_engine: sa.Engine, resource: Any) -> None:
    with Reader(sqlite_engine).connect() as connection:
        for key in resource.SORTABLE:
            assert (
                resource.find(connection, page=Page(limit=1, sort_key=key, sort_dir="desc")) == []
            )
        assert resource.get(connection, "nobody") is None
        assert resource.find(connection, uuids=[]) == []
        for page, field in (
            (Page(sort_key="id"), "sort_key"),
            (Page(sort_key="; DROP TABLE x"), "sort_key"),
            (Page(sort_dir="up"), "sort_dir"),
            (Page(limit=0), "limit"),
            (Page(limit=-1), "limit"),
            (Page(marker="nobody"), "marker"),
        ):
            with pytest.raises(Invalid, match=f"^{field}: ") as raised:
                resource.find(connection, page=page)
            assert raised.value.details["field"] == field


def test_page_in_the_order_of_uuids_starts_after_any_text(sqlite_engine: sa.Engine) -> None:
    for letter in "ba":
        uuid = f"{letter * 8}-0000-4000-8000-000000000000"
        rows.insert(sqlite_engine, schema.device_profiles, uuid=uuid, name=letter, groups=[])
    with Reader(sqlite_engine).connect() as connection:
        for marker, order, expected in (
            ("aaaa", "asc", ["a", "b"]),
            ("aaab", "asc", ["b"]),
            ("aaab", "desc", ["a"]),
            ("c", "asc", []),
        ):
            page = Page(limit=5, sort_key="uuid", marker=marker, sort_dir=order)
            found = profiles.find(connection, page=page)
            assert [row["uuid"][0] for row in found] == expected
            listed = paging.paginate_rows([{"uuid": "a" * 8}, {"uuid": "b" * 8}], page, ["uuid"])
            assert [row["uuid"][0] for row in listed] == expected


def test_marker_of_another_project_is_rejected(sqlite_engine: sa.Engine) -> None:
    uuid = rows.insert_arq(sqlite_engine, rows.insert_profile(sqlite_engine), project_id="theirs")
    with (
        Reader(sqlite_engine).connect() as connection,
        pytest.raises(Invalid, match="not in this list"),
    ):
        arqs.find(connection, project_id="ours", page=Page(marker=uuid))


def test_marker_costs_one_statement(sqlite_engine: sa.Engine) -> None:
    uuid = rows.insert_arq(sqlite_engine, rows.insert_profile(sqlite_engine))
    with count_statements(sqlite_engine) as count, Reader(sqlite_engine).connect() as connection:
        arqs.find(connection, page=Page(limit=5, marker=uuid, sort_key="created_at"))
    assert len(count) == 2, count.statements

# SPDX-License-Identifier: Apache-2.0
"""Pages: every row once, in any order, whatever comes and goes in between."""

import random
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Invalid
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.read import (
    attributes,
    deployables,
    devices,
    discoveries,
    providers,
    requests,
    services,
)
from cyborg.db.read import device_profiles as profiles
from cyborg.db.read.paging import Page
from cyborg.db.reader import Reader
from cyborg.fixtures import rows

NOUNS = (services, devices, deployables, attributes, profiles, requests, discoveries, providers)


def _walk(engine: sa.Engine, noun: Any, limit: int, **page: Any) -> list[str]:
    seen: list[str] = []
    with Reader(engine).connect() as connection:
        while True:
            marker = seen[-1] if seen else None
            part = noun.find(connection, page=Page(limit=limit, marker=marker, **page))
            seen.extend(row["uuid"] for row in part)
            if len(part) < limit:
                return seen


def _some_requests(engine: sa.Engine) -> None:
    profile = rows.profile(engine)
    hosts = [None, "b", "a", "b", None, "c", "a"]
    for host in hosts:
        rows.request(engine, profile, hostname=host, state=random.choice(["Initial", "Bound"]))


@pytest.mark.parametrize("sort_dir", ["asc", "desc"])
def test_pages_put_together_are_the_list(engine: sa.Engine, sort_dir: str) -> None:
    _some_requests(engine)
    for key in (None, *requests.SORTABLE):
        page = {"sort_key": key, "sort_dir": sort_dir}
        with Reader(engine).connect() as connection:
            whole = requests.find(connection, page=Page(**page))
        assert len(whole) == 7
        for limit in (1, 2, 3, 7):
            assert _walk(engine, requests, limit, **page) == [row["uuid"] for row in whole], key


def test_the_order_is_that_of_the_key_and_nulls_come_first(engine: sa.Engine) -> None:
    _some_requests(engine)
    with Reader(engine).connect() as connection:
        up = requests.find(connection, page=Page(sort_key="hostname"))
        down = requests.find(connection, page=Page(sort_key="hostname", sort_dir="desc"))
    assert [row["hostname"] for row in up] == [None, None, "a", "a", "b", "b", "c"]
    assert [row["uuid"] for row in down] == [row["uuid"] for row in reversed(up)]


def test_rows_that_come_or_go_shift_no_page(engine: sa.Engine) -> None:
    for name in "abcd":
        rows.profile(engine, name)
    with Reader(engine).connect() as connection:
        first = profiles.find(connection, page=Page(limit=2, sort_key="name"))
    with engine.begin() as tx:
        table = schema.device_profiles
        tx.execute(sa.delete(table).where(table.c.name == "a"))
    rows.profile(engine, "aa")
    with Reader(engine).connect() as connection:
        page = Page(limit=2, sort_key="name", marker=first[-1]["uuid"])
        assert [row["name"] for row in profiles.find(connection, page=page)] == ["c", "d"]


def test_without_a_page_every_row_comes_in_the_order_of_creation(sqlite_engine: sa.Engine) -> None:
    with sqlite_engine.begin() as tx:
        tx.execute(
            sa.insert(schema.device_profiles),
            [{"uuid": f"u{n}", "name": f"n{5000 - n}", "groups": []} for n in range(5000)],
        )
    with Reader(sqlite_engine).connect() as connection:
        found = profiles.find(connection)
    assert [row["uuid"] for row in found] == [f"u{n}" for n in range(5000)]


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: noun.__name__.rpartition(".")[2])
def test_every_noun_knows_pages(sqlite_engine: sa.Engine, noun: Any) -> None:
    with Reader(sqlite_engine).connect() as connection:
        for key in noun.SORTABLE:
            assert noun.find(connection, page=Page(limit=1, sort_key=key, sort_dir="desc")) == []
        assert noun.get(connection, "nobody") is None
        assert noun.find(connection, uuids=[]) == []
        for page, field in (
            (Page(sort_key="id"), "sort_key"),
            (Page(sort_key="; DROP TABLE x"), "sort_key"),
            (Page(sort_dir="up"), "sort_dir"),
            (Page(limit=0), "limit"),
            (Page(limit=-1), "limit"),
            (Page(marker="nobody"), "marker"),
            (Page(marker="nobody", sort_key="uuid"), "marker"),
        ):
            with pytest.raises(Invalid, match=f"^{field}: ") as refused:
                noun.find(connection, page=page)
            assert refused.value.details["field"] == field


def test_a_marker_of_another_project_is_no_row_of_the_list(sqlite_engine: sa.Engine) -> None:
    uuid = rows.request(sqlite_engine, rows.profile(sqlite_engine), project_id="theirs")
    with Reader(sqlite_engine).connect() as connection, pytest.raises(Invalid, match="no row"):
        requests.find(connection, project_id="ours", page=Page(marker=uuid))


def test_a_marker_costs_one_statement(sqlite_engine: sa.Engine) -> None:
    uuid = rows.request(sqlite_engine, rows.profile(sqlite_engine))
    with counting(sqlite_engine) as count, Reader(sqlite_engine).connect() as connection:
        requests.find(connection, page=Page(limit=5, marker=uuid, sort_key="hostname"))
    assert len(count) == 2, count.statements

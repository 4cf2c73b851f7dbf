# SPDX-License-Identifier: Apache-2.0
"""Drivers over all hosts, and hardware in the words of the contract."""

from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.driver import driver_uuid
from cyborg.core.errors import Invalid
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.read import drivers, hardware
from cyborg.db.read.paging import Page
from cyborg.fixtures import rows


def agent(engine: sa.Engine, host: str, versions: Any, **backends: str) -> None:
    service = rows.agent(engine, host)
    rows.change(engine, schema.services, service, versions=versions)
    for name, driver in backends.items():
        rows.insert(
            engine, schema.backends, service_id=service, name=name, driver=driver, status="READY"
        )


@pytest.fixture
def cloud(engine: sa.Engine) -> sa.Engine:
    agent(engine, "b", {"drivers": {"generic": "2"}}, gen1="generic", gen0="generic")
    agent(engine, "a", {"drivers": {"generic": "1", "fake": "1"}}, g="generic", f="fake")
    agent(engine, "c", {})
    return engine


def test_a_driver_has_the_backends_of_all_hosts(cloud: sa.Engine) -> None:
    with cloud.connect() as connection:
        fake, generic = drivers.find(connection)
        assert drivers.get(connection, "generic") == generic
        assert drivers.get(connection, driver_uuid("fake").upper()) == fake
        assert drivers.get(connection, "gen0") is None
    assert (fake["name"], fake["uuid"]) == ("fake", driver_uuid("fake"))
    places = [(h["host"], h["backend"], h["status"], h["version"]) for h in generic["hosts"]]
    assert places == [
        ("a", "g", "READY", "1"),
        ("b", "gen0", "READY", "2"),
        ("b", "gen1", "READY", "2"),
    ]
    assert {h["error"] for h in generic["hosts"]} == {None}


def test_pages_and_the_host(cloud: sa.Engine) -> None:
    def names(*page: Any, **filters: Any) -> list[str]:
        with cloud.connect() as connection:
            return [r["name"] for r in drivers.find(connection, page=Page(*page), **filters)]

    assert names(1) == ["fake"]
    assert names(5, driver_uuid("fake")) == ["generic"]
    assert names(1, None, "name", "desc") == ["generic"]
    assert names(1, driver_uuid("generic"), "name", "desc") == ["fake"]
    assert sorted(names(None, None, "uuid")) == names()
    assert names(host="b") == ["generic"]
    assert names(host="c") == names(host="none") == []
    with cloud.connect() as connection:
        (one,) = drivers.find(connection, host="b")
    assert {h["host"] for h in one["hosts"]} == {"b"}


@pytest.mark.parametrize(
    ("page", "field"),
    [
        (Page(0), "limit"),
        (Page(marker="x"), "marker"),
        (Page(sort_key="hosts"), "sort_key"),
        (Page(sort_dir="up"), "sort_dir"),
    ],
)
def test_a_page_that_cannot_be(sqlite_engine: sa.Engine, page: Page, field: str) -> None:
    with sqlite_engine.connect() as connection, pytest.raises(Invalid) as raised:
        drivers.find(connection, page=page)
    assert raised.value.details["field"] == field


def test_hardware_is_what_the_contract_says(engine: sa.Engine) -> None:
    agent(engine, "compute-1", {}, gen0="generic")
    board = {"vendor_id": "10de", "product_id": "1eb8"}
    facts = {"backend": "gen0", "numa_node": 1, "serial": "S1", "reboot_required": True}
    card = rows.card(engine, handles=3, type="GPU", std_board_info=board, **facts)
    last = rows.read(engine, schema.attach_handles)[-1]
    rows.change(engine, schema.attach_handles, last["id"], draining=True)
    rows.card(engine, "compute-2", handles=0)
    rows.card(engine, "compute-2", "gone", draining=True)
    with engine.connect() as connection:
        first, second = hardware.find(connection)
        assert hardware.find(connection, host="compute-2") == [second]
        assert hardware.find(connection, driver="generic") == [first]
        assert hardware.find(connection, driver="gen0", host="compute-2") == []
    (device,) = rows.read(engine, schema.devices, id=card.device_id)
    assert first == {
        "uuid": device["uuid"],
        "host": "compute-1",
        "acc_specs": {"remote": 0, "num": 2, "device_type": "GPU", "acc_capability": {}},
        "acc_status": {"setup_required": False, "reboot_required": True},
        "address": "0000:01:00.0",
        "driver": "generic",
        "backend": "gen0",
        "vendor_id": "10de",
        "product_id": "1eb8",
        "numa_node": 1,
        "health": "ok",
        "serial": "S1",
    }
    assert (second["driver"], second["vendor_id"], second["product_id"]) == (None, "0xABCD", None)
    assert second["acc_specs"]["num"] == 0


def test_the_number_of_statements_does_not_grow(sqlite_engine: sa.Engine) -> None:
    for number in (1, 20):
        for n in range(number):
            agent(sqlite_engine, f"{number}-{n}", {}, a="x", b=f"driver-{number}-{n}")
            rows.card(sqlite_engine, f"{number}-{n}", handles=2)
        with sqlite_engine.connect() as connection:
            for noun, cost in ((drivers, 2), (hardware, 1)):
                with counting(sqlite_engine) as count:
                    assert len(noun.find(connection)) >= number
                assert len(count) == cost, count.statements

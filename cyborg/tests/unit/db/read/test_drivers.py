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
        assert drivers.get(connection, "generic") == {**generic, "options": []}
        assert drivers.get(connection, driver_uuid("fake").upper()) == {**fake, "options": []}
        assert drivers.get(connection, "gen0") is None
    assert (fake["name"], fake["uuid"]) == ("fake", driver_uuid("fake"))
    places = [(h["host"], h["backend"], h["status"], h["version"]) for h in generic["hosts"]]
    assert places == [
        ("a", "g", "READY", "1"),
        ("b", "gen0", "READY", "2"),
        ("b", "gen1", "READY", "2"),
    ]
    assert {(h["error"], h["wish"], h["applied"]) for h in generic["hosts"]} == {(None,) * 3}
    assert (generic["version"], fake["version"]) == (None, "1")
    assert (generic["type"], generic["support"], generic["abilities"]) == (None, "unknown", [])


def install(engine: sa.Engine, host: str, driver: str, **facts: Any) -> None:
    (service,) = rows.read(engine, schema.services, host=host)
    known = {"support": "supported", "abilities": [], "options": [], "version": "1"}
    rows.insert(engine, schema.drivers, service_id=service["id"], name=driver, **known | facts)


def want(engine: sa.Engine, host: str, backend: str, driver: str, wish: str, **facts: Any) -> None:
    (service,) = rows.read(engine, schema.services, host=host)
    known = {"config": {}, "revision": 1, "applied": True}
    its = {"backend": backend, "driver": driver, "wish": wish}
    rows.insert(engine, schema.wanted_backends, service_id=service["id"], **its, **known | facts)


def places(row: Any) -> list[tuple[Any, ...]]:
    keys = ("host", "backend", "status", "wish", "applied", "error")
    return [tuple(place[key] for key in keys) for place in row["hosts"]]


def test_what_is_installed_and_what_is_wanted(cloud: sa.Engine) -> None:
    option = {"name": "rule", "kind": "multi", "default": [], "help": "Which."}
    facts = {"type": "FPGA", "abilities": ["programs"]}
    install(cloud, "a", "generic", version="1.9", type="GPU")
    install(cloud, "b", "generic", version="1.10", options=[option], **facts)
    install(cloud, "c", "generic", version="1.8")
    install(cloud, "c", "broken", version=None, error="no module acme")
    want(cloud, "a", "g", "generic", "disabled")
    want(cloud, "b", "gen1", "generic", "absent", applied=False, error="something is bound")
    want(cloud, "b", "gen2", "generic", "enabled", applied=False)
    # Another driver's, and one that is gone.
    want(cloud, "a", "f", "acme", "enabled", applied=False)
    want(cloud, "c", "gone", "generic", "absent")
    want(cloud, "c", "went", "nowhere", "absent")
    with cloud.connect() as connection:
        acme, broken, fake, generic = drivers.find(connection)
        assert drivers.find(connection, type="FPGA") == [generic]
        assert drivers.find(connection, type="SSD") == []
        assert [row["name"] for row in drivers.find(connection, host="c")] == ["broken", "generic"]
        shown = drivers.get(connection, "generic")
        assert drivers.get(connection, "nowhere") is None
        assert drivers.get(connection, "broken") == {**broken, "options": []}
    assert places(acme) == [("a", "f", "AWAITED", "enabled", False, None)]
    assert places(broken) == [("c", None, "UNIMPORTABLE", None, None, "no module acme")]
    assert places(fake) == [("a", "f", "READY", None, None, None)]
    assert places(generic) == [
        ("a", "g", "READY", "disabled", True, None),
        ("b", "gen0", "READY", None, None, None),
        ("b", "gen1", "READY", "absent", False, "something is bound"),
        ("b", "gen2", "AWAITED", "enabled", False, None),
        ("c", None, "INSTALLED", None, None, None),
    ]
    # What an agent runs counts for more than what is installed beside it.
    assert [place["version"] for place in generic["hosts"]] == ["1", "2", "2", "1.10", "1.8"]
    assert {key: generic[key] for key in facts} == facts
    assert shown == {**generic, "options": [option]}


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
            install(sqlite_engine, f"{number}-{n}", "x")
            want(sqlite_engine, f"{number}-{n}", "a", "x", "enabled")
            rows.card(sqlite_engine, f"{number}-{n}", handles=2)
        with sqlite_engine.connect() as connection:
            for noun, cost in ((drivers, 4), (hardware, 1)):
                with counting(sqlite_engine) as count:
                    assert len(noun.find(connection)) >= number
                assert len(count) == cost, count.statements

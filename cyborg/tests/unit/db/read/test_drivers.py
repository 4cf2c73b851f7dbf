# SPDX-License-Identifier: Apache-2.0
"""Tests of reading drivers of all hosts, and hardware in the format of the contract."""

from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.drivers.driver import driver_uuid
from cyborg.core.errors import Invalid
from cyborg.db import schema
from cyborg.db.paging import Page
from cyborg.db.read import drivers, hardware
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements


def agent(engine: sa.Engine, host: str, versions: Any, **backends: str) -> None:
    service = rows.insert_agent(engine, host)
    rows.update(engine, schema.services, service, versions=versions)
    for name, driver in backends.items():
        rows.insert(
            engine, schema.backends, service_id=service, name=name, driver=driver, status="READY"
        )


BARE: dict[str, Any] = {"options": [], "effective_options": []}


@pytest.fixture
def cloud(engine: sa.Engine) -> sa.Engine:
    agent(engine, "b", {"drivers": {"generic": "2"}}, gen1="generic", gen0="generic")
    agent(engine, "a", {"drivers": {"generic": "1", "fake": "1"}}, g="generic", f="fake")
    agent(engine, "c", {})
    return engine


def test_driver_has_the_backends_of_all_hosts(cloud: sa.Engine) -> None:
    with cloud.connect() as connection:
        fake, generic = drivers.find(connection)
        assert drivers.get(connection, "generic") == {**generic, **BARE}
        assert drivers.get(connection, driver_uuid("fake").upper()) == {**fake, **BARE}
        assert drivers.get(connection, "gen0") is None
    assert (fake["name"], fake["uuid"]) == ("fake", driver_uuid("fake"))
    host_entries = [(h["host"], h["backend"], h["status"], h["version"]) for h in generic["hosts"]]
    assert host_entries == [
        ("a", "g", "READY", "1"),
        ("b", "gen0", "READY", "2"),
        ("b", "gen1", "READY", "2"),
    ]
    assert {(h["error"], h["desired_status"], h["applied"]) for h in generic["hosts"]} == {
        (None,) * 3
    }
    assert (generic["version"], fake["version"]) == (None, "1")
    assert (generic["type"], generic["support"], generic["abilities"]) == (None, "unknown", [])


def install(engine: sa.Engine, host: str, driver: str, **facts: Any) -> None:
    (service,) = rows.read(engine, schema.services, host=host)
    defaults = {"support": "supported", "abilities": [], "options": [], "version": "1"}
    rows.insert(engine, schema.drivers, service_id=service["id"], name=driver, **defaults | facts)


def add_desired(
    engine: sa.Engine, host: str, backend: str, driver: str, status: str, **facts: Any
) -> None:
    (service,) = rows.read(engine, schema.services, host=host)
    defaults = {"config": {}, "generation": 1, "applied": True}
    columns = {"backend": backend, "driver": driver, "status": status}
    rows.insert(
        engine, schema.desired_backends, service_id=service["id"], **columns, **defaults | facts
    )


def host_entries(row: Any) -> list[tuple[Any, ...]]:
    keys = ("host", "backend", "status", "desired_status", "applied", "error")
    return [tuple(entry[key] for key in keys) for entry in row["hosts"]]


def test_find_merges_installed_reported_and_desired(cloud: sa.Engine) -> None:
    option = {"name": "rule", "kind": "multi", "default": [], "help": "Which."}
    facts = {"type": "FPGA", "abilities": ["programs"]}
    install(cloud, "a", "generic", version="1.9", type="GPU")
    install(cloud, "b", "generic", version="1.10", options=[option], **facts)
    install(cloud, "c", "generic", version="1.8")
    install(cloud, "c", "broken", version=None, error="no module acme")
    add_desired(cloud, "a", "g", "generic", "disabled")
    add_desired(cloud, "b", "gen1", "generic", "absent", applied=False, error="something is bound")
    add_desired(cloud, "b", "gen2", "generic", "enabled", applied=False)
    # Backends of another driver, and removed ones.
    add_desired(cloud, "a", "f", "acme", "enabled", applied=False)
    add_desired(cloud, "c", "gone", "generic", "absent")
    add_desired(cloud, "c", "went", "nowhere", "absent")
    with cloud.connect() as connection:
        acme, broken, fake, generic = drivers.find(connection)
        assert drivers.find(connection, type="FPGA") == [generic]
        assert drivers.find(connection, type="SSD") == []
        assert [row["name"] for row in drivers.find(connection, host="c")] == ["broken", "generic"]
        details = drivers.get(connection, "generic")
        assert drivers.get(connection, "nowhere") is None
        assert drivers.get(connection, "broken") == {**broken, **BARE}
    assert host_entries(acme) == [("a", "f", "NOT_REPORTED", "enabled", False, None)]
    assert host_entries(broken) == [("c", None, "IMPORT_FAILED", None, None, "no module acme")]
    assert host_entries(fake) == [("a", "f", "READY", None, None, None)]
    assert host_entries(generic) == [
        ("a", "g", "READY", "disabled", True, None),
        ("b", "gen0", "READY", None, None, None),
        ("b", "gen1", "READY", "absent", False, "something is bound"),
        ("b", "gen2", "NOT_REPORTED", "enabled", False, None),
        ("c", None, "INSTALLED", None, None, None),
    ]
    # The version that an agent runs takes precedence over the installed version.
    assert [entry["version"] for entry in generic["hosts"]] == ["1", "2", "2", "1.10", "1.8"]
    assert {**generic, **facts} == generic
    assert details == {**generic, **BARE, "options": [option]}


def test_pages_and_host_filter(cloud: sa.Engine) -> None:
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
        (driver,) = drivers.find(connection, host="b")
    assert {h["host"] for h in driver["hosts"]} == {"b"}


@pytest.mark.parametrize(
    ("page", "field"),
    [
        (Page(0), "limit"),
        (Page(marker="x"), "marker"),
        (Page(sort_key="hosts"), "sort_key"),
        (Page(sort_dir="up"), "sort_dir"),
    ],
)
def test_invalid_page_is_rejected(sqlite_engine: sa.Engine, page: Page, field: str) -> None:
    with sqlite_engine.connect() as connection, pytest.raises(Invalid) as raised:
        drivers.find(connection, page=page)
    assert raised.value.details["field"] == field


@pytest.mark.slow
def test_hardware_has_the_format_of_the_contract(engine: sa.Engine) -> None:
    agent(engine, "compute-1", {}, gen0="generic")
    board = {"vendor_id": "10de", "product_id": "1eb8"}
    facts: dict[str, Any] = {
        "backend": "gen0",
        "numa_node": 1,
        "serial": "S1",
        "reboot_required": True,
    }
    card = rows.insert_card(engine, handles=3, type="GPU", std_board_info=board, **facts)
    last = rows.read(engine, schema.attach_handles)[-1]
    rows.update(engine, schema.attach_handles, last["id"], draining=True)
    rows.insert_card(engine, "compute-2", handles=0)
    rows.insert_card(engine, "compute-2", "gone", draining=True)
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
        "not_offered": None,
        "host_down": False,
    }
    assert (second["driver"], second["vendor_id"], second["product_id"]) == (None, "0xABCD", None)
    assert second["acc_specs"]["num"] == 0


def test_find_needs_a_constant_number_of_statements(sqlite_engine: sa.Engine) -> None:
    for number in (1, 20):
        for n in range(number):
            agent(sqlite_engine, f"{number}-{n}", {}, a="x", b=f"driver-{number}-{n}")
            install(sqlite_engine, f"{number}-{n}", "x")
            add_desired(sqlite_engine, f"{number}-{n}", "a", "x", "enabled")
            rows.insert_card(sqlite_engine, f"{number}-{n}", handles=2)
        with sqlite_engine.connect() as connection:
            for resource, cost in ((drivers, 4), (hardware, 1)):
                with count_statements(sqlite_engine) as count:
                    assert len(resource.find(connection)) >= number
                assert len(count) == cost, count.statements

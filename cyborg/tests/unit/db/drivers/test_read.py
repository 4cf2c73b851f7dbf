# SPDX-License-Identifier: Apache-2.0
"""Tests of reading drivers of all hosts, and hardware in the format of the contract."""

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.core.drivers.registry import driver_uuid
from cyborg.core.errors import Invalid
from cyborg.db import schema
from cyborg.db.devices import hardware
from cyborg.db.drivers import entries as hosts
from cyborg.db.drivers import read as summaries
from cyborg.db.drivers.read import DriverDetailsRow, DriverRow
from cyborg.db.paging import Page
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements


def agent(engine: sa.Engine, host: str, versions: Any, **backends: str) -> None:
    service = rows.insert_agent(engine, host)
    rows.update(engine, schema.services, service, versions=versions)
    for name, driver in backends.items():
        rows.insert(
            engine, schema.backends, service_id=service, name=name, driver=driver, status="READY"
        )


NOW = datetime(2020, 1, 1)  # before the heartbeats of the rows


def find(connection: sa.Connection, **arguments: Any) -> list[DriverRow]:
    return summaries.find(connection, now=NOW, **arguments)


def get(connection: sa.Connection, key: str, **arguments: Any) -> DriverDetailsRow | None:
    return summaries.get(connection, key, now=NOW, **arguments)


def entries_of(
    connection: sa.Connection, driver: str, *page: Any, now: datetime = NOW, **filters: Any
) -> list[hosts.HostDriverRow]:
    """Return the entries of a page of hosts."""
    found = hosts.find_hosts(connection, driver, page=Page(*page), now=now, **filters)
    filters.pop("host", None)
    return hosts.find_entries(connection, driver, found, now=now, **filters)


@pytest.fixture
def cloud(engine: sa.Engine) -> sa.Engine:
    agent(engine, "b", {"drivers": {"generic": "2"}}, gen1="generic", gen0="generic")
    agent(engine, "a", {"drivers": {"generic": "1", "fake": "1"}}, g="generic", f="fake")
    agent(engine, "c", {})
    return engine


def details_of(row: DriverRow, *options: Any) -> dict[str, Any]:
    """Return the details of a driver that a list has."""
    return {**{key: row[key] for key in row if key != "hosts"}, "options": [*options]}  # type: ignore[literal-required]


def test_driver_has_the_backends_of_all_hosts(cloud: sa.Engine) -> None:
    with cloud.connect() as connection:
        fake, generic = find(connection)
        assert get(connection, "generic") == details_of(generic)
        assert get(connection, driver_uuid("fake").upper()) == details_of(fake)
        assert get(connection, "gen0") is None
        entries = entries_of(connection, "generic")
        options = hosts.find_effective_options(connection, "generic", [])
    assert (fake["name"], fake["uuid"]) == ("fake", driver_uuid("fake"))
    assert (generic["hosts"], options) == (None, [])
    assert (generic["num_hosts"], generic["statuses"]) == (2, {"READY": 3})
    assert [(h["host"], h["backend"], h["status"], h["version"]) for h in entries] == [
        ("a", "g", "READY", "1"),
        ("b", "gen0", "READY", "2"),
        ("b", "gen1", "READY", "2"),
    ]
    assert {(h["error"], h["desired_status"], h["applied"]) for h in entries} == {(None,) * 3}
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


def facts_of(entries: list[hosts.HostDriverRow]) -> list[tuple[Any, ...]]:
    return [
        (e["host"], e["backend"], e["status"], e["desired_status"], e["applied"], e["error"])
        for e in entries
    ]


@pytest.fixture
def mixed_cloud(cloud: sa.Engine) -> sa.Engine:
    """Return a cloud with entries of all kinds."""
    install(cloud, "a", "generic", version="1.9", type="GPU")
    install(cloud, "b", "generic", version="1.10", options=[OPTION], **FACTS)
    install(cloud, "c", "generic", version="1.8")
    install(cloud, "c", "broken", version=None, error="no module acme")
    add_desired(cloud, "a", "g", "generic", "disabled")
    add_desired(cloud, "b", "gen1", "generic", "absent", applied=False, error="something is bound")
    add_desired(cloud, "b", "gen2", "generic", "enabled", applied=False)
    # Backends of another driver, and removed ones.
    add_desired(cloud, "a", "f", "acme", "enabled", applied=False)
    add_desired(cloud, "c", "gone", "generic", "absent")
    add_desired(cloud, "c", "went", "nowhere", "absent")
    return cloud


OPTION = {"name": "rule", "kind": "multi", "default": [], "help": "Which."}
FACTS: dict[str, Any] = {"type": "FPGA", "abilities": ["programs"]}


def test_find_merges_installed_reported_and_desired(mixed_cloud: sa.Engine) -> None:
    with mixed_cloud.connect() as connection:
        acme, broken, _, generic = find(connection)
        assert find(connection, type="FPGA") == [generic]
        assert find(connection, type="SSD") == []
        assert [row["name"] for row in find(connection, host="c")] == ["broken", "generic"]
        assert get(connection, "generic") == details_of(generic, OPTION)
        assert get(connection, "nowhere") is None
        assert get(connection, "broken") == details_of(broken)
        entries = {r["name"]: entries_of(connection, r["name"]) for r in find(connection)}
    assert facts_of(entries["acme"]) == [("a", "f", "NOT_REPORTED", "enabled", False, None)]
    assert facts_of(entries["broken"]) == [
        ("c", None, "IMPORT_FAILED", None, None, "no module acme")
    ]
    assert facts_of(entries["fake"]) == [("a", "f", "READY", None, None, None)]
    assert facts_of(entries["generic"]) == [
        ("a", "g", "READY", "disabled", True, None),
        ("b", "gen0", "READY", None, None, None),
        ("b", "gen1", "READY", "absent", False, "something is bound"),
        ("b", "gen2", "NOT_REPORTED", "enabled", False, None),
        ("c", None, "INSTALLED", None, None, None),
    ]
    # The version that an agent runs takes precedence over the installed version.
    versions = [entry["version"] for entry in entries["generic"]]
    assert versions == ["1", "2", "2", "1.10", "1.8"]
    assert {**generic, **FACTS} == generic
    assert (generic["num_hosts"], generic["version"], broken["version"]) == (3, None, None)
    assert generic["statuses"] == {"INSTALLED": 1, "NOT_REPORTED": 1, "READY": 3}
    assert (acme["statuses"], broken["statuses"]) == ({"NOT_REPORTED": 1}, {"IMPORT_FAILED": 1})


def test_statuses_are_the_numbers_of_the_entries(mixed_cloud: sa.Engine) -> None:
    (service,) = rows.read(mixed_cloud, schema.services, host="b")
    rows.update(mixed_cloud, schema.services, service["id"], down_at=NOW - timedelta(days=1))
    for host in (None, "a", "b", "c"):
        with mixed_cloud.connect() as connection:
            found = find(connection, host=host)
            for row in found:
                entries = entries_of(connection, row["name"], host=host)
                assert row["hosts"] == (None if host is None else entries)
                statuses = Counter(
                    "UNKNOWN" if entry["host"] == "b" else entry["status"] for entry in entries
                )
                assert row["statuses"] == statuses
                assert row["num_hosts"] == len({entry["host"] for entry in entries})
                details = get(connection, row["name"], host=host)
                assert details is not None
                assert details["statuses"] == statuses
                for status, count in statuses.items():
                    filters: dict[str, Any] = {"host": host, "status": status}
                    assert len(entries_of(connection, row["name"], **filters)) == count
        assert found


def test_pages_of_hosts(mixed_cloud: sa.Engine) -> None:
    def names(*page: Any, **filters: Any) -> list[tuple[str, str | None]]:
        with mixed_cloud.connect() as connection:
            found = entries_of(connection, "generic", *page, **filters)
        return [(entry["host"], entry["backend"]) for entry in found]

    a, b, c = [("a", "g")], [("b", "gen0"), ("b", "gen1"), ("b", "gen2")], [("c", None)]
    assert names(2) == a + b
    assert names(2, "b") == c
    assert names(2, "bb") == c, "a host that left the list is a marker too"
    assert names(2, None, "host", "desc") == c + b
    assert names(2, "b", None, "desc") == a
    assert names(host="b") == b
    assert names(status="NOT_REPORTED") == [("b", "gen2")]
    assert names(1, status="READY") == a
    assert names(1, "a", status="READY") == b[:2]
    assert names(host="c", status="READY") == names(status="FAILED") == []
    with mixed_cloud.connect() as connection:
        assert entries_of(connection, "none-such") == []
        later = timeutils.utcnow() + timedelta(days=1)
        assert len(entries_of(connection, "generic", now=later, status="UNKNOWN")) == 5
        assert entries_of(connection, "generic", now=later, status="READY") == []


@pytest.mark.parametrize(
    ("page", "field"),
    [
        (Page(0), "limit"),
        (Page(sort_key="x"), "sort_key"),
        (Page(marker="a", sort_dir="up"), "sort_dir"),
    ],
)
def test_invalid_page_of_hosts_is_rejected(
    sqlite_engine: sa.Engine, page: Page, field: str
) -> None:
    with sqlite_engine.connect() as connection, pytest.raises(Invalid) as raised:
        hosts.find_hosts(connection, "generic", page=page, now=NOW)
    assert raised.value.details["field"] == field


def test_pages_and_host_filter(cloud: sa.Engine) -> None:
    def names(*page: Any, **filters: Any) -> list[str]:
        with cloud.connect() as connection:
            return [r["name"] for r in find(connection, page=Page(*page), **filters)]

    assert names(1) == ["fake"]
    assert names(5, driver_uuid("fake")) == ["generic"]
    assert names(1, None, "name", "desc") == ["generic"]
    assert names(1, driver_uuid("generic"), "name", "desc") == ["fake"]
    assert sorted(names(None, None, "uuid")) == names()
    assert names(host="b") == ["generic"]
    assert names(host="c") == names(host="none") == []
    with cloud.connect() as connection:
        (driver,) = find(connection, host="b")
    assert {h["host"] for h in driver["hosts"] or ()} == {"b"}


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
        find(connection, page=page)
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
            for read, cost in ((find, 5), (hardware.find, 1)):
                with count_statements(sqlite_engine) as count:
                    assert len(read(connection)) >= number
                assert len(count) == cost, count.statements
            with count_statements(sqlite_engine) as count:
                assert find(connection, host=f"{number}-0")
                assert get(connection, "x")
                assert entries_of(connection, "x")
            assert len(count) == 9 + 8 + 4, count.statements

# SPDX-License-Identifier: Apache-2.0
"""Tests of reading accelerators, and of the state filter against core."""

import itertools
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.core.binding.accelerator import AcceleratorState
from cyborg.core.errors import Invalid
from cyborg.db import schema
from cyborg.db.binding import accelerators as read
from cyborg.db.devices import read as read_devices
from cyborg.db.paging import Page
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements

INSTANCE = "11111111-2222-3333-4444-555555555555"


def assign_handle(
    engine: sa.Engine, card: rows.Card, nth: int = 0, **request: Any
) -> tuple[str, str]:
    """Assign the nth handle of a card to a new ARQ; return the uuids of handle and ARQ."""
    profiles = rows.read(engine, schema.device_profiles)
    profile = profiles[0]["id"] if profiles else rows.insert_profile(engine)
    arq = rows.insert_arq(engine, profile, **{"state": "Bound", **request})
    (row,) = rows.read(engine, schema.arqs, uuid=arq)
    handle = rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id)[nth]
    rows.update(engine, schema.attach_handles, handle["id"], arq_id=row["id"])
    return handle["uuid"], arq


def find(engine: sa.Engine, **filters: Any) -> list[Any]:
    with engine.connect() as connection:
        return read.find(connection, **filters)


def read_pages(engine: sa.Engine, limit: int, **filters: Any) -> list[str]:
    """Return the uuids of all pages of a list."""
    uuids: list[str] = []
    order = {name: filters.pop(name) for name in ("sort_key", "sort_dir") if name in filters}
    while True:
        page = Page(limit, uuids[-1] if uuids else None, **order)
        found = [row["uuid"] for row in find(engine, page=page, **filters)]
        uuids += found
        if len(found) < limit:
            return uuids


def agent_with_backend(engine: sa.Engine, host: str = "compute-1") -> int:
    service = rows.insert_agent(engine, host)
    rows.insert(
        engine, schema.backends, service_id=service, name="gen0", driver="generic", status="READY"
    )
    return service


def test_find_shows_an_owned_accelerator(engine: sa.Engine) -> None:
    agent_with_backend(engine)
    card = rows.insert_card(engine, handles=2, backend="gen0")
    label = {"label_name": "mine", "label_description": "d\ne", "label_tags": ["é", "b"]}
    handle, arq = assign_handle(engine, card, 1, instance_uuid=INSTANCE, instance_slot=0, **label)
    free, owned = find(engine)
    (device,) = rows.read(engine, schema.devices)
    (deployable,) = rows.read(engine, schema.deployables)
    (row,) = rows.read(engine, schema.attach_handles, uuid=handle)
    assert (owned.pop("created_at"), owned.pop("updated_at")) == (
        row["created_at"],
        row["updated_at"],
    )
    assert owned == {
        "uuid": handle,
        "type": "FPGA",
        "vendor": "0xABCD",
        "model": "fake",
        "hostname": "compute-1",
        "backend": "gen0",
        "driver": "generic",
        "device_uuid": device["uuid"],
        "deployable_uuid": deployable["uuid"],
        "rp_uuid": card.provider,
        "resource_class": "FPGA",
        "attach_handle_type": "TEST_PCI",
        "attach_handle_info": {"domain": "0000", "bus": "01", "device": "00", "function": "1"},
        "state": "bound",
        "state_reasons": [],
        "error": None,
        "arq_uuid": arq,
        "instance_uuid": INSTANCE,
        "project_id": "project-1",
        "name": "mine",
        "description": "d\ne",
        "tags": ["é", "b"],
        "attached_at": None,
        "attach_error": None,
    }
    assert set(free) == {*owned, "created_at", "updated_at"}
    arq_columns = ("arq_uuid", "instance_uuid", "project_id", "name", "description")
    assert {free[name] for name in arq_columns} == {None}
    assert (free["state"], free["tags"]) == ("free", [])


def test_filters(engine: sa.Engine) -> None:
    agent_with_backend(engine)
    first = rows.insert_card(engine, handles=2, backend="gen0")
    second = rows.insert_card(
        engine, "compute-2", handles=1, resource_class="PGPU", health="unhealthy"
    )
    bound, _ = assign_handle(
        engine, first, instance_uuid=INSTANCE, instance_slot=0, label_name="card"
    )
    other, _ = assign_handle(engine, second, project_id="project-2", state="BindStarted")

    def uuids(**filters: Any) -> list[str]:
        return [row["uuid"] for row in find(engine, **filters)]

    assert len(uuids()) == 3
    assert uuids(project_id="project-1") == uuids(instance_uuid=INSTANCE) == [bound]
    assert uuids(project_id="") == uuids(project_id="project-1", hostname="compute-2") == []
    assert uuids(hostname="compute-2") == uuids(resource_class="PGPU") == [other]
    assert uuids(name="card") == [bound]
    assert uuids(name="card", project_id="project-2") == uuids(name="Card") == []
    assert uuids(driver="generic") == uuids(driver="gen0") == uuids(hostname="compute-1")
    assert uuids(driver="fake") == uuids(states=["preparing"]) == [other]
    with engine.connect() as connection:
        devices = [row["uuid"] for row in read_devices.find(connection)]
    assert uuids(device_uuid=devices[0]) == uuids(hostname="compute-1")
    page = Page(1, None, None, "desc")
    assert uuids(device_uuid=devices[0], page=page) == uuids(hostname="compute-1")[1:]
    assert uuids(device_uuid=devices[1], states=["free"]) == []
    assert uuids(states=["bound"]) == [bound]
    with engine.connect() as connection:
        assert read.get(connection, bound, "project-2") is None
        accelerator = read.get(connection, other, "project-2")
    assert accelerator is not None
    assert (accelerator["driver"], accelerator["state_reasons"]) == (None, ["unhealthy"])


def test_address_is_that_of_a_handle_or_of_the_parent_of_a_mediated_device(
    engine: sa.Engine,
) -> None:
    parent, other = "0000:3d:00.4", "0000:3d:00.41"
    for host in ("a", "b"):
        rows.insert_card(engine, host, handles=4)
    addresses = (parent, f"{parent}/nvidia-222/0", other, f"x/{parent}")
    for row in rows.read(engine, schema.attach_handles):
        address = addresses[int(row["address"])]
        rows.update(engine, schema.attach_handles, row["id"], address=address)
    everything = [row["uuid"] for row in find(engine)]
    for page in (None, Page(8)):
        found = find(engine, page=page, address=parent)
        assert [row["uuid"] for row in found] == [*everything[:2], *everything[4:6]]
        found = find(engine, page=page, address=parent, hostname="b", states=["free"])
        assert [row["uuid"] for row in found] == everything[4:6]
        assert find(engine, page=page, address="0000:3d:00._") == []
    assert len(find(engine, page=Page(8), address=other, states=["free"])) == 2


@pytest.mark.parametrize("key", read.SORTABLE)
def test_pages_by_each_sort_key(engine: sa.Engine, key: str) -> None:
    for host in ("b", "a"):
        card = rows.insert_card(engine, host, handles=2)
        assign_handle(engine, card, label_name=f"name-{host}", project_id=host)
    all_uuids = [row["uuid"] for row in find(engine, page=Page(sort_key=key, sort_dir="desc"))]
    found_values: list[str] = []
    while len(found_values) < 4:
        marker = found_values[-1] if found_values else None
        found_values += [row["uuid"] for row in find(engine, page=Page(1, marker, key, "desc"))]
    assert found_values == all_uuids
    assert len(set(found_values)) == 4


FILTERS: list[dict[str, Any]] = [
    {},
    {"project_id": "a"},
    {"resource_class": "PGPU"},
    {"driver": "generic"},
    {"resource_class": "FPGA", "driver": "fake"},
    {"hostname": "b", "resource_class": "FPGA"},
    {"states": ["bound"]},
    {"states": ["free", "draining"]},
    {"states": ["cordoned"], "resource_class": "FPGA"},
    {"project_id": "a", "states": ["preparing"]},
    {"instance_uuid": INSTANCE, "project_id": "b"},
    {"states": ["dirty", "error"]},
    {"states": ["free"]},
    {"states": ["free", "cordoned"]},
    {"states": ["free"], "hostname": "b"},
    {"states": ["cordoned"]},
    {"states": ["draining"]},
    {"states": ["draining", "cordoned"], "hostname": "a"},
]


# Each is read in pages of several lengths by each key: every third in the default tier.
@pytest.mark.parametrize(
    "filters",
    [
        pytest.param(filters, marks=pytest.mark.matrix if number % 3 else ())
        for number, filters in enumerate(FILTERS)
    ],
    ids=str,
)
def test_pages_of_each_filter_have_all_rows(engine: sa.Engine, filters: Any) -> None:
    agent_with_backend(engine, "a")
    bound: dict[str, Any] = {"instance_uuid": INSTANCE, "instance_slot": 0}
    for host, n in itertools.product("ab", range(4)):
        values = {"resource_class": ("FPGA", "PGPU")[n % 2], "backend": ("gen0", "fake")[n // 2]}
        health = "unhealthy" if n == 2 else "ok"
        card = rows.insert_card(
            engine, host, f"0000:0{n}:00.0", handles=1 + n % 3, health=health, **values
        )
        if n == 1:
            assign_handle(engine, card, project_id="a", state=("Bound", "BindStarted")[host == "b"])
        if n == 3:
            assign_handle(engine, card, project_id="b", **bound)
            bound = {}
    dirty = rows.read(engine, schema.attach_handles, arq_id=None)[-1]
    rows.update(engine, schema.attach_handles, dirty["id"], needs_cleaning=True)
    draining = rows.read(engine, schema.attach_handles, arq_id=None)[0]
    rows.update(engine, schema.attach_handles, draining["id"], draining=True)
    rows.update(engine, schema.deployables, card.deployable_id, draining=True)
    expected = sorted(row["uuid"] for row in find(engine, **filters))
    assert expected
    for key in (None, *read.SORTABLE):
        ascending = read_pages(engine, 100, sort_key=key, **filters)
        assert sorted(ascending) == expected, key
        for limit in (1, 2, 3):
            assert read_pages(engine, limit, sort_key=key, **filters) == ascending, key
            down = read_pages(engine, limit, sort_key=key, sort_dir="desc", **filters)
            assert down == ascending[::-1], key


@pytest.mark.parametrize("filters", [{"project_id": "b"}, {"resource_class": "PGPU"}], ids=str)
def test_marker_of_another_list_is_rejected(sqlite_engine: sa.Engine, filters: Any) -> None:
    card = rows.insert_card(sqlite_engine, handles=1)
    handle, _ = assign_handle(sqlite_engine, card, project_id="a")
    # In the order of uuids the marker is a text, which reveals no row.
    assert find(sqlite_engine, page=Page(1, handle, "uuid"), **filters) == []
    for page in (Page(1, handle), Page(1, "nobody")):
        with pytest.raises(Invalid, match="is not in this list"):
            find(sqlite_engine, page=page, **filters)
    for page, field in ((Page(0), "limit"), (Page(1, sort_dir="up"), "sort_dir")):
        with pytest.raises(Invalid, match=f"^{field}: "):
            find(sqlite_engine, page=page, **filters)


def test_pages_read_further_deployables_until_they_are_full(
    sqlite_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "MAX_CHUNK", 3)
    cards = [rows.insert_card(sqlite_engine, f"host-{n:02}", handles=1) for n in range(20)]
    for card in (cards[1], cards[17], cards[18]):
        assign_handle(sqlite_engine, card)
    uuids = read_pages(sqlite_engine, 2, resource_class="FPGA", states=["bound"])
    assert uuids == [row["uuid"] for row in find(sqlite_engine, states=["bound"])]
    assert len(uuids) == 3


@pytest.mark.slow
def test_state_filter_matches_core(sqlite_engine: sa.Engine) -> None:
    engine = sqlite_engine
    agent = rows.insert_agent(engine)
    job = rows.insert(
        engine, schema.jobs, kind="program", host="h", subject="s", arguments={}, state="open"
    )
    failing = rows.insert(
        engine,
        schema.jobs,
        kind="release",
        host="h",
        subject="s",
        arguments={},
        error="it broke",
    )
    card = rows.insert_card(engine, handles=1)
    (handle,) = rows.read(engine, schema.attach_handles)
    assign_handle(engine, card)
    (request,) = rows.read(engine, schema.arqs)
    # Each column that affects the state, with its possible values.
    choices: dict[tuple[sa.Table, int, str], list[Any]] = {
        (schema.attach_handles, handle["id"], "arq_id"): [None, request["id"]],
        (schema.attach_handles, handle["id"], "needs_cleaning"): [False, True],
        (schema.attach_handles, handle["id"], "job_id"): [None, failing],
        (schema.attach_handles, handle["id"], "draining"): [False, True],
        (schema.deployables, card.deployable_id, "draining"): [False, True],
        (schema.devices, card.device_id, "draining"): [False, True],
        (schema.arqs, request["id"], "state"): ["Bound", "BindStarted"],
    }
    cordoning: dict[tuple[sa.Table, int, str], list[Any]] = {
        (schema.devices, card.device_id, "status"): ["enabled", "maintaining"],
        (schema.devices, card.device_id, "health"): ["ok", "unknown", "unhealthy"],
        (schema.devices, card.device_id, "setup_required"): [False, True],
        (schema.devices, card.device_id, "reboot_required"): [False, True],
        (schema.devices, card.device_id, "failing"): [False, True],
        (schema.devices, card.device_id, "deliverable"): [True, False],
        (schema.deployables, card.deployable_id, "job_id"): [None, job],
        (schema.services, agent, "down_since"): [None, timeutils.utcnow()],
    }
    written: dict[tuple[sa.Table, int, str], Any] = {}

    def write(tx: sa.Connection, place: tuple[sa.Table, int, str], value: Any) -> None:
        table, id_, column = place
        tx.execute(sa.update(table).where(table.c.id == id_).values({column: value}))
        written[place] = value

    found_values = set()
    with engine.connect() as tx:
        for columns in (choices, cordoning):
            for values in itertools.product(*columns.values()):
                for place, value in zip(columns, values, strict=True):
                    if written.get(place, ...) != value:
                        write(tx, place, value)
                (row,) = read.find(tx)
                assert read.find(tx, states=[row["state"]]) == [row], values
                others = [state for state in AcceleratorState if state != row["state"]]
                assert read.find(tx, states=others) == [], values
                found_values.add(row["state"])
            # The second round is of a handle without an owner, on which only the device decides.
            for place, (first, *_) in columns.items():
                write(tx, place, first)
        tx.rollback()
    assert found_values == set(AcceleratorState)


def test_find_needs_a_constant_number_of_statements(sqlite_engine: sa.Engine) -> None:
    for number in (1, 30):
        for n in range(number):
            assign_handle(
                sqlite_engine, rows.insert_card(sqlite_engine, f"host-{number}-{n}", handles=2)
            )
        with count_statements(sqlite_engine) as count:
            assert len(find(sqlite_engine)) >= 2 * number
        assert len(count) == 1, count.statements
        with count_statements(sqlite_engine) as count:
            found = find(sqlite_engine, page=Page(2 * number), resource_class="FPGA")
        assert len(found) == 2 * number
        assert len(count) == 3, count.statements

# SPDX-License-Identifier: Apache-2.0
"""Accelerators as the API shows them, and the filter of states against the rule of core."""

import itertools
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.core.accelerator import State
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.read import accelerators as read
from cyborg.db.read.paging import Page
from cyborg.fixtures import rows

INSTANCE = "11111111-2222-3333-4444-555555555555"


def hold(engine: sa.Engine, card: rows.Card, nth: int = 0, **request: Any) -> tuple[str, str]:
    """Have a request hold the nth handle of a card; return the uuids of handle and request."""
    profiles = rows.read(engine, schema.device_profiles)
    profile = profiles[0]["id"] if profiles else rows.profile(engine)
    arq = rows.request(engine, profile, **{"state": "Bound", **request})
    (row,) = rows.read(engine, schema.requests, uuid=arq)
    handle = rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id)[nth]
    rows.change(engine, schema.attach_handles, handle["id"], request_id=row["id"])
    return handle["uuid"], arq


def found(engine: sa.Engine, **filters: Any) -> list[Any]:
    with engine.connect() as connection:
        return read.find(connection, **filters)


def agent_with_backend(engine: sa.Engine, host: str = "compute-1") -> int:
    service = rows.agent(engine, host)
    rows.insert(
        engine, schema.backends, service_id=service, name="gen0", driver="generic", status="READY"
    )
    return service


def test_one_that_is_held(engine: sa.Engine) -> None:
    agent_with_backend(engine)
    card = rows.card(engine, handles=2, backend="gen0")
    label = {"label_name": "mine", "label_description": "d\ne", "label_tags": ["é", "b"]}
    handle, arq = hold(engine, card, 1, instance_uuid=INSTANCE, instance_slot=0, **label)
    free, held = found(engine)
    (device,) = rows.read(engine, schema.devices)
    (part,) = rows.read(engine, schema.deployables)
    (row,) = rows.read(engine, schema.attach_handles, uuid=handle)
    assert (held.pop("created_at"), held.pop("updated_at")) == (
        row["created_at"],
        row["updated_at"],
    )
    assert held == {
        "uuid": handle,
        "type": "FPGA",
        "vendor": "0xABCD",
        "model": "fake",
        "hostname": "compute-1",
        "backend": "gen0",
        "driver": "generic",
        "device_uuid": device["uuid"],
        "deployable_uuid": part["uuid"],
        "rp_uuid": card.provider,
        "resource_class": "FPGA",
        "attach_handle_type": "TEST_PCI",
        "attach_handle_info": {"domain": "0000", "bus": "01", "device": "00", "function": "1"},
        "state": "bound",
        "state_reasons": [],
        "arq_uuid": arq,
        "instance_uuid": INSTANCE,
        "project_id": "project-1",
        "name": "mine",
        "description": "d\ne",
        "tags": ["é", "b"],
    }
    assert set(free) == {*held, "created_at", "updated_at"}
    nothing = ("arq_uuid", "instance_uuid", "project_id", "name", "description")
    assert {free[name] for name in nothing} == {None}
    assert (free["state"], free["tags"]) == ("free", [])


def test_filters(engine: sa.Engine) -> None:
    agent_with_backend(engine)
    one = rows.card(engine, handles=2, backend="gen0")
    two = rows.card(engine, "compute-2", handles=1, resource_class="PGPU", health="unhealthy")
    mine, _ = hold(engine, one, instance_uuid=INSTANCE, instance_slot=0)
    other, _ = hold(engine, two, project_id="project-2", state="BindStarted")

    def uuids(**filters: Any) -> list[str]:
        return [row["uuid"] for row in found(engine, **filters)]

    assert len(uuids()) == 3
    assert uuids(project_id="project-1") == uuids(instance_uuid=INSTANCE) == [mine]
    assert uuids(project_id="") == uuids(project_id="project-1", hostname="compute-2") == []
    assert uuids(hostname="compute-2") == uuids(resource_class="PGPU") == [other]
    assert uuids(driver="generic") == uuids(driver="gen0") == uuids(hostname="compute-1")
    assert uuids(driver="fake") == uuids(state="preparing") == [other]
    assert uuids(state="bound") == [mine]
    with engine.connect() as connection:
        assert read.get(connection, mine, "project-2") is None
        shown = read.get(connection, other, "project-2")
    assert shown is not None
    assert (shown["driver"], shown["state_reasons"]) == (None, ["unhealthy"])


@pytest.mark.parametrize("key", read.SORTABLE)
def test_pages_in_every_order(engine: sa.Engine, key: str) -> None:
    for host in ("b", "a"):
        card = rows.card(engine, host, handles=2)
        hold(engine, card, label_name=f"name-{host}", project_id=host)
    whole = [row["uuid"] for row in found(engine, page=Page(sort_key=key, sort_dir="desc"))]
    seen: list[str] = []
    while len(seen) < 4:
        marker = seen[-1] if seen else None
        seen += [row["uuid"] for row in found(engine, page=Page(1, marker, key, "desc"))]
    assert seen == whole
    assert len(set(seen)) == 4


def test_the_filter_of_states_is_the_rule_of_core(sqlite_engine: sa.Engine) -> None:
    engine = sqlite_engine
    agent = rows.agent(engine)
    job = rows.insert(
        engine, schema.jobs, kind="program", host="h", subject="s", arguments={}, state="open"
    )
    card = rows.card(engine, handles=1)
    (handle,) = rows.read(engine, schema.attach_handles)
    hold(engine, card)
    (request,) = rows.read(engine, schema.requests)
    # Each column that decides anything, with the values that it can take.
    choices: dict[tuple[sa.Table, int, str], list[Any]] = {
        (schema.attach_handles, handle["id"], "request_id"): [None, request["id"]],
        (schema.attach_handles, handle["id"], "prepared"): [False, True],
        (schema.attach_handles, handle["id"], "draining"): [False, True],
        (schema.deployables, card.deployable_id, "draining"): [False, True],
        (schema.devices, card.device_id, "draining"): [False, True],
        (schema.requests, request["id"], "state"): ["Bound", "BindStarted"],
    }
    closing: dict[tuple[sa.Table, int, str], list[Any]] = {
        (schema.devices, card.device_id, "status"): ["enabled", "maintaining"],
        (schema.devices, card.device_id, "health"): ["ok", "unknown", "unhealthy"],
        (schema.devices, card.device_id, "setup_required"): [False, True],
        (schema.devices, card.device_id, "reboot_required"): [False, True],
        (schema.deployables, card.deployable_id, "job_id"): [None, job],
        (schema.services, agent, "down_since"): [None, timeutils.utcnow()],
    }
    seen = set()
    with engine.connect() as tx:
        for some in (choices, closing):
            for values in itertools.product(*some.values()):
                for (table, id_, column), value in zip(some, values, strict=True):
                    tx.execute(sa.update(table).where(table.c.id == id_).values({column: value}))
                (row,) = read.find(tx)
                told = [s for s in State if read.find(tx, state=s)]
                assert told == [row["state"]], values
                seen.add(row["state"])
            # The second round is of what nobody holds and nothing else keeps.
            for (table, id_, column), (first, *_) in some.items():
                tx.execute(sa.update(table).where(table.c.id == id_).values({column: first}))
        tx.rollback()
    assert seen == set(State)


def test_the_number_of_statements_does_not_grow(sqlite_engine: sa.Engine) -> None:
    for number in (1, 30):
        for n in range(number):
            hold(sqlite_engine, rows.card(sqlite_engine, f"host-{number}-{n}", handles=2))
        with counting(sqlite_engine) as count:
            assert len(found(sqlite_engine)) >= 2 * number
        assert len(count) == 1, count.statements

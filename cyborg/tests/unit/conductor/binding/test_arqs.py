# SPDX-License-Identifier: Apache-2.0
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import Arqs
from cyborg.core.errors import Invalid, NotFound, ServiceTokenRequired, WrongState
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.machine.log_lines import texts_of
from cyborg.tests.fixtures.machine.options import make_conf

INSTANCE = str(uuid4())


@pytest.fixture
def arqs(engine: sa.Engine) -> Arqs:
    return Arqs(make_conf(nova={"send_events": False}), UnitOfWork(engine))


@pytest.fixture
def sqlite_arqs(sqlite_engine: sa.Engine) -> Arqs:
    return Arqs(make_conf(), UnitOfWork(sqlite_engine))


def states(engine: sa.Engine) -> dict[str, str]:
    return {row["uuid"]: row["state"] for row in rows.read(engine, schema.arqs)}


def bound(engine: sa.Engine, card: rows.Card, count: int = 1, **values: Any) -> list[str]:
    """Insert ARQs that own the first handles of a card."""
    profile = rows.insert_profile(engine, f"p-{uuid4()}")
    handles = rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id)
    facts = {"state": "Bound", "instance_uuid": INSTANCE, "hostname": card.host}
    uuids = []
    for n in range(count):
        uuids.append(
            rows.insert_arq(
                engine,
                profile,
                **facts | {"device_rp_uuid": card.provider, "instance_slot": n} | values,
            )
        )
        (row,) = rows.read(engine, schema.arqs, uuid=uuids[-1])
        rows.update(engine, schema.attach_handles, handles[n]["id"], arq_id=row["id"])
    return uuids


def owners(engine: sa.Engine) -> list[int]:
    handles = rows.read(engine, schema.attach_handles)
    return [row["arq_id"] for row in handles if row["arq_id"] is not None]


def test_create_returns_one_arq_for_each_unit_in_group_order(engine: sa.Engine, arqs: Arqs) -> None:
    groups = [{"resources:FPGA": "2", "trait:CUSTOM_A": "required"}, {"resources:PGPU": "1"}]
    rows.insert_profile(engine, "p", groups)
    created = arqs.create("p", "project-1")["arqs"]
    assert [(a["device_profile_group_id"], a["resource_class"]) for a in created] == [
        (0, "FPGA"),
        (0, "FPGA"),
        (1, "PGPU"),
    ]
    assert [a["group"] for a in created] == [groups[0], groups[0], groups[1]]
    assert {a["state"] for a in created} == {"Initial"}
    assert {a["project_id"] for a in created} == {"project-1"}
    assert created[0]["attach_handle_type"] == ""
    assert created[0]["attach_handle_info"] == {}
    assert created[0]["attach_handle_uuid"] is None
    assert created[0]["created_at"].endswith("+00:00")
    stored = rows.read(engine, schema.arqs)
    assert [row["uuid"] for row in stored] == [a["uuid"] for a in created]


@pytest.mark.parametrize("name", ["nobody", ""])
def test_create_with_unknown_profile_raises_not_found(sqlite_arqs: Arqs, name: str) -> None:
    with pytest.raises(NotFound, match="no device profile"):
        sqlite_arqs.create(name, "project-1")


def test_create_with_non_string_name_raises_invalid(sqlite_arqs: Arqs) -> None:
    with pytest.raises(Invalid):
        sqlite_arqs.create(None, "project-1")  # type: ignore[arg-type]


def test_unbind_frees_the_handle_and_is_idempotent(engine: sa.Engine, arqs: Arqs) -> None:
    uuids = bound(engine, rows.insert_card(engine), 2)
    items = [{"request": uuid} for uuid in uuids]
    for _ in range(2):
        arqs.unbind(items, "project-1")
        assert states(engine) == dict.fromkeys(uuids, "Unbound")
        assert owners(engine) == []
    for row in rows.read(engine, schema.arqs):
        for column in ("hostname", "device_rp_uuid", "instance_uuid", "instance_slot"):
            assert row[column] is None
    assert rows.read(engine, schema.providers)[0]["revision"] == 1


def test_unbind_with_invalid_arq_changes_nothing(engine: sa.Engine, arqs: Arqs) -> None:
    card = rows.insert_card(engine)
    (uuid,) = bound(engine, card)
    fresh = rows.insert_arq(engine, rows.insert_profile(engine, "q"))
    with pytest.raises(WrongState, match=f"{fresh} in state Initial"):
        arqs.unbind([{"request": uuid}, {"request": fresh}], None)
    missing = str(uuid4())
    with pytest.raises(NotFound) as raised:
        arqs.unbind([{"request": uuid}, {"request": missing}], None)
    assert raised.value.details == {"unknown": [missing]}
    with pytest.raises(NotFound):
        arqs.unbind([{"request": uuid}], "project-2")
    assert states(engine)[uuid] == "Bound"
    assert len(owners(engine)) == 1


def test_unbind_of_draining_handle_marks_its_provider_stale(engine: sa.Engine, arqs: Arqs) -> None:
    card, other = rows.insert_card(engine), rows.insert_card(engine, "compute-2")
    (uuid,) = bound(engine, card)
    (handle,) = [h for h in rows.read(engine, schema.attach_handles) if h["arq_id"]]
    rows.update(engine, schema.attach_handles, handle["id"], draining=True)
    arqs.unbind([{"request": uuid}], None)
    (handle_row,) = rows.read(engine, schema.attach_handles, id=handle["id"])
    assert (handle_row["draining"], handle_row["arq_id"]) == (True, None)
    revisions = {row["uuid"]: row["revision"] for row in rows.read(engine, schema.providers)}
    assert revisions == {card.provider: 2, other.provider: 1}
    assert rows.read(engine, schema.providers, uuid=card.provider)[0]["stale_since"] is not None


def test_delete_with_unknown_uuids_deletes_existing_arqs(engine: sa.Engine, arqs: Arqs) -> None:
    profile = rows.insert_profile(engine)
    own = rows.insert_arq(engine, profile)
    foreign = rows.insert_arq(engine, profile, project_id="project-2")
    missing = str(uuid4())
    with pytest.raises(NotFound) as raised:
        arqs.delete([own, foreign, missing], None, "project-1", allow_bound=False)
    assert raised.value.details == {"unknown": sorted([foreign, missing])}
    assert states(engine) == {foreign: "Initial"}


def test_delete_of_bound_arq_requires_service_token(engine: sa.Engine, arqs: Arqs) -> None:
    (uuid,) = bound(engine, rows.insert_card(engine))
    fresh = rows.insert_arq(engine, rows.insert_profile(engine, "q"))
    with pytest.raises(ServiceTokenRequired, match="requires a service token"):
        arqs.delete([uuid, fresh], None, None, allow_bound=False)
    assert states(engine) == {uuid: "Bound", fresh: "Initial"}
    arqs.delete([uuid, fresh], None, None, allow_bound=True)
    assert states(engine) == {}
    assert owners(engine) == []


def test_delete_by_instance_is_idempotent(engine: sa.Engine, arqs: Arqs) -> None:
    bound(engine, rows.insert_card(engine), 3)
    fresh = rows.insert_arq(engine, rows.insert_profile(engine, "q"))
    with pytest.raises(ServiceTokenRequired):
        arqs.delete(None, INSTANCE, None, allow_bound=False)
    for _ in range(2):
        arqs.delete(None, INSTANCE, None, allow_bound=True)
        assert states(engine) == {fresh: "Initial"}
        assert owners(engine) == []


@pytest.mark.parametrize(
    ("uuids", "instance"),
    [
        (None, None),
        ([], None),
        (["x"], None),
        (None, "x"),
        pytest.param([INSTANCE], INSTANCE, id="both"),
    ],
)
def test_delete_with_malformed_arguments_raises_invalid(
    sqlite_arqs: Arqs, uuids: Any, instance: Any
) -> None:
    with pytest.raises(Invalid):
        sqlite_arqs.delete(uuids, instance, None, allow_bound=True)


@pytest.mark.parametrize(
    ("items", "verb"),
    [
        ([], "bind"),
        ([], "unbind"),
        ([{}], "bind"),
        ([1], "unbind"),
        ({}, "bind"),
        ("x", "unbind"),
        ([{"request": 1}], "unbind"),
        ([{"request": INSTANCE}, {"request": INSTANCE.upper()}], "unbind"),
        ([{"request": INSTANCE}], "bind"),
        ([{"request": INSTANCE, "hostname": "h", "device_rp_uuid": "x"}], "bind"),
    ],
)
def test_bind_and_unbind_with_malformed_items_raises_invalid(
    sqlite_arqs: Arqs, items: Any, verb: str
) -> None:
    with pytest.raises(Invalid):
        getattr(sqlite_arqs, verb)(items, None)


def test_releases_are_logged_with_instance(
    sqlite_engine: sa.Engine, sqlite_arqs: Arqs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cyborg.conductor.binding.arqs")
    uuids = bound(sqlite_engine, rows.insert_card(sqlite_engine), 3)
    sqlite_arqs.unbind([{"request": uuid} for uuid in uuids[:2]], None)
    sqlite_arqs.delete(uuids[:2], None, None, True)
    sqlite_arqs.delete(None, INSTANCE, None, True)
    sqlite_arqs.delete(None, INSTANCE, None, True)
    assert [sorted(text.split("] ")) for text in texts_of(caplog.records)] == [
        sorted(f"{fields}] {message}".split("] "))
        for fields, message in (
            (f"[arq={uuids[0]} arq={uuids[1]} instance={INSTANCE}", "Unbound 2 ARQ(s)"),
            (f"[arq={uuids[0]} arq={uuids[1]}", "Deleted 2 ARQ(s)"),
            (f"[arq={uuids[2]} instance={INSTANCE}", "Deleted 1 ARQ(s)"),
        )
    ]

# SPDX-License-Identifier: Apache-2.0
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.requests import Requests
from cyborg.core.errors import Invalid, NotFound, ServiceTokenRequired, WrongState
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.options import make_conf

INSTANCE = str(uuid4())


@pytest.fixture
def requests(engine: sa.Engine) -> Requests:
    return Requests(make_conf(nova={"notify": False}), UnitOfWork(engine))


@pytest.fixture
def light(sqlite_engine: sa.Engine) -> Requests:
    return Requests(make_conf(), UnitOfWork(sqlite_engine))


def states(engine: sa.Engine) -> dict[str, str]:
    return {row["uuid"]: row["state"] for row in rows.read(engine, schema.requests)}


def bound(engine: sa.Engine, card: rows.Card, count: int = 1, **values: Any) -> list[str]:
    """Insert requests that own the first handles of a card."""
    profile = rows.profile(engine, f"p-{uuid4()}")
    handles = rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id)
    facts = {"state": "Bound", "instance_uuid": INSTANCE, "hostname": card.host}
    uuids = []
    for n in range(count):
        uuids.append(
            rows.request(
                engine,
                profile,
                **facts | {"device_rp_uuid": card.provider, "instance_slot": n} | values,
            )
        )
        (row,) = rows.read(engine, schema.requests, uuid=uuids[-1])
        rows.change(engine, schema.attach_handles, handles[n]["id"], request_id=row["id"])
    return uuids


def owners(engine: sa.Engine) -> list[int]:
    found = rows.read(engine, schema.attach_handles)
    return [row["request_id"] for row in found if row["request_id"] is not None]


def test_one_request_for_each_unit_in_group_order(engine: sa.Engine, requests: Requests) -> None:
    groups = [{"resources:FPGA": "2", "trait:CUSTOM_A": "required"}, {"resources:PGPU": "1"}]
    rows.profile(engine, "p", groups)
    made = requests.create("p", "project-1")["arqs"]
    assert [(a["device_profile_group_id"], a["resource_class"]) for a in made] == [
        (0, "FPGA"),
        (0, "FPGA"),
        (1, "PGPU"),
    ]
    assert [a["group"] for a in made] == [groups[0], groups[0], groups[1]]
    assert {a["state"] for a in made} == {"Initial"}
    assert {a["project_id"] for a in made} == {"project-1"}
    assert made[0]["attach_handle_type"] == ""
    assert made[0]["attach_handle_info"] == {}
    assert made[0]["attach_handle_uuid"] is None
    assert made[0]["created_at"].endswith("+00:00")
    stored = rows.read(engine, schema.requests)
    assert [row["uuid"] for row in stored] == [a["uuid"] for a in made]


@pytest.mark.parametrize("name", ["nobody", ""])
def test_an_unknown_profile(light: Requests, name: str) -> None:
    with pytest.raises(NotFound, match="no device profile"):
        light.create(name, "project-1")


def test_a_name_that_is_no_name(light: Requests) -> None:
    with pytest.raises(Invalid):
        light.create(None, "project-1")  # type: ignore[arg-type]


def test_unbind_gives_the_handle_back_and_again_changes_nothing(
    engine: sa.Engine, requests: Requests
) -> None:
    uuids = bound(engine, rows.card(engine), 2)
    wishes = [{"request": uuid} for uuid in uuids]
    for _ in range(2):
        requests.patch(wishes, "unbind", "project-1")
        assert states(engine) == dict.fromkeys(uuids, "Unbound")
        assert owners(engine) == []
    for row in rows.read(engine, schema.requests):
        for column in ("hostname", "device_rp_uuid", "instance_uuid", "instance_slot"):
            assert row[column] is None
    assert rows.read(engine, schema.providers)[0]["revision"] == 1


def test_unbind_all_or_none(engine: sa.Engine, requests: Requests) -> None:
    card = rows.card(engine)
    (uuid,) = bound(engine, card)
    fresh = rows.request(engine, rows.profile(engine, "q"))
    with pytest.raises(WrongState, match=f"{fresh}, which is Initial"):
        requests.patch([{"request": uuid}, {"request": fresh}], "unbind", None)
    unknown = str(uuid4())
    with pytest.raises(NotFound) as raised:
        requests.patch([{"request": uuid}, {"request": unknown}], "unbind", None)
    assert raised.value.details == {"unknown": [unknown]}
    with pytest.raises(NotFound):
        requests.patch([{"request": uuid}], "unbind", "project-2")
    assert states(engine)[uuid] == "Bound"
    assert len(owners(engine)) == 1


def test_a_drained_handle_that_is_freed_marks_its_provider(
    engine: sa.Engine, requests: Requests
) -> None:
    card, other = rows.card(engine), rows.card(engine, "compute-2")
    (uuid,) = bound(engine, card)
    (handle,) = [h for h in rows.read(engine, schema.attach_handles) if h["request_id"]]
    rows.change(engine, schema.attach_handles, handle["id"], draining=True)
    requests.patch([{"request": uuid}], "unbind", None)
    (kept,) = rows.read(engine, schema.attach_handles, id=handle["id"])
    assert (kept["draining"], kept["request_id"]) == (True, None)
    revisions = {row["uuid"]: row["revision"] for row in rows.read(engine, schema.providers)}
    assert revisions == {card.provider: 2, other.provider: 1}
    assert rows.read(engine, schema.providers, uuid=card.provider)[0]["stale_since"] is not None


def test_the_known_are_deleted_beside_the_unknown(engine: sa.Engine, requests: Requests) -> None:
    profile = rows.profile(engine)
    mine = rows.request(engine, profile)
    foreign = rows.request(engine, profile, project_id="project-2")
    unknown = str(uuid4())
    with pytest.raises(NotFound) as raised:
        requests.delete([mine, foreign, unknown], None, "project-1", bound_too=False)
    assert raised.value.details == {"unknown": sorted([foreign, unknown])}
    assert states(engine) == {foreign: "Initial"}


def test_a_bound_one_goes_with_a_service_token_alone(engine: sa.Engine, requests: Requests) -> None:
    (uuid,) = bound(engine, rows.card(engine))
    fresh = rows.request(engine, rows.profile(engine, "q"))
    with pytest.raises(ServiceTokenRequired, match="requires a service token"):
        requests.delete([uuid, fresh], None, None, bound_too=False)
    assert states(engine) == {uuid: "Bound", fresh: "Initial"}
    requests.delete([uuid, fresh], None, None, bound_too=True)
    assert states(engine) == {}
    assert owners(engine) == []


def test_those_of_an_instance_once_and_again(engine: sa.Engine, requests: Requests) -> None:
    bound(engine, rows.card(engine), 3)
    fresh = rows.request(engine, rows.profile(engine, "q"))
    with pytest.raises(ServiceTokenRequired):
        requests.delete(None, INSTANCE, None, bound_too=False)
    for _ in range(2):
        requests.delete(None, INSTANCE, None, bound_too=True)
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
def test_deleting_what_is_not_named(light: Requests, uuids: Any, instance: Any) -> None:
    with pytest.raises(Invalid):
        light.delete(uuids, instance, None, bound_too=True)


@pytest.mark.parametrize(
    ("wishes", "verb"),
    [
        ([], "bind"),
        ([], "unbind"),
        ([{}], "bind"),
        ([1], "unbind"),
        ({}, "bind"),
        ([{"request": INSTANCE}], "bind"),
        ([{"request": INSTANCE}], "shake"),
        ([{"request": INSTANCE, "hostname": "h", "device_rp_uuid": "x"}], "bind"),
    ],
)
def test_wishes_that_cannot_be_read(light: Requests, wishes: Any, verb: str) -> None:
    with pytest.raises(Invalid):
        light.patch(wishes, verb, None)

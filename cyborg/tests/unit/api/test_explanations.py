# SPDX-License-Identifier: Apache-2.0
"""Explanation and capacity of a device profile, for administrators and for projects."""

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.api import controller
from cyborg.api.v2 import device_profiles, explanations
from cyborg.db import schema
from cyborg.testing.fake_keystone import FakeKeystone
from cyborg.tests.fixtures.clouds.api import INSTANCE, ApiEnv, error_message
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.unit.api.test_auth import keystone_conf
from cyborg.tests.unit.api.test_routes import _check

NEWEST = {"OpenStack-API-Version": "accelerator latest"}
PROFILE = "/v2/device_profiles/p1"


def fill(api: ApiEnv) -> dict[str, str]:
    """Insert two hosts with three devices, of which one is unhealthy and one has a bound ARQ."""
    api.create_profile(**{"trait:CUSTOM_FAKE_DEVICE": "required"})
    card = rows.insert_card(api.engine, handles=2)
    sick = rows.insert_card(
        api.engine, address="0000:02:00.0", handles=4, health="unhealthy", health_reason="hot"
    )
    nic = rows.insert_card(api.engine, "compute-2", resource_class="CUSTOM_NIC", handles=1)
    for host in ("compute-1", "compute-2"):
        rows.insert_agent(api.engine, host)
    (arq,) = api.create_arqs()
    assert api.bind(arq, card.provider).status_int == 202
    return {"card": card.provider, "sick": sick.provider, "nic": nic.provider, "arq": arq}


def codes(document: dict[str, Any], key: str = "providers") -> dict[str, int]:
    (group,) = document["groups"]
    return {reason["code"]: reason[key] for reason in group["reasons"]}


def test_explanation_has_first_failure_of_each_provider(api: ApiEnv) -> None:
    uuids = fill(api)
    document = api.get(f"{PROFILE}/explanation")
    _check(explanations.Explanation, document, "explanation")
    (group,) = document["groups"]
    assert (group["group"], group["resources"]) == (0, {"FPGA": 1})
    assert (group["fitting_providers"], group["free_handles"]) == (1, 1)
    assert codes(document) == {"unhealthy": 1, "resource_class": 1}
    found = {row["uuid"]: row for row in document["providers"]}
    assert {uuid: row["groups"][0]["code"] for uuid, row in found.items()} == {
        uuids["card"]: None,
        uuids["sick"]: "unhealthy",
        uuids["nic"]: "resource_class",
    }
    sick = found[uuids["sick"]]
    assert sick["groups"][0]["reason"] == "device is unhealthy: hot"
    assert "health_reason" in sick["groups"][0]["remedy"]
    assert (sick["hostname"], sick["address"], sick["handles"]) == ("compute-1", "0000:02:00.0", 4)
    (owner,) = found[uuids["card"]]["owners"]
    assert (owner["arq_uuid"], owner["instance_uuid"]) == (uuids["arq"], INSTANCE)


def test_explanation_of_one_host(api: ApiEnv) -> None:
    uuids = fill(api)
    document = api.get(f"{PROFILE}/explanation?host=compute-2")
    assert [row["uuid"] for row in document["providers"]] == [uuids["nic"]]
    assert codes(document) == {"resource_class": 1}
    unknown = api.call("GET", f"{PROFILE}/explanation?host=none", headers=NEWEST)
    assert "unknown host 'none'; known are compute-1, compute-2" in error_message(unknown)


def test_explanation_when_all_handles_are_taken(api: ApiEnv) -> None:
    uuids = fill(api)
    (second,) = api.create_arqs()
    other = "99999999-2222-3333-4444-555555555555"
    assert api.bind(second, uuids["card"], other).status_int == 202
    document = api.get(f"{PROFILE}/explanation")
    found = {row["uuid"]: row for row in document["providers"]}
    card = found[uuids["card"]]
    assert card["groups"][0]["reason"] == "handle is taken (2 of 2 handles)"
    assert {owner["instance_uuid"] for owner in card["owners"]} == {INSTANCE, other}
    # The error of a bind has the same text, from the same predicate.
    (third,) = api.create_arqs()
    refused = api.bind(third, uuids["card"], "88888888-2222-3333-4444-555555555555")
    assert refused.status_int == 409
    assert "handle is taken (2 handles)" in error_message(refused)


def test_capacity_by_host_and_losses(api: ApiEnv) -> None:
    fill(api)
    document = api.get(f"{PROFILE}/capacity")
    _check(device_profiles.Capacity, document, "capacity")
    assert (document["servers"], document["exact"]) == (1, True)
    assert (document["free_handles"], document["handles"]) == (1, 6)
    assert [(loss["code"], loss["handles"]) for loss in document["losses"]] == [
        ("unhealthy", 4),
        ("taken", 1),
    ]
    (host,) = document["hosts"]
    assert (host["hostname"], host["servers"]) == ("compute-1", 1)
    assert api.get(f"{PROFILE}/capacity?host=compute-2")["servers"] == 0


def test_capacity_and_bind_agree(api: ApiEnv) -> None:
    """As many servers as the capacity says can be bound, and no more."""
    uuids = fill(api)
    rows.insert_card(api.engine, address="0000:03:00.0", handles=0)
    for number in range(api.get(f"{PROFILE}/capacity")["servers"]):
        (arq,) = api.create_arqs()
        instance = f"{number:08}-2222-3333-4444-555555555555"
        assert api.bind(arq, uuids["card"], instance).status_int == 202
    assert api.get(f"{PROFILE}/capacity")["servers"] == 0
    (arq,) = api.create_arqs()
    assert api.bind(arq, uuids["card"], f"{99:08}-2222-3333-4444-555555555555").status_int == 409


@pytest.mark.parametrize(("kind", "key"), [("explanation", "providers"), ("capacity", "hosts")])
def test_pages_have_every_row_once(api: ApiEnv, kind: str, key: str) -> None:
    api.create_profile()
    for n in range(7):
        rows.insert_card(api.engine, f"host-{n}", handles=1)
    api.conf.set_override("max_limit", 3, group="api")
    hosts, pages, path = [], 0, f"{PROFILE}/{kind}?sort_key=hostname&sort_dir=desc"
    while path:
        body = api.get(path)
        assert len(body[key]) <= 3
        hosts += [row["hostname"] for row in body[key]]
        pages += 1
        path = next((link["href"] for link in body.get(f"{key}_links", ())), "")
    assert hosts == [f"host-{n}" for n in reversed(range(7))]
    assert pages == 3


@pytest.mark.parametrize(
    ("kind", "statements"), [("explanation", 11), ("capacity", 3)], ids=["explanation", "capacity"]
)
def test_statements_are_constant(api: ApiEnv, kind: str, statements: int) -> None:
    uuids = fill(api)
    counts = []
    for start, end in ((0, 2), (2, 12)):
        for n in range(start, end):
            rows.insert_card(api.engine, f"host-{n}", handles=4)
        with count_statements(api.engine) as executed:
            assert uuids["card"] in str(api.get(f"{PROFILE}/{kind}")) or kind == "capacity"
        counts.append(len(executed))
    assert counts == [statements, statements]


@pytest.mark.parametrize("kind", ["explanation", "capacity"])
def test_one_evaluation_of_all_hosts_at_a_time(
    sqlite_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(controller, "EVALUATION_TURN_SECONDS", 0.01)
    conf = make_conf()
    conf.set_override("auth_strategy", "noauth")
    api = ApiEnv(conf, sqlite_engine)
    fill(api)
    path, answers = f"{PROFILE}/{kind}", list[Any]()
    started, proceed = threading.Event(), threading.Event()
    first = threading.Thread(target=lambda: answers.append(api.get(path)))

    def hold(_: Any, __: Any, statement: str, *___: Any) -> None:
        if threading.current_thread() is first and "attach_handles" in statement:
            started.set()
            assert proceed.wait(10)

    sa.event.listen(api.engine, "before_cursor_execute", hold)
    first.start()
    try:
        assert started.wait(10)
        refused = api.call("GET", path, headers=NEWEST)
        assert refused.status_int == 429
        assert refused.headers["Retry-After"] == "1"
        assert "are being evaluated for other requests, retry in 1 s" in error_message(refused)
        # One host takes no time, and needs no turn.
        assert api.get(f"{path}?host=compute-1")
    finally:
        proceed.set()
        first.join()
        sa.event.remove(api.engine, "before_cursor_execute", hold)
    assert answers == [api.get(path)]


@pytest.mark.parametrize("kind", ["explanation", "capacity"])
def test_bad_requests(api: ApiEnv, kind: str) -> None:
    latest = {"OpenStack-API-Version": "accelerator latest"}
    fill(api)
    for query, status in (
        ("", 200),
        ("?limit=1", 200),
        ("?limit=0", 400),
        ("?marker=none", 400),
        ("?sort_key=none", 400),
        ("?host=%00", 400),
        ("?rack=1", 400),
    ):
        assert api.call("GET", f"{PROFILE}/{kind}{query}", headers=latest).status_int == status
    missing = f"/v2/device_profiles/none/{kind}"
    assert api.call("GET", missing, headers=latest).status_int == 404
    old = {"OpenStack-API-Version": "accelerator 2.5"}
    assert api.call("GET", f"{PROFILE}/{kind}", headers=old).status_int == 404


@pytest.fixture
def keystone_api(sqlite_engine: sa.Engine, fake_keystone: FakeKeystone) -> ApiEnv:
    return ApiEnv(keystone_conf(**fake_keystone.options()), sqlite_engine)


def test_project_sees_counts_and_no_host(keystone_api: ApiEnv, fake_keystone: FakeKeystone) -> None:
    engine = keystone_api.engine
    latest = {"OpenStack-API-Version": "accelerator latest"}
    token = fake_keystone.issue_token(["member", "reader"])
    keystone_api.headers = {**latest, "X-Auth-Token": token}
    profile = rows.insert_profile(engine, "p1")
    card = rows.insert_card(engine, "secret-host", "0000:99:00.0", handles=2)
    handles = rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id)
    instances = [INSTANCE, "99999999-2222-3333-4444-555555555555"]
    for number, (handle, project) in enumerate(zip(handles, ("project-1", "other"), strict=True)):
        bound = {"state": "Bound", "project_id": project, "instance_uuid": instances[number]}
        provider = {"device_rp_uuid": card.provider}
        uuid = rows.insert_arq(engine, profile, **bound, **provider, instance_slot=0)
        (arq,) = rows.read(engine, schema.arqs, uuid=uuid)
        rows.update(engine, schema.attach_handles, handle["id"], arq_id=arq["id"])
    answer = keystone_api.call("GET", f"{PROFILE}/explanation")
    assert answer.status_int == 200, answer.text
    (group,) = answer.json["groups"]
    (reason,) = group["reasons"]
    assert reason["reason"] == (
        f"handle is taken by another project; taken by your project: instance {INSTANCE}"
    )
    assert reason["remedy"] is None
    assert answer.json["providers"] == []
    capacity = keystone_api.call("GET", f"{PROFILE}/capacity")
    assert (capacity.json["servers"], capacity.json["hosts"]) == (0, [])
    assert [loss["code"] for loss in capacity.json["losses"]] == ["taken"]
    for secret in ("secret-host", "0000:99", instances[1], 'other"', card.provider, "cyborg "):
        assert secret not in answer.text + capacity.text
    for kind in ("explanation", "capacity"):
        refused = keystone_api.call("GET", f"{PROFILE}/{kind}?host=secret-host")
        assert refused.status_int == 403
        assert error_message(refused).startswith("host: only administrators")
    admin = {"X-Auth-Token": fake_keystone.issue_token(["admin"])}
    seen = keystone_api.call("GET", f"{PROFILE}/explanation", headers=admin)
    assert seen.json["providers"][0]["hostname"] == "secret-host"


def test_project_sees_owners_of_the_failing_providers_only(
    keystone_api: ApiEnv, fake_keystone: FakeKeystone
) -> None:
    """An own handle of a provider without the trait is no owner, and a draining one is none."""
    engine = keystone_api.engine
    token = fake_keystone.issue_token(["member", "reader"])
    keystone_api.headers = {
        "OpenStack-API-Version": "accelerator latest",
        "X-Auth-Token": token,
    }
    small = {"resources:FPGA": "1", "trait:CUSTOM_SMALL": "required"}
    big = {"resources:FPGA": "1", "trait:CUSTOM_BIG": "required"}
    profile = rows.insert_profile(engine, "p1", groups=[big, small])
    mine, theirs = "project-1", "other"
    # The owners of the handles of each card: (project, handle is draining).
    cards = {
        "CUSTOM_BIG": [(theirs, False), (mine, True)],
        "CUSTOM_SMALL": [(mine, False)],
    }
    slot = 0
    for number, (trait, owners) in enumerate(cards.items()):
        card = rows.insert_card(
            engine, address=f"0000:0{number}:00.0", traits=[trait], handles=len(owners)
        )
        handles = rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id)
        for handle, (project, draining) in zip(handles, owners, strict=True):
            bound = {"state": "Bound", "project_id": project, "instance_uuid": INSTANCE}
            provider = {"device_rp_uuid": card.provider}
            uuid = rows.insert_arq(engine, profile, **bound, **provider, instance_slot=slot)
            slot += 1
            (arq,) = rows.read(engine, schema.arqs, uuid=uuid)
            owned = {"arq_id": arq["id"], "draining": draining}
            rows.update(engine, schema.attach_handles, handle["id"], **owned)
    answer = keystone_api.call("GET", f"{PROFILE}/explanation")
    reasons = [
        {reason["code"]: reason["reason"] for reason in group["reasons"]}
        for group in answer.json["groups"]
    ]
    assert [found["taken"] for found in reasons] == [
        "handle is taken by another project",
        f"handle is taken by your project: instance {INSTANCE}",
    ]


def test_quota_of_the_project_is_considered(
    sqlite_engine: sa.Engine, fake_keystone: FakeKeystone
) -> None:
    """A project at its limit is told so before a server of it is refused."""
    conf = keystone_conf(**fake_keystone.options())
    conf.set_override("driver", "static", group="quota")
    conf.set_override("default_limits", {"FPGA": "3"}, group="quota")
    api = ApiEnv(conf, sqlite_engine)
    latest = {"OpenStack-API-Version": "accelerator latest"}
    api.headers = {**latest, "X-Auth-Token": fake_keystone.issue_token(["member", "reader"])}
    profile = rows.insert_profile(api.engine, "p1")
    rows.insert_card(api.engine, handles=8)
    seen = []
    for _ in range(4):
        explanation = api.call("GET", f"{PROFILE}/explanation").json
        capacity = api.call("GET", f"{PROFILE}/capacity").json
        seen.append((capacity["servers"], codes(explanation)))
        lost = sum(loss["handles"] for loss in capacity["losses"])
        assert capacity["free_handles"] + lost == capacity["handles"] == 8
        assert capacity["losses"][0]["code"] == "quota"
        rows.insert_arq(api.engine, profile, project_id="project-1")
    assert seen == [(3, {}), (2, {}), (1, {}), (0, {"quota": 1})]
    admin = {**latest, "X-Auth-Token": fake_keystone.issue_token(["admin"])}
    assert api.call("GET", f"{PROFILE}/capacity", headers=admin).json["servers"] == 8


def test_agent_down_is_shown(api: ApiEnv) -> None:
    api.create_profile()
    rows.insert_card(api.engine)
    agent = rows.insert_agent(api.engine)
    rows.update(api.engine, schema.services, agent, down_since=timeutils.utcnow())
    assert codes(api.get(f"{PROFILE}/explanation"), "handles") == {"host_down": 16}
    assert api.get(f"{PROFILE}/capacity")["servers"] == 0

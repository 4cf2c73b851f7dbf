# SPDX-License-Identifier: Apache-2.0
"""Visibility and labels of accelerators for each kind of caller."""

from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.testing.fake_keystone import FakeKeystone
from cyborg.tests.fixtures.clouds.api import INSTANCE, ApiEnv, error_message
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.unit.api.test_auth import keystone_conf

PATH = "/v2/accelerators"
LATEST = {"OpenStack-API-Version": "accelerator latest"}


@pytest.fixture
def keystone_api(sqlite_engine: sa.Engine, fake_keystone: FakeKeystone) -> ApiEnv:
    """Return an API with keystone authentication, with one card of three handles."""
    env = ApiEnv(keystone_conf(**fake_keystone.options()), sqlite_engine)
    rows.insert_card(env.engine, handles=3)
    profile = rows.insert_profile(env.engine)
    for n, handle in enumerate(rows.read(env.engine, schema.attach_handles)[:2], 1):
        arq = rows.insert_arq(env.engine, profile, state="Bound", project_id=f"project-{n}")
        (request,) = rows.read(env.engine, schema.arqs, uuid=arq)
        rows.update(env.engine, schema.attach_handles, handle["id"], arq_id=request["id"])
    return env


def test_error_of_the_host_is_hidden_from_a_project(
    keystone_api: ApiEnv, fake_keystone: FakeKeystone
) -> None:
    job = rows.insert(
        keystone_api.engine,
        schema.jobs,
        kind="restore",
        host="compute-1",
        subject="s",
        arguments={},
        error="no file /etc/secret",
    )
    (arq, _) = rows.read(keystone_api.engine, schema.arqs)
    rows.update(keystone_api.engine, schema.arqs, arq["id"], job_id=job)
    for roles, project, errors in (
        (["reader"], "project-1", {None}),
        (["accelerator_admin"], "x", {None, "no file /etc/secret"}),
    ):
        headers = {"X-Auth-Token": fake_keystone.issue_token(roles, project), **LATEST}
        answer = keystone_api.call("GET", PATH, None, headers)
        assert answer.status_int == 200
        assert {row["error"] for row in answer.json["accelerators"]} == errors


def test_owner_sees_from_2_6_on_whether_the_guest_has_the_device(
    keystone_api: ApiEnv, fake_keystone: FakeKeystone
) -> None:
    (arq, _) = rows.read(keystone_api.engine, schema.arqs)
    error = "No more available PCI slots"
    rows.update(keystone_api.engine, schema.arqs, arq["id"], attach_error=error)
    token = {"X-Auth-Token": fake_keystone.issue_token(["reader"], "project-1")}
    for version in ("2.5", "2.6"):
        headers = {**token, "OpenStack-API-Version": f"accelerator {version}"}
        (row,) = keystone_api.call("GET", PATH, None, headers).json["accelerators"]
        found = {key: row[key] for key in ("attached_at", "attach_error") if key in row}
        expected = {"attached_at": None, "attach_error": error} if version == "2.6" else {}
        assert found == expected


@pytest.mark.slow
def test_find_and_update_are_limited_to_own_project(
    keystone_api: ApiEnv, fake_keystone: FakeKeystone
) -> None:
    first, second, free = [
        row["uuid"] for row in rows.read(keystone_api.engine, schema.attach_handles)
    ]

    def call(persona: tuple[str, ...], method: str, path: str, body: Any = None) -> Any:
        *roles, project = persona
        headers = {"X-Auth-Token": fake_keystone.issue_token(roles, project), **LATEST}
        if "with_service_token" in roles:
            headers["X-Service-Token"] = fake_keystone.issue_token(["service"])
        return keystone_api.call(method, PATH + path, body, headers)

    all_uuids = {first, second, free}
    table = [
        (("member", "project-1"), {first}, {first: 200, second: 404, free: 404}),
        (("member", "project-2"), {second}, {first: 404, second: 200, free: 404}),
        (("reader", "project-1"), {first}, {first: 403, second: 403, free: 403}),
        (("member", "project-3"), set(), {first: 404, second: 404, free: 404}),
        (("accelerator_admin", "x"), all_uuids, {first: 200, second: 200, free: 409}),
        (("with_service_token", "x"), all_uuids, {first: 200, second: 200, free: 409}),
        # Without a service token, a service user is limited to its project, as for ARQs.
        (("service", "project-2"), {second}, {first: 404, second: 200, free: 404}),
    ]
    for persona, visible, update_statuses in table:
        # Keystone's member role implies reader; a member without it would see nothing.
        roles = ("reader", *persona) if persona[0] == "member" else persona
        accelerators = call(roles, "GET", "").json["accelerators"]
        assert {row["uuid"] for row in accelerators} == visible, persona
        for uuid, status in update_statuses.items():
            response = call(roles, "GET", f"/{uuid}")
            assert response.status_int == (200 if uuid in visible else 404), (persona, uuid)
            updated = call(roles, "PATCH", f"/{uuid}", {"name": "-".join(persona)})
            assert updated.status_int == status, (persona, uuid)
    assert call(("admin", "x"), "GET", f"/{first}").json["name"] == "with_service_token-x"
    for path in ("", f"/{first}"):
        assert call(("swift_user", "project-1"), "GET", path).status_int == 403


def test_find_marker_of_other_project_is_rejected(
    keystone_api: ApiEnv, fake_keystone: FakeKeystone
) -> None:
    other = rows.read(keystone_api.engine, schema.attach_handles)[1]["uuid"]
    token = fake_keystone.issue_token(["member", "reader"], "project-1")
    answer = keystone_api.call(
        "GET", f"{PATH}?marker={other}", None, {"X-Auth-Token": token, **LATEST}
    )
    assert answer.status_int == 400
    assert "is not in this list" in error_message(answer)


def test_failed_cleaning_is_dirty_before_2_5(api: ApiEnv) -> None:
    rows.insert_card(api.engine, handles=2)
    job = {"kind": "release", "host": "compute-1", "subject": "s", "arguments": {}, "error": "no"}
    for handle, job_id in zip(
        rows.read(api.engine, schema.attach_handles),
        (rows.insert(api.engine, schema.jobs, **job), None),
        strict=True,
    ):
        values = {"needs_cleaning": True, "job_id": job_id}
        rows.update(api.engine, schema.attach_handles, handle["id"], **values)
    found = {
        version: [
            row["state"]
            for row in api.call(
                "GET",
                f"{PATH}?state=dirty",
                None,
                {"OpenStack-API-Version": f"accelerator {version}"},
            ).json["accelerators"]
        ]
        for version in ("2.4", "2.5")
    }
    assert found == {"2.4": ["dirty", "dirty"], "2.5": ["dirty"]}


def test_label_is_removed_with_binding(api: ApiEnv) -> None:
    card = rows.insert_card(api.engine, handles=2)
    api.create_profile()
    (arq,) = api.create_arqs()
    assert {a["state"] for a in api.get(PATH)["accelerators"]} == {"free"}
    assert api.bind(arq, card.provider).status_int == 202
    (bound,) = api.get(f"{PATH}?instance={INSTANCE}")["accelerators"]
    assert (bound["state"], bound["arq_uuid"], bound["tags"]) == ("bound", arq, [])
    path = f"{PATH}/{bound['uuid']}"
    updated = api.call("PATCH", path, {"name": "fast", "tags": ["a", "a"]}, LATEST)
    assert updated.json == bound | {"name": "fast", "tags": ["a"]} == api.get(path)
    assert [r["uuid"] for r in api.get(f"{PATH}?state=bound")["accelerators"]] == [bound["uuid"]]
    deleted = api.call("DELETE", f"/v2/accelerator_requests?instance={INSTANCE}")
    assert deleted.status_int == 204
    assert (api.get(path)["name"], api.get(path)["state"]) == (None, "free")
    # The label is not part of the ARQ, whose fields existing clients know.
    assert not any(key.startswith("label") for key in api.get("/v2/accelerator_requests"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "nothing to change"),
        ({"name": ""}, "name"),
        ({"name": "n" * 256}, "name"),
        ({"tags": "a"}, "tags"),
        ({"tags": [7]}, "tags"),
        ({"tags": ["t"] * 51}, "tags"),
        ({"description": "a\0"}, "description"),
        ({"state": "free"}, "state: unknown field"),
        ([], "object"),
    ],
)
def test_update_label_invalid_body_is_rejected(api: ApiEnv, body: Any, message: str) -> None:
    rows.insert_card(api.engine, handles=1)
    (handle,) = rows.read(api.engine, schema.attach_handles)
    answer = api.call("PATCH", f"{PATH}/{handle['uuid']}", body, LATEST)
    assert answer.status_int == 400
    assert message in error_message(answer)
    assert api.conductor.calls == []

# SPDX-License-Identifier: Apache-2.0
"""Device contexts through the API: callers, versions, and the answers to bad input."""

from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg import os_acc
from cyborg.core.errors import Unavailable
from cyborg.db import schema
from cyborg.testing.fake_keystone import FakeKeystone
from cyborg.tests.fixtures.clouds.api import ApiEnv, bind_body, error_message
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.unit.api.test_auth import keystone_conf
from cyborg.tests.unit.core.contexts.test_context import BAD

PATH = "/v2/device_contexts"
PROFILES = "/v2/device_profiles"
ARQS = "/v2/accelerator_requests"
LATEST = {"OpenStack-API-Version": "accelerator 2.6"}
BODY = {"resources": {"FPGA": 1}, "config_data": {"key1": "val1"}}


def create(api: ApiEnv, **more: Any) -> dict[str, Any]:
    answer = api.call("POST", PATH, {**BODY, **more}, LATEST)
    assert answer.status_int == 201, answer.text
    return dict(answer.json)


def test_older_versions_have_no_contexts(api: ApiEnv) -> None:
    create(api)
    for version in ("2.0", "2.5"):
        headers = {"OpenStack-API-Version": f"accelerator {version}"}
        answer = api.call("GET", PATH, None, headers)
        assert (answer.status_int, "2.6" in error_message(answer)) == (404, True)


def test_new_context_has_a_location(api: ApiEnv) -> None:
    answer = api.call("POST", PATH, BODY, LATEST)
    assert answer.headers["Location"].endswith(f"{PATH}/{answer.json['uuid']}")
    assert answer.json["hidden_profile"] == f"ctx-{answer.json['uuid']}"
    assert api.conductor.calls == ["device_context_create"]


def test_shown_context_has_its_arqs(api: ApiEnv) -> None:
    group = {"resources:FPGA": "1"}
    context = create(api, resources=None, groups=[group, {"resources:FPGA": "2"}])
    create(api)
    path = f"{PATH}/{context['uuid']}"
    shown = api.get(path)
    assert {name: shown[name] for name in context} == context
    assert [arq["device_profile_group_id"] for arq in shown["arqs"]] == [0, 1, 1]
    assert [api.get(f"{ARQS}/{arq['uuid']}") for arq in shown["arqs"]] == shown["arqs"]
    body = {"device_profile_name": context["hidden_profile"]}
    created = api.call("POST", ARQS, body, LATEST).json["arqs"]
    assert api.get(path)["arqs"] == created != shown["arqs"]


def test_library_parses_a_shown_context(api: ApiEnv) -> None:
    group = {"resources:FPGA": "1"}
    uuid = create(api, resources=None, groups=[group, {"resources:FPGA": "2"}])["uuid"]
    shown, providers = api.get(f"{PATH}/{uuid}"), [str(uuid4()), str(uuid4())]
    mappings = {str(number): [provider] for number, provider in enumerate(providers)}
    parameters = os_acc.parse(shown, "compute-1", str(uuid4()), mappings)
    assert [(item.arq_uuid, item.device_rp_uuid) for item in parameters] == [
        (arq["uuid"], providers[arq["device_profile_group_id"]]) for arq in shown["arqs"]
    ]


def test_list_of_contexts_reads_no_arqs(api: ApiEnv) -> None:
    for _ in range(3):
        create(api)
    with count_statements(api.engine) as count:
        found = api.get(PATH)["device_contexts"]
    assert ["arqs" in row for row in found] == [False] * 3
    assert not [text for text in count.statements if "FROM arqs" in text]


@pytest.mark.parametrize(("body", "field"), BAD)
def test_bad_body_is_400_and_changes_nothing(api: ApiEnv, body: dict[str, Any], field: str) -> None:
    answer = api.call("POST", PATH, body, LATEST)
    assert answer.status_int == 400
    assert field in error_message(answer)
    for table in (schema.device_contexts, schema.device_profiles, schema.arqs):
        assert rows.read(api.engine, table) == []
    assert api.conductor.calls == []


def test_body_of_a_megabyte_is_413(api: ApiEnv) -> None:
    body = {**BODY, "config_data": {"k": "v" * 2**20}}
    assert api.call("POST", PATH, body, LATEST).status_int == 413
    assert rows.read(api.engine, schema.device_contexts) == []


def test_change_of_a_context(api: ApiEnv) -> None:
    context = create(api)
    path = f"{PATH}/{context['uuid']}"
    changed = {"name": "n", "expires_at": "2999-01-01T00:00:00.000000+00:00"}
    answer = api.call("PATCH", path, changed, LATEST)
    assert answer.status_int == 200
    assert {name: answer.json[name] for name in changed} == changed
    assert api.call("PATCH", path, {"name": None}, LATEST).json["name"] is None
    for body, field in (
        ({}, "nothing to change"),
        ({"expires_at": "2020-01-01T00:00:00+00:00"}, "expires_at"),
        ({"expires_at": 5}, "expires_at"),
        ({"config_data": {"k": "\x00"}}, "config_data"),
        ({"config_data": {"k": "v" * 2**15}}, "config_data"),
        ({"groups": []}, "groups"),
    ):
        answer = api.call("PATCH", path, body, LATEST)
        assert (answer.status_int, field in error_message(answer)) == (400, True), body
    assert api.call("PATCH", f"{PATH}/{uuid4()}", {"name": "n"}, LATEST).status_int == 404


def test_list_is_filtered(api: ApiEnv) -> None:
    api.create_profile("gzip")
    plain = create(api)
    answer = api.call("POST", PATH, {"device_profile": "gzip"}, LATEST)
    (row,) = rows.read(api.engine, schema.device_contexts, uuid=plain["uuid"])
    instance = str(uuid4())
    bound = {"state": "bound", "instance_uuid": instance, "hostname": "compute-1"}
    rows.update(api.engine, schema.device_contexts, row["id"], **bound)
    for query, uuids in (
        ("device_profile=gzip", [answer.json["uuid"]]),
        ("state=bound", [plain["uuid"]]),
        (f"instance={instance}", [plain["uuid"]]),
        ("host=compute-1", [plain["uuid"]]),
        ("sort_key=name&limit=1", [plain["uuid"]]),
    ):
        found = api.get(f"{PATH}?{query}")["device_contexts"]
        assert [context["uuid"] for context in found] == uuids, query
    unknown = api.call("GET", f"{PATH}?host=compute-2", None, LATEST)
    assert (unknown.status_int, "unknown host 'compute-2'" in unknown.text) == (404, True)
    for query in ("state=lost", "instance=x", "colour=red"):
        assert api.call("GET", f"{PATH}?{query}", None, LATEST).status_int == 400


def test_hidden_profile_is_listed_by_name_only(api: ApiEnv) -> None:
    context, visible = create(api), api.create_profile("p")
    assert [row["name"] for row in api.get(PROFILES)["device_profiles"]] == ["p"]
    name = context["hidden_profile"]
    (found,) = api.get(f"{PROFILES}?name={name}", "2.0")["device_profiles"]
    assert (found["name"], found["groups"]) == (name, context["groups"])
    assert api.get(f"{PROFILES}/{name}")["device_profile"] == found
    answer = api.call("DELETE", f"{PROFILES}/{name}")
    assert (answer.status_int, context["uuid"] in error_message(answer)) == (409, True)
    answer = api.call("DELETE", f"{PROFILES}?value=p,{name}")
    assert answer.status_int == 409
    assert api.get(f"{PROFILES}/p")["device_profile"]["uuid"] == visible["uuid"]
    body = {"name": f"ctx-{uuid4()}", "groups": context["groups"]}
    answer = api.call("POST", PROFILES, body)
    assert (answer.status_int, "name" in error_message(answer)) == (400, True)


def test_candidates_without_placement_are_503(api: ApiEnv) -> None:
    context = create(api)
    path = f"{PATH}/{context['uuid']}/allocation_candidates"
    assert api.call("GET", path, None, LATEST).status_int == 503
    api.conductor.error = Unavailable("Placement is away")
    assert api.call("GET", path, None, LATEST).status_int == 503
    assert api.call("GET", f"{path}?limit=0", None, LATEST).status_int == 400


class Cloud:
    """The API with keystone; ``call`` takes the roles and the project of a token."""

    def __init__(self, api: ApiEnv, keystone: FakeKeystone) -> None:
        self.api, self.keystone = api, keystone

    def call(
        self, persona: str, method: str, path: str, body: Any = None, *, service: bool = False
    ) -> Any:
        role, project = persona.split("@")
        roles = ["member", "reader"] if role == "member" else [role]
        headers = {"X-Auth-Token": self.keystone.issue_token(roles, project), **LATEST}
        if service:
            headers["X-Service-Token"] = self.keystone.issue_token(["service"])
        return self.api.call(method, path, body, headers)


@pytest.fixture
def cloud(sqlite_engine: sa.Engine, fake_keystone: FakeKeystone) -> Cloud:
    return Cloud(ApiEnv(keystone_conf(**fake_keystone.options()), sqlite_engine), fake_keystone)


@pytest.mark.slow
def test_context_of_another_project_does_not_exist(cloud: Cloud) -> None:
    context = cloud.call("member@a", "POST", PATH, BODY).json
    assert context["project_id"] == "a"
    path = f"{PATH}/{context['uuid']}"
    for method, target, body in (
        ("GET", path, None),
        ("GET", f"{path}/request_groups", None),
        ("GET", f"{path}/explanation", None),
        ("PATCH", path, {"name": "n"}),
        ("DELETE", path, None),
        ("GET", f"{PROFILES}/{context['hidden_profile']}", None),
        ("GET", f"{PROFILES}/{context['hidden_profile']}/explanation", None),
        ("GET", f"{PROFILES}/{context['hidden_profile']}/capacity", None),
        ("POST", ARQS, {"device_profile_name": context["hidden_profile"]}),
    ):
        assert cloud.call("member@b", method, target, body).status_int == 404, (method, target)
    assert cloud.call("member@b", "GET", PATH).json == {"device_contexts": []}
    query = f"{PROFILES}?name={context['hidden_profile']}"
    assert cloud.call("member@b", "GET", query).json == {"device_profiles": []}
    assert len(cloud.call("member@b", "GET", query, service=True).json["device_profiles"]) == 1
    for persona in ("member@a", "reader@a", "admin@b", "accelerator_admin@b"):
        explanation = f"{PROFILES}/{context['hidden_profile']}/explanation"
        assert cloud.call(persona, "GET", explanation).status_int == 200, persona
        assert len(cloud.call(persona, "GET", PATH).json["device_contexts"]) == 1, persona
        assert len(cloud.call(persona, "GET", query).json["device_profiles"]) == 1, persona


def test_arqs_of_a_context_need_its_project(cloud: Cloud) -> None:
    context = cloud.call("member@a", "POST", PATH, BODY).json
    body = {"device_profile_name": context["hidden_profile"]}
    # A service token does not make the server of a member another project's.
    assert cloud.call("member@b", "POST", ARQS, body, service=True).status_int == 404
    found = [
        cloud.call(persona, "POST", ARQS, body, service=True)
        for persona in ("member@a", "member@a", "admin@b")
    ]
    assert [answer.status_int for answer in found] == [201] * 3
    assert len({answer.json["arqs"][0]["uuid"] for answer in found}) == 3
    assert found[2].json["arqs"][0]["project_id"] == "a"


def test_reader_changes_nothing(cloud: Cloud) -> None:
    context = cloud.call("member@a", "POST", PATH, BODY).json
    path = f"{PATH}/{context['uuid']}"
    assert cloud.call("reader@a", "POST", PATH, BODY).status_int == 403
    assert cloud.call("reader@a", "PATCH", path, {"name": "n"}).status_int == 403
    assert cloud.call("reader@a", "DELETE", path).status_int == 403
    assert cloud.call("member@a", "GET", f"{path}/allocation_candidates").status_int == 403
    assert cloud.call("member@a", "DELETE", path).status_int == 204


def test_only_a_service_token_deletes_a_bound_context(cloud: Cloud) -> None:
    card, instance = rows.insert_card(cloud.api.engine), str(uuid4())
    context = cloud.call("member@a", "POST", PATH, BODY).json
    body = {"device_profile_name": context["hidden_profile"]}
    (arq,) = cloud.call("member@a", "POST", ARQS, body, service=True).json["arqs"]
    bind = bind_body(arq["uuid"], card.provider, instance)
    assert cloud.call("member@a", "PATCH", ARQS, bind, service=True).status_int == 202
    path = f"{PATH}/{context['uuid']}"
    assert cloud.call("member@a", "GET", path).json["state"] == "bound"
    for persona in ("member@a", "admin@b", "accelerator_admin@b"):
        answer = cloud.call(persona, "DELETE", path)
        assert (answer.status_int, instance in error_message(answer)) == (409, True), persona
    assert cloud.call("member@a", "DELETE", path, service=True).status_int == 204
    assert cloud.call("member@a", "GET", path).status_int == 404
    assert rows.read(cloud.api.engine, schema.arqs) == []
    handles = rows.read(cloud.api.engine, schema.attach_handles)
    assert {row["arq_id"] for row in handles} == {None}

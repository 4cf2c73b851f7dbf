# SPDX-License-Identifier: Apache-2.0
"""Every policy rule with every kind of caller, with tokens of a real keystone, over HTTP.

The expected permissions are in the policy unit tests. Here each persona calls each operation of
each rule.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
import requests
from oslo_policy import policy

import cyborg
from cyborg.policies.rules import list_rules
from cyborg.rpc.notifications import GROUP
from cyborg.tests.fixtures.clouds.api import bind_body
from cyborg.tests.fixtures.clouds.keystone_cloud import KeystoneCloud
from cyborg.tests.fixtures.clouds.keystone_stack import LOGINS
from cyborg.tests.fixtures.machine.processes import BIN, free_port, ini, wait_until
from cyborg.tests.unit.policies.test_personas import PERSONAS, TABLE

pytestmark = pytest.mark.services

MAP_FILE = Path(cyborg.__file__).parents[1] / "etc" / "cyborg" / "api_audit_map.conf"
NOBODY = str(uuid4())
ARQS = "/v2/accelerator_requests"
# The rules check the role in the project of the token, which personas from elsewhere have.
AT_HOME = {"reader elsewhere": "reader", "member elsewhere": "member"}
NEEDED = "requires a service token"


class Call(NamedTuple):
    """The request of an operation, and the status for callers that the policy allows.

    The names are those of missing objects, so that no call changes anything.
    """

    status: int
    body: Any = None
    query: str = ""
    needs_service: bool = False


PROGRAM = [{"path": "/program", "op": "replace", "value": [{"image_uuid": NOBODY}]}]
CALLS: dict[str, Call] = {
    "GET /v2/accelerator_requests": Call(200),
    "GET /v2/accelerator_requests/{uuid}": Call(404),
    "POST /v2/accelerator_requests": Call(404, {"device_profile_name": "none-such"}),
    "PATCH /v2/accelerator_requests": Call(404, bind_body(NOBODY, NOBODY), needs_service=True),
    "PATCH /v2/accelerator_requests/{uuid}": Call(
        404, bind_body(NOBODY, NOBODY), needs_service=True
    ),
    "DELETE /v2/accelerator_requests": Call(404, query=f"?arqs={NOBODY}"),
    "DELETE /v2/accelerator_requests/{uuid}": Call(404),
    "GET /v2/accelerators": Call(200),
    "GET /v2/accelerators/{uuid}": Call(404),
    "PATCH /v2/accelerators/{uuid}": Call(404, {"name": "n"}),
    "GET /v2/attachments": Call(200),
    "GET /v2/attachments/{uuid}": Call(404),
    "POST /v2/attachments": Call(400, {"instance_uuid": NOBODY, "accelerator": "x"}),
    "DELETE /v2/attachments": Call(404, query=f"?instance={NOBODY}"),
    "DELETE /v2/attachments/{uuid}": Call(404),
    "GET /v2/attributes": Call(200),
    "GET /v2/attributes/{uuid}": Call(404),
    "POST /v2/attributes": Call(404, {"deployable_id": NOBODY, "key": "k", "value": "v"}),
    "DELETE /v2/attributes/{uuid}": Call(404),
    "GET /v2/audits": Call(200),
    "GET /v2/audits/{uuid}": Call(404),
    "POST /v2/audits": Call(404, {"host": "none-such"}),
    "GET /v2/deployables": Call(200),
    "GET /v2/deployables/{uuid}": Call(404),
    "PATCH /v2/deployables/{uuid}/program": Call(404, PROGRAM),
    "PATCH /v2/deployables/{uuid}/program/{suffix}": Call(404, PROGRAM),
    "GET /v2/devices": Call(200),
    "GET /v2/devices/{uuid}": Call(404),
    "POST /v2/devices/{uuid}/enable": Call(404),
    "POST /v2/devices/{uuid}/disable": Call(404),
    "PUT /v2/devices/{uuid}/maintenance": Call(400, {"until": "2020-01-01T00:00:00Z"}),
    "DELETE /v2/devices/{uuid}/maintenance": Call(404),
    "GET /v2/devices/{uuid}/custody": Call(404),
    "GET /v2/devices/{uuid}/layout": Call(404),
    "PUT /v2/devices/{uuid}/layout": Call(404, {"layout": "none-such"}),
    "GET /v2/device_contexts": Call(200),
    "GET /v2/device_contexts/{uuid}": Call(404),
    "POST /v2/device_contexts": Call(404, {"device_profile": "none-such"}),
    "PATCH /v2/device_contexts/{uuid}": Call(404, {"name": "n"}),
    "DELETE /v2/device_contexts/{uuid}": Call(404),
    "POST /v2/device_contexts/{uuid}/pre_bind": Call(
        404, {"hostname": "h", "mappings": {"0": [NOBODY]}}, needs_service=True
    ),
    "POST /v2/device_contexts/{uuid}/bind": Call(
        404, {"hostname": "h", "instance_uuid": NOBODY}, needs_service=True
    ),
    "POST /v2/device_contexts/{uuid}/unbind": Call(404, needs_service=True),
    "GET /v2/device_contexts/{uuid}/request_groups": Call(404),
    "GET /v2/device_contexts/{uuid}/explanation": Call(404),
    "GET /v2/device_contexts/{uuid}/allocation_candidates": Call(404),
    "GET /v2/device_profiles": Call(200),
    "GET /v2/device_profiles/{uuid_or_name}": Call(404),
    "GET /v2/device_profiles/{uuid_or_name}/explanation": Call(404),
    "GET /v2/device_profiles/{uuid_or_name}/capacity": Call(404),
    "POST /v2/device_profiles": Call(400, [{"name": "x y", "groups": []}]),
    "DELETE /v2/device_profiles/{uuid_or_name}": Call(404),
    "DELETE /v2/device_profiles": Call(404, query="?value=none-such"),
    "GET /v2/discoveries": Call(200),
    "POST /v2/discoveries": Call(404, {"host": "none-such"}),
    "GET /v2/discoveries/{uuid}": Call(404),
    "GET /v2/drivers": Call(200),
    "GET /v2/drivers/{uuid_or_name}": Call(404),
    "POST /v2/drivers": Call(404, {"driver": "none-such"}),
    "PATCH /v2/drivers/{uuid_or_name}": Call(404, {"reload": True}),
    "DELETE /v2/drivers/{uuid_or_name}": Call(404),
    "GET /v2/hardware": Call(200),
    "POST /v2/hardware": Call(404, {"host": "none-such", "address": "a", "backend": "b"}),
    "DELETE /v2/hardware/{uuid}": Call(404),
    "GET /v2/hosts": Call(200),
    "DELETE /v2/hosts/{host}": Call(404),
    "GET /v2/jobs": Call(200),
    "GET /v2/jobs/{uuid}": Call(404),
    "DELETE /v2/jobs/{uuid}": Call(404),
    "GET /v2/limits": Call(200),
    "GET /v2/outbox": Call(200),
    "POST /v2/outbox/{uuid}/retry": Call(404),
    "DELETE /v2/outbox/{uuid}": Call(404),
    "GET /v2/services": Call(200),
    "DELETE /v2/services/{uuid}": Call(404),
    "GET /v2/summary": Call(200),
}
# The rules of an operation that some requests require in addition.
BY_ACCELERATOR = "cyborg:attachment:create_by_accelerator"
FOR_HOST = "cyborg:attachment:create_for_host"
ADDITIONAL = {BY_ACCELERATOR, FOR_HOST, "cyborg:attachment:delete_for_host"}
OPERATIONS = {
    f"{operation['method']} {operation['path']}": rule.name
    for rule in list_rules()
    if isinstance(rule, policy.DocumentedRuleDefault) and rule.name not in ADDITIONAL
    for operation in rule.operations
}


def test_persona_tables_cover_the_same_operations() -> None:
    assert set(LOGINS) == set(PERSONAS)
    assert set(CALLS) == set(OPERATIONS)
    assert {*OPERATIONS.values(), *ADDITIONAL} == set(TABLE)


def test_member_who_may_attach_may_not_choose_an_accelerator_or_a_host(
    keystone_cloud: KeystoneCloud,
) -> None:
    cloud = keystone_cloud
    allowed = "rule:elevated or rule:project_member or rule:service"
    operations = ("create", "delete")
    cloud.set_policy({f"cyborg:attachment:{name}": allowed for name in operations})
    try:
        for name, status in (("member", 404), ("reader", 403)):
            answer = cloud.call(name, "DELETE", f"/v2/attachments/{NOBODY}")
            assert answer.status_code == status, answer.text
        for name, refused in (("member", True), ("admin", False)):
            body = {"instance_uuid": NOBODY, "accelerator": "x"}
            assert cloud.call(name, "POST", "/v2/attachments", body).status_code == 400
            body["accelerator"] = NOBODY
            answer = cloud.call(name, "POST", "/v2/attachments", body)
            assert (answer.status_code == 403) is refused, answer.text
            assert (BY_ACCELERATOR in answer.text) is refused
            body = {"hostname": "no-such-host", "device_context": NOBODY}
            answer = cloud.call(name, "POST", "/v2/attachments", body)
            assert answer.status_code == (403 if refused else 404), answer.text
            assert (FOR_HOST in answer.text) is refused
            body = {"instance_uuid": NOBODY, "device_context": NOBODY}
            answer = cloud.call(name, "POST", "/v2/attachments", body)
            assert answer.status_code in (404, 409, 503), answer.text
    finally:
        cloud.set_policy({})


@pytest.mark.parametrize("operation", CALLS)
def test_operation_by_each_persona_has_expected_status(
    keystone_cloud: KeystoneCloud, operation: str
) -> None:
    rule, call = OPERATIONS[operation], CALLS[operation]
    method, path = operation.split()
    for part in ("{uuid}", "{uuid_or_name}", "{suffix}"):
        path = path.replace(part, NOBODY)
    actual, expected = {}, {}
    for name in LOGINS:
        answer = keystone_cloud.call(name, method, path + call.query, call.body)
        actual[name] = f"{answer.status_code} {_explain(answer, rule)}".strip()
        if AT_HOME.get(name, name) not in TABLE[rule]:
            expected[name] = f"403 {rule}"
        elif call.needs_service and not LOGINS[name].service_token:
            expected[name] = f"403 {NEEDED}"
        else:
            expected[name] = str(call.status)
    assert actual == expected


@pytest.mark.parametrize("token", [None, "made-up"])
def test_request_without_valid_token_gets_401(
    keystone_cloud: KeystoneCloud, token: str | None
) -> None:
    headers = {} if token is None else {"X-Auth-Token": token}
    for operation in CALLS:
        method, path = operation.split()
        answer = requests.request(
            method, keystone_cloud.endpoint + path, headers=headers, timeout=60
        )
        assert answer.status_code == 401, operation
    assert requests.get(f"{keystone_cloud.endpoint}/v2", timeout=60).status_code == 200


@pytest.fixture
def arq(keystone_cloud: KeystoneCloud) -> Any:
    """Yield an ARQ that a member created; delete it and its profile afterwards."""
    name = f"real-{uuid4().hex[:8]}"
    groups = [{"resources:FPGA": "1", "trait:CUSTOM_FAKE_DEVICE": "required"}]
    creation = keystone_cloud.call(
        "admin", "POST", "/v2/device_profiles", {"name": name, "groups": groups}
    )
    assert creation.status_code == 201, creation.text
    creation = keystone_cloud.call("member", "POST", ARQS, {"device_profile_name": name})
    assert creation.status_code == 201, creation.text
    uuid = creation.json()["arqs"][0]["uuid"]
    yield uuid
    keystone_cloud.call("member", "DELETE", f"{ARQS}/{uuid}", service_token=True)
    deletion = keystone_cloud.call("admin", "DELETE", f"/v2/device_profiles/{name}")
    assert deletion.status_code == 204, deletion.text


def test_arq_is_visible_to_its_project_only(keystone_cloud: KeystoneCloud, arq: str) -> None:
    # Callers that may read ARQs see it, or get 404.
    visible = {
        *("reader", "member", "manager", "admin", "accelerator_admin"),
        *("service user", "service token", "admin elsewhere"),
    }
    for name in (*visible, "reader elsewhere", "member elsewhere"):
        listing = keystone_cloud.call(name, "GET", ARQS)
        assert (arq in [a["uuid"] for a in listing.json()["arqs"]]) == (name in visible), name
        detail = keystone_cloud.call(name, "GET", f"{ARQS}/{arq}")
        assert detail.status_code == (200 if name in visible else 404), name
    rejection = keystone_cloud.call("member elsewhere", "DELETE", f"{ARQS}/{arq}")
    assert rejection.status_code == 404
    assert keystone_cloud.call("member", "GET", f"{ARQS}/{arq}").status_code == 200


def test_service_token_allows_service_operations(keystone_cloud: KeystoneCloud, arq: str) -> None:
    cloud, instance = keystone_cloud, str(uuid4())
    body = bind_body(arq, cloud.provider, instance)

    def state() -> str:
        return str(cloud.call("member", "GET", f"{ARQS}/{arq}").json()["state"])

    for name in ("member", "admin", "service user"):
        for path in (ARQS, f"{ARQS}/{arq}"):
            rejection = cloud.call(name, "PATCH", path, body)
            assert (rejection.status_code, NEEDED in rejection.text) == (403, True), name
    # A token without the service role is not a service token.
    for token in ("made-up", cloud.token("member"), cloud.token("admin")):
        headers = cloud.headers("member") | {"X-Service-Token": token}
        rejection = requests.patch(cloud.endpoint + ARQS, json=body, headers=headers, timeout=60)
        assert rejection.status_code == 401
    assert state() == "Initial"

    bound = cloud.call("member", "PATCH", ARQS, body, service_token=True)
    assert bound.status_code == 202, bound.text
    assert state() == "Bound"
    for path in (f"{ARQS}/{arq}", f"{ARQS}?arqs={arq}", f"{ARQS}?instance={instance}"):
        for name in ("member", "admin"):
            rejection = cloud.call(name, "DELETE", path)
            assert (rejection.status_code, NEEDED in rejection.text) == (403, True), (name, path)
    assert state() == "Bound"

    freed = cloud.call("member", "DELETE", f"{ARQS}?instance={instance}", service_token=True)
    assert freed.status_code == 204
    assert cloud.call("member", "GET", f"{ARQS}/{arq}").status_code == 404


def test_audit_events_name_the_user_of_the_token(keystone_cloud: KeystoneCloud) -> None:
    """A second API with audit and the log driver; its log has the events."""
    cloud, port = keystone_cloud, free_port()
    path = cloud.config("audited-api", host="audited")
    with path.open("a", encoding="utf-8") as file:
        # Repeated sections of one file are merged.
        file.write(ini({"api": {"audit_map_file": MAP_FILE}, GROUP: {"driver": "log"}}))
    bind = ("--bind", f"127.0.0.1:{port}", "cyborg.wsgi.api:application")
    daemon = cloud.add(
        "audited-api", [BIN / "gunicorn", "--threads=2", *bind], OS_CYBORG_CONFIG_FILES=str(path)
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until("the API answers", lambda: _answers(url))
        answers = [
            requests.delete(f"{url}{ARQS}/{NOBODY}", headers=cloud.headers(name), timeout=60)
            for name in ("member", "reader")
        ]
        assert [answer.status_code for answer in answers] == [404, 403]
        refused = requests.delete(f"{url}{ARQS}/{NOBODY}", timeout=60)
        assert refused.status_code == 401

        def events() -> list[dict[str, Any]] | None:
            lines = [line for line in daemon.log.read_text().splitlines() if "audit.http." in line]
            found = [json.loads(line[line.index("{") :])["payload"] for line in lines]
            return found if len(found) == 4 else None

        found = wait_until("the log has the events", events)
        text = daemon.log.read_text()
    finally:
        daemon.stop()
    finished = [event for event in found if event["outcome"] != "pending"]
    for answer, event, name in zip(answers, finished, ("member", "reader"), strict=True):
        user = cloud.keystone.session(name)
        initiator = event["initiator"]
        assert initiator["id"] == user.get_user_id()
        assert initiator["project_id"] == user.get_project_id()
        assert initiator["request_id"] == answer.headers["X-Openstack-Request-Id"]
        assert event["reason"]["reasonCode"] == str(answer.status_code)
        assert event["target"]["typeURI"].endswith("/accelerator_requests/accelerator_request")
        assert cloud.token(name)[:20] not in text
    assert "Traceback" not in text


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/healthcheck", timeout=5).ok
    except requests.RequestException:
        return False


def _explain(response: requests.Response, rule: str) -> str:
    if response.status_code != 403:
        return ""
    if f"the policy does not allow {rule} to this token" in response.text:
        return rule
    return NEEDED if NEEDED in response.text else response.text

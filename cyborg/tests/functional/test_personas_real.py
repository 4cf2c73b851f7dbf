# SPDX-License-Identifier: Apache-2.0
"""Every rule against every kind of caller, by tokens that a real keystone gave, over HTTP.

Who may do what stands in the table of the policies' unit tests. Here each operation of each rule is
called by each persona.
"""

from typing import Any, NamedTuple
from uuid import uuid4

import pytest
import requests
from oslo_policy import policy

from cyborg.fixtures.api import wish
from cyborg.fixtures.keystone_cloud import KeystoneCloud
from cyborg.fixtures.keystone_stack import LOGINS
from cyborg.policies import list_rules
from cyborg.tests.unit.policies.test_personas import PERSONAS, TABLE

pytestmark = pytest.mark.services

NOBODY = str(uuid4())
ARQS = "/v2/accelerator_requests"
# The rules ask for a role in the project of the token, and there those from elsewhere are at home.
AT_HOME = {"reader elsewhere": "reader", "member elsewhere": "member"}
NEEDED = "requires a service token"


class Call(NamedTuple):
    """How an operation is called, and what it answers to those whom the policy lets pass.

    Names are of nothing that there is, so that no call changes anything.
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
    "PATCH /v2/accelerator_requests": Call(404, wish(NOBODY, NOBODY), needs_service=True),
    "PATCH /v2/accelerator_requests/{uuid}": Call(404, wish(NOBODY, NOBODY), needs_service=True),
    "DELETE /v2/accelerator_requests": Call(404, query=f"?arqs={NOBODY}"),
    "DELETE /v2/accelerator_requests/{uuid}": Call(404),
    "GET /v2/accelerators": Call(200),
    "GET /v2/accelerators/{uuid}": Call(404),
    "PATCH /v2/accelerators/{uuid}": Call(404, {"name": "n"}),
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
    "PATCH /v2/deployables/{uuid}/program/{again}": Call(404, PROGRAM),
    "GET /v2/devices": Call(200),
    "GET /v2/devices/{uuid}": Call(404),
    "POST /v2/devices/{uuid}/enable": Call(404),
    "POST /v2/devices/{uuid}/disable": Call(404),
    "GET /v2/device_profiles": Call(200),
    "GET /v2/device_profiles/{uuid_or_name}": Call(404),
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
    "GET /v2/jobs": Call(200),
    "GET /v2/jobs/{uuid}": Call(404),
    "DELETE /v2/jobs/{uuid}": Call(404),
    "GET /v2/outbox": Call(200),
    "POST /v2/outbox/{uuid}/retry": Call(404),
    "DELETE /v2/outbox/{uuid}": Call(404),
    "GET /v2/services": Call(200),
}
OPERATIONS = {
    f"{operation['method']} {operation['path']}": rule.name
    for rule in list_rules()
    if isinstance(rule, policy.DocumentedRuleDefault)
    for operation in rule.operations
}


def test_the_tables_are_of_the_same_things() -> None:
    assert set(LOGINS) == set(PERSONAS)
    assert set(CALLS) == set(OPERATIONS)
    assert set(OPERATIONS.values()) == set(TABLE)


@pytest.mark.parametrize("operation", CALLS)
def test_operation(keystone_cloud: KeystoneCloud, operation: str) -> None:
    rule, call = OPERATIONS[operation], CALLS[operation]
    method, path = operation.split()
    for part in ("{uuid}", "{uuid_or_name}", "{again}"):
        path = path.replace(part, NOBODY)
    seen, expected = {}, {}
    for name in LOGINS:
        answer = keystone_cloud.call(name, method, path + call.query, call.body)
        seen[name] = f"{answer.status_code} {_why(answer, rule)}".strip()
        if AT_HOME.get(name, name) not in TABLE[rule]:
            expected[name] = f"403 {rule}"
        elif call.needs_service and not LOGINS[name].vouched:
            expected[name] = f"403 {NEEDED}"
        else:
            expected[name] = str(call.status)
    assert seen == expected


@pytest.mark.parametrize("token", [None, "made-up"])
def test_without_a_token_of_keystone(keystone_cloud: KeystoneCloud, token: str | None) -> None:
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
    """A request that a member made, and its profile; gone afterwards."""
    name = f"real-{uuid4().hex[:8]}"
    groups = [{"resources:FPGA": "1", "trait:CUSTOM_FAKE_DEVICE": "required"}]
    made = keystone_cloud.call(
        "admin", "POST", "/v2/device_profiles", {"name": name, "groups": groups}
    )
    assert made.status_code == 201, made.text
    made = keystone_cloud.call("member", "POST", ARQS, {"device_profile_name": name})
    assert made.status_code == 201, made.text
    uuid = made.json()["arqs"][0]["uuid"]
    yield uuid
    keystone_cloud.call("member", "DELETE", f"{ARQS}/{uuid}", vouched=True)
    gone = keystone_cloud.call("admin", "DELETE", f"/v2/device_profiles/{name}")
    assert gone.status_code == 204, gone.text


def test_a_request_is_there_for_its_project(keystone_cloud: KeystoneCloud, arq: str) -> None:
    # Whoever may look at requests sees it, or does as if it were not there.
    see = {
        *("reader", "member", "manager", "admin", "accelerator_admin"),
        *("service user", "service token", "admin elsewhere"),
    }
    for name in (*see, "reader elsewhere", "member elsewhere"):
        found = keystone_cloud.call(name, "GET", ARQS)
        assert (arq in [a["uuid"] for a in found.json()["arqs"]]) == (name in see), name
        one = keystone_cloud.call(name, "GET", f"{ARQS}/{arq}")
        assert one.status_code == (200 if name in see else 404), name
    refused = keystone_cloud.call("member elsewhere", "DELETE", f"{ARQS}/{arq}")
    assert refused.status_code == 404
    assert keystone_cloud.call("member", "GET", f"{ARQS}/{arq}").status_code == 200


def test_service_tokens(keystone_cloud: KeystoneCloud, arq: str) -> None:
    cloud, instance = keystone_cloud, str(uuid4())
    body = wish(arq, cloud.provider, instance)

    def state() -> str:
        return str(cloud.call("member", "GET", f"{ARQS}/{arq}").json()["state"])

    for name in ("member", "admin", "service user"):
        for path in (ARQS, f"{ARQS}/{arq}"):
            refused = cloud.call(name, "PATCH", path, body)
            assert (refused.status_code, NEEDED in refused.text) == (403, True), name
    # A token is no service token because it says so.
    for token in ("made-up", cloud.token("member"), cloud.token("admin")):
        headers = cloud.headers("member") | {"X-Service-Token": token}
        refused = requests.patch(cloud.endpoint + ARQS, json=body, headers=headers, timeout=60)
        assert refused.status_code == 401
    assert state() == "Initial"

    bound = cloud.call("member", "PATCH", ARQS, body, vouched=True)
    assert bound.status_code == 202, bound.text
    assert state() == "Bound"
    for path in (f"{ARQS}/{arq}", f"{ARQS}?arqs={arq}", f"{ARQS}?instance={instance}"):
        for name in ("member", "admin"):
            refused = cloud.call(name, "DELETE", path)
            assert (refused.status_code, NEEDED in refused.text) == (403, True), (name, path)
    assert state() == "Bound"

    freed = cloud.call("member", "DELETE", f"{ARQS}?instance={instance}", vouched=True)
    assert freed.status_code == 204
    assert cloud.call("member", "GET", f"{ARQS}/{arq}").status_code == 404


def _why(answer: requests.Response, rule: str) -> str:
    if answer.status_code != 403:
        return ""
    if f"the policy does not allow {rule} to this token" in answer.text:
        return rule
    return NEEDED if NEEDED in answer.text else answer.text

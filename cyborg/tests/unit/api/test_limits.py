# SPDX-License-Identifier: Apache-2.0
"""Limits of projects and their usage in the API."""

from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Unavailable
from cyborg.testing.fake_keystone import FakeKeystone
from cyborg.tests.fixtures.clouds.api import ApiEnv, error_message
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.unit.api.test_auth import keystone_conf

PATH = "/v2/limits"
LATEST = {"OpenStack-API-Version": "accelerator latest"}
QUOTA = {
    "driver": "static",
    "default_limits": {"FPGA": "4", "PGPU": "1"},
    "project_limits": ["project-2:FPGA:8"],
}


@pytest.fixture
def limited_api(sqlite_engine: sa.Engine) -> ApiEnv:
    """Return an API without authentication whose conductor has static limits."""
    conf = make_conf(quota=QUOTA, conductor={"max_project_arqs": 20})
    conf.set_override("auth_strategy", "noauth")
    return ApiEnv(conf, sqlite_engine)


def resource(name: str, limit: int, used: int = 0, bound: int = 0) -> dict[str, Any]:
    return {"resource_class": name, "limit": limit, "used": used, "bound": bound}


def test_limits_show_used_and_bound_units(limited_api: ApiEnv) -> None:
    profile = rows.insert_profile(limited_api.engine)
    for state in ("Initial", "Bound", "BindStarted", "BindFailed", "Unbound", "UnbindFailed"):
        rows.insert_arq(limited_api.engine, profile, state=state, project_id="project-2")
    rows.insert_arq(
        limited_api.engine, profile, resource_class="CUSTOM_QAT", project_id="project-2"
    )
    rows.insert_arq(limited_api.engine, profile, project_id="another")
    assert limited_api.get(f"{PATH}?project_id=project-2") == {
        "project_id": "project-2",
        "accelerator_requests": {"limit": 20, "used": 7},
        "attachments": {"limit": 1000, "used": 0},
        "device_contexts": {"limit": 1000, "used": 0},
        "resources": [
            resource("CUSTOM_QAT", -1, used=1),
            resource("FPGA", 8, used=6, bound=2),
            resource("PGPU", 1),
        ],
    }
    assert limited_api.conductor.calls == ["limits_get"]


def test_limits_of_own_project_are_the_default(limited_api: ApiEnv) -> None:
    limited_api.create_profile()
    limited_api.create_arqs()
    shown = limited_api.get(PATH)
    assert shown["project_id"] == "noauth"
    assert shown["accelerator_requests"] == {"limit": 20, "used": 1}
    assert shown["device_contexts"] == {"limit": 1000, "used": 0}
    body = {"resources": {"FPGA": 1}}
    assert limited_api.call("POST", "/v2/device_contexts", body, LATEST).status_int == 201
    assert limited_api.get(PATH)["device_contexts"] == {"limit": 1000, "used": 1}
    assert shown["resources"] == [resource("FPGA", 4, used=1), resource("PGPU", 1)]


def test_create_over_a_limit_is_forbidden(
    sqlite_engine: sa.Engine, fake_keystone: FakeKeystone
) -> None:
    conf = keystone_conf(**fake_keystone.options())
    for name, value in QUOTA.items():
        conf.set_override(name, value, group="quota")
    api = ApiEnv(conf, sqlite_engine)
    rows.insert_profile(sqlite_engine, "p1")

    def create(*roles: str) -> Any:
        headers = {"X-Auth-Token": fake_keystone.issue_token(list(roles), "project-1")}
        return api.call("POST", "/v2/accelerator_requests", {"device_profile_name": "p1"}, headers)

    assert [create("member", "reader").status_int for _ in range(4)] == [201] * 4
    refused = create("member", "reader")
    assert refused.status_int == 403
    assert error_message(refused) == (
        "project project-1 uses 4 units of FPGA and the limit is 4, cannot create 1 more; delete "
        "unused accelerator requests or ask for a higher limit"
    )
    # An administrator creates the requests of other projects to evacuate a host.
    assert create("admin").status_int == 201
    # A context stays in the project of its creator, whoever that is.
    admin = {"X-Auth-Token": fake_keystone.issue_token(["admin"], "project-1"), **LATEST}
    context = api.call("POST", "/v2/device_contexts", {"resources": {"FPGA": 1}}, admin)
    assert context.status_int == 403
    assert "project project-1 uses 5 units of FPGA" in error_message(context)


def test_bind_over_a_limit_is_forbidden(limited_api: ApiEnv) -> None:
    limited_api.create_profile()
    card = rows.insert_card(limited_api.engine, handles=8)
    answers = []
    for number in range(5):
        (arq,) = limited_api.create_arqs()
        instance = f"{number:08}-2222-3333-4444-555555555555"
        answers.append(limited_api.bind(arq, card.provider, instance))
    assert [answer.status_int for answer in answers] == [202] * 4 + [403]
    assert "project noauth has bound 4 units of FPGA" in error_message(answers[-1])


def test_limits_need_three_statements(limited_api: ApiEnv) -> None:
    profile = rows.insert_profile(limited_api.engine)
    for name in ("FPGA", "PGPU", "VGPU"):
        rows.insert_arq(limited_api.engine, profile, resource_class=name, project_id="project-2")
    with count_statements(limited_api.engine) as count:
        limited_api.get(f"{PATH}?project_id=project-2")
    assert len(count) == 3


def test_limits_are_absent_before_2_6(limited_api: ApiEnv) -> None:
    for version in ("2.0", "2.5"):
        headers = {"OpenStack-API-Version": f"accelerator {version}"}
        answer = limited_api.call("GET", PATH, headers=headers)
        assert answer.status_int == 404
        assert "2.6" in error_message(answer)


def test_unavailable_limits_are_503(limited_api: ApiEnv) -> None:
    limited_api.conductor.error = Unavailable("keystone does not answer")
    answer = limited_api.call("GET", PATH, headers=LATEST)
    assert answer.status_int == 503
    assert "unavailable, retry later: keystone does not answer" in answer.text


def test_limits_of_another_project_are_visible_to_administrators_and_services(
    sqlite_engine: sa.Engine, fake_keystone: FakeKeystone
) -> None:
    api = ApiEnv(keystone_conf(**fake_keystone.options()), sqlite_engine)

    def status(*roles: str, path: str) -> int:
        token = fake_keystone.issue_token(list(roles), "project-1")
        headers = {"X-Auth-Token": token, **LATEST}
        return int(api.call("GET", path, headers=headers).status_int)

    own, other = f"{PATH}?project_id=project-1", f"{PATH}?project_id=project-2"
    for roles, expected in (
        (("reader",), (200, 200, 403)),
        (("member", "reader"), (200, 200, 403)),
        (("manager", "member", "reader"), (200, 200, 403)),
        (("admin",), (200, 200, 200)),
        (("accelerator_admin",), (200, 200, 200)),
        (("swift_user",), (403, 403, 403)),
    ):
        assert tuple(status(*roles, path=path) for path in (PATH, own, other)) == expected, roles

# SPDX-License-Identifier: Apache-2.0
"""Who is answered, and as whom: keystone's tokens and the loopback's administrators."""

import pytest
import sqlalchemy as sa
from keystoneauth1 import loading
from keystonemiddleware import opts
from oslo_config import cfg

from cyborg.api.auth import is_local
from cyborg.core.errors import Misconfigured
from cyborg.fixtures import rows
from cyborg.fixtures.api import INSTANCE, ApiBed, fault
from cyborg.fixtures.keystone import FakeKeystone
from cyborg.fixtures.options import make_conf
from cyborg.fixtures.processes import free_port

LIST = "/v2/accelerator_requests"


@pytest.fixture
def guarded(sqlite_engine: sa.Engine, fake_keystone: FakeKeystone) -> ApiBed:
    """Return an API that asks keystone."""
    return ApiBed(keystone_conf(**fake_keystone.options()), sqlite_engine)


def keystone_conf(**values: str) -> cfg.ConfigOpts:
    """Return options whose [keystone_authtoken] holds these."""
    conf = make_conf()
    conf.set_override("notify", False, group="nova")
    for group, options in opts.list_auth_token_opts():
        conf.register_opts(options, group=group)
    plugin = loading.get_plugin_loader("admin_token")
    conf.register_opts(loading.get_auth_plugin_conf_options(plugin), group="keystone_authtoken")
    for name, value in values.items():
        conf.set_override(name, value, group="keystone_authtoken")
    return conf


def test_a_keystone_that_is_away(sqlite_engine: sa.Engine, fake_keystone: FakeKeystone) -> None:
    away = fake_keystone.options() | {"endpoint": f"http://127.0.0.1:{free_port()}/v3"}
    conf = keystone_conf(**away)
    conf.set_override("http_request_max_retries", 0, group="keystone_authtoken")
    api = ApiBed(conf, sqlite_engine)
    assert api.call("GET", LIST, headers={"X-Auth-Token": "any"}).status_int == 503
    assert api.call("GET", "/v2").status_int == 200


def test_a_keystone_that_nobody_named(sqlite_engine: sa.Engine) -> None:
    with pytest.raises(Misconfigured, match="auth_type"):
        ApiBed(keystone_conf(), sqlite_engine)


def test_public_paths_need_no_token(guarded: ApiBed) -> None:
    for path in ("/", "/v2", "/v2/", "/healthcheck"):
        assert guarded.call("GET", path).status_int == 200


def test_the_rest_does(guarded: ApiBed) -> None:
    answer = guarded.call("GET", LIST)
    assert answer.status_int == 401
    assert answer.headers["OpenStack-API-Version"] == "accelerator 2.0"
    assert "req-" in answer.headers["X-Openstack-Request-Id"]
    assert guarded.call("GET", LIST, headers={"X-Auth-Token": "made-up"}).status_int == 401


def test_a_token_without_a_role_is_refused_everywhere(
    guarded: ApiBed, fake_keystone: FakeKeystone
) -> None:
    headers = {
        "X-Auth-Token": fake_keystone.token([]),
        "OpenStack-API-Version": "accelerator latest",
        # What a client says of itself is not listened to.
        "X-Roles": "admin",
        "X-Service-Roles": "service",
    }
    for path in ("devices", "deployables", "device_profiles", "attributes", "services"):
        answer = guarded.call("GET", f"/v2/{path}", headers=headers)
        assert answer.status_int == 403, path
        assert "the policy does not allow" in fault(answer)
    assert guarded.call("GET", LIST, headers=headers).status_int == 403


def test_a_member_sees_the_requests_of_its_own_project(
    guarded: ApiBed, fake_keystone: FakeKeystone
) -> None:
    profile = rows.profile(guarded.engine)
    mine = rows.request(guarded.engine, profile, project_id="project-1")
    other = rows.request(guarded.engine, profile, project_id="project-2")
    member = {"X-Auth-Token": fake_keystone.token(["member", "reader"])}
    admin = {"X-Auth-Token": fake_keystone.token(["admin"])}
    seen = guarded.call("GET", LIST, headers=member).json["arqs"]
    assert [arq["uuid"] for arq in seen] == [mine]
    assert guarded.call("GET", f"{LIST}/{other}", headers=member).status_int == 404
    assert guarded.call("DELETE", f"{LIST}/{other}", headers=member).status_int == 404
    assert len(guarded.call("GET", LIST, headers=admin).json["arqs"]) == 2
    assert guarded.call("DELETE", f"{LIST}/{mine}", headers=member).status_int == 204


def test_binding_takes_a_service_token(guarded: ApiBed, fake_keystone: FakeKeystone) -> None:
    card = rows.card(guarded.engine)
    rows.profile(guarded.engine)
    user = {"X-Auth-Token": fake_keystone.token(["member", "reader"])}
    guarded.headers = user
    (arq,) = guarded.arqs("fpga")
    refused = guarded.bind(arq, card.provider)
    assert refused.status_int == 403
    assert "requires a service token" in fault(refused)
    # One whose roles are no service's is refused by the middleware itself.
    guarded.headers = user | {"X-Service-Token": fake_keystone.token(["member"], "service")}
    assert guarded.bind(arq, card.provider).status_int == 401
    nova = user | {"X-Service-Token": fake_keystone.token(["service"], "service")}
    guarded.headers = nova
    assert guarded.bind(arq, card.provider).status_int == 202
    guarded.headers = user
    for path in (f"{LIST}/{arq}", f"{LIST}?arqs={arq}", f"{LIST}?instance={INSTANCE}"):
        refused = guarded.call("DELETE", path)
        assert refused.status_int == 403, path
        assert "requires a service token" in fault(refused)
    guarded.headers = nova
    assert guarded.call("DELETE", f"{LIST}?instance={INSTANCE}").status_int == 204
    assert guarded.call("GET", LIST).json["arqs"] == []


def test_an_admin_too_binds_with_a_service_token_alone(
    guarded: ApiBed, fake_keystone: FakeKeystone
) -> None:
    card = rows.card(guarded.engine)
    rows.profile(guarded.engine)
    guarded.headers = {"X-Auth-Token": fake_keystone.token(["admin"])}
    (arq,) = guarded.arqs("fpga")
    assert guarded.bind(arq, card.provider).status_int == 403


def test_only_an_admin_names_the_project(guarded: ApiBed, fake_keystone: FakeKeystone) -> None:
    card = rows.card(guarded.engine)
    rows.profile(guarded.engine)
    service = {"X-Service-Token": fake_keystone.token(["service"], "service")}
    latest = {"OpenStack-API-Version": "accelerator 2.1"}
    guarded.headers = {"X-Auth-Token": fake_keystone.token(["member", "reader"]), **service}
    (arq,) = guarded.arqs("fpga")
    assert guarded.bind(arq, card.provider, project_id="p9").status_int == 400
    guarded.headers |= latest
    assert guarded.bind(arq, card.provider, project_id="p9").status_int == 403
    guarded.headers |= {"X-Auth-Token": fake_keystone.token(["admin"])}
    assert guarded.bind(arq, card.provider, project_id="p9").status_int == 202
    assert guarded.get(f"{LIST}/{arq}")["project_id"] == "p9"


def test_a_token_of_the_system_is_refused(guarded: ApiBed, fake_keystone: FakeKeystone) -> None:
    token = fake_keystone.token(["admin"], None, system={"all": True})
    answer = guarded.call("GET", "/v2/devices", headers={"X-Auth-Token": token})
    assert answer.status_int == 403


@pytest.mark.parametrize("peer", ["192.0.2.7", "10.0.0.1", "::ffff:192.0.2.7", "nonsense"])
def test_without_keystone_no_other_machine_is_answered(api: ApiBed, peer: str) -> None:
    answer = api.call("GET", LIST, REMOTE_ADDR=peer)
    assert answer.status_int == 403
    assert "auth_strategy" in fault(answer)


def test_a_forged_proxy_header_makes_nobody_local(sqlite_engine: sa.Engine) -> None:
    conf = make_conf()
    conf.set_override("auth_strategy", "noauth")
    api = ApiBed(conf, sqlite_engine)
    conf.set_override("enable_proxy_headers_parsing", True, group="oslo_middleware")
    api = ApiBed(conf, sqlite_engine)
    headers = {"X-Forwarded-For": "127.0.0.1"}
    assert api.call("GET", LIST, headers=headers, REMOTE_ADDR="192.0.2.7").status_int == 403
    assert api.call("GET", LIST, headers=headers).status_int == 200


def test_who_is_local() -> None:
    assert all(map(is_local, ["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1", "", None]))


def test_without_keystone_a_header_names_the_project(api: ApiBed) -> None:
    api.profile()
    api.headers = {"X-Project-Id": "mine"}
    (arq,) = api.arqs()
    assert api.get(f"{LIST}/{arq}")["project_id"] == "mine"
    assert api.call("GET", LIST, headers={"X-Project-Id": "x" * 256}).status_int == 400

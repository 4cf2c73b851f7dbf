# SPDX-License-Identifier: Apache-2.0
"""Authentication with keystone, and with noauth over loopback."""

import socket
from typing import Any

import pytest
import sqlalchemy as sa
from keystoneauth1 import loading
from keystonemiddleware import opts
from oslo_config import cfg
from oslo_middleware import http_proxy_to_wsgi

from cyborg.api import auth
from cyborg.api.auth import is_local
from cyborg.core.errors import Misconfigured
from cyborg.testing.fake_keystone import FakeKeystone
from cyborg.tests.fixtures.clouds.api import INSTANCE, ApiEnv, error_message
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import free_port

LIST = "/v2/accelerator_requests"


@pytest.fixture
def keystone_api(sqlite_engine: sa.Engine, fake_keystone: FakeKeystone) -> ApiEnv:
    """Return an API with keystone authentication."""
    return ApiEnv(keystone_conf(**fake_keystone.options()), sqlite_engine)


def keystone_conf(**values: str) -> cfg.ConfigOpts:
    """Return a configuration with these values in [keystone_authtoken]."""
    conf = make_conf()
    conf.set_override("send_events", False, group="nova")
    for group, options in opts.list_auth_token_opts():
        conf.register_opts(options, group=group)
    plugin: Any = loading.get_plugin_loader("admin_token")
    conf.register_opts(loading.get_auth_plugin_conf_options(plugin), group="keystone_authtoken")
    for name, value in values.items():
        conf.set_override(name, value, group="keystone_authtoken")
    return conf


def test_keystone_unreachable_is_503(sqlite_engine: sa.Engine, fake_keystone: FakeKeystone) -> None:
    options = fake_keystone.options() | {"endpoint": f"http://127.0.0.1:{free_port()}/v3"}
    conf = keystone_conf(**options)
    conf.set_override("http_request_max_retries", 0, group="keystone_authtoken")
    api = ApiEnv(conf, sqlite_engine)
    answer = api.call("GET", LIST, headers={"X-Auth-Token": "any"})
    assert answer.status_int == 503
    assert "is unavailable, retry later" in error_message(answer)
    assert api.call("GET", "/v2").status_int == 200


def test_keystone_hanging_times_out(sqlite_engine: sa.Engine, fake_keystone: FakeKeystone) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v3"
        conf = keystone_conf(**fake_keystone.options() | {"endpoint": url})
        auth.check_config(conf)
        assert conf.keystone_authtoken.http_connect_timeout == auth.KEYSTONE_TIMEOUT
        conf.set_override("http_connect_timeout", 0.2, group="keystone_authtoken")
        conf.set_override("http_request_max_retries", 0, group="keystone_authtoken")
        answer = ApiEnv(conf, sqlite_engine).call("GET", LIST, headers={"X-Auth-Token": "any"})
    assert answer.status_int == 503
    assert error_message(answer)


@pytest.mark.slow
@pytest.mark.parametrize("answer", [b"", b"<html>", b"[]", b"null", b'{"token": null}'])
def test_keystone_malformed_response_is_refused(
    keystone_api: ApiEnv,
    fake_keystone: FakeKeystone,
    monkeypatch: pytest.MonkeyPatch,
    answer: bytes,
) -> None:
    monkeypatch.setattr(fake_keystone, "answer", lambda path, headers: (200, answer))
    refused = keystone_api.call("GET", LIST, headers={"X-Auth-Token": "any"})
    assert refused.status_int in (401, 503), refused.text
    assert error_message(refused)


def test_keystone_without_auth_type_is_misconfigured(sqlite_engine: sa.Engine) -> None:
    with pytest.raises(Misconfigured, match="auth_type"):
        ApiEnv(keystone_conf(), sqlite_engine)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("auth_version", "three", "'three': expected 3"),
        ("auth_type", "no-such-plugin", "no-such-plugin"),
        ("cafile", "/absent/ca.pem", "/absent/ca.pem: No such file"),
        ("www_authenticate_uri", "controller:5000", "'controller:5000': expected a URL"),
    ],
)
def test_unusable_keystone_option_is_named_at_the_start(
    option: str, value: str, expected: str
) -> None:
    usable = {"auth_type": "admin_token", "endpoint": "http://127.0.0.1:1/v3", "token": "t"}
    conf = keystone_conf(**usable | {option: value})
    with pytest.raises(Misconfigured, match=rf"^\[keystone_authtoken\] {option}: .*{expected}"):
        auth.check_config(conf)


def test_public_paths_need_no_token(keystone_api: ApiEnv) -> None:
    for path in ("/", "/v2", "/v2/", "/healthcheck"):
        assert keystone_api.call("GET", path).status_int == 200


def test_request_without_valid_token_is_401(keystone_api: ApiEnv) -> None:
    answer = keystone_api.call("GET", LIST)
    assert answer.status_int == 401
    assert answer.headers["OpenStack-API-Version"] == "accelerator 2.0"
    assert "req-" in answer.headers["X-Openstack-Request-Id"]
    assert "the token is missing" in error_message(answer)
    assert answer.headers["WWW-Authenticate"].startswith("Keystone uri=")
    assert keystone_api.call("GET", LIST, headers={"X-Auth-Token": "made-up"}).status_int == 401


def test_token_without_role_is_forbidden(keystone_api: ApiEnv, fake_keystone: FakeKeystone) -> None:
    headers = {
        "X-Auth-Token": fake_keystone.issue_token([]),
        "OpenStack-API-Version": "accelerator latest",
        # Identity headers of the client are ignored.
        "X-Roles": "admin",
        "X-Service-Roles": "service",
    }
    for path in ("devices", "deployables", "device_profiles", "attributes", "services"):
        answer = keystone_api.call("GET", f"/v2/{path}", headers=headers)
        assert answer.status_int == 403, path
        assert "the policy does not allow" in error_message(answer)
    assert keystone_api.call("GET", LIST, headers=headers).status_int == 403


@pytest.mark.slow
def test_member_sees_arqs_of_own_project_only(
    keystone_api: ApiEnv, fake_keystone: FakeKeystone
) -> None:
    profile = rows.insert_profile(keystone_api.engine)
    own = rows.insert_arq(keystone_api.engine, profile, project_id="project-1")
    other = rows.insert_arq(keystone_api.engine, profile, project_id="project-2")
    member = {"X-Auth-Token": fake_keystone.issue_token(["member", "reader"])}
    admin = {"X-Auth-Token": fake_keystone.issue_token(["admin"])}
    arqs = keystone_api.call("GET", LIST, headers=member).json["arqs"]
    assert [arq["uuid"] for arq in arqs] == [own]
    assert keystone_api.call("GET", f"{LIST}/{other}", headers=member).status_int == 404
    assert keystone_api.call("DELETE", f"{LIST}/{other}", headers=member).status_int == 404
    assert len(keystone_api.call("GET", LIST, headers=admin).json["arqs"]) == 2
    assert keystone_api.call("DELETE", f"{LIST}/{own}", headers=member).status_int == 204


def test_bind_requires_service_token(keystone_api: ApiEnv, fake_keystone: FakeKeystone) -> None:
    card = rows.insert_card(keystone_api.engine)
    rows.insert_profile(keystone_api.engine)
    user = {"X-Auth-Token": fake_keystone.issue_token(["member", "reader"])}
    keystone_api.headers = user
    (arq,) = keystone_api.create_arqs("fpga")
    refused = keystone_api.bind(arq, card.provider)
    assert refused.status_int == 403
    assert "requires a service token" in error_message(refused)
    # A service token without a service role is rejected by keystonemiddleware.
    keystone_api.headers = user | {
        "X-Service-Token": fake_keystone.issue_token(["member"], "service")
    }
    assert keystone_api.bind(arq, card.provider).status_int == 401
    nova = user | {"X-Service-Token": fake_keystone.issue_token(["service"], "service")}
    keystone_api.headers = nova
    assert keystone_api.bind(arq, card.provider).status_int == 202
    keystone_api.headers = user
    for path in (f"{LIST}/{arq}", f"{LIST}?arqs={arq}", f"{LIST}?instance={INSTANCE}"):
        refused = keystone_api.call("DELETE", path)
        assert refused.status_int == 403, path
        assert "requires a service token" in error_message(refused)
    keystone_api.headers = nova
    assert keystone_api.call("DELETE", f"{LIST}?instance={INSTANCE}").status_int == 204
    assert keystone_api.call("GET", LIST).json["arqs"] == []


def test_bind_as_admin_requires_service_token(
    keystone_api: ApiEnv, fake_keystone: FakeKeystone
) -> None:
    card = rows.insert_card(keystone_api.engine)
    rows.insert_profile(keystone_api.engine)
    keystone_api.headers = {"X-Auth-Token": fake_keystone.issue_token(["admin"])}
    (arq,) = keystone_api.create_arqs("fpga")
    assert keystone_api.bind(arq, card.provider).status_int == 403


def test_bind_project_override_requires_admin(
    keystone_api: ApiEnv, fake_keystone: FakeKeystone
) -> None:
    card = rows.insert_card(keystone_api.engine)
    rows.insert_profile(keystone_api.engine)
    service = {"X-Service-Token": fake_keystone.issue_token(["service"], "service")}
    latest = {"OpenStack-API-Version": "accelerator 2.1"}
    keystone_api.headers = {
        "X-Auth-Token": fake_keystone.issue_token(["member", "reader"]),
        **service,
    }
    (arq,) = keystone_api.create_arqs("fpga")
    assert keystone_api.bind(arq, card.provider, project_id="p9").status_int == 400
    keystone_api.headers |= latest
    assert keystone_api.bind(arq, card.provider, project_id="p9").status_int == 403
    keystone_api.headers |= {"X-Auth-Token": fake_keystone.issue_token(["admin"])}
    assert keystone_api.bind(arq, card.provider, project_id="p9").status_int == 202
    assert keystone_api.get(f"{LIST}/{arq}")["project_id"] == "p9"


def test_system_scoped_token_is_forbidden(
    keystone_api: ApiEnv, fake_keystone: FakeKeystone
) -> None:
    token = fake_keystone.issue_token(["admin"], None, system={"all": True})
    answer = keystone_api.call("GET", "/v2/devices", headers={"X-Auth-Token": token})
    assert answer.status_int == 403


@pytest.mark.parametrize("peer", ["192.0.2.7", "10.0.0.1", "::ffff:192.0.2.7", "nonsense"])
def test_noauth_remote_peer_is_forbidden(api: ApiEnv, peer: str) -> None:
    answer = api.call("GET", LIST, REMOTE_ADDR=peer)
    assert answer.status_int == 403
    assert "auth_strategy" in error_message(answer)


def test_noauth_forged_proxy_header_is_ignored(sqlite_engine: sa.Engine) -> None:
    conf = make_conf()
    conf.set_override("auth_strategy", "noauth")
    api = ApiEnv(conf, sqlite_engine)
    conf.set_override("enable_proxy_headers_parsing", True, group="oslo_middleware")
    api = ApiEnv(conf, sqlite_engine)
    headers = {"X-Forwarded-For": "127.0.0.1"}
    assert api.call("GET", LIST, headers=headers, REMOTE_ADDR="192.0.2.7").status_int == 403
    assert api.call("GET", LIST, headers=headers).status_int == 200


def test_is_local_accepts_loopback_and_unix_sockets() -> None:
    assert all(map(is_local, ["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1", "", None]))


def test_noauth_header_sets_project(api: ApiEnv) -> None:
    api.create_profile()
    api.headers = {"X-Project-Id": "project-a"}
    (arq,) = api.create_arqs()
    assert api.get(f"{LIST}/{arq}")["project_id"] == "project-a"
    assert api.call("GET", LIST, headers={"X-Project-Id": "x" * 256}).status_int == 400


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(
            (host, 200)
            for host in ("localhost", "LOCALHOST:6666", "localhost.:1", "127.0.0.1:6666")
        ),
        *((host, 200) for host in ("127.9.9.9", "[::1]:6666", "[::1]", "acc.example:6666")),
        *((host, 403) for host in ("rebound.example", "rebound.example:6666", "192.0.2.7:6666")),
        *((host, 403) for host in ("127.0.0.1.rebound.example", "localhost.rebound.example", "")),
        *(
            (host, 403)
            for host in ("evil@localhost", "localhost/", "2130706433", "0.0.0.0", "[::]")
        ),
    ],
)
def test_noauth_foreign_host_is_forbidden(sqlite_engine: sa.Engine, host: str, status: int) -> None:
    conf = make_conf(api={"server_names": ["Acc.Example"]})
    conf.set_override("auth_strategy", "noauth")
    http_proxy_to_wsgi.HTTPProxyToWSGI(None, conf)
    conf.set_override("enable_proxy_headers_parsing", True, group="oslo_middleware")
    api = ApiEnv(conf, sqlite_engine)
    headers = {"Host": host, "X-Forwarded-Host": "localhost"}
    for path in (LIST, "/", "/v2", "/healthcheck", "/v2/openapi.json"):
        answer = api.call("GET", path, headers=headers)
        assert answer.status_int == status, path
        assert status == 200 or "not a name of this service" in error_message(answer)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        *((o, 201) for o in (None, "http://localhost:6666", "https://LOCALHOST:6666")),
        *((o, 403) for o in ("http://rebound.example", "null", "", "http://localhost:3000")),
        *((o, 403) for o in ("http://127.0.0.1:6666", "localhost:6666")),
    ],
)
def test_noauth_foreign_origin_is_forbidden(api: ApiEnv, origin: str | None, status: int) -> None:
    profile = {"name": "p", "groups": [{"resources:FPGA": "1"}]}
    headers = {"Host": "localhost:6666"} | ({} if origin is None else {"Origin": origin})
    answer = api.call("POST", "/v2/device_profiles", profile, headers=headers)
    assert answer.status_int == status
    assert status == 201 or "another site" in error_message(answer)


def test_keystone_any_host_is_served(keystone_api: ApiEnv) -> None:
    headers = {"Host": "cloud.example", "Origin": "https://horizon.example"}
    assert keystone_api.call("GET", "/v2", headers=headers).status_int == 200

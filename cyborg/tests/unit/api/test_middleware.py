# SPDX-License-Identifier: Apache-2.0
"""Checks before authentication: versions, links, sizes, health; and heartbeats."""

import io
from datetime import timedelta
from typing import Any

import pytest
from oslo_utils import timeutils

from cyborg.api import versions
from cyborg.api.controller import Request
from cyborg.api.health import Heartbeat
from cyborg.core import hosts
from cyborg.core.errors import Unavailable
from cyborg.core.text import to_iso
from cyborg.db import schema
from cyborg.tests.fixtures.clouds.api import ApiEnv, error_message
from cyborg.tests.fixtures.databases import rows
from cyborg.threads.failures import RateLimitedLogger


@pytest.mark.parametrize("mount", ["", "/accelerator", "/a/b"])
def test_links_start_with_mount_path(api: ApiEnv, mount: str) -> None:
    root = f"http://localhost{mount}"
    for path in ("", "/"):
        body = api.call("GET", path or "/", SCRIPT_NAME=mount, PATH_INFO=path).json
        assert body["versions"][0]["links"] == [{"rel": "self", "href": f"{root}/v2"}]
    body = api.call("GET", "/v2", SCRIPT_NAME=mount).json
    assert body["links"] == [{"rel": "self", "href": f"{root}/v2"}]
    profile = {"name": "p", "groups": [{"resources:FPGA": "1"}]}
    created = api.call("POST", "/device_profiles", profile, SCRIPT_NAME=mount).json
    assert created["links"][0]["href"] == f"{root}/v2/device_profiles/{created['uuid']}"


@pytest.mark.parametrize(
    "option", ["https://cloud/acc", "https://cloud/acc/", "https://cloud/acc/v2"]
)
def test_links_start_with_public_endpoint(api: ApiEnv, option: str) -> None:
    api.conf.set_override("public_endpoint", option, group="api")
    body = api.call("GET", "/v2", SCRIPT_NAME="/inner").json
    assert body["links"][0]["href"] == "https://cloud/acc/v2"


def test_body_over_size_limit_is_413(api: ApiEnv) -> None:
    api.conf.set_override("max_body_size", 1024, group="api")
    answer = api.call("POST", "/v2/device_profiles", b"[" + b" " * 1024)
    assert answer.status_int == 413
    assert "1024" in error_message(answer)
    assert api.call("POST", "/v2/device_profiles", b"[" + b" " * 1000).status_int == 400


@pytest.mark.parametrize(("size", "status"), [(1000, 400), (1025, 413)])
def test_chunked_body_over_size_limit_is_413(api: ApiEnv, size: int, status: int) -> None:
    api.conf.set_override("max_body_size", 1024, group="api")
    chunks: dict[str, Any] = {
        "HTTP_TRANSFER_ENCODING": "chunked",
        "CONTENT_TYPE": "application/json",
        "wsgi.input": io.BytesIO(b" " * size),
        "wsgi.input_terminated": True,
    }
    assert api.call("POST", "/v2/device_profiles", **chunks).status_int == status


@pytest.mark.parametrize("length", ["x", "-1", "1e3", "²"])
def test_invalid_content_length_is_400(api: ApiEnv, length: str) -> None:
    answer = api.call("POST", "/v2/device_profiles", b"[]", CONTENT_LENGTH=length)
    assert answer.status_int == 400
    assert "Content-Length" in error_message(answer)


def test_truncated_body_is_400(api: ApiEnv) -> None:
    answer = api.call("POST", "/v2/device_profiles", b"[]", CONTENT_LENGTH="100")
    assert answer.status_int == 400


@pytest.mark.parametrize("body", [b"\xff", b'"\xc2"', b"\x00\x00\x00"])
def test_body_of_malformed_bytes_is_400_without_error_log(
    api: ApiEnv, caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    answer = api.call("POST", "/v2/device_profiles", body)
    assert answer.status_int == 400
    assert "not JSON" in error_message(answer)
    # Otherwise any client could fill the log with tracebacks.
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_large_body_stays_in_memory() -> None:
    body = b'["' + b"x" * 100_000 + b'"]'
    environ = {
        "REQUEST_METHOD": "POST",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body),
    }
    request = Request(environ)
    assert request.json == ["x" * 100_000]
    assert isinstance(request.body_file_raw, io.BytesIO)


@pytest.mark.parametrize(
    ("accept", "status"),
    [("*/*", 200), ("text/html, */*;q=0.1", 200), ("x", 200), ("text/html", 406), ("a/b", 406)],
)
def test_accept_without_json_is_406(
    api: ApiEnv, caplog: pytest.LogCaptureFixture, accept: str, status: int
) -> None:
    answer = api.call("GET", "/v2/devices", headers={"Accept": accept})
    assert answer.status_int == status
    assert (status == 200) or "application/json" in error_message(answer)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_response_has_request_id(api: ApiEnv) -> None:
    ids = {
        api.call("GET", p).headers["X-Openstack-Request-Id"] for p in ("/", "/v2/x", "/v2/devices")
    }
    assert len(ids) == 3


def test_head_is_get_without_body(api: ApiEnv) -> None:
    for path in ("/", "/v2", "/healthcheck", "/v2/devices"):
        answer = api.call("HEAD", path)
        assert (answer.status_int, answer.body) == (200, b""), path


def test_healthcheck_is_served(api: ApiEnv) -> None:
    assert api.call("GET", "/healthcheck").json["status"] == "healthy"
    schema.metadata.drop_all(api.engine)
    api.app.health._ended = float("-inf")
    answer = api.call("GET", "/healthcheck", REMOTE_ADDR="192.0.2.7")
    assert answer.status_int == 503
    assert answer.json["status"] == "unhealthy"


def test_heartbeat_registers_api_as_service(api: ApiEnv) -> None:
    conductor: Any = api.conductor
    first = Heartbeat(api.conf, conductor, "server-1", api.app.health)
    second = Heartbeat(api.conf, conductor, "server-1", api.app.health)
    assert [first.run_once(), second.run_once()] == [10.0, 10.0]
    (service,) = api.get("/v2/services")["services"]
    assert (service["binary"], service["state"]) == (hosts.API, "up")
    (row,) = rows.read(api.engine, schema.services)
    assert row["started_at"] < row["last_seen_at"]
    assert api.app.health.check()[1]["conductor"] == "ok"


def test_heartbeat_continues_without_conductor(api: ApiEnv) -> None:
    conductor: Any = api.conductor
    conductor.error = Unavailable("the broker at secret-host does not respond")
    heartbeat = Heartbeat(api.conf, conductor, "server-1", api.app.health)
    assert heartbeat.run_once() == 10.0
    healthy, body = api.app.health.check()
    assert healthy
    assert body["conductor"] == "unavailable"
    conductor.error = None
    heartbeat.run_once()
    assert len(api.get("/v2/services")["services"]) == 1


@pytest.mark.parametrize(("age", "state"), [(0, "up"), (35, "late"), (75, "down")])
def test_service_state_by_age_of_last_heartbeat(api: ApiEnv, age: int, state: str) -> None:
    last_seen_at = timeutils.utcnow() - timedelta(seconds=age)
    agent = rows.insert_agent(api.engine)
    rows.update(api.engine, schema.services, agent, **rows.heartbeat(last_seen_at))
    service = api.get("/v2/services")["services"][0]
    # The state follows the heartbeat; down_since is set only when a conductor cordons the host.
    assert (service["state"], service["down_since"]) == (state, None)


def test_agent_marked_down_shows_down_since(api: ApiEnv) -> None:
    agent, since = rows.insert_agent(api.engine), timeutils.utcnow()
    backend = {"name": "gpus", "driver": "generic", "status": "READY"}
    rows.insert(api.engine, schema.backends, service_id=agent, **backend)
    rows.update(api.engine, schema.services, agent, down_since=since)
    for kind in ("daemon", "backend"):
        (service,) = api.get(f"/v2/services?kind={kind}")["services"]
        assert service["down_since"] == to_iso(since)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("accelerator 9.9", "names no version from 2.0 to 2.6"),
        ("9.9", "names no version from 2.0 to 2.6"),
        ("accelerator", "is malformed"),
        ("accelerator 2.6 beta", "is malformed"),
        ("2.6beta", "is malformed"),
    ],
)
def test_refused_version_names_the_header_and_the_right_form(
    api: ApiEnv, header: str, reason: str
) -> None:
    answer = api.call("GET", "/v2/devices", HTTP_OPENSTACK_API_VERSION=header)
    assert answer.status_int == 406
    assert error_message(answer) == (
        f"OpenStack-API-Version: {header!r} {reason}, expected for example 'accelerator 2.6' or "
        "'accelerator latest'"
    )


def test_version_without_service_type_is_accepted_with_one_warning(
    api: ApiEnv, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_BARE_VERSION_LOG", RateLimitedLogger(logger=versions.LOG))
    for _ in range(2):
        answer = api.call("GET", "/v2/devices", HTTP_OPENSTACK_API_VERSION="2.1")
        assert answer.status_int == 200
        assert answer.headers["OpenStack-API-Version"] == "accelerator 2.1"
    (record,) = [record for record in caplog.records if record.name == versions.__name__]
    assert "'2.1' lacks the service type, taken as 'accelerator 2.1'" in record.getMessage()
    typed = ("accelerator 2.1", "compute 2.1, accelerator 2.1", "accelerator 2.1, 2.1")
    for header in (*typed, "compute latest"):
        caplog.clear()
        monkeypatch.setattr(versions, "_BARE_VERSION_LOG", RateLimitedLogger(logger=versions.LOG))
        assert api.call("GET", "/v2/devices", HTTP_OPENSTACK_API_VERSION=header).status_int == 200
        assert not [record for record in caplog.records if record.name == versions.__name__]

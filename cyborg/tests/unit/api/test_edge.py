# SPDX-License-Identifier: Apache-2.0
"""What is decided before anybody is asked who he is: versions, links, sizes, health."""

import io
from datetime import UTC, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.api.call import Request
from cyborg.api.health import Health
from cyborg.api.heartbeat import BINARY, Heartbeat
from cyborg.core.errors import Unavailable
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.reader import Reader
from cyborg.fixtures import rows
from cyborg.fixtures.api import ApiBed, fault


@pytest.mark.parametrize("mount", ["", "/accelerator", "/a/b"])
def test_links_start_with_the_mount(api: ApiBed, mount: str) -> None:
    root = f"http://localhost{mount}"
    for path in ("", "/"):
        body = api.call("GET", path or "/", SCRIPT_NAME=mount, PATH_INFO=path).json
        assert body["versions"][0]["links"] == [{"rel": "self", "href": f"{root}/v2"}]
    body = api.call("GET", "/v2", SCRIPT_NAME=mount).json
    assert body["links"] == [{"rel": "self", "href": f"{root}/v2"}]
    profile = {"name": "p", "groups": [{"resources:FPGA": "1"}]}
    made = api.call("POST", "/device_profiles", profile, SCRIPT_NAME=mount).json
    assert made["links"][0]["href"] == f"{root}/v2/device_profiles/{made['uuid']}"


@pytest.mark.parametrize(
    "option", ["https://cloud/acc", "https://cloud/acc/", "https://cloud/acc/v2"]
)
def test_links_start_with_the_public_endpoint(api: ApiBed, option: str) -> None:
    api.conf.set_override("public_endpoint", option, group="api")
    body = api.call("GET", "/v2", SCRIPT_NAME="/inner").json
    assert body["links"][0]["href"] == "https://cloud/acc/v2"


def test_a_body_has_a_largest_size(api: ApiBed) -> None:
    api.conf.set_override("max_body_size", 1024, group="api")
    answer = api.call("POST", "/v2/device_profiles", b"[" + b" " * 1024)
    assert answer.status_int == 413
    assert "1024" in fault(answer)
    assert api.call("POST", "/v2/device_profiles", b"[" + b" " * 1000).status_int == 400


@pytest.mark.parametrize(("size", "status"), [(1000, 400), (1025, 413)])
def test_a_body_in_chunks_has_one_too(api: ApiBed, size: int, status: int) -> None:
    api.conf.set_override("max_body_size", 1024, group="api")
    chunks: dict[str, Any] = {
        "HTTP_TRANSFER_ENCODING": "chunked",
        "CONTENT_TYPE": "application/json",
        "wsgi.input": io.BytesIO(b" " * size),
        "wsgi.input_terminated": True,
    }
    assert api.call("POST", "/v2/device_profiles", **chunks).status_int == status


@pytest.mark.parametrize("length", ["x", "-1", "1e3", "²"])
def test_a_length_that_is_none(api: ApiBed, length: str) -> None:
    answer = api.call("POST", "/v2/device_profiles", b"[]", CONTENT_LENGTH=length)
    assert answer.status_int == 400
    assert "Content-Length" in fault(answer)


def test_a_body_that_ends_early(api: ApiBed) -> None:
    answer = api.call("POST", "/v2/device_profiles", b"[]", CONTENT_LENGTH="100")
    assert answer.status_int == 400


@pytest.mark.parametrize("body", [b"\xff", b'"\xc2"', b"\x00\x00\x00"])
def test_a_body_of_odd_bytes_is_no_error_of_ours(
    api: ApiBed, caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    answer = api.call("POST", "/v2/device_profiles", body)
    assert answer.status_int == 400
    assert "not JSON" in fault(answer)
    # Whoever may send a request could fill the log with tracebacks.
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_body_lies_in_memory() -> None:
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
    ("wanted", "status"),
    [("*/*", 200), ("text/html, */*;q=0.1", 200), ("x", 200), ("text/html", 406), ("a/b", 406)],
)
def test_a_client_takes_json(
    api: ApiBed, caplog: pytest.LogCaptureFixture, wanted: str, status: int
) -> None:
    answer = api.call("GET", "/v2/devices", headers={"Accept": wanted})
    assert answer.status_int == status
    assert (status == 200) or "application/json" in fault(answer)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_an_answer_has_a_request_id(api: ApiBed) -> None:
    ids = {
        api.call("GET", p).headers["X-Openstack-Request-Id"] for p in ("/", "/v2/x", "/v2/devices")
    }
    assert len(ids) == 3


def test_head_is_get_without_a_body(api: ApiBed) -> None:
    for path in ("/", "/v2", "/healthcheck", "/v2/devices"):
        answer = api.call("HEAD", path)
        assert (answer.status_int, answer.body) == (200, b""), path


def test_health_looks_once_a_second(sqlite_engine: sa.Engine) -> None:
    now = [0.0]
    health = Health(Reader(sqlite_engine), lambda: now[0])
    with counting(sqlite_engine) as statements:
        assert [health.look()[0] for _ in range(5)] == [True] * 5
        now[0] = 1.5
        assert health.look()[1]["conductor"] == "unknown"
    assert len(statements) == 2


def test_health_says_what_is_wrong(sqlite_engine: sa.Engine) -> None:
    schema.metadata.drop_all(sqlite_engine)
    well, body = Health(Reader(sqlite_engine)).look()
    assert not well
    assert body["database"] == "unavailable"
    assert "cyborg-dbsync" in body["reason"]


def test_health_is_served(api: ApiBed) -> None:
    assert api.call("GET", "/healthcheck").json["status"] == "healthy"
    schema.metadata.drop_all(api.engine)
    api.app.health._looked = float("-inf")
    answer = api.call("GET", "/healthcheck", REMOTE_ADDR="192.0.2.7")
    assert answer.status_int == 503
    assert answer.json["status"] == "unhealthy"


def test_a_heartbeat_makes_the_api_a_service(api: ApiBed) -> None:
    line: Any = api.line
    first = Heartbeat(api.conf, line, "life-1", api.app.health)
    second = Heartbeat(api.conf, line, "life-1", api.app.health)
    assert [first.beat(), second.beat()] == [10.0, 10.0]
    (service,) = api.get("/v2/services")["services"]
    assert (service["binary"], service["state"]) == (BINARY, "up")
    (row,) = rows.read(api.engine, schema.services)
    assert row["started_at"] < row["last_seen_at"]
    assert api.app.health.look()[1]["conductor"] == "ok"


def test_a_heartbeat_goes_on_without_a_conductor(api: ApiBed) -> None:
    line: Any = api.line
    line.away = Unavailable("the broker at secret-host does not answer")
    heart = Heartbeat(api.conf, line, "life-1", api.app.health)
    assert heart.beat() == 10.0
    well, body = api.app.health.look()
    assert well
    assert body["conductor"] == "unavailable"
    line.away = None
    heart.beat()
    assert len(api.get("/v2/services")["services"]) == 1


@pytest.mark.parametrize(("silent", "state"), [(0, "up"), (35, "late"), (75, "down")])
def test_a_silent_service(api: ApiBed, silent: int, state: str) -> None:
    seen = timeutils.utcnow() - timedelta(seconds=silent)
    agent = rows.agent(api.engine)
    rows.change(api.engine, schema.services, agent, last_seen_at=seen)
    shown = api.get("/v2/services")["services"][0]
    # What it says is one thing, that a conductor has closed its host is another.
    assert (shown["state"], shown["down_since"]) == (state, None)


def test_an_agent_that_is_held_for_down(api: ApiBed) -> None:
    agent, since = rows.agent(api.engine), timeutils.utcnow()
    backend = {"name": "gpus", "driver": "generic", "status": "READY"}
    rows.insert(api.engine, schema.backends, service_id=agent, **backend)
    rows.change(api.engine, schema.services, agent, down_since=since)
    for kind in ("daemon", "backend"):
        (shown,) = api.get(f"/v2/services?kind={kind}")["services"]
        assert shown["down_since"] == since.replace(tzinfo=UTC).isoformat()

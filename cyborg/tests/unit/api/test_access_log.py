# SPDX-License-Identifier: Apache-2.0
"""The access log: one line for each request, with nothing that a client can choose."""

import io
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import formatters, log

from cyborg.api.middleware import AccessLog
from cyborg.core import errors
from cyborg.telemetry.recorder import MetricRecorder
from cyborg.tests.fixtures.clouds.api import ApiEnv
from cyborg.tests.unit.api.test_auth import keystone_conf

NAME = "cyborg.api.access"
UUID = "02c950a2-e263-4eeb-bf72-b1d2b6e2065c"


class Handler(logging.StreamHandler[io.StringIO]):
    """Handler with the formatter of the services; keeps the lines and the records."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        conf = cfg.ConfigOpts()
        log.register_options(conf)
        conf([])
        self.setFormatter(formatters.ContextFormatter(config=conf))
        self.records: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        super().emit(record)

    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def access() -> Iterator[Handler]:
    handler, logger = Handler(), logging.getLogger(NAME)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/v2/devices", "GET /v2/devices 200"),
        ("GET", "/devices/", "GET /v2/devices 200"),
        ("HEAD", "/v2/devices", "HEAD /v2/devices 200"),
        ("GET", f"/v2/devices/{UUID}", "GET /v2/devices/{uuid} 404"),
        ("POST", f"/v2/devices/{UUID}/disable", "POST /v2/devices/{uuid}/disable 404"),
        ("PUT", f"/v2/devices/{UUID}", "PUT /v2/devices/{uuid} 405"),
        ("GET", "/v2/secrets/x", "GET - 404"),
        ("GET", "/", "GET / 200"),
        ("GET", "/v2", "GET /v2 200"),
        ("GET", "/v2/openapi.json", "GET /v2/openapi.json 200"),
    ],
)
def test_request_logs_route_and_status(
    api: ApiEnv, access: Handler, method: str, path: str, expected: str
) -> None:
    api.call(method, path, headers={"OpenStack-API-Version": "accelerator 2.4"})
    (line,) = access.lines()
    assert re.search(rf"INFO {NAME} \[.*\] {re.escape(expected)} \d+\.\d ms$", line)


def test_line_has_request_id_caller_and_fields(api: ApiEnv, access: Handler) -> None:
    answer = api.call("GET", "/v2/devices", headers={"X-Project-Id": "p1"})
    (line,), (record,) = access.lines(), access.records
    assert f"{answer.headers['X-Openstack-Request-Id']} noauth p1 " in line
    assert {**record.extra, "ms": 0} == {
        "method": "GET",
        "route": "/v2/devices",
        "status": 200,
        "ms": 0,
    }
    assert isinstance(record.extra["ms"], float)


def test_refused_request_shows_no_caller_of_an_earlier_one(
    sqlite_engine: sa.Engine, fake_keystone: Any, api: ApiEnv, access: Handler
) -> None:
    api.call("GET", "/v2/devices")
    keystone_api = ApiEnv(keystone_conf(**fake_keystone.options()), sqlite_engine)
    answer = keystone_api.call("GET", "/v2/devices", headers={"X-User-Id": "mallory"})
    assert answer.status_int == 401
    line = access.lines()[-1]
    assert f"[None {answer.headers['X-Openstack-Request-Id']} - - - - - -]" in line


def test_line_has_no_text_of_the_client(api: ApiEnv, access: Handler) -> None:
    evil = "\r\nERROR root forged\x1b[31m"
    api.call("GET", "/v2/devices", QUERY_STRING="token=secret")
    api.call("GET", f"/v2/devices/{evil}")
    api.call("GET", f"/v2/{evil}")
    api.call("GET", "/v2/devices", REQUEST_METHOD=f"GET{evil}")
    api.call("GET", "/v2/devices", HTTP_OPENSTACK_API_VERSION=evil)
    api.call("GET", "/v2/devices", HTTP_X_OPENSTACK_REQUEST_ID=evil)
    lines = access.lines()
    assert len(lines) == 6
    assert not [line for line in lines if re.search("secret|forged|root|\x1b", line)]
    assert [line for line in lines if " - /v2/devices " in line]


def test_healthcheck_is_logged_at_debug(api: ApiEnv, access: Handler) -> None:
    api.call("GET", "/healthcheck")
    assert access.lines() == []
    logging.getLogger(NAME).setLevel(logging.DEBUG)
    api.call("GET", "/healthcheck")
    assert "DEBUG cyborg.api.access" in access.lines()[0]
    assert "GET /healthcheck 200" in access.lines()[0]


def test_internal_error_is_logged_with_500(api: ApiEnv, access: Handler) -> None:
    api.conductor.error = errors.CyborgError("x")
    api.call("POST", "/v2/device_profiles", [{"name": "p1", "groups": [{"resources:FPGA": "1"}]}])
    assert "POST /v2/device_profiles 500" in access.lines()[0]


def test_layer_that_fails_is_logged_with_500(access: Handler) -> None:
    def fail(environ: Any, start_response: Any) -> Any:
        raise SystemExit

    clock = iter([1.0, 3.5])
    app = AccessLog(fail, lambda *_: ("-", "-"), MetricRecorder(), lambda: next(clock))
    with pytest.raises(SystemExit):
        app({"REQUEST_METHOD": "GET", "PATH_INFO": "/v2"}, None)
    assert access.lines()[0].endswith("GET - 500 2500.0 ms")

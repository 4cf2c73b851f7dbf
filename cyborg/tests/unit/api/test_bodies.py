# SPDX-License-Identifier: Apache-2.0
"""Malformed, slow and unauthenticated bodies: no 500, and no read before authentication."""

import io
import json
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from webob import exc

from cyborg.api import controller as resource
from cyborg.api import routes
from cyborg.api.body import STOP_READING, ReadDeadlines
from cyborg.db import schema
from cyborg.tests.fixtures.bus.malformed_values import nested
from cyborg.tests.fixtures.clouds.api import INSTANCE, ApiEnv, bind_body, error_message
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.unit.api.test_auth import keystone_conf

LATEST = {"OpenStack-API-Version": "accelerator latest"}
UUID = "a0000000-0000-4000-8000-000000000001"
GROUPS = [{"resources:FPGA": "1", "trait:CUSTOM_A": "required"}]
MALFORMED_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**64, 10**400, 0.5, float("nan"), float("inf"), "", " ", "x" * 70_000),
    *("\0", "\ud800", "null", [], [None], [[]], [{}], {}, {"": None}, {"\ud800": {}}, [[None] * 3]),
    *([None, "a"], {UUID: None}, {UUID: [None]}, {"resources:FPGA": None}),
)
MALFORMED_BODIES = (
    b"null",
    b"[null]",
    b"[[null]]",
    b'{"":null}',
    b"1e999",
    b"-0",
    b"9" * 5000,
    b"9" * 4000,
    b"NaN",
    b"[Infinity]",
    b'"\\ud800"',
    b'"\xed\xa0\x80"',
    b'{"a":1,"a":2}',
    b'{"name":"a","name":null,"groups":[],"groups":null}',
    nested("[", "1", "]").encode(),
    nested("[", "1", "]", 900).encode(),
    nested('{"a":', "1", "}").encode(),
    nested('{"a":', "null", "}", 900).encode(),
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b'{"a":',
    b"\x00",
    b" ",
)


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiEnv]:
    folder: Path = tmp_path_factory.mktemp("bodies")
    with fresh_database("sqlite", folder) as url, engine_of(url) as engine:
        schema.metadata.create_all(engine)
        conf = make_conf()
        conf.set_override("auth_strategy", "noauth")
        rows.insert_card(engine)
        api_env = ApiEnv(conf, engine)
        api_env.headers = LATEST
        yield api_env


def valid_bodies() -> dict[tuple[str, str], Any]:
    """Return a valid body for each operation that has one, by method and route."""
    program = {"path": "/program", "op": "replace", "value": [{"image_uuid": UUID}]}
    driver = {"driver": "fake", "backend": "b", "hosts": ["h"], "config": {"num": [1, "a"]}}
    change = {"hosts": ["h"], "config": {"a": 1}, "enabled": True, "reload": True}
    profile = {"name": "p", "groups": GROUPS, "uuid": UUID, "description": "d"}
    context = {"name": "n", "resources": {"FPGA": 1}, "requires": ["X"], "config_data": {"k": "v"}}
    return {
        ("POST", "accelerator_requests"): {"device_profile_name": "p"},
        ("PATCH", "accelerator_requests"): bind_body(UUID, UUID, INSTANCE, project_id="p"),
        ("PATCH", "accelerator_requests/*"): bind_body(UUID, UUID, INSTANCE, project_id="p"),
        ("PATCH", "accelerators/*"): {"name": "n", "description": "d", "tags": ["a"]},
        ("POST", "attachments"): {
            "uuid": UUID,
            "instance_uuid": INSTANCE,
            "device_profile": "p",
            "mode": "next-boot",
            "reboot": True,
        },
        ("POST", "attributes"): {"deployable_id": UUID, "key": "k", "value": "v"},
        ("POST", "audits"): {"host": "h", "repair": False},
        ("PATCH", "deployables/*/program"): [program],
        ("PATCH", "deployables/*/program/*"): [program],
        ("PUT", "devices/*/layout"): {"layout": "2", "drain": True},
        ("PUT", "devices/*/maintenance"): {"until": "2030-01-31T12:00:00Z", "successor": "auto"},
        ("POST", "device_contexts"): context,
        ("PATCH", "device_contexts/*"): {"name": "n", "config_data": {"k": "v"}},
        ("POST", "device_contexts/*/pre_bind"): {
            "hostname": "h",
            "mappings": {"0": [UUID]},
            "lease_seconds": 60,
            "epoch": 1,
        },
        ("POST", "device_contexts/*/unbind"): {"epoch": 1, "instance_uuid": INSTANCE},
        ("POST", "device_contexts/*/bind"): {
            "hostname": "h",
            "instance_uuid": INSTANCE,
            "mappings": {"0": [UUID]},
            "epoch": 1,
        },
        ("POST", "device_profiles"): [profile],
        ("POST", "discoveries"): {"host": "h", "driver": "fake"},
        ("POST", "drivers"): driver,
        ("PATCH", "drivers/*"): change,
        ("POST", "hardware"): {"host": "h", "address": "0000:00:00.0", "backend": "b"},
    }


def test_valid_bodies_cover_all_operations() -> None:
    table = routes.build_routes(resource.ApiContext.__new__(resource.ApiContext))
    operations = {
        (method, path)
        for path, methods in table.items()
        for method, controller in methods.items()
        if controller.operation.body is not None
    }
    assert operations == set(valid_bodies())


def malformed_bodies(value: Any) -> Iterator[Any]:
    """Yield copies of a value, each with one element replaced by one malformed value."""
    yield from MALFORMED_VALUES
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: item} for item in malformed_bodies(inner))
            yield {**value, f"{key}?": inner}
            yield {name: item for name, item in value.items() if name != key}
    if isinstance(value, list):
        for index, inner in enumerate(value):
            for item in malformed_bodies(inner):
                yield [*value[:index], item, *value[index + 1 :]]
        yield value * 2
        yield [*value, None]


def call(env: ApiEnv, method: str, route: str, body: Any) -> Any:
    answer = env.call(method, f"/v2/{route.replace('*', UUID)}", body)
    assert answer.status_int < 500, (method, route, body, answer.text)
    if answer.status_int >= 400:
        assert error_message(answer)
    return answer


@pytest.mark.slow
@pytest.mark.parametrize(("method", "route"), valid_bodies())
def test_body_with_malformed_value_is_client_error(env: ApiEnv, method: str, route: str) -> None:
    for body in malformed_bodies(valid_bodies()[method, route]):
        call(env, method, route, body)


@pytest.mark.parametrize(("method", "route"), valid_bodies())
def test_body_null_is_400(env: ApiEnv, method: str, route: str) -> None:
    assert call(env, method, route, b"null").status_int == 400


@pytest.mark.slow
@pytest.mark.parametrize(("method", "route"), valid_bodies())
def test_body_of_malformed_bytes_is_client_error(env: ApiEnv, method: str, route: str) -> None:
    for body in MALFORMED_BODIES:
        call(env, method, route, body)


class Malformed(io.BytesIO):
    """A body whose chunks are malformed; raises an error like that of gunicorn."""

    def read(self, size: int | None = -1, /) -> bytes:
        raise ArithmeticError("Invalid chunk size: b'zz'")


def chunks(stream: io.BytesIO) -> dict[str, Any]:
    return {
        "HTTP_TRANSFER_ENCODING": "chunked",
        "CONTENT_TYPE": "application/json",
        "wsgi.input": stream,
        "wsgi.input_terminated": True,
    }


def test_body_malformed_chunk_is_400_with_one_log_line(
    api: ApiEnv, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "cyborg.api"):
        answer = api.call("POST", "/v2/device_profiles", **chunks(Malformed()))
    assert answer.status_int == 400
    assert "malformed chunks" in error_message(answer)
    records = [r for r in caplog.records if r.name.startswith("cyborg.api")]
    assert [r.name for r in records] == ["cyborg.api.faults", "cyborg.api.access"]
    assert [(r.levelname, r.exc_info) for r in records] == [("INFO", None)] * 2


def test_body_is_read_after_authentication(
    sqlite_engine: sa.Engine, fake_keystone: Any, caplog: pytest.LogCaptureFixture
) -> None:
    keystone_api = ApiEnv(keystone_conf(**fake_keystone.options()), sqlite_engine)
    answer = keystone_api.call("POST", "/v2/device_profiles", **chunks(Malformed()))
    assert answer.status_int == 401
    stream = io.BytesIO(b"{}")
    length = {"CONTENT_LENGTH": "2", "CONTENT_TYPE": "application/json", "wsgi.input": stream}
    assert keystone_api.call("POST", "/v2/device_profiles", **length).status_int == 401
    assert stream.tell() == 0
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


def test_body_rejected_with_keystone_has_error_message(
    sqlite_engine: sa.Engine, fake_keystone: Any
) -> None:
    conf = keystone_conf(**fake_keystone.options())
    conf.set_override("max_body_size", 1024, group="api")
    keystone_api = ApiEnv(conf, sqlite_engine)
    keystone_api.headers = {"X-Auth-Token": fake_keystone.issue_token(["admin"])}
    for stream, status in ((io.BytesIO(b" " * 1025), 413), (Malformed(), 400)):
        answer = keystone_api.call("POST", "/v2/device_profiles", **chunks(stream))
        assert answer.status_int == status
        assert error_message(answer)


def test_body_chunked_unsupported_is_411(api: ApiEnv) -> None:
    answer = api.call("POST", "/v2/device_profiles", HTTP_TRANSFER_ENCODING="chunked")
    assert answer.status_int == 411
    assert "Content-Length" in error_message(answer)


@pytest.mark.parametrize(
    ("length", "status"),
    [("0" * 5000 + "2", 400), ("0" * 20 + "9" * 20, 413), ("9" * 5000, 413), ("0", 400)],
)
def test_content_length_with_many_digits(api: ApiEnv, length: str, status: int) -> None:
    answer = api.call("POST", "/v2/device_profiles", b"[]", CONTENT_LENGTH=length)
    assert answer.status_int == status, answer.text


class Slow(io.BytesIO):
    """A body that blocks until the input of the connection is shut down; 20 s are an error."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def read(self, size: int | None = -1, /) -> bytes:
        if not self.ended.wait(20):
            raise AssertionError("the read was not ended")
        return b""


@pytest.mark.slow
def test_body_slow_is_408(api: ApiEnv) -> None:
    api.conf.set_override("body_timeout", 1.0, group="api")
    for length in ({}, {"CONTENT_LENGTH": "10"}):
        slow = Slow()
        answer = api.call(
            "POST",
            "/v2/device_profiles",
            **chunks(slow),
            **length,
            **{STOP_READING: slow.ended.set},
        )
        assert answer.status_int == exc.HTTPRequestTimeout.code
        assert "in time" in error_message(answer)


def test_read_deadlines_stop_expired_reads_only() -> None:
    deadlines = ReadDeadlines()
    late, soon = threading.Event(), threading.Event()
    with deadlines.limit(60, late.set) as first, deadlines.limit(60, late.set):
        assert not first()
    # A read that finished in time is not stopped later, and the thread serves the next read.
    with deadlines.limit(0.01, soon.set) as second:
        assert soon.wait(120)
        assert second()
    assert not late.is_set()


def test_read_stopper_keeps_output_open() -> None:
    from cyborg.wsgi.application import make_read_stopper

    server, client = socket.socketpair()
    with server, client:
        stop = make_read_stopper({"gunicorn.socket": server})
        assert stop is not None
        stop()
        assert server.recv(1) == b""
        server.sendall(b"answer")
        assert client.recv(6) == b"answer"
    stop()
    assert make_read_stopper({}) is None


def test_body_valid_json_is_accepted(api: ApiEnv) -> None:
    profile = json.dumps([{"name": "p", "groups": GROUPS}])
    assert api.call("POST", "/v2/device_profiles", profile.encode()).status_int == 201

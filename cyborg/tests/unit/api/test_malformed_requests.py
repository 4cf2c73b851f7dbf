# SPDX-License-Identifier: Apache-2.0
"""Property tests: no input of a client causes a server error."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyborg.db import schema
from cyborg.tests.fixtures.clouds.api import ApiEnv, error_message
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.machine import tiers
from cyborg.tests.fixtures.machine.options import make_conf

WORDS = st.sampled_from(
    [
        *("name", "groups", "uuid", "description", "device_profile_name", "host", "driver"),
        *("resources:FPGA", "trait:CUSTOM_A", "accel:x", "required", "op", "path", "value", "add"),
        *("config", "hosts", "backend", "status", "reload", "enabled", "drain", "force", "true"),
        *("/hostname", "/instance_uuid", "a0000000-0000-4000-8000-000000000001", "1", "", "\0"),
        *("limit", "marker", "sort_key", "sort_dir", "instance", "arqs", "type", "filters.field"),
        *("\ud800", "é", "a" * 300, "-1", "1e9"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)
PATHS = st.sampled_from(
    [
        *("device_profiles", "accelerator_requests", "devices", "deployables", "attributes"),
        *("accelerators", "drivers", "drivers/x", "hardware", "jobs"),
        "hardware/a0000000-0000-4000-8000-000000000001",
        "jobs/a0000000-0000-4000-8000-000000000001",
        "accelerators/a0000000-0000-4000-8000-000000000001",
        *("services", "discoveries", "device_profiles/x", "accelerator_requests/x", "nothing"),
        "accelerator_requests/a0000000-0000-4000-8000-000000000001",
        "devices/a0000000-0000-4000-8000-000000000001/enable",
    ]
)
METHODS = st.sampled_from(["GET", "POST", "PATCH", "PUT", "DELETE", "OPTIONS"])
SETTINGS = settings(deadline=None, max_examples=tiers.scale(150))
LATEST = {"OpenStack-API-Version": "accelerator latest"}


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiEnv]:
    folder: Path = tmp_path_factory.mktemp("nonsense")
    with fresh_database("sqlite", folder) as url, engine_of(url) as engine:
        schema.metadata.create_all(engine)
        conf = make_conf()
        conf.set_override("auth_strategy", "noauth")
        rows.insert_card(engine)
        yield ApiEnv(conf, engine)


def assert_no_server_error(env: ApiEnv, *args: Any, **kwargs: Any) -> None:
    answer = env.call(*args, **kwargs)
    assert answer.status_int < 500, answer.text
    if answer.status_int >= 400:
        assert error_message(answer)


@pytest.mark.slow
@SETTINGS
@given(METHODS, PATHS, VALUES)
def test_random_json_bodies(env: ApiEnv, method: str, path: str, body: Any) -> None:
    assert_no_server_error(env, method, f"/v2/{path}", body, LATEST)


@SETTINGS
@given(METHODS, PATHS, st.binary(max_size=40))
def test_random_bytes_as_bodies(env: ApiEnv, method: str, path: str, body: bytes) -> None:
    assert_no_server_error(env, method, f"/v2/{path}", body, LATEST)


@pytest.mark.slow
@SETTINGS
@given(METHODS, PATHS, st.lists(st.tuples(WORDS, WORDS), max_size=3))
def test_random_queries(env: ApiEnv, method: str, path: str, query: list[tuple[str, str]]) -> None:
    text = urlencode(query, errors="surrogatepass")
    assert_no_server_error(env, method, f"/v2/{path}?{text}", None, LATEST)


@SETTINGS
@given(METHODS, st.lists(st.binary(max_size=6), max_size=4))
def test_random_paths(env: ApiEnv, method: str, segments: list[bytes]) -> None:
    path = "/".join(quote(segment) for segment in segments)
    assert_no_server_error(env, method, f"/v2/{path}", None, LATEST)


@pytest.mark.slow
@SETTINGS
@given(st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=24))
def test_random_version_headers(env: ApiEnv, header: str) -> None:
    assert_no_server_error(env, "GET", "/v2/devices", None, {"OpenStack-API-Version": header})
    assert_no_server_error(
        env, "GET", "/v2/devices", None, {"OpenStack-API-Version": f"accelerator {header}"}
    )
    assert_no_server_error(
        env, "GET", "/v2/devices", None, {"Accept": header, "X-Project-Id": header}
    )

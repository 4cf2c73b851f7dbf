# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core import external
from cyborg.core.errors import Invalid
from cyborg.core.inventory.device import Ability, Device, Health
from cyborg.core.inventory.device_state import Measurement
from cyborg.tests.fixtures.hosts.external_drivers import hello_body

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def test_parse_hello_name_is_from_endpoint() -> None:
    body = {"status": "READY", "endpoint": "/run/x/crypto-1.sock", "type": "crypto"}
    assert external.parse_hello(body, "/run/x") == external.Hello("crypto-1", "CRYPTO")


def test_parse_hello_abilities() -> None:
    calls = ["prepare", "release", "program", "health"]
    assert external.parse_hello(hello_body(abilities=calls), "/x").abilities == {
        Ability.PREPARES,
        Ability.PROGRAMS,
        Ability.MEASURES,
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "the hello is malformed"),
        ([], "the hello is malformed"),
        ({}, "malformed .KeyError 'status'"),
        (hello_body(status="BUSY"), "status 'BUSY': expected READY"),
        (
            hello_body(endpoint="/etc/crypto.sock"),
            r"endpoint '/etc/crypto.sock': expected /x/<name>.sock",
        ),
        (hello_body("../a"), "endpoint"),
        (hello_body("agent"), "endpoint 'agent.sock'"),
        (hello_body("A"), "endpoint"),
        (hello_body(endpoint=5), "malformed"),
        (hello_body(type=""), "type ''"),
        (hello_body(abilities="prepare"), "malformed .TypeError expected a list"),
        (
            hello_body(abilities=["fly"]),
            "ability 'fly': expected any of health, prepare, program, release",
        ),
        (hello_body(abilities=["prepare"]), "ability prepare requires release"),
    ],
)
def test_parse_hello_malformed_is_rejected(body: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        external.parse_hello(body, "/x")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a": NaN}', b"1" * 5000, b'{"a": -Infinity}']
)
def test_decode_malformed_is_rejected(body: bytes) -> None:
    with pytest.raises(Invalid, match="the body is not JSON"):
        external.decode(body)


def test_parse_discovery() -> None:
    assert external.parse_discovery({"status": "IN-PROGRESS", "discovery_id": "d"}) == "d"


def test_parse_health() -> None:
    body = {"health": {"a": {"health": "unhealthy", "reason": "hot"}, "b": {"health": "ok"}}}
    assert external.parse_health(body) == {
        "a": Measurement(Health.UNHEALTHY, "hot"),
        "b": Measurement(Health.OK),
    }


@pytest.mark.parametrize("body", [None, {}, {"health": []}, {"health": {"a": {"health": "fine"}}}])
def test_parse_health_malformed_is_rejected(body: Any) -> None:
    with pytest.raises(Invalid, match="the answer is malformed"):
        external.parse_health(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "the answer is malformed"),
        ({"status": "IN-PROGRESS"}, "'discovery_id'"),
        ({"status": "DONE", "discovery_id": "1"}, "status is 'DONE': expected IN-PROGRESS"),
    ],
)
def test_parse_discovery_malformed_is_rejected(body: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        external.parse_discovery(body)


@given(JSON, st.sampled_from(["status", "endpoint", "type", "abilities"]))
def test_parse_hello_any_value_gives_hello_or_invalid(value: Any, key: str) -> None:
    for body in (value, hello_body(**{key: value})):
        try:
            assert isinstance(external.parse_hello(body, "/x"), external.Hello)
        except Invalid as exc:
            assert exc.message


IN_A_PIECE = ("uuid", "acc_specs", "acc_status", "address", "vendor_id", "numa_node", "health")
IN_SPECS = ("num", "remote", "device_type", "acc_capability", "serial", "handles", "attach_type")


@given(JSON, st.sampled_from([*IN_A_PIECE, *IN_SPECS]))
def test_load_devices_any_value_gives_devices_or_invalid(value: Any, key: str) -> None:
    piece: dict[str, Any] = {"address": "0000:5a:00.0", "acc_specs": {"num": 1}, key: value}
    if isinstance(piece["acc_specs"], dict):
        piece["acc_specs"][key] = value
    for body in (value, {"hardware": value}, {"hardware": [value]}, {"hardware": [piece]}):
        try:
            devices = external.load_devices(body, "b0", "CRYPTO")
            assert all(isinstance(device, Device) for device in devices)
        except Invalid as exc:
            assert exc.message

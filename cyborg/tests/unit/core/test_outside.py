# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core import outside, outside_hardware
from cyborg.core.device import Ability, Device, Health
from cyborg.core.errors import Invalid
from cyborg.core.health import Measurement
from cyborg.fixtures.outside import hello

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def test_a_hello_of_the_contract_says_its_name_by_its_endpoint() -> None:
    body = {"status": "READY", "endpoint": "/run/x/crypto-1.sock", "type": "crypto"}
    assert outside.hello(body, "/run/x") == outside.Hello("crypto-1", "CRYPTO")


def test_abilities() -> None:
    words = ["prepare", "release", "program", "health"]
    assert outside.hello(hello(abilities=words), "/x").abilities == {
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
        (hello(status="BUSY"), "status 'BUSY': expected READY"),
        (
            hello(endpoint="/etc/crypto.sock"),
            r"endpoint '/etc/crypto.sock': expected /x/<name>.sock",
        ),
        (hello("../a"), "endpoint"),
        (hello("agent"), "endpoint 'agent.sock'"),
        (hello("A"), "endpoint"),
        (hello(endpoint=5), "malformed"),
        (hello(type=""), "type ''"),
        (hello(abilities="prepare"), "malformed .TypeError expected a list"),
        (
            hello(abilities=["fly"]),
            "ability 'fly': expected some of health, prepare, program, release",
        ),
        (hello(abilities=["prepare"]), "prepare without release: one who prepares must release"),
    ],
)
def test_what_is_no_hello(body: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        outside.hello(body, "/x")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a": NaN}', b"1" * 5000, b'{"a": -Infinity}']
)
def test_what_is_no_json(body: bytes) -> None:
    with pytest.raises(Invalid, match="the body is not JSON"):
        outside.decode(body)


def test_a_discovery() -> None:
    assert outside.discovery({"status": "IN-PROGRESS", "discovery_id": "d"}) == "d"


def test_health() -> None:
    body = {"health": {"a": {"health": "unhealthy", "reason": "hot"}, "b": {"health": "ok"}}}
    assert outside.health(body) == {
        "a": Measurement(Health.UNHEALTHY, "hot"),
        "b": Measurement(Health.OK),
    }


@pytest.mark.parametrize("body", [None, {}, {"health": []}, {"health": {"a": {"health": "fine"}}}])
def test_what_is_no_health(body: Any) -> None:
    with pytest.raises(Invalid, match="the answer is malformed"):
        outside.health(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "the answer is malformed"),
        ({"status": "IN-PROGRESS"}, "'discovery_id'"),
        ({"status": "DONE", "discovery_id": "1"}, "status is 'DONE': expected IN-PROGRESS"),
    ],
)
def test_what_is_no_discovery(body: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        outside.discovery(body)


@given(JSON, st.sampled_from(["status", "endpoint", "type", "abilities"]))
def test_a_hello_is_read_or_refused(value: Any, key: str) -> None:
    for body in (value, hello(**{key: value})):
        try:
            assert isinstance(outside.hello(body, "/x"), outside.Hello)
        except Invalid as bad:
            assert bad.message


IN_A_PIECE = ("uuid", "acc_specs", "acc_status", "address", "vendor_id", "numa_node", "health")
IN_SPECS = ("num", "remote", "device_type", "acc_capability", "serial", "handles", "attach_type")


@given(JSON, st.sampled_from([*IN_A_PIECE, *IN_SPECS]))
def test_hardware_is_read_or_refused(value: Any, key: str) -> None:
    piece: dict[str, Any] = {"address": "0000:5a:00.0", "acc_specs": {"num": 1}, key: value}
    if isinstance(piece["acc_specs"], dict):
        piece["acc_specs"][key] = value
    for body in (value, {"hardware": value}, {"hardware": [value]}, {"hardware": [piece]}):
        try:
            found = outside_hardware.load(body, "b0", "CRYPTO")
            assert all(isinstance(device, Device) for device in found)
        except Invalid as bad:
            assert bad.message

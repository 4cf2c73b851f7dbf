# SPDX-License-Identifier: Apache-2.0
"""Kinds of errors, and their form on the bus."""

import json

import pytest

from cyborg.core import errors
from cyborg.core.errors import KINDS, CyborgError


@pytest.mark.parametrize("code", sorted(KINDS))
def test_error_wire_round_trip(code: str) -> None:
    error = KINDS[code]("a message", field="name", count=2)
    body = json.loads(json.dumps(error.to_wire()))
    received = errors.from_wire(body)
    assert type(received) is KINDS[code]
    assert (received.message, received.details, str(received)) == (
        "a message",
        {"field": "name", "count": 2},
        "a message",
    )


def test_error_codes_match_contract() -> None:
    assert sorted(KINDS) == [
        "conflict",
        "driver_failed",
        "forbidden",
        "in_use",
        "internal",
        "invalid",
        "misconfigured",
        "no_handle",
        "not_found",
        "over_limit",
        "service_token",
        "stale",
        "timed_out",
        "unavailable",
        "unresolved",
        "wrong_state",
    ]


@pytest.mark.parametrize("body", [{}, {"code": "new"}, {"code": "invalid", "details": 7}])
def test_from_wire_unknown_body_is_accepted(body: dict[str, object]) -> None:
    assert isinstance(errors.from_wire(body), CyborgError)

# SPDX-License-Identifier: Apache-2.0
"""The tree of errors."""

import json

import pytest

from cyborg.core import errors
from cyborg.core.errors import KINDS, CyborgError


@pytest.mark.parametrize("code", sorted(KINDS))
def test_each_kind_crosses_the_bus(code: str) -> None:
    sent = KINDS[code]("said", field="name", count=2)
    body = json.loads(json.dumps(sent.to_wire()))
    got = errors.from_wire(body)
    assert type(got) is KINDS[code]
    assert (got.message, got.details, str(got)) == ("said", {"field": "name", "count": 2}, "said")


def test_codes_are_part_of_the_contract() -> None:
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
        "service_token",
        "stale",
        "timed_out",
        "unavailable",
        "unresolved",
        "wrong_state",
    ]


@pytest.mark.parametrize("body", [{}, {"code": "new"}, {"code": "invalid", "details": 7}])
def test_a_newer_peer_is_understood(body: dict[str, object]) -> None:
    assert isinstance(errors.from_wire(body), CyborgError)

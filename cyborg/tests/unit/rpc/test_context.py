# SPDX-License-Identifier: Apache-2.0
"""Context of a call: the values that are sent, and those that are accepted."""

from datetime import datetime
from typing import Any

import pytest
from oslo_context.context import RequestContext

from cyborg.rpc.context import CallSerializer, ContextSerializer, for_call

READ = ContextSerializer().deserialize_context


def test_context_round_trip_drops_only_the_token() -> None:
    context = RequestContext(
        auth_token="secret", user_id="u", project_id="p", roles=["member"], overwrite=False
    )
    values = ContextSerializer().serialize_context(context)
    assert "secret" not in str(values)
    received = READ({**values, "sender": "cyborg-api@controller"})
    assert (received.request_id, received.user_id, received.project_id) == (
        context.request_id,
        "u",
        "p",
    )
    assert received.roles == ["member"]
    assert received.sender == "cyborg-api@controller"
    assert READ({**values, "auth_token": "theirs"}).auth_token is None


@pytest.mark.parametrize(
    "value", [1, [], {}, [["x"]], [1], "a\nb", "\x00", "\ud800", "x" * 256, ["x\n"], True, None]
)
@pytest.mark.parametrize("key", ["request_id", "user", "roles", "project_id", "is_admin", "new"])
def test_malformed_context_values_are_left_out(key: str, value: Any) -> None:
    received = READ({key: value})
    assert received.request_id.startswith("req-")
    assert received.user_id is None
    assert all(isinstance(role, str) for role in received.roles or [])
    assert received.is_admin is (key == "is_admin" and value is True)


def test_end_of_the_callers_wait_is_sent_with_the_call() -> None:
    end = datetime(2030, 1, 31, 12, 0, 0, 250)
    assert READ(CallSerializer().serialize_context(for_call(end))).answer_by == end
    assert READ(CallSerializer().serialize_context(for_call())).answer_by is None


@pytest.mark.parametrize("value", [1, "", "soon", "99999-01-01", "0001-01-01T00:00:00+23:00", None])
def test_malformed_end_of_the_callers_wait_is_left_out(value: Any) -> None:
    assert READ({"answer_by": value}).answer_by is None

# SPDX-License-Identifier: Apache-2.0
"""The context of a call: what of it travels, and what of it is believed."""

from typing import Any

import pytest
from oslo_context.context import RequestContext

from cyborg.rpc.context import ContextSerializer

READ = ContextSerializer().deserialize_context


def test_a_context_comes_out_as_it_went_in_but_for_the_token() -> None:
    asking = RequestContext(
        auth_token="secret", user_id="u", project_id="p", roles=["member"], overwrite=False
    )
    travels = ContextSerializer().serialize_context(asking)
    assert "secret" not in str(travels)
    heard = READ({**travels, "sender": "cyborg-api@controller"})
    assert (heard.request_id, heard.user_id, heard.project_id) == (asking.request_id, "u", "p")
    assert heard.roles == ["member"]
    assert heard.sender == "cyborg-api@controller"
    assert READ({**travels, "auth_token": "theirs"}).auth_token is None


@pytest.mark.parametrize(
    "value", [1, [], {}, [["x"]], [1], "a\nb", "\x00", "\ud800", "x" * 256, ["x\n"], True, None]
)
@pytest.mark.parametrize("key", ["request_id", "user", "roles", "project_id", "is_admin", "new"])
def test_what_is_malformed_is_left_out(key: str, value: Any) -> None:
    heard = READ({key: value})
    assert heard.request_id.startswith("req-")
    assert heard.user_id is None
    assert all(isinstance(role, str) for role in heard.roles or [])
    assert heard.is_admin is (key == "is_admin" and value is True)

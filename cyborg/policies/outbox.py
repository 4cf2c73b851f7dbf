# SPDX-License-Identifier: Apache-2.0
"""Rules of the outbox: what neighbours must be told, and what they never took."""

from cyborg.policies.base import ELEVATED, rule

_WHO = (ELEVATED,)
_ONE = "/v2/outbox/{uuid}"

RULES = [
    rule("outbox", "get_all", _WHO, "List the messages of the outbox.", "GET /v2/outbox"),
    rule("outbox", "retry", _WHO, "Have a dead message delivered.", f"POST {_ONE}/retry"),
    rule("outbox", "delete", _WHO, "Forget a dead message.", f"DELETE {_ONE}"),
]

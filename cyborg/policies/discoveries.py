# SPDX-License-Identifier: Apache-2.0
"""Rules of discoveries on demand."""

from cyborg.policies.base import ELEVATED, rule

_WHO = (ELEVATED,)

RULES = [
    rule("discovery", "create", _WHO, "Have backends look again.", "POST /v2/discoveries"),
    rule("discovery", "get_all", _WHO, "List discoveries.", "GET /v2/discoveries"),
    rule("discovery", "get_one", _WHO, "Show a discovery.", "GET /v2/discoveries/{uuid}"),
]

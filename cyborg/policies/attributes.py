# SPDX-License-Identifier: Apache-2.0
"""Rules of the attributes that operators give to deployables."""

from cyborg.policies.base import ELEVATED, rule

_WHO = (ELEVATED,)

RULES = [
    rule("attribute", "get_all", _WHO, "List attributes.", "GET /v2/attributes"),
    rule("attribute", "get_one", _WHO, "Show an attribute.", "GET /v2/attributes/{uuid}"),
    rule("attribute", "create", _WHO, "Give an attribute.", "POST /v2/attributes"),
    rule("attribute", "delete", _WHO, "Take an attribute away.", "DELETE /v2/attributes/{uuid}"),
]

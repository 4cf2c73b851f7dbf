# SPDX-License-Identifier: Apache-2.0
"""Rules of hardware."""

from cyborg.policies.base import ELEVATED, rule

_WHO = (ELEVATED,)

RULES = [
    rule("hardware", "get_all", _WHO, "List hardware.", "GET /v2/hardware"),
    rule("hardware", "adopt", _WHO, "Have a backend manage a device.", "POST /v2/hardware"),
    rule("hardware", "release", _WHO, "Have it left alone.", "DELETE /v2/hardware/{uuid}"),
]

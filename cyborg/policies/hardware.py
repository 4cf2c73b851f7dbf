# SPDX-License-Identifier: Apache-2.0
"""Rules of hardware."""

from cyborg.policies.base import ELEVATED, rule

RULES = [
    rule("hardware", "get_all", (ELEVATED,), "List hardware.", "GET /v2/hardware"),
]

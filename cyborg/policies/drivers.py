# SPDX-License-Identifier: Apache-2.0
"""Rules of drivers."""

from cyborg.policies.base import ELEVATED, rule

RULES = [
    rule("driver", "get_all", (ELEVATED,), "List drivers.", "GET /v2/drivers"),
    rule("driver", "get_one", (ELEVATED,), "Show a driver.", "GET /v2/drivers/{uuid_or_name}"),
]

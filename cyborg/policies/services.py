# SPDX-License-Identifier: Apache-2.0
"""Rules of services: the daemons and the backends of each host."""

from cyborg.policies.base import ELEVATED, rule

RULES = [
    rule("service", "get_all", (ELEVATED,), "List services.", "GET /v2/services"),
]

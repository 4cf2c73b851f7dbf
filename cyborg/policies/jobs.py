# SPDX-License-Identifier: Apache-2.0
"""Rules of jobs: what takes time, and how far it is."""

from cyborg.policies.base import ELEVATED, rule

RULES = [
    rule("job", "get_all", (ELEVATED,), "List jobs.", "GET /v2/jobs"),
    rule("job", "get_one", (ELEVATED,), "Show a job.", "GET /v2/jobs/{uuid}"),
]

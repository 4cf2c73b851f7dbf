# SPDX-License-Identifier: Apache-2.0
"""Rules of jobs: what takes time, how far it is, and giving it up."""

from cyborg.policies.base import ELEVATED, rule

RULES = [
    rule("job", "get_all", (ELEVATED,), "List jobs.", "GET /v2/jobs"),
    rule("job", "get_one", (ELEVATED,), "Show a job.", "GET /v2/jobs/{uuid}"),
    rule("job", "cancel", (ELEVATED,), "Cancel a job.", "DELETE /v2/jobs/{uuid}"),
]

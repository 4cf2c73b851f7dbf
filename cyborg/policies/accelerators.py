# SPDX-License-Identifier: Apache-2.0
"""Rules of accelerators. Whose project's they see and label is no matter of these rules."""

from cyborg.policies.base import ELEVATED, MEMBER, READER, SERVICE, rule

_READ = (ELEVATED, READER, SERVICE)

RULES = [
    rule("accelerator", "get_all", _READ, "List accelerators.", "GET /v2/accelerators"),
    rule("accelerator", "get_one", _READ, "Show an accelerator.", "GET /v2/accelerators/{uuid}"),
    rule(
        "accelerator",
        "update",
        (ELEVATED, MEMBER, SERVICE),
        "Label an accelerator.",
        "PATCH /v2/accelerators/{uuid}",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""Rules of deployables."""

from cyborg.policies.base import ELEVATED, rule

_WHO = (ELEVATED,)
_PROGRAM = "PATCH /v2/deployables/{uuid}/program"

RULES = [
    rule("deployable", "get_all", _WHO, "List deployables.", "GET /v2/deployables"),
    rule("deployable", "get_one", _WHO, "Show a deployable.", "GET /v2/deployables/{uuid}"),
    rule("deployable", "program", _WHO, "Load an image.", _PROGRAM, f"{_PROGRAM}/{{again}}"),
]

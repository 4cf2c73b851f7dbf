# SPDX-License-Identifier: Apache-2.0
"""Rules of accelerator requests (ARQs).

To bind, to unbind and to delete what is bound takes a service token besides, whoever asks: that is
no matter of roles and no policy file changes it.
"""

from cyborg.policies.base import ELEVATED, MEMBER, READER, SERVICE, rule

_READ = (ELEVATED, READER, SERVICE)
_WRITE = (ELEVATED, MEMBER, SERVICE)

RULES = [
    rule("arq", "get_all", _READ, "List accelerator requests.", "GET /v2/accelerator_requests"),
    rule(
        "arq",
        "get_one",
        _READ,
        "Show an accelerator request.",
        "GET /v2/accelerator_requests/{uuid}",
    ),
    rule(
        "arq",
        "create",
        _WRITE,
        "Make the accelerator requests of a device profile.",
        "POST /v2/accelerator_requests",
    ),
    rule(
        "arq",
        "update",
        _WRITE,
        "Bind or unbind accelerator requests.",
        "PATCH /v2/accelerator_requests",
        "PATCH /v2/accelerator_requests/{uuid}",
    ),
    rule(
        "arq",
        "delete",
        _WRITE,
        "Delete accelerator requests.",
        "DELETE /v2/accelerator_requests",
        "DELETE /v2/accelerator_requests/{uuid}",
    ),
]

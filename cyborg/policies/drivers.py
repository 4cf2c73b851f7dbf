# SPDX-License-Identifier: Apache-2.0
"""Rules of drivers: they are of the whole cloud, and no project's."""

from cyborg.policies.base import ELEVATED, rule

_WHO = (ELEVATED,)
_ONE = "/v2/drivers/{uuid_or_name}"

RULES = [
    rule("driver", "get_all", _WHO, "List drivers.", "GET /v2/drivers"),
    rule("driver", "get_one", _WHO, "Show a driver.", f"GET {_ONE}"),
    rule("driver", "install", _WHO, "Have hosts enable a driver.", "POST /v2/drivers"),
    rule("driver", "update", _WHO, "Change a driver's backends.", f"PATCH {_ONE}"),
    rule("driver", "uninstall", _WHO, "Have hosts give up a driver.", f"DELETE {_ONE}"),
]

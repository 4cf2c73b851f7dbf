# SPDX-License-Identifier: Apache-2.0
"""Rules of device profiles."""

from cyborg.policies.base import ELEVATED, READER, SERVICE, rule

_READ = (ELEVATED, READER, SERVICE)

RULES = [
    rule("device_profile", "get_all", _READ, "List device profiles.", "GET /v2/device_profiles"),
    rule(
        "device_profile",
        "get_one",
        _READ,
        "Show a device profile.",
        "GET /v2/device_profiles/{uuid_or_name}",
    ),
    rule(
        "device_profile",
        "create",
        (ELEVATED,),
        "Make a device profile.",
        "POST /v2/device_profiles",
    ),
    rule(
        "device_profile",
        "delete",
        (ELEVATED,),
        "Delete device profiles.",
        "DELETE /v2/device_profiles/{uuid_or_name}",
        "DELETE /v2/device_profiles",
    ),
]

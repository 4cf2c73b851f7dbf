# SPDX-License-Identifier: Apache-2.0
"""Rules of devices."""

from cyborg.policies.base import ELEVATED, rule

_WHO = (ELEVATED,)

RULES = [
    rule("device", "get_all", _WHO, "List devices.", "GET /v2/devices"),
    rule("device", "get_one", _WHO, "Show a device.", "GET /v2/devices/{uuid}"),
    rule(
        "device",
        "enable",
        _WHO,
        "Open a device to new requests.",
        "POST /v2/devices/{uuid}/enable",
    ),
    rule(
        "device",
        "disable",
        _WHO,
        "Close a device to new requests.",
        "POST /v2/devices/{uuid}/disable",
    ),
]

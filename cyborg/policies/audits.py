# SPDX-License-Identifier: Apache-2.0
"""Rules of audits: what the sides of a host disagree about, and repairing it."""

from cyborg.policies.base import ELEVATED, rule

_WHO = (ELEVATED,)

RULES = [
    rule("audit", "get_all", _WHO, "List audits.", "GET /v2/audits"),
    rule("audit", "get_one", _WHO, "Show an audit.", "GET /v2/audits/{uuid}"),
    rule("audit", "create", _WHO, "Audit hosts, with repairs or without.", "POST /v2/audits"),
]

# SPDX-License-Identifier: Apache-2.0
"""The default policy rules, and the enforcer."""

from cyborg.policies.rules import list_rules

__all__ = ["list_rules"]

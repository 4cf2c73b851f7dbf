# SPDX-License-Identifier: Apache-2.0
"""Enforcing the rules: those in code, and over them those of the operator's policy file."""

from collections.abc import Mapping
from typing import Any

from oslo_config import cfg
from oslo_policy import policy

from cyborg.core.errors import Forbidden
from cyborg.policies import list_rules


def make_enforcer(conf: cfg.ConfigOpts) -> policy.Enforcer:
    """Return an enforcer of all rules, for this configuration's policy file."""
    enforcer = policy.Enforcer(conf)
    enforcer.register_defaults(list_rules())
    return enforcer


def get_enforcer() -> policy.Enforcer:
    """Return an enforcer for oslopolicy's own commands: the entry point of oslo.policy.enforcer."""
    conf = cfg.ConfigOpts()
    # Those commands have read their own command line.
    conf([], project="cyborg")
    return make_enforcer(conf)


def authorize(
    enforcer: policy.Enforcer, rule: str, who: Mapping[str, Any], target: Mapping[str, Any]
) -> None:
    """Raise Forbidden, naming the rule, unless it lets this caller do that."""
    if not enforcer.authorize(rule, dict(target), dict(who)):
        raise Forbidden(f"the policy does not allow {rule} to this token", rule=rule)

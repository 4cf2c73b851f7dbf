# SPDX-License-Identifier: Apache-2.0
"""The policy enforcer: the rules in code, overridden by the operator's policy file."""

import itertools
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from oslo_config import cfg
from oslo_policy import policy

from cyborg.compat.oslo import cache_policy_signatures
from cyborg.core.errors import Forbidden
from cyborg.core.text import join_limited
from cyborg.policies.rules import list_rules

RELOAD_INTERVAL = 1.0  # seconds between checks of the policy file for changes


# Rules within rules that are searched for roles.
MAX_DEPTH = 16

# Roles that an error names.
MAX_ROLES = 10

# Stands for a service token among the roles.
_FROM_SERVICE = "service token"

# Decisions that are kept until the next check of the policy file.
MAX_DECISIONS = 1000


class _Enforcer(policy.Enforcer):
    """An enforcer that checks the policy file once per RELOAD_INTERVAL, not for each decision.

    Equal decisions between two checks are made once: Nova sends five requests with the same tokens
    for each boot.
    """

    def __init__(self, conf: cfg.ConfigOpts, clock: Callable[[], float]) -> None:
        super().__init__(conf)
        self._clock = clock
        self._next_check = -RELOAD_INTERVAL
        self._decisions: dict[Hashable, Any] = {}

    def register_default(self, default: policy.RuleDefault) -> None:
        """Register a rule itself, not a copy of it as oslo.policy does.

        The copies take most of the time of a start of the API. oslo.policy changes only rules that
        replace a deprecated one, which no rule does.
        """
        if default.name in self.registered_rules:
            raise policy.DuplicatePolicyError(default.name)
        self.registered_rules[default.name] = default

    def load_rules(self, force_reload: bool = False) -> None:
        """Reload the policy file if it has changed; skip the check if it is not due."""
        now = self._clock()
        if force_reload or now >= self._next_check:
            super().load_rules(force_reload)
            self._next_check = now + RELOAD_INTERVAL
            # A new dictionary: a decision by the old rules, in another thread, goes to the old one.
            self._decisions = {}

    def authorize(self, rule: str, target: Any, creds: Any, *args: Any, **options: Any) -> Any:
        """Return the decision of ``policy.Enforcer.authorize``, which may have been made before."""
        # Only the plain call, that of this service, is kept: others may expect an exception.
        if args or options:
            return super().authorize(rule, target, creds, *args, **options)
        self.load_rules()
        decisions, key = self._decisions, (rule, _freeze(target), _freeze(creds))
        if key not in decisions:
            decision = super().authorize(rule, target, creds)
            # Not evicted: the next check of the file empties it anyway.
            if len(decisions) >= MAX_DECISIONS:
                return decision
            decisions[key] = decision
        return decisions[key]


def _freeze(values: Mapping[str, Any]) -> Hashable:
    # Lists, such as the roles, are not hashable.
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value) for name, value in values.items()
    )


def make_enforcer(
    conf: cfg.ConfigOpts, clock: Callable[[], float] = time.monotonic
) -> policy.Enforcer:
    """Return an enforcer of all rules with the policy file of the configuration.

    A changed policy file is reloaded within RELOAD_INTERVAL. ``clock`` is monotonic, in seconds.
    """
    cache_policy_signatures()
    enforcer = _Enforcer(conf, clock)
    enforcer.register_defaults(list_rules())
    return enforcer


def get_enforcer() -> policy.Enforcer:
    """Return an enforcer for the oslopolicy commands: the entry point of oslo.policy.enforcer."""
    conf = cfg.ConfigOpts()
    # No arguments: sys.argv is the command line of the oslopolicy command.
    conf([], project="cyborg")
    return make_enforcer(conf)


def authorize(
    enforcer: policy.Enforcer, rule: str, credentials: Mapping[str, Any], target: Mapping[str, Any]
) -> None:
    """Raise Forbidden, with the name of the rule, unless the rule allows the caller's operation.

    The error also names the roles that the rule asks for. These are no secret: the policy reference
    and oslopolicy-list-redundant show them. Other parts of a rule, which may be an operator's, are
    not shown.
    """
    if not enforcer.authorize(rule, dict(target), dict(credentials)):
        roles = describe_roles(enforcer, rule)
        needed = f", which needs {roles}" if roles else ""
        raise Forbidden(f"the policy does not allow {rule} to this token{needed}", rule=rule)


def describe_roles(enforcer: policy.Enforcer, rule: str) -> str:
    """Return which roles a rule asks for: "one of the roles ..."; empty if it asks for none."""
    rules: Mapping[str, Any] = enforcer.rules or {}
    combinations = _list_roles(rules.get(rule), rules, 0)
    roles = list(dict.fromkeys(" and ".join(names) for names in combinations if names))
    shown = join_limited([name for name in roles if name != _FROM_SERVICE], MAX_ROLES)
    needed = [f"one of the roles {shown}"] if shown else []
    needed += ["a service token"] if _FROM_SERVICE in roles else []
    return " or ".join(needed)


def _list_roles(check: Any, rules: Mapping[str, Any], depth: int) -> list[tuple[str, ...]]:
    """Return the combinations of roles with which a check may pass.

    The combination ``()`` is that of a check that asks for no role.
    """
    if depth > MAX_DEPTH:  # of a rule that refers to itself
        return []
    if isinstance(check, policy.RuleCheck):
        return _list_roles(rules.get(check.match), rules, depth + 1)
    parts = [_list_roles(part, rules, depth + 1) for part in getattr(check, "rules", ())]
    if isinstance(check, policy.OrCheck):
        return [roles for part in parts for roles in part]
    if isinstance(check, policy.AndCheck):
        # The product of many alternatives grows without bound.
        choices = itertools.islice(itertools.product(*parts), MAX_ROLES)
        return [sum(roles, ()) for roles in choices]
    if isinstance(check, policy.Check) and check.kind == "role":
        return [(str(check.match),)]
    if isinstance(check, policy.Check) and check.kind == "service_token":
        return [(_FROM_SERVICE,)]
    # The check "!" passes for nobody, other checks look at something else than roles.
    return [] if str(check) == "!" else [()]

# SPDX-License-Identifier: Apache-2.0
"""The policy enforcer: the rules in code, overridden by the operator's policy file."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from oslo_config import cfg
from oslo_policy import policy

from cyborg.compat import policy_signatures
from cyborg.core.errors import Forbidden
from cyborg.policies import list_rules

RELOAD_INTERVAL = 1.0  # seconds between checks of the policy file for changes


MAX_DECISIONS = 1000
"""Decisions that are kept until the next check of the policy file."""


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
        if args or options:
            return super().authorize(rule, target, creds, *args, **options)
        self.load_rules()
        decisions, key = self._decisions, (rule, _freeze(target), _freeze(creds))
        if key not in decisions:
            decision = super().authorize(rule, target, creds)
            if len(decisions) >= MAX_DECISIONS:
                return decision
            decisions[key] = decision
        return decisions[key]


def _freeze(values: Mapping[str, Any]) -> Hashable:
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value) for name, value in values.items()
    )


def make_enforcer(
    conf: cfg.ConfigOpts, clock: Callable[[], float] = time.monotonic
) -> policy.Enforcer:
    """Return an enforcer of all rules with the policy file of the configuration.

    A changed policy file is reloaded within RELOAD_INTERVAL. ``clock`` is monotonic, in seconds.
    """
    policy_signatures.install()
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
    """Raise Forbidden, with the name of the rule, unless the rule allows the caller's operation."""
    if not enforcer.authorize(rule, dict(target), dict(credentials)):
        raise Forbidden(f"the policy does not allow {rule} to this token", rule=rule)

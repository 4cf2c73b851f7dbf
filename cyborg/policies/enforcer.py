# SPDX-License-Identifier: Apache-2.0
"""Enforcing the rules: those in code, and over them those of the operator's policy file."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from oslo_config import cfg
from oslo_policy import policy

from cyborg.core.errors import Forbidden
from cyborg.policies import list_rules

READ_AGAIN = 1.0  # seconds between two looks at the operator's policy file


class _Enforcer(policy.Enforcer):  # type: ignore[misc]
    """Looks for a changed policy file once a second: by itself it does so for each question."""

    def __init__(self, conf: cfg.ConfigOpts, clock: Callable[[], float]) -> None:
        super().__init__(conf)
        self._clock = clock
        self._look_at = -READ_AGAIN

    def load_rules(self, force_reload: bool = False) -> None:
        """Read the file if it is new and the last look was not just now."""
        now = self._clock()
        if force_reload or now >= self._look_at:
            super().load_rules(force_reload)
            self._look_at = now + READ_AGAIN


def make_enforcer(
    conf: cfg.ConfigOpts, clock: Callable[[], float] = time.monotonic
) -> policy.Enforcer:
    """Return an enforcer of all rules, for this configuration's policy file.

    ``clock`` counts seconds upwards: a file that changes is read again within one.
    """
    enforcer = _Enforcer(conf, clock)
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

# SPDX-License-Identifier: Apache-2.0
"""Who may do what: the default rules, one file a noun.

Secure role defaults alone, closed by default: a token without a role passes no rule.
"""

import itertools
from collections.abc import Sequence
from types import ModuleType

from oslo_policy import policy

from cyborg.policies import (
    accelerator_requests,
    accelerators,
    attributes,
    audits,
    base,
    deployables,
    device_profiles,
    devices,
    discoveries,
    drivers,
    hardware,
    jobs,
    outbox,
    services,
)

NOUNS: Sequence[ModuleType] = (
    base,
    accelerator_requests,
    accelerators,
    attributes,
    audits,
    deployables,
    device_profiles,
    devices,
    discoveries,
    drivers,
    hardware,
    jobs,
    outbox,
    services,
)


def list_rules() -> list[policy.RuleDefault]:
    """Return every rule: the entry point of oslo.policy.policies."""
    return list(itertools.chain.from_iterable(noun.RULES for noun in NOUNS))

# SPDX-License-Identifier: Apache-2.0
"""Registry of the conformance rules; the import of a module with rules adds its rules."""

from collections.abc import Callable
from dataclasses import dataclass

from cyborg.core.inventory.device import Ability
from cyborg.testing.conformance.environment import Environment

RuleCheck = Callable[[Environment], None]


@dataclass(frozen=True, slots=True)
class Rule:
    """A requirement for drivers.

    ``source`` is the member of ``cyborg.drivers.base`` that defines the requirement. The rule
    applies only to drivers that claim ``ability`` and implement ``protocol``; None means no such
    condition. Rules with ``changes_host`` or ``needs_image`` run only on request. Rules with
    ``needs_class`` inspect a Python class. ``check`` raises RuleViolated. It raises RuleBlocked if
    a violation of another rule prevents the check.
    """

    name: str
    sentence: str
    source: str
    check: RuleCheck
    ability: Ability | None = None
    changes_host: bool = False
    needs_image: bool = False
    protocol: type | None = None
    needs_class: bool = False


RULES: list[Rule] = []


def rule(
    sentence: str,
    source: str,
    ability: Ability | None = None,
    *,
    changes_host: bool = False,
    needs_image: bool = False,
    protocol: type | None = None,
    needs_class: bool = False,
) -> Callable[[RuleCheck], RuleCheck]:
    """Register a function as a rule; the name of the function is the name of the rule."""

    def add(judge: RuleCheck) -> RuleCheck:
        conditions = (ability, changes_host, needs_image, protocol, needs_class)
        RULES.append(Rule(judge.__name__, sentence, source, judge, *conditions))
        return judge

    return add

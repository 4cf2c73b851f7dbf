# SPDX-License-Identifier: Apache-2.0
"""The default policy rules: the base rules, and one rule for each operation of the API.

They are in ``rules.ini``. Only secure role defaults are used: a token without a role
passes no rule.
"""

import configparser
import functools
from importlib import resources

from oslo_policy import policy

# The callers of an operation, as ``rules.ini`` names them.
CALLERS = {
    "ELEVATED": "rule:elevated",
    "READ": "rule:elevated or rule:project_reader or rule:service",
    "WRITE": "rule:elevated or rule:project_member or rule:service",
    "SERVICE": "rule:elevated or rule:service",
}


def list_rules() -> list[policy.RuleDefault]:
    """Return every rule: the entry point of oslo.policy.policies."""
    return list(_read_rules())


@functools.cache
def _read_rules() -> tuple[policy.RuleDefault, ...]:
    """Return the rules of ``rules.ini``: the base rules, and one rule for each operation."""
    # A name contains a colon, and a check percent signs.
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.read_string(resources.files(__package__).joinpath("rules.ini").read_text("utf-8"))
    rules = []
    for name, text in parser["base"].items():
        check, *lines = text.split("\n")
        rules.append(policy.RuleDefault(name, check, " ".join(lines)))
    # The first line of an operation names its callers in CALLERS, the last ones are its calls.
    for name, text in parser["operations"].items():
        callers, description, *calls = text.split("\n")
        operations: list[policy.Operation] = [
            {"method": method, "path": f"/v2/{path}"} for method, path in map(str.split, calls)
        ]
        rule = policy.DocumentedRuleDefault(
            f"cyborg:{name}", CALLERS[callers], description, operations, scope_types=["project"]
        )
        rules.append(rule)
    return tuple(rules)

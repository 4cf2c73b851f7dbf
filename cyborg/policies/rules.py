# SPDX-License-Identifier: Apache-2.0
"""The default policy rules: the base rules, and one rule for each operation of the API.

The rules of the operations are in ``rules.ini``. Only secure role defaults are used: a token
without a role passes no rule.
"""

import configparser
import functools
from collections.abc import Iterator
from pathlib import Path

from oslo_policy import policy

# The callers of an operation, as ``rules.ini`` names them.
CALLERS = {
    "ELEVATED": "rule:elevated",
    "READ": "rule:elevated or rule:project_reader or rule:service",
    "WRITE": "rule:elevated or rule:project_member or rule:service",
    "SERVICE": "rule:elevated or rule:service",
}

BASE_RULES = (
    policy.RuleDefault(
        "elevated",
        "role:admin or role:accelerator_admin",
        "Administrators of the cloud or, with a role that the operator creates, of its "
        "accelerators.",
    ),
    policy.RuleDefault(
        "project_reader",
        "role:reader and project_id:%(project_id)s",
        "Users who can read objects of the project of the token.",
    ),
    policy.RuleDefault(
        "project_member",
        "role:member and project_id:%(project_id)s",
        "Users who can change objects of the project of the token.",
    ),
    policy.RuleDefault(
        "service",
        "role:service or service_token:True",
        "Another service, such as Nova: with a token of its own user, or with a service token in "
        "addition to the user's token. The service token must have one of the roles in "
        "[keystone_authtoken] service_token_roles.",
    ),
)


def list_rules() -> list[policy.RuleDefault]:
    """Return every rule: the entry point of oslo.policy.policies."""
    return list(_all_rules())


@functools.cache
def _all_rules() -> tuple[policy.RuleDefault, ...]:
    return (*BASE_RULES, *_read_operation_rules())


def _read_operation_rules() -> Iterator[policy.DocumentedRuleDefault]:
    # A name contains a colon, and a path upper case and braces.
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.read_string(Path(__file__).with_name("rules.ini").read_text("utf-8"))
    for name, text in parser["operations"].items():
        callers, description, *calls = text.split("\n")
        operations: list[policy.Operation] = []
        for method, path in (call.split() for call in calls):
            operations.append({"method": method, "path": f"/v2/{path}"})
        yield policy.DocumentedRuleDefault(
            f"cyborg:{name}", CALLERS[callers], description, operations, scope_types=["project"]
        )

# SPDX-License-Identifier: Apache-2.0
"""The kinds of callers that the rules speak of, and how a rule is written."""

from oslo_policy import policy

ELEVATED = "rule:elevated"
READER = "rule:project_reader"
MEMBER = "rule:project_member"
SERVICE = "rule:service"

RULES: list[policy.RuleDefault] = [
    policy.RuleDefault(
        "elevated",
        "role:admin or role:accelerator_admin",
        "Who runs the cloud or, by a role that its operator makes, its accelerators.",
    ),
    policy.RuleDefault(
        "project_reader",
        "role:reader and project_id:%(project_id)s",
        "Who may look at what belongs to the project of the token.",
    ),
    policy.RuleDefault(
        "project_member",
        "role:member and project_id:%(project_id)s",
        "Who may work with what belongs to the project of the token.",
    ),
    policy.RuleDefault(
        "service",
        "role:service or service_token:True",
        "Another service, such as Nova: by a token of its own user, or by a service token beside "
        "the user's, whose roles meet [keystone_authtoken] service_token_roles.",
    ),
]


def rule(
    noun: str, action: str, who: tuple[str, ...], told: str, *calls: str
) -> policy.DocumentedRuleDefault:
    """Return the rule ``cyborg:<noun>:<action>``; a call is a method and a path."""
    return policy.DocumentedRuleDefault(
        f"cyborg:{noun}:{action}",
        " or ".join(who),
        told,
        [dict(zip(("method", "path"), call.split(), strict=True)) for call in calls],
        scope_types=["project"],
    )

# SPDX-License-Identifier: Apache-2.0
"""The caller of a request and the policy decisions about it."""

import functools
from collections.abc import Collection
from typing import Any

from oslo_context import context
from oslo_policy import policy

from cyborg.policies import enforcer as policies

ENVIRON = "cyborg.caller"
NAMES_SERVICE = "cyborg.names_service"
"""False in the environ of a request that counts as one of a service without a service token."""


class Caller:
    """The owner of a token; ``is_service`` is True if a valid service token came with it.

    Without keystone, every caller is a service; ``has_service_token`` is whether it says so.
    """

    def __init__(
        self,
        request_context: context.RequestContext,
        is_service: bool,
        enforcer: policy.Enforcer,
        *,
        has_service_token: bool,
    ) -> None:
        self.context = request_context
        self.is_service = is_service
        self.has_service_token = has_service_token
        self._enforcer = enforcer

    @property
    def project_id(self) -> str | None:
        """Return the project of the token."""
        return self.context.project_id

    def require(self, rule: str) -> None:
        """Raise Forbidden unless the policy allows the rule in the token's project."""
        policies.authorize(
            self._enforcer, rule, self._credentials(), {"project_id": self.project_id}
        )

    def allows(self, rule: str) -> bool:
        """Return whether the policy allows the rule in the token's project."""
        target = {"project_id": self.project_id}
        return bool(self._enforcer.authorize(rule, target, self._credentials()))

    @functools.cached_property
    def is_elevated(self) -> bool:
        """Return whether the caller administers the accelerators of the whole cloud."""
        return bool(self._enforcer.authorize("elevated", {}, self._credentials()))

    @property
    def administrators(self) -> str:
        """Return who administers the accelerators, for an error: with which roles."""
        roles = policies.describe_roles(self._enforcer, "elevated")
        return f"administrators, with {roles}," if roles else "administrators"

    @property
    def project_scope(self) -> str | None:
        """Return the project whose ARQs are visible to the caller; None means all projects."""
        return None if self.is_service or self.is_elevated else self.project_id or ""

    @property
    def instance_project(self) -> str | None:
        """Return the project of the instances that the caller can manage; None means any project.

        An instance that Nova binds with a member's token belongs to that member's project. The
        token of an administrator or a service does not identify the project of the instance.
        """
        is_member = not self.is_elevated and "service" not in {
            r.lower() for r in self.context.roles
        }
        return self.project_id if is_member else None

    def _credentials(self) -> dict[str, Any]:
        ctx = self.context
        return {
            "user_id": ctx.user_id,
            "project_id": ctx.project_id,
            "domain_id": ctx.domain_id,
            "system_scope": ctx.system_scope,
            "roles": ctx.roles,
            "service_roles": ctx.service_roles,
            "service_token": self.is_service,
        }


def read_caller(
    environ: dict[str, Any], service_roles: Collection[str], enforcer: policy.Enforcer
) -> Caller:
    """Return the caller of a request, from the headers that authentication has set.

    Side effect: the oslo context of the thread is set, and appears in RPC calls and log lines.
    """
    ctx = context.RequestContext.from_environ(environ)
    token_roles = {role.lower() for role in ctx.service_roles}
    is_service = not token_roles.isdisjoint(role.lower() for role in service_roles)
    has_service_token = is_service and environ.get(NAMES_SERVICE, True)
    return Caller(ctx, is_service, enforcer, has_service_token=has_service_token)

# SPDX-License-Identifier: Apache-2.0
"""Who sent a request, and what the policy lets them do."""

from collections.abc import Collection, Mapping
from typing import Any

from oslo_context import context
from oslo_policy import policy

from cyborg.policies import enforcer as policies

ENVIRON = "cyborg.caller"


class Caller:
    """The bearer of a token; ``is_service`` tells whether a service token vouches for the call."""

    def __init__(
        self, who: context.RequestContext, is_service: bool, enforcer: policy.Enforcer
    ) -> None:
        self.context = who
        self.is_service = is_service
        self._enforcer = enforcer

    @property
    def project_id(self) -> str | None:
        """The project of the token."""
        return self.context.project_id  # type: ignore[no-any-return]

    def require(self, rule: str) -> None:
        """Raise Forbidden unless the policy lets the caller do this in the token's project."""
        policies.authorize(self._enforcer, rule, self._who(), {"project_id": self.project_id})

    @property
    def is_elevated(self) -> bool:
        """Whether the caller runs the accelerators of the whole cloud."""
        return bool(self._enforcer.authorize("elevated", {}, self._who()))

    @property
    def scope(self) -> str | None:
        """The project whose requests exist for the caller; None is every project."""
        return None if self.is_service or self.is_elevated else self.project_id or ""

    @property
    def reach(self) -> str | None:
        """The one project whose instances the caller can work on, None for others' as well.

        What Nova binds with the token of a plain member is an instance of that member's project; an
        administrator's or a service's token does not tell whose it is.
        """
        plain = not self.is_elevated and "service" not in {r.lower() for r in self.context.roles}
        return self.project_id if plain else None

    def _who(self) -> Mapping[str, Any]:
        who = self.context
        return {
            "user_id": who.user_id,
            "project_id": who.project_id,
            "domain_id": who.domain_id,
            "system_scope": who.system_scope,
            "roles": who.roles,
            "service_roles": who.service_roles,
            "service_token": self.is_service,
        }


def read(
    environ: Mapping[str, Any], service_roles: Collection[str], enforcer: policy.Enforcer
) -> Caller:
    """Return who sent a request, from the headers that the authentication has put in place.

    The context becomes the thread's own: calls on the bus and lines of the log carry it.
    """
    who = context.RequestContext.from_environ(environ)
    vouching = {role.lower() for role in who.service_roles}
    return Caller(who, not vouching.isdisjoint(role.lower() for role in service_roles), enforcer)

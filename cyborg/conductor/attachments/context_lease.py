# SPDX-License-Identifier: Apache-2.0
"""The lease of a device context that is attached: the attachment takes its handles.

The epoch of the lease is recorded with the request and checked by the step ``bind``, because the
lease can end, and another lease can begin, before this step.
"""

from dataclasses import dataclass

import sqlalchemy as sa

from cyborg.core.contexts.leases import ContextFacts, lost_lease
from cyborg.core.contexts.states import LEASED
from cyborg.core.errors import NotFound
from cyborg.db.contexts import states
from cyborg.db.contexts import write as contexts


@dataclass(frozen=True, slots=True)
class ContextLease:
    """Lease of a device context: host, epoch, and the provider of each group by group number."""

    context: str
    hostname: str
    epoch: int
    providers: tuple[str, ...]


def find_lease(tx: sa.Connection, context: contexts.ContextRow) -> ContextLease | None:
    """Return the lease of a context, which may have ended, or None. The context is not locked."""
    if context["state"] not in LEASED or context["hostname"] is None:
        return None
    found = states.group_providers(tx, context["id"])
    if len(found) != len(context["groups"]):
        return None
    providers = tuple(found[number] for number in sorted(found))
    return ContextLease(context["uuid"], context["hostname"], context["epoch"], providers)


def require_lease(tx: sa.Connection, uuid: str, epoch: int) -> ContextLease:
    """Return the lease of a context with an epoch. Raise NotFound, WrongState, Conflict."""
    context = contexts.find(tx, uuid)
    if context is None:
        raise NotFound(f"device context {uuid} does not exist any more")
    lease = find_lease(tx, context)
    if lease is None or lease.epoch != epoch:
        facts = ContextFacts(
            uuid, context["state"], context["epoch"], instance=context["instance_uuid"]
        )
        raise lost_lease(facts, epoch, context["error"])
    return lease

# SPDX-License-Identifier: Apache-2.0
"""Assignments of the UPDATEs by which providers become stale or due for verification."""

from datetime import datetime
from typing import Any

import sqlalchemy as sa

from cyborg.db.schema import providers

Assignments = list[tuple[sa.Column[Any], Any]]


def stale_values(now: datetime, *, evict: bool = False) -> Assignments:
    """Return the assignments for changed providers: their desired state is published again.

    With ``evict`` the provider is deleted from Placement together with its allocations. A later
    change cancels that: the host has returned.
    """
    p = providers.c
    return [
        *_end_verifier_lease(),
        # A publisher that works on this provider now records an old revision: it stays stale.
        (p.revision, p.revision + 1),
        # The first change counts: a provider that changes all the time is not put off for ever.
        (p.stale_since, sa.func.coalesce(p.stale_since, now)),
        (p.verified_at, None),
        (p.attempts, 0),
        (p.next_try_at, None),
        (p.verify_only, False),
        (p.evict, evict),
    ]


def verify_values(now: datetime) -> Assignments:
    """Return the assignments that have providers compared with Placement, although unchanged."""
    p = providers.c
    return [
        *_end_verifier_lease(),
        # A stale row is not only verified.
        (p.verify_only, sa.case((p.stale_since.is_(None), sa.true()), else_=p.verify_only)),
        (p.stale_since, sa.func.coalesce(p.stale_since, now)),
        (p.verified_at, None),
        (p.attempts, 0),
        (p.next_try_at, None),
    ]


def _end_verifier_lease() -> Assignments:
    """Return the assignments that end the lease of a row unless it is already stale.

    They must be the first ones, because MySQL assigns from left to right.
    """
    p = providers.c
    return [
        (column, sa.case((p.stale_since.is_not(None), column)))
        for column in (p.owner, p.lease_until)
    ]

# SPDX-License-Identifier: Apache-2.0
"""Everything that the four sides of a host disagree about."""

from cyborg.core import audit_hardware, audit_providers, audit_requests
from cyborg.core.audit import Finding
from cyborg.core.audit_view import Facts


def compare(facts: Facts) -> tuple[Finding, ...]:
    """Return every disagreement of the sides that were looked at; none when all say the same."""
    return (
        *audit_hardware.compare(facts),
        *audit_providers.compare(facts),
        *audit_requests.compare(facts),
    )


def doubtful(facts: Facts, here: frozenset[str]) -> frozenset[str]:
    """Return the instances that Nova must be asked about one by one.

    ``here`` are those that it lists on the host. Of the others, it is asked about those that hold a
    device, and about every consumer whose allocations and requests do not match: one that Nova is
    busy with is passed over.
    """
    bound = {r.instance for r in facts.records.requests if r.settled(facts.now)}
    odd = {f.instance for f in audit_requests.compare(facts) if f.instance is not None}
    return frozenset((bound - here) | odd)

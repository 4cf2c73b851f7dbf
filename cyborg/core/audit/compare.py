# SPDX-License-Identifier: Apache-2.0
"""Comparison of the four sources of a host."""

from cyborg.core.audit.arqs import compare_arqs
from cyborg.core.audit.hardware import compare_hardware
from cyborg.core.audit.model import Finding
from cyborg.core.audit.providers import compare_providers
from cyborg.core.audit.sources import HostSnapshot


def compare(snapshot: HostSnapshot) -> tuple[Finding, ...]:
    """Return all findings of the sources that were collected; none if they agree."""
    return (
        *compare_hardware(snapshot),
        *compare_providers(snapshot),
        *compare_arqs(snapshot),
    )


def instances_to_verify(snapshot: HostSnapshot, listed: frozenset[str]) -> frozenset[str]:
    """Return the instances that must be read from Nova one by one.

    ``listed`` are the instances that Nova lists on the host. The result has the bound instances
    that are not listed, and all consumers whose allocations and ARQs do not match. A consumer
    with a mismatch is read even if it is listed, because a mismatch is not a finding while Nova is
    busy with the instance.
    """
    settled = [arq for arq in snapshot.database.arqs if arq.is_settled(snapshot.now)]
    bound = {arq.instance for arq in settled if arq.instance}
    mismatched = {f.instance for f in compare_arqs(snapshot) if f.instance is not None}
    return frozenset((bound - listed) | mismatched)

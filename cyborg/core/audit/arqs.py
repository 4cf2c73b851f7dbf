# SPDX-License-Identifier: Apache-2.0
"""Audit of ARQs against handles, allocations and Nova's instances."""

from collections.abc import Collection, Iterator, Sequence

from cyborg.core.audit.model import Finding, Kind, Repair
from cyborg.core.audit.sources import ArqRecord, DeployableRecord, HostSnapshot
from cyborg.core.binding.states import OWNING_STATES


def compare_arqs(snapshot: HostSnapshot) -> Iterator[Finding]:
    """Yield the findings about handles and ARQs. Changes that may be in progress are skipped."""
    for device in snapshot.database.devices:
        for deployable in device.deployables:
            yield from _compare_handles(snapshot, deployable)
    settled = [arq for arq in snapshot.database.arqs if arq.is_settled(snapshot.now)]
    for arq in settled:
        if not arq.has_handle:
            yield _arq_finding(
                snapshot, arq, Kind.REQUEST_WITHOUT_HANDLE, "database: the ARQ owns no handle"
            )
    # Without an instance, Nova does not know of it: it is under a lease, or for its host.
    misplaced = tuple(_compare_instances(snapshot, [arq for arq in settled if arq.instance]))
    yield from misplaced
    # Nor does Placement under a lease.
    allocated = [arq for arq in settled if arq.consumer]
    instances = {finding.instance for finding in misplaced}
    yield from _compare_allocations(snapshot, allocated, instances)


def _compare_handles(snapshot: HostSnapshot, deployable: DeployableRecord) -> Iterator[Finding]:
    for handle in deployable.handles:
        name = f"handle {deployable.address}/{handle.address}"
        text = None
        if handle.owner is None:
            if handle.needs_cleaning and not handle.cleaning:
                kind = Kind.HANDLE_DIRTY
                text = "database: the handle needs cleaning, has no owner and no job cleans it"
        elif handle.owner_state not in OWNING_STATES:
            kind = Kind.HANDLE_WRONG_OWNER
            text = f"database: its owner, ARQ {handle.owner}, is in state {handle.owner_state}"
        elif handle.owner_provider != deployable.provider:
            kind = Kind.REQUEST_MISPLACED
            text = (
                f"database: the handle is of provider {deployable.provider}; its owner, ARQ "
                f"{handle.owner}, is bound to {handle.owner_provider}"
            )
        if text is not None:
            yield Finding(snapshot.host, kind, name, text, kind.repair, ids=(handle.id,))


def _compare_instances(snapshot: HostSnapshot, settled: Sequence[ArqRecord]) -> Iterator[Finding]:
    if snapshot.instances is None:
        return
    for arq in settled:
        if (
            arq.instance in snapshot.instances.listed
            or arq.instance not in snapshot.instances.queried
        ):
            continue
        server = snapshot.instances.queried[arq.instance]
        bound = f"database: bound to instance {arq.instance} on {arq.hostname}"
        if server is None or server.deleted:
            text = f"{bound}; Nova: no such instance"
            yield _arq_finding(
                snapshot, arq, Kind.INSTANCE_GONE, text, _instance_gone_repair(snapshot, arq)
            )
        elif server.host_visible and not server.busy and not server.is_on(arq.hostname):
            where = f"the server is {server.status} on {server.host or 'no host'}"
            yield _arq_finding(snapshot, arq, Kind.INSTANCE_ELSEWHERE, f"{bound}; Nova: {where}")


def _instance_gone_repair(snapshot: HostSnapshot, arq: ArqRecord) -> Repair | None:
    """Return the repair of an ARQ whose instance is gone: RECONCILE if it has no allocation."""
    consumers = snapshot.placement.consumers.get(arq.provider)
    if (
        not snapshot.allocations_expected
        or arq.orphan_since
        or consumers is None
        or arq.instance in consumers
    ):
        return None
    return Repair.RECONCILE


def _compare_allocations(
    snapshot: HostSnapshot, settled: Sequence[ArqRecord], misplaced: Collection[str | None]
) -> Iterator[Finding]:
    """Compare the allocated units of each consumer with its bound ARQs, provider by provider.

    A consumer is an instance, or an attachment to a host.

    Skip instances that Nova or an ARQ is changing, and ``misplaced`` instances.
    """
    moving = {arq.consumer for arq in snapshot.database.arqs if not arq.is_settled(snapshot.now)}
    bound: dict[str, dict[str, list[ArqRecord]]] = {}
    for arq in settled:
        bound.setdefault(arq.provider, {}).setdefault(arq.consumer, []).append(arq)
    # A provider without a deployable is one finding of its own, PROVIDER_LEFTOVER.
    tracked = {*snapshot.desired, *snapshot.database.providers}
    for provider, consumers in snapshot.placement.consumers.items():
        if provider not in tracked or provider not in snapshot.placement.actual:
            continue
        bound_arqs = bound.get(provider, {})
        for instance in sorted({*bound_arqs, *consumers} - moving):
            server = snapshot.instances.queried.get(instance) if snapshot.instances else None
            if instance not in misplaced and (server is None or not server.busy):
                units = consumers.get(instance, 0)
                yield from _compare_units(
                    snapshot, provider, instance, units, bound_arqs.get(instance, ())
                )


def _compare_units(
    snapshot: HostSnapshot,
    provider: str,
    instance: str,
    units: int,
    bound_arqs: Sequence[ArqRecord],
) -> Iterator[Finding]:
    name = snapshot.placement.actual[provider].name
    is_instance = all(arq.instance for arq in bound_arqs)
    consumer = f"{'instance' if is_instance else 'attachment'} {instance}"
    if units > len(bound_arqs):
        text = (
            f"Placement: consumer {instance} has {units} units of {name}; database: "
            f"{len(bound_arqs)} of its ARQs are bound there"
        )
        kind = Kind.ALLOCATION_UNUSED
    elif units < len(bound_arqs) and snapshot.allocations_expected:
        text = (
            f"database: {len(bound_arqs)} ARQs of {consumer} are bound to {name}; "
            f"Placement: {units} units are allocated to it"
        )
        kind = Kind.ALLOCATION_SHORT if units else Kind.ALLOCATION_MISSING
    else:
        return
    suspects = tuple(arq.id for arq in bound_arqs if arq.orphan_since is None)
    repair = (
        Repair.RECONCILE if kind is Kind.ALLOCATION_MISSING and suspects and is_instance else None
    )
    yield Finding(
        snapshot.host,
        kind,
        f"{consumer} on {name}",
        text,
        repair,
        provider=provider,
        instance=instance if is_instance else None,
        ids=suspects,
    )


def _arq_finding(
    snapshot: HostSnapshot, arq: ArqRecord, kind: Kind, text: str, repair: Repair | None = None
) -> Finding:
    return Finding(
        snapshot.host,
        kind,
        f"request {arq.uuid}",
        text,
        repair,
        provider=arq.provider,
        instance=arq.instance or None,
        ids=(arq.id,),
    )

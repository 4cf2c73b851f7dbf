# SPDX-License-Identifier: Apache-2.0
"""An audit's other pairs: requests against handles, allocations and Nova's instances."""

from collections.abc import Collection, Iterator, Sequence

from cyborg.core.audit import REPAIRS, Finding, Kind, Repair
from cyborg.core.audit_view import Facts, PartRecord, RequestRecord
from cyborg.core.states import HOLDING


def compare(facts: Facts) -> Iterator[Finding]:
    """Give what disagrees about who holds what. Nothing that is on its way is told."""
    for device in facts.records.devices:
        for part in device.parts:
            yield from _handles(facts, part)
    settled = [one for one in facts.records.requests if one.settled(facts.now)]
    for one in settled:
        if not one.has_handle:
            yield _of(facts, one, Kind.REQUEST_WITHOUT_HANDLE, "database: it owns no handle")
    strayed = tuple(_instances(facts, settled))
    yield from strayed
    yield from _allocations(facts, settled, {finding.instance for finding in strayed})


def _handles(facts: Facts, part: PartRecord) -> Iterator[Finding]:
    for handle in part.handles:
        name = f"handle {part.address}/{handle.address}"
        told = None
        if handle.owner is None:
            if handle.prepared and not handle.cleaning:
                kind = Kind.HANDLE_DIRTY
                told = "database: its host has prepared it, nobody owns it and no job cleans it"
        elif handle.owner_state not in HOLDING:
            kind = Kind.HANDLE_MISHELD
            told = f"database: request {handle.owner} owns it and is {handle.owner_state}"
        elif handle.owner_provider != part.provider:
            kind = Kind.REQUEST_MISPLACED
            told = (
                f"database: it is of provider {part.provider}, and its owner, request "
                f"{handle.owner}, is bound to {handle.owner_provider}"
            )
        if told is not None:
            yield Finding(facts.host, kind, name, told, REPAIRS.get(kind), ids=(handle.id,))


def _instances(facts: Facts, settled: Sequence[RequestRecord]) -> Iterator[Finding]:
    if facts.instances is None:
        return
    for one in settled:
        if one.instance in facts.instances.here or one.instance not in facts.instances.asked:
            continue
        server = facts.instances.asked[one.instance]
        bound = f"database: bound to instance {one.instance} on {one.hostname}"
        if server is None or server.deleted:
            told = f"{bound}; Nova: no such instance"
            yield _of(facts, one, Kind.INSTANCE_GONE, told, _freed(facts, one))
        elif server.told and not server.busy and not server.is_on(one.hostname):
            where = f"it is {server.status} on {server.host or 'no host'}"
            yield _of(facts, one, Kind.INSTANCE_ELSEWHERE, f"{bound}; Nova: {where}")


def _freed(facts: Facts, one: RequestRecord) -> Repair | None:
    """Return the repair of a request whose instance is gone; with an allocation it is no orphan."""
    consumers = facts.placed.consumers.get(one.provider)
    if not facts.allocates or one.orphan_since or consumers is None or one.instance in consumers:
        return None
    return Repair.RECONCILE


def _allocations(
    facts: Facts, settled: Sequence[RequestRecord], strayed: Collection[str | None]
) -> Iterator[Finding]:
    """Compare units, but of instances that are on their way or that were told of already."""
    moving = {one.instance for one in facts.records.requests if not one.settled(facts.now)}
    bound: dict[str, dict[str, list[RequestRecord]]] = {}
    for one in settled:
        bound.setdefault(one.provider, {}).setdefault(one.instance, []).append(one)
    # A provider that nobody of ours has any longer is told of as a whole.
    mine = {*facts.wanted, *facts.records.providers}
    for provider, consumers in facts.placed.consumers.items():
        if provider not in mine or provider not in facts.placed.actual:
            continue
        requests = bound.get(provider, {})
        for instance in sorted({*requests, *consumers} - moving):
            server = facts.instances.asked.get(instance) if facts.instances else None
            if instance not in strayed and (server is None or not server.busy):
                units = consumers.get(instance, 0)
                yield from _units(facts, provider, instance, units, requests.get(instance, ()))


def _units(
    facts: Facts, provider: str, instance: str, units: int, requests: Sequence[RequestRecord]
) -> Iterator[Finding]:
    name = facts.placed.actual[provider].name
    if units > len(requests):
        told = (
            f"Placement: consumer {instance} has {units} units of {name}; database: "
            f"{len(requests)} of its requests are bound there"
        )
        kind = Kind.ALLOCATION_UNUSED
    elif units < len(requests) and facts.allocates:
        told = (
            f"database: {len(requests)} requests of instance {instance} are bound to {name}; "
            f"Placement: {units} units are allocated to it"
        )
        kind = Kind.ALLOCATION_SHORT if units else Kind.ALLOCATION_MISSING
    else:
        return
    suspects = tuple(one.id for one in requests if one.orphan_since is None)
    repair = Repair.RECONCILE if kind is Kind.ALLOCATION_MISSING and suspects else None
    yield Finding(
        facts.host,
        kind,
        f"instance {instance} on {name}",
        told,
        repair,
        provider=provider,
        instance=instance,
        ids=suspects,
    )


def _of(
    facts: Facts, one: RequestRecord, kind: Kind, told: str, repair: Repair | None = None
) -> Finding:
    return Finding(
        facts.host,
        kind,
        f"request {one.uuid}",
        told,
        repair,
        provider=one.provider,
        instance=one.instance,
        ids=(one.id,),
    )

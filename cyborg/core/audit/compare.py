# SPDX-License-Identifier: Apache-2.0
"""Comparison of the four sources of a host: the findings of an audit.

The database is compared with the hardware that the agent observes. The desired providers, which
follow from the database, are compared with Placement, and the ARQs with handles, allocations and
Nova's instances.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from cyborg.core.audit import sources
from cyborg.core.audit.partitions import compare_activation
from cyborg.core.audit.sources import (
    ArqRecord,
    DeployableRecord,
    Finding,
    HostSnapshot,
    Kind,
    Repair,
)
from cyborg.core.binding.states import OWNING_STATES
from cyborg.core.inventory.report import Hardware, ObservedDeployable, ObservedDevice
from cyborg.core.placement import Inventory, Provider
from cyborg.core.text import format_number, join_limited

# Names of a list in an explanation; of the others only the number is given.
MAX_NAMES = 5


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


def compare_providers(snapshot: HostSnapshot) -> Iterator[Finding]:
    """Yield the findings about resource providers.

    A provider that waits for the publisher gives a separate finding and is not compared.
    """
    records = snapshot.database.providers
    if snapshot.placement.missing_reason is not None:
        # Without providers and deployables nothing is published, and no compute node is needed.
        if records or any(device.deployables for device in snapshot.database.devices):
            text = f"Placement: {snapshot.placement.missing_reason}"
            yield snapshot.finding(Kind.NODE_MISSING, "compute node", text)
        return
    # The providers that a deployable needs.
    for uuid, desired in snapshot.desired.items():
        record = records.get(uuid)
        if record is None:
            text = "database: the deployable exists and its provider is not queued for publishing"
            yield _provider_finding(snapshot, Kind.PROVIDER_UNTRACKED, uuid, desired.name, text)
        elif record.stale_since is not None:
            yield from _not_published(snapshot, record)
        else:
            yield from _compare_provider(snapshot, desired, snapshot.placement.actual.get(uuid))
    # Those that were published, and that no deployable needs any more.
    for uuid, record in records.items():
        if uuid not in snapshot.desired:
            if record.stale_since is not None:
                yield from _not_published(snapshot, record)
            elif uuid in snapshot.placement.actual:
                # The publisher deletes the provider of a record without a deployable.
                yield _leftover_finding(snapshot, uuid, record.name, Repair.PUBLISH)
    # Those of this service of which the database knows nothing.
    for uuid, actual in snapshot.placement.actual.items():
        if uuid not in snapshot.desired and uuid not in records:
            # Known to be empty: a provider whose allocations were not read must not be deleted.
            unused = snapshot.placement.consumers.get(uuid) == {}
            repair = Repair.DELETE_PROVIDER if unused else None
            yield _leftover_finding(snapshot, uuid, actual.name, repair)


def _not_published(snapshot: HostSnapshot, record: sources.ProviderRecord) -> Iterator[Finding]:
    if record.stale_since is None:
        return
    since = f"since {record.stale_since.isoformat(timespec='seconds')}Z"
    if record.error is not None:
        text = f"database: not published {since}; Placement: {record.error}"
        yield _provider_finding(snapshot, Kind.PROVIDER_FAILING, record.uuid, record.name, text)
    elif snapshot.now - record.stale_since >= sources.SETTLE_TIME:
        text = f"database: waiting to be published {since}"
        yield _provider_finding(snapshot, Kind.PROVIDER_STALE, record.uuid, record.name, text)


def _compare_provider(
    snapshot: HostSnapshot, desired: Provider, actual: Provider | None
) -> Iterator[Finding]:
    """Compare a published provider with the one in Placement."""
    uuid, name = desired.uuid, desired.name
    if actual is None:
        text = "database: published; Placement: no such provider"
        yield _provider_finding(snapshot, Kind.PROVIDER_MISSING, uuid, name, text)
        return
    if (desired.name, desired.parent_uuid) != (actual.name, actual.parent_uuid):
        text = (
            f"database: {desired.name} below {desired.parent_uuid}; "
            f"Placement: {actual.name} below {actual.parent_uuid}"
        )
        yield _provider_finding(snapshot, Kind.PROVIDER_MISPLACED, uuid, name, text)
    if desired.inventories != actual.inventories:
        kind = _inventory_kind(desired.inventories, actual.inventories)
        text = (
            f"database: {_describe_inventories(desired.inventories)}; "
            f"Placement: {_describe_inventories(actual.inventories)}"
        )
        yield _provider_finding(snapshot, kind, uuid, name, text)
    if desired.traits != actual.traits:
        text = (
            f"only database: {', '.join(sorted(desired.traits - actual.traits)) or 'none'}; "
            f"only Placement: {', '.join(sorted(actual.traits - desired.traits)) or 'none'}"
        )
        yield _provider_finding(snapshot, Kind.TRAITS_DIFFER, uuid, name, text)


def _inventory_kind(desired: Mapping[str, Inventory], actual: Mapping[str, Inventory]) -> Kind:
    """Return the kind of a difference of inventories.

    It is PROVIDER_CORDONED if only Placement has all units reserved, PROVIDER_NOT_CORDONED if only
    the database does. Otherwise, or if the resource classes differ, it is INVENTORY_DIFFERS.
    """
    if desired.keys() == actual.keys():
        expected, offered = _is_schedulable(desired), _is_schedulable(actual)
        if expected != offered:
            return Kind.PROVIDER_NOT_CORDONED if offered else Kind.PROVIDER_CORDONED
    return Kind.INVENTORY_DIFFERS


def _is_schedulable(inventories: Mapping[str, Inventory]) -> bool:
    return any(inv.reserved < inv.total for inv in inventories.values())


def _describe_inventories(inventories: Mapping[str, Inventory]) -> str:
    lines = [
        f"{name} total {inv.total}, reserved {inv.reserved}, units {inv.min_unit} to "
        f"{inv.max_unit} by {inv.step_size}, ratio {format_number(inv.allocation_ratio)}"
        for name, inv in sorted(inventories.items())
    ]
    return "; ".join(lines) or "no inventory"


def _leftover_finding(
    snapshot: HostSnapshot, uuid: str, name: str, repair: Repair | None
) -> Finding:
    users = len(snapshot.placement.consumers.get(uuid, ()))
    text = f"Placement: our provider {uuid} with {users} consumers; database: no deployable has it"
    return snapshot.finding(
        Kind.PROVIDER_LEFTOVER, f"provider {name}", text, repair, provider=uuid, name=name
    )


def _provider_finding(
    snapshot: HostSnapshot, kind: Kind, uuid: str, name: str, text: str
) -> Finding:
    return snapshot.finding(kind, f"provider {name}", text, provider=uuid, name=name)


def compare_hardware(snapshot: HostSnapshot) -> Iterator[Finding]:
    """Yield the findings about hardware. An unreachable agent is one finding."""
    if snapshot.unreachable_reason is not None:
        yield snapshot.finding(
            Kind.AGENT_UNREACHABLE,
            "agent",
            f"hardware: {snapshot.unreachable_reason}; the hardware is unknown",
        )
    failed = snapshot.hardware.failed_backends if snapshot.hardware is not None else {}
    for backend, error in sorted(failed.items()):
        # A backend in its first discovery has no error yet.
        if error is not None:
            yield snapshot.finding(
                Kind.BACKEND_UNAVAILABLE,
                f"backend {backend}",
                f"hardware: discovery fails ({error}); the database has the last known devices",
            )
    recorded = {device.address: device for device in snapshot.database.devices}
    for device in recorded.values():
        if not _is_programming(device):
            if snapshot.hardware is not None:
                yield from _compare_device(snapshot, snapshot.hardware, device)
            # No report removes a device while its backend fails, or its agent does not answer.
            if device.backend not in failed and snapshot.unreachable_reason is None:
                yield from _drained_not_removed(snapshot, device)
    if snapshot.hardware is not None:
        for address, observed in sorted(snapshot.hardware.devices.items()):
            if address not in recorded:
                yield snapshot.finding(
                    Kind.DEVICE_UNRECORDED,
                    f"device {address}",
                    f"hardware: backend {observed.backend} has it; database: no such device",
                )


def _compare_device(
    snapshot: HostSnapshot, hardware: Hardware, device: sources.DeviceRecord
) -> Iterator[Finding]:
    """Compare a recorded device with the hardware."""
    observed = hardware.devices.get(device.address)
    name = f"device {device.address}"
    if observed is None:
        # A report has no news of the devices of a backend whose discovery fails.
        if not device.draining and device.backend not in hardware.failed_backends:
            text = "hardware: no such device; database: the device exists and is not draining"
            yield snapshot.finding(Kind.DEVICE_VANISHED, name, text)
    elif device.draining:
        text = f"hardware: backend {observed.backend} has it; database: the device is draining"
        yield snapshot.finding(Kind.DEVICE_RETURNED, name, text)
    else:
        yield from _compare_deployables(snapshot, device, observed)


def _compare_deployables(
    snapshot: HostSnapshot, device: sources.DeviceRecord, observed: ObservedDevice
) -> Iterator[Finding]:
    """Compare the deployables of a device that hardware and database both have."""
    if observed.deployables is None:  # an agent of the previous release
        return
    recorded = {deployable.address: deployable for deployable in device.deployables}
    for address, deployable in sorted(observed.deployables.items()):
        record = recorded.get(address)
        if record is None or record.draining:
            recorded_as = "no such deployable" if record is None else "the deployable is draining"
            text = (
                f"hardware: {deployable.resource_class}, {len(deployable.handles)} handles; "
                f"database: {recorded_as}"
            )
            yield snapshot.finding(Kind.DEPLOYABLE_UNRECORDED, f"deployable {address}", text)
        else:
            yield from _compare_deployable(snapshot, record, deployable)
    for address, record in sorted(recorded.items()):
        if address not in observed.deployables and not record.draining:
            text = (
                "hardware: no such deployable; database: the deployable exists and is not draining"
            )
            yield snapshot.finding(Kind.DEPLOYABLE_VANISHED, f"deployable {address}", text)


def _compare_deployable(
    snapshot: HostSnapshot, record: DeployableRecord, deployable: ObservedDeployable
) -> Iterator[Finding]:
    """Compare class, handles and activation of a deployable with the hardware."""
    name = f"deployable {record.address}"
    if record.resource_class != deployable.resource_class:
        text = (
            f"hardware: class {deployable.resource_class}; database: class {record.resource_class}"
        )
        yield snapshot.finding(Kind.DEPLOYABLE_DIFFERS, name, text)
    offered = {handle.address for handle in record.handles if not handle.draining}
    if offered != deployable.handles:
        text = (
            f"only hardware: handles {_name_handles(deployable.handles - offered)}; "
            f"only database: {_name_handles(offered - deployable.handles)}"
        )
        yield snapshot.finding(Kind.HANDLES_DIFFER, name, text)
    if deployable.activation is not None:
        yield from compare_activation(snapshot, record, deployable.activation)


def _drained_not_removed(snapshot: HostSnapshot, device: sources.DeviceRecord) -> Iterator[Finding]:
    """Yield a finding if draining handles or deployables without an owner are still recorded."""
    # A handle drains alone, or together with its deployable or its device.
    num_handles = sum(
        not handle.in_use
        for deployable in device.deployables
        for handle in deployable.handles
        if device.draining or deployable.draining or handle.draining
    )
    idle_deployables = [
        deployable
        for deployable in device.deployables
        if not any(handle.in_use for handle in deployable.handles)
    ]
    is_device_idle = len(idle_deployables) == len(device.deployables)
    if (
        num_handles
        or any(deployable.draining for deployable in idle_deployables)
        or (device.draining and is_device_idle)
    ):
        is_device = device.draining and is_device_idle
        found = "a draining device" if is_device else "a draining deployable"
        if num_handles:
            found = f"{num_handles} draining handle(s)"
        yield snapshot.finding(
            Kind.DRAINED_NOT_REMOVED,
            f"device {device.address}",
            f"database: {found} without an owner; no cleaning is due",
        )


def _is_programming(device: sources.DeviceRecord) -> bool:
    # Reports do not change such a device until the job has ended.
    return any(deployable.programming for deployable in device.deployables)


def _name_handles(names: Collection[str]) -> str:
    return join_limited(sorted(names), MAX_NAMES) or "none"


def compare_arqs(snapshot: HostSnapshot) -> Iterator[Finding]:
    """Yield the findings about handles and ARQs. Changes that may be in progress are skipped."""
    for device in snapshot.database.devices:
        for deployable in device.deployables:
            yield from _compare_handles(snapshot, deployable)
    # The sources are read one after the other, so a change in between would look like a finding.
    settled = [arq for arq in snapshot.database.arqs if arq.is_settled(snapshot.now)]
    for arq in settled:
        if not arq.has_handle:
            yield _arq_finding(
                snapshot, arq, Kind.REQUEST_WITHOUT_HANDLE, "database: the ARQ owns no handle"
            )
    # An ARQ under a lease, or for its host, has no instance.
    misplaced = tuple(_compare_instances(snapshot, [arq for arq in settled if arq.instance]))
    yield from misplaced
    # An ARQ under a lease has no allocation.
    allocated = [arq for arq in settled if arq.consumer]
    # That such an instance is gone, or elsewhere, is a finding already.
    skipped = {finding.instance for finding in misplaced}
    yield from _compare_allocations(snapshot, allocated, skipped)


def _compare_handles(snapshot: HostSnapshot, deployable: DeployableRecord) -> Iterator[Finding]:
    """Yield the handles whose owner in the database is missing or wrong."""
    for handle in deployable.handles:
        name = f"handle {deployable.address}/{handle.address}"
        # A handle that was claimed through a device set is bound to the provider of the set.
        provider = handle.set_provider or deployable.provider
        text = None
        if handle.owner is None:
            if handle.needs_cleaning and not handle.cleaning:
                kind = Kind.HANDLE_DIRTY
                text = "database: the handle needs cleaning, has no owner and no job cleans it"
        elif handle.owner_state not in OWNING_STATES:
            kind = Kind.HANDLE_WRONG_OWNER
            text = f"database: its owner, ARQ {handle.owner}, is in state {handle.owner_state}"
        elif handle.owner_provider != provider:
            kind = Kind.REQUEST_MISPLACED
            text = (
                f"database: the handle is of provider {provider}; its owner, ARQ "
                f"{handle.owner}, is bound to {handle.owner_provider}"
            )
        if text is not None:
            yield snapshot.finding(kind, name, text, ids=(handle.id,))


def _compare_instances(snapshot: HostSnapshot, settled: Sequence[ArqRecord]) -> Iterator[Finding]:
    """Yield the ARQs whose instance is gone, or on another host; each of ``settled`` has one."""
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
        # The list alone proves nothing: an instance that it lacks was queried by its uuid.
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
    # None if the allocations of the provider were not read. A suspected ARQ needs no repair.
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
    snapshot: HostSnapshot, allocated: Sequence[ArqRecord], skipped: Collection[str | None]
) -> Iterator[Finding]:
    """Compare the allocated units of each consumer with its bound ARQs, provider by provider.

    A consumer is an instance, or an attachment to a host. ``allocated`` are the settled ARQs that
    need an allocation. Skip consumers that Nova or an ARQ is changing, and those in ``skipped``.
    """
    # Placement and the database are read one after the other: a bind in between would be a
    # mismatch.
    moving = {arq.consumer for arq in snapshot.database.arqs if not arq.is_settled(snapshot.now)}
    bound: dict[str, dict[str, list[ArqRecord]]] = {}
    for arq in allocated:
        bound.setdefault(arq.provider, {}).setdefault(arq.consumer, []).append(arq)
    # A provider without a deployable is one finding of its own, PROVIDER_LEFTOVER. So is one that
    # Placement lacks, PROVIDER_MISSING.
    tracked = {*snapshot.desired, *snapshot.database.providers}
    for provider, consumers in snapshot.placement.consumers.items():
        if provider not in tracked or provider not in snapshot.placement.actual:
            continue
        bound_arqs = bound.get(provider, {})
        for consumer in sorted({*bound_arqs, *consumers} - moving):
            server = snapshot.instances.queried.get(consumer) if snapshot.instances else None
            if consumer not in skipped and (server is None or not server.busy):
                units = consumers.get(consumer, 0)
                yield from _compare_units(
                    snapshot, provider, consumer, units, bound_arqs.get(consumer, ())
                )


def _compare_units(
    snapshot: HostSnapshot,
    provider: str,
    consumer: str,
    units: int,
    bound_arqs: Sequence[ArqRecord],
) -> Iterator[Finding]:
    """Compare the units that a consumer has allocated with its bound ARQs."""
    name = snapshot.placement.actual[provider].name
    # Without ARQs nothing shows that a consumer is an attachment.
    is_instance = all(arq.instance for arq in bound_arqs)
    subject = f"{'instance' if is_instance else 'attachment'} {consumer}"
    if units > len(bound_arqs):
        text = (
            f"Placement: consumer {consumer} has {units} units of {name}; database: "
            f"{len(bound_arqs)} of its ARQs are bound there"
        )
        kind = Kind.ALLOCATION_UNUSED
    elif units < len(bound_arqs) and snapshot.allocations_expected:
        text = (
            f"database: {len(bound_arqs)} ARQs of {subject} are bound to {name}; "
            f"Placement: {units} units are allocated to it"
        )
        kind = Kind.ALLOCATION_SHORT if units else Kind.ALLOCATION_MISSING
    else:
        return
    # An ARQ with ``orphan_since`` is suspected already.
    suspects = tuple(arq.id for arq in bound_arqs if arq.orphan_since is None)
    repair = (
        Repair.RECONCILE if kind is Kind.ALLOCATION_MISSING and suspects and is_instance else None
    )
    yield snapshot.finding(
        kind,
        f"{subject} on {name}",
        text,
        repair,
        provider=provider,
        instance=consumer if is_instance else None,
        ids=suspects,
    )


def _arq_finding(
    snapshot: HostSnapshot,
    arq: ArqRecord,
    kind: Kind,
    text: str,
    repair: Repair | None = None,
) -> Finding:
    return snapshot.finding(
        kind,
        f"request {arq.uuid}",
        text,
        repair,
        provider=arq.provider,
        instance=arq.instance or None,
        ids=(arq.id,),
    )

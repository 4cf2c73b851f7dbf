# SPDX-License-Identifier: Apache-2.0
"""Audit of the desired providers, which follow from the database, against Placement."""

from collections.abc import Iterator, Mapping

from cyborg.core.audit.model import Finding, Kind, Repair
from cyborg.core.audit.sources import SETTLE_TIME, HostSnapshot, ProviderRecord
from cyborg.core.placement.provider_tree import Inventory, Provider
from cyborg.core.text import format_number


def compare_providers(snapshot: HostSnapshot) -> Iterator[Finding]:
    """Yield the findings about resource providers.

    A provider that waits for the publisher gives a separate finding and is not compared.
    """
    records = snapshot.database.providers
    if snapshot.placement.missing is not None:
        # Without a device there is nothing to publish, and no compute node is needed.
        if records or any(device.deployables for device in snapshot.database.devices):
            text = f"Placement: {snapshot.placement.missing}"
            yield Finding(snapshot.host, Kind.NODE_MISSING, "compute node", text)
        return
    for uuid, desired in snapshot.desired.items():
        record = records.get(uuid)
        if record is None:
            text = "database: the deployable exists and its provider is not queued for publishing"
            yield _provider_finding(snapshot, Kind.PROVIDER_UNTRACKED, uuid, desired.name, text)
        elif record.stale_since is not None:
            yield from _not_published(snapshot, record)
        else:
            yield from _compare_provider(snapshot, desired, snapshot.placement.actual.get(uuid))
    for uuid, record in records.items():
        if uuid not in snapshot.desired:
            if record.stale_since is not None:
                yield from _not_published(snapshot, record)
            elif uuid in snapshot.placement.actual:
                yield _leftover_finding(snapshot, uuid, record.name, Repair.PUBLISH)
    for uuid, actual in snapshot.placement.actual.items():
        if uuid not in snapshot.desired and uuid not in records:
            unused = snapshot.placement.consumers.get(uuid) == {}
            repair = Repair.DELETE_PROVIDER if unused else None
            yield _leftover_finding(snapshot, uuid, actual.name, repair)


def _not_published(snapshot: HostSnapshot, record: ProviderRecord) -> Iterator[Finding]:
    if record.stale_since is None:
        return
    since = f"since {record.stale_since.isoformat(timespec='seconds')}Z"
    if record.error is not None:
        text = f"database: not published {since}; Placement: {record.error}"
        yield _provider_finding(snapshot, Kind.PROVIDER_FAILING, record.uuid, record.name, text)
    elif snapshot.now - record.stale_since >= SETTLE_TIME:
        text = f"database: waiting to be published {since}"
        yield _provider_finding(snapshot, Kind.PROVIDER_STALE, record.uuid, record.name, text)


def _compare_provider(
    snapshot: HostSnapshot, desired: Provider, actual: Provider | None
) -> Iterator[Finding]:
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
    kind = Kind.PROVIDER_LEFTOVER
    return Finding(snapshot.host, kind, f"provider {name}", text, repair, uuid, name)


def _provider_finding(
    snapshot: HostSnapshot, kind: Kind, uuid: str, name: str, text: str
) -> Finding:
    return Finding(snapshot.host, kind, f"provider {name}", text, kind.repair, uuid, name)

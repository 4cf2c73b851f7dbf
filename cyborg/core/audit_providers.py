# SPDX-License-Identifier: Apache-2.0
"""An audit's second pair: what the database wants of Placement against what Placement has."""

from collections.abc import Iterator, Mapping

from cyborg.core.audit import REPAIRS, Finding, Kind, Repair
from cyborg.core.audit_view import SETTLE, Facts, ProviderRecord
from cyborg.core.provider_tree import Inventory, Provider


def compare(facts: Facts) -> Iterator[Finding]:
    """Give what database and Placement disagree about, provider by provider.

    What the publisher still has to do is told as that, and not compared.
    """
    records = facts.records.providers
    if facts.placed.missing is not None:
        # Without a device there is nothing to publish, and no compute node is needed.
        if records or any(device.parts for device in facts.records.devices):
            told = f"Placement: {facts.placed.missing}"
            yield Finding(facts.host, Kind.NODE_MISSING, "compute node", told)
        return
    for uuid, wanted in facts.wanted.items():
        record = records.get(uuid)
        if record is None:
            told = "database: the deployable is there, and nobody was asked to publish its provider"
            yield _found(facts, Kind.PROVIDER_UNTRACKED, uuid, wanted.name, told)
        elif record.stale_since is not None:
            yield from _waiting(facts, record)
        else:
            yield from _provider(facts, wanted, facts.placed.actual.get(uuid))
    for uuid, record in records.items():
        if uuid not in facts.wanted:
            if record.stale_since is not None:
                yield from _waiting(facts, record)
            elif uuid in facts.placed.actual:
                yield _leftover(facts, uuid, record.name, Repair.PUBLISH)
    for uuid, actual in facts.placed.actual.items():
        if uuid not in facts.wanted and uuid not in records:
            unused = facts.placed.consumers.get(uuid) == {}
            repair = Repair.DELETE_PROVIDER if unused else None
            yield _leftover(facts, uuid, actual.name, repair)


def _waiting(facts: Facts, record: ProviderRecord) -> Iterator[Finding]:
    if record.stale_since is None:
        return
    since = f"since {record.stale_since.isoformat(timespec='seconds')}Z"
    if record.error is not None:
        told = f"database: not published {since}; Placement: {record.error}"
        yield _found(facts, Kind.PROVIDER_FAILING, record.uuid, record.name, told)
    elif facts.now - record.stale_since >= SETTLE:
        told = f"database: to be published {since}, and nobody has"
        yield _found(facts, Kind.PROVIDER_STALE, record.uuid, record.name, told)


def _provider(facts: Facts, wanted: Provider, actual: Provider | None) -> Iterator[Finding]:
    uuid, name = wanted.uuid, wanted.name
    if actual is None:
        told = "database: published; Placement: no such provider"
        yield _found(facts, Kind.PROVIDER_MISSING, uuid, name, told)
        return
    if (wanted.name, wanted.parent_uuid) != (actual.name, actual.parent_uuid):
        told = (
            f"database: {wanted.name} below {wanted.parent_uuid}; "
            f"Placement: {actual.name} below {actual.parent_uuid}"
        )
        yield _found(facts, Kind.PROVIDER_MISPLACED, uuid, name, told)
    if wanted.inventories != actual.inventories:
        kind = _sale(wanted.inventories, actual.inventories)
        told = (
            f"database: {_amounts(wanted.inventories)}; Placement: {_amounts(actual.inventories)}"
        )
        yield _found(facts, kind, uuid, name, told)
    if wanted.traits != actual.traits:
        told = (
            f"database alone: {', '.join(sorted(wanted.traits - actual.traits)) or 'none'}; "
            f"Placement alone: {', '.join(sorted(actual.traits - wanted.traits)) or 'none'}"
        )
        yield _found(facts, Kind.TRAITS_DIFFER, uuid, name, told)


def _sale(wanted: Mapping[str, Inventory], actual: Mapping[str, Inventory]) -> Kind:
    """Return whether the two differ in that one is sold and the other is not."""
    if wanted.keys() == actual.keys():
        sold, offered = _is_open(wanted), _is_open(actual)
        if sold != offered:
            return Kind.PROVIDER_OPEN if offered else Kind.PROVIDER_CLOSED
    return Kind.INVENTORY_DIFFERS


def _is_open(inventories: Mapping[str, Inventory]) -> bool:
    return any(one.reserved < one.total for one in inventories.values())


def _amounts(inventories: Mapping[str, Inventory]) -> str:
    told = [
        f"{name} total {one.total}, reserved {one.reserved}, units {one.min_unit} to "
        f"{one.max_unit} by {one.step_size}, ratio {one.allocation_ratio:g}"
        for name, one in sorted(inventories.items())
    ]
    return "; ".join(told) or "no inventory"


def _leftover(facts: Facts, uuid: str, name: str, repair: Repair | None) -> Finding:
    users = len(facts.placed.consumers.get(uuid, ()))
    told = (
        f"Placement: a provider of ours ({uuid}) with {users} consumers; database: no deployable "
        "has it"
    )
    kind = Kind.PROVIDER_LEFTOVER
    return Finding(facts.host, kind, f"provider {name}", told, repair, uuid, name)


def _found(facts: Facts, kind: Kind, uuid: str, name: str, told: str) -> Finding:
    return Finding(facts.host, kind, f"provider {name}", told, REPAIRS.get(kind), uuid, name)

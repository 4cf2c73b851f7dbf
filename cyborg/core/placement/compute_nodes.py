# SPDX-License-Identifier: Apache-2.0
"""Changes of compute nodes between two listings of their providers, and the hosts affected."""

from collections.abc import Mapping
from dataclasses import dataclass

from cyborg.core.errors import Invalid
from cyborg.core.hosts.identity import Identity, matching_nodes, name_variants
from cyborg.core.validation import parse_uuid


@dataclass(frozen=True, slots=True)
class ComputeNode:
    """Resource provider of a compute node, as Placement lists it."""

    name: str
    generation: int


def changed_nodes(
    previous: Mapping[str, ComputeNode], current: Mapping[str, ComputeNode]
) -> dict[str, ComputeNode]:
    """Return the removed, added, renamed and recreated compute nodes, by uuid.

    A lower generation than before means that the provider was recreated with the same uuid, which
    nova-compute keeps in a file: the generation of one provider only rises.
    """
    removed = {uuid: node for uuid, node in previous.items() if uuid not in current}
    return removed | {
        uuid: node
        for uuid, node in current.items()
        if (old := previous.get(uuid)) is None
        or old.name != node.name
        or node.generation < old.generation
    }


def may_belong_to(host: str, identity: Identity, uuid: str, node: ComputeNode) -> bool:
    """Return whether a compute node may belong to a host.

    The result can be True for several hosts.
    """
    # A false positive costs a few calls; a false negative would leave a host unpublished.
    if identity.provider is not None:
        return identity.provider.casefold() in (uuid, node.name.casefold())
    if uuid == identity.compute_id or node.name == host:
        return True
    return bool(matching_nodes([host, *identity.names], [node.name]))


def is_certain(host: str, identity: Identity, uuid: str, name: str) -> bool:
    """Return whether a root provider is certainly the compute node of a host.

    False means that only a search in Placement can tell: it has other names and spellings.
    """
    if identity.provider is not None:
        try:
            return uuid == parse_uuid(identity.provider, "resource_provider")
        except Invalid:
            return name == identity.provider
    return uuid == identity.compute_id if identity.compute_id is not None else name == host


def affected_hosts(
    changed: Mapping[str, ComputeNode], identities: Mapping[str, Identity]
) -> list[str]:
    """Return the hosts of ``identities`` to which one of the changed compute nodes may belong."""
    # Indexed by name, so that the work grows with the two numbers and not with their product: all
    # compute nodes change at once when Placement has another database.
    by_name: dict[str, dict[str, ComputeNode]] = {}
    for uuid, node in changed.items():
        for name in {uuid, node.name.casefold(), *name_variants([node.name])}:
            by_name.setdefault(name, {})[uuid] = node

    def candidates(host: str, identity: Identity) -> dict[str, ComputeNode]:
        names = {host.casefold(), *name_variants([host, *identity.names])}
        names |= {(identity.provider or "").casefold(), identity.compute_id or ""}
        return {uuid: node for name in names for uuid, node in by_name.get(name, {}).items()}

    return [
        host
        for host, identity in identities.items()
        if any(
            may_belong_to(host, identity, uuid, node)
            for uuid, node in candidates(host, identity).items()
        )
    ]

# SPDX-License-Identifier: Apache-2.0
"""Names that Nova may use for a host, to find its compute node, the parent of our providers."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cyborg.core.codec import Serializable
from cyborg.core.errors import Invalid
from cyborg.core.validation import check_text, parse_uuid

MAX_NAMES = 16
MAX_NAME = 255
MAX_COMPARED = 2000  # names that closest_names compares: each costs some microseconds


@dataclass(frozen=True, slots=True)
class Identity(Serializable):
    """Identity of a host's compute node, as the agent knows it.

    ``provider`` is the configured name or uuid of a resource provider. ``compute_id`` is the
    provider's uuid from nova-compute's file ``compute_id``. ``names`` are the other names that the
    system has for the host.
    """

    provider: str | None = None
    compute_id: str | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.compute_id is not None:
            object.__setattr__(self, "compute_id", parse_uuid(self.compute_id, "compute_id"))
        if len(self.names) > MAX_NAMES:
            raise Invalid(
                f"the host has {len(self.names)} names, at most {MAX_NAMES} are allowed",
                field="identity",
            )
        for name in [*self.names, *([] if self.provider is None else [self.provider])]:
            check_text("identity", name, MAX_NAME, subject="host name")


NO_IDENTITY = Identity()


def name_variants(names: Iterable[str]) -> tuple[str, ...]:
    """Return the ways in which Nova may write these names of a host, case-folded.

    The full names come first, then the names without their domains. An IP address has no domain to
    remove. ``localhost`` is left out: every host has that name.
    """
    full = [name.casefold() for name in names]
    variants = [name for name in [*full, *map(_short, full)] if not _is_localhost(name)]
    return tuple(dict.fromkeys(variants))


def matching_nodes(names: Sequence[str], nodes: Iterable[str]) -> tuple[str, ...]:
    """Return the sorted names of compute nodes that may belong to the host with these ``names``.

    A node name with a domain matches a short name of the host, unless the host also has that short
    name with another domain. More than one result is ambiguous.
    """
    variants = name_variants(names)
    with_domain = {_short(name) for name in variants if _short(name) != name}
    bare = {name for name in variants if _short(name) == name and name not in with_domain}
    return tuple(
        sorted(
            node
            for node in set(nodes)
            if (folded := node.casefold()) in variants or _short(folded) in bare
        )
    )


def closest_names(name: str, nodes: Iterable[str], max_names: int = 3) -> tuple[str, ...]:
    """Return up to ``max_names`` node names that are similar to ``name``, best first.

    Only the first MAX_COMPARED nodes are compared.
    """
    folded = {node.casefold(): node for node in sorted(nodes)[:MAX_COMPARED]}
    return tuple(folded[n] for n in difflib.get_close_matches(name.casefold(), folded, max_names))


def _short(name: str) -> str:
    first, dot, _ = name.partition(".")
    is_address = name.replace(".", "").isdecimal() or ":" in name
    return first if dot and first and not is_address else name


def _is_localhost(name: str) -> bool:
    return _short(name) in ("localhost", "localhost4", "localhost6", "ip6-localhost")

# SPDX-License-Identifier: Apache-2.0
"""By which names a host may be known to Nova, whose compute node is our providers' parent."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cyborg.core.errors import Invalid
from cyborg.core.request import parse_uuid

MAX_NAMES = 16
MAX_NAME = 255
MAX_COMPARED = 2000  # names that the nearest are looked for among: each costs some microseconds


@dataclass(frozen=True, slots=True)
class Identity:
    """What an agent knows of its host's compute node.

    ``provider`` is what the operator configured, the name or the uuid of a resource provider;
    ``compute_id`` is nova-compute's own file of that name, which holds the provider's uuid;
    ``names`` are the host's other names as the system tells them.
    """

    provider: str | None = None
    compute_id: str | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.compute_id is not None:
            object.__setattr__(self, "compute_id", parse_uuid(self.compute_id, "compute_id"))
        if len(self.names) > MAX_NAMES:
            raise Invalid(f"a host has at most {MAX_NAMES} names", field="identity")
        told = [*self.names, *([] if self.provider is None else [self.provider])]
        for name in told:
            if not name or len(name) > MAX_NAME or not name.isprintable():
                raise Invalid(
                    f"{name[:40]!r} names no host: expected 1 to {MAX_NAME} printable characters",
                    field="identity",
                )


def spellings(names: Iterable[str]) -> tuple[str, ...]:
    """Return the ways in which Nova may write these names of a host, folded to one case.

    Those are the names in full, then the names without their domains. An address is no name with a
    domain, and what every host calls itself, ``localhost``, names none.
    """
    full = [name.casefold() for name in names]
    found = dict.fromkeys(name for name in [*full, *map(_short, full)] if not _of_any_host(name))
    return tuple(found)


def matching(names: Sequence[str], roots: Iterable[str]) -> tuple[str, ...]:
    """Return those of the compute nodes' names that may be this host's, in order.

    A compute node that is known by its domain is the one of a short name of ours, unless we know
    ourselves by that short name in another domain. More than one answer means that nobody can tell.
    """
    ours = spellings(names)
    placed = {_short(name) for name in ours if _short(name) != name}
    bare = {name for name in ours if _short(name) == name and name not in placed}
    return tuple(
        sorted(
            root
            for root in set(roots)
            if (folded := root.casefold()) in ours or _short(folded) in bare
        )
    )


def nearest(name: str, roots: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """Return the names that look most like this one, best first, of up to MAX_COMPARED."""
    folded = {root.casefold(): root for root in sorted(roots)[:MAX_COMPARED]}
    return tuple(folded[n] for n in difflib.get_close_matches(name.casefold(), folded, most))


def _short(name: str) -> str:
    first, dot, _ = name.partition(".")
    is_address = name.replace(".", "").isdecimal() or ":" in name
    return first if dot and first and not is_address else name


def _of_any_host(name: str) -> bool:
    return _short(name) in ("localhost", "localhost4", "localhost6", "ip6-localhost")

# SPDX-License-Identifier: Apache-2.0
"""Providers of many hosts as numbers by kind, instead of one value for each provider.

Providers that differ only in their names, and in the details of their conditions, fail the same
predicates and have the same free handles. A large cloud has few such kinds, and many hosts whose
numbers of each kind are equal, so that a request is evaluated once for each kind and once for each
composition of a host.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cyborg.core.explain.explanation import ProviderState

# The kinds of providers that belong together: those of a device with several deployables, if its
# layout can be changed; otherwise a single one.
Unit = tuple[int, ...]
# The numbers of the units of a host, in the order of the units. Of equal hosts it is equal.
Composition = tuple[tuple[Unit, int], ...]


@dataclass(frozen=True, slots=True)
class ProviderCounts:
    """The providers of hosts.

    ``kinds`` has a representative of each kind, whose names mean nothing. A kind is known by its
    index. ``hosts`` has the composition of each host. ``others`` is the number of further providers
    whose resource class no group requests, and whose devices have no other layout for one;
    ``other_handles`` is the number of their handles.
    """

    kinds: Sequence[ProviderState]
    hosts: Mapping[str, Composition]
    others: int = 0
    other_handles: int = 0

    def totals(self) -> tuple[int, int]:
        """Return the numbers of providers and of their handles, without the others."""
        providers = handles = 0
        for composition, hosts in Counter(self.hosts.values()).items():
            for kind, number in count_kinds(composition).items():
                providers += number * hosts
                handles += number * hosts * self.kinds[kind].handles.total
        return providers, handles


def count_kinds(composition: Composition) -> Counter[int]:
    """Return the numbers of providers of each kind in a composition."""
    kinds = Counter[int]()
    for unit, number in composition:
        for kind in unit:
            kinds[kind] += number
    return kinds


@dataclass(slots=True)
class Census:
    """Counts providers by host, one after another."""

    hosts: dict[str, Counter[Unit]] = field(default_factory=dict)
    devices: dict[str, dict[object, list[int]]] = field(default_factory=dict)

    def add(self, host: str, kind: int, count: int = 1, device: object = None) -> None:
        """Count providers of a kind; ``device`` is the key of their unit, None for none."""
        units = self.hosts.setdefault(host, Counter())
        if device is None:
            units[(kind,)] += count
        else:
            self.devices.setdefault(host, {}).setdefault(device, []).extend([kind] * count)

    def compositions(self) -> dict[str, Composition]:
        """Return the composition of each host, in the order in which the hosts were added."""
        for host, devices in self.devices.items():
            self.hosts[host].update(tuple(sorted(kinds)) for kinds in devices.values())
        self.devices = {}  # they are in ``hosts`` now: a second call must not count them again
        # Interned: equal compositions are compared by their identity first.
        interned: dict[Composition, Composition] = {}
        by_host: dict[str, Composition] = {}
        for host, units in self.hosts.items():
            composition = tuple(sorted(units.items()))
            by_host[host] = interned.setdefault(composition, composition)
        return by_host


def list_providers(providers: Iterable[ProviderState]) -> ProviderCounts:
    """Return providers of which each one is a kind of its own."""
    kinds = list(providers)
    census = Census()
    for kind, provider in enumerate(kinds):
        census.add(provider.host, kind, device=provider.device_uuid)
    return ProviderCounts(kinds, census.compositions())

# SPDX-License-Identifier: Apache-2.0
"""One provider at a time: compare it with what is wanted, and write what differs.

What is there is read at most once unless somebody else writes at the same time: a write carries the
generation that was read before, and after a conflict all is read anew.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cyborg.clients.placement import Known, Placement
from cyborg.conductor import rendering
from cyborg.core import names, provider_tree
from cyborg.core.errors import Conflict, InUse, Stale
from cyborg.core.provider_tree import Inventory, Provider

TRIES = 4  # of one provider, when others write to it at the same time


class Bringer:
    """Brings single providers to what is wanted."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def bring(
        self,
        uuid: str,
        wanted: Provider | None,
        known: Known | None,
        *,
        audited: bool = False,
        late: Callable[[], bool] = lambda: False,
    ) -> tuple[str, ...]:
        """Bring a provider to what is wanted, None for none; tell in words what others had done.

        ``known`` is what Placement has, and None that it probably has not. ``audited`` says that
        nothing has changed here: whatever differs is the doing of others then. ``late`` tells
        whether others may know better by now what is wanted: it is asked before each write that no
        generation guards and before all is read anew. Raises Stale when it is so, Conflict when
        others do not cease to write or have its name, InUse for what cannot go yet and was closed,
        and whatever else Placement refuses.
        """
        if wanted is None:
            # It may hang in a tree that is not the host's any longer.
            known = known or self._placement.get(uuid)
            _in_time(late)
        told: tuple[str, ...] = ()
        for _ in range(TRIES):
            try:
                actual, inventories = self._read(known, wanted)
                if audited and wanted is not None:
                    # The first look counts: after it, part of the difference may be gone.
                    told = told or provider_tree.drift(wanted, actual)
                if wanted is not None and actual is not None and _moves(actual, wanted):
                    _in_time(late)
                self._write(uuid, wanted, known, actual, inventories)
            except InUse:
                raise
            except Conflict as bad:
                clash = bad
                # Whoever wrote in between may have had newer orders than these.
                _in_time(late)
                known = self._placement.get(uuid)
                if wanted is not None and (known is None or known.name != wanted.name):
                    told += self._evict(wanted)
            else:
                return told
        raise Conflict(f"gave up after {TRIES} tries: {clash.message}")

    def _read(
        self, known: Known | None, wanted: Provider | None
    ) -> tuple[Provider | None, dict[str, dict[str, Any]]]:
        """Return what Placement has, as a value and, of the inventories, as Placement says it."""
        if known is None:
            return None, {}
        if wanted is None:
            return rendering.actual(known, {}, frozenset()), {}
        inventories = self._placement.inventories(known.uuid)
        traits = self._placement.traits(known.uuid)
        return rendering.actual(known, inventories, traits), inventories

    def _write(
        self,
        uuid: str,
        wanted: Provider | None,
        known: Known | None,
        actual: Provider | None,
        inventories: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Make the calls that the difference comes to, from the generation that was read first."""
        placement = self._placement
        generation = known.generation if known else 0
        if known is not None and wanted is not None and _moves(known, wanted):
            generation = placement.rename(uuid, wanted.name, wanted.parent_uuid)
            # That write is not guarded, so it tells nothing of what was read before it.
            actual, inventories = self._read(replace(known, generation=generation), wanted)
        for call in provider_tree.difference({uuid: wanted}, {uuid: actual} if actual else {}):
            match call:
                case provider_tree.EnsureClasses(some):
                    placement.ensure_classes(some)
                case provider_tree.EnsureTraits(some):
                    placement.ensure_traits(some)
                case provider_tree.CreateProvider(new):
                    generation = placement.create(new.uuid, new.name, new.parent_uuid)
                case provider_tree.SetInventories(_, new_inventories):
                    generation = self._sell(uuid, generation, new_inventories, inventories)
                case provider_tree.SetTraits(_, traits):
                    generation = placement.set_traits(uuid, generation, traits)
                case provider_tree.DeleteProvider(_):
                    self._delete(uuid)

    def _sell(
        self,
        uuid: str,
        generation: int,
        wanted: Mapping[str, Inventory],
        actual: Mapping[str, Mapping[str, Any]],
    ) -> int:
        """Set inventories; what must go and is allocated is closed, and InUse raised.

        Its units may well be units of what is offered instead: so many are reserved of that.
        """
        body = rendering.body(wanted)
        try:
            return self._placement.set_inventories(uuid, generation, body)
        except InUse as bad:
            going = {name: values for name, values in actual.items() if name not in body}
            users = (self._placement.allocations(uuid) or {}).values()
            used = sum(has.get(name, 0) for has in users for name in going)
            kept = _closed(going) | {
                name: {**values, "reserved": min(values["total"], values["reserved"] + used)}
                for name, values in body.items()
            }
            if actual != kept:
                self._placement.set_inventories(uuid, generation, kept)
            raise InUse(
                f"it should not have {', '.join(sorted(going))} any longer, of which there are "
                f"allocations: closed, and removed when these are gone ({bad.message})"
            ) from bad

    def _delete(self, uuid: str) -> None:
        """Delete a provider, or close it while an instance is allocated to it."""
        try:
            self._placement.delete(uuid)
        except InUse as bad:
            known = self._placement.get(uuid)
            inventories = self._placement.inventories(uuid)
            if known is not None and _closed(inventories) != inventories:
                self._placement.set_inventories(uuid, known.generation, _closed(inventories))
            raise InUse(
                f"the host does not have it any longer, but it has allocations: closed, and "
                f"deleted when these are gone ({bad.message})"
            ) from bad

    def _evict(self, wanted: Provider) -> tuple[str, ...]:
        """Make room where another provider has our name; return what was said of that one.

        One below the same parent that has our trait stands for the same device: an installation
        before this one made it. Any other is somebody else's, and only a person can tell.
        """
        other = self._placement.find(wanted.name)
        if other is None or other.uuid == wanted.uuid:
            return ()
        same = other.parent_uuid == wanted.parent_uuid
        if not same or names.OWNER_TRAIT not in self._placement.traits(other.uuid):
            raise Conflict(
                f"resource provider {other.uuid} has the name {wanted.name!r} and is not known to "
                "be ours: rename or delete it"
            )
        try:
            self._delete(other.uuid)
        except InUse as bad:
            raise InUse(
                f"resource provider {other.uuid} of an earlier installation has its name and "
                f"cannot be deleted yet: {bad.message}"
            ) from bad
        return (f"resource provider {other.uuid} had its name",)


def _moves(actual: Known | Provider, wanted: Provider) -> bool:
    return (actual.name, actual.parent_uuid) != (wanted.name, wanted.parent_uuid)


def _in_time(late: Callable[[], bool]) -> None:
    if late():
        raise Stale("the time in which this conductor had it for itself is over: tried again")


def _closed(inventories: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {**values, "reserved": values["total"]} for name, values in inventories.items()}


def in_order(
    rows: Sequence[Mapping[Any, Any]], tree: Mapping[str, Known], wanted: Mapping[str, Provider]
) -> list[Mapping[Any, Any]]:
    """Put parents before their children, and what goes last, children before their parents."""
    above = {uuid: known.parent_uuid for uuid, known in tree.items()}
    above |= {uuid: provider.parent_uuid for uuid, provider in wanted.items()}

    def depth(uuid: str) -> int:
        steps, at = 0, above.get(uuid)
        while at is not None and steps < len(above):
            steps, at = steps + 1, above.get(at)
        return steps

    def place(row: Mapping[Any, Any]) -> tuple[bool, int]:
        going = row["uuid"] not in wanted
        return going, -depth(row["uuid"]) if going else depth(row["uuid"])

    return sorted(rows, key=place)

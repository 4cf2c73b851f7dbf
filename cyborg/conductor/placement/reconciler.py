# SPDX-License-Identifier: Apache-2.0
"""Reconcile single resource providers: compare with the desired state and write the difference.

A provider is read at most once, unless another client writes to it concurrently: a write carries
the generation that was read, and after a conflict the provider is read again. The functions after
the class order rows of providers, and convert them to bodies of Placement's API and back.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeVar

from cyborg.clients.placement import Placement, ProviderSummary
from cyborg.core import naming
from cyborg.core import placement as core
from cyborg.core.errors import Conflict, CyborgError, InUse, Stale, Unavailable
from cyborg.core.inventory import device_state
from cyborg.core.log import get_logger
from cyborg.core.text import join_limited
from cyborg.db.deployables.write import DesiredProviderRow
from cyborg.db.providers.write import LeasedProviderRow, PlacementState, VerifiedProviderRow

LOG = get_logger(__name__)

# Consumers that an error message names.
MAX_NAMED = 3
# Attempts for one provider, while other clients write to it.
MAX_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a reconciliation: the drift as texts, and the provider's state in Placement."""

    drift: tuple[str, ...]
    state: PlacementState


@dataclass(frozen=True)
class ProviderReconciler:
    """Reconciler of single resource providers."""

    placement: Placement

    def reconcile(
        self,
        uuid: str,
        desired: core.Provider | None,
        summary: ProviderSummary | None,
        *,
        verify_only: bool = False,
        may_evict: Callable[[], bool] = lambda: False,
        lease_expired: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Reconcile a provider, or delete it if ``desired`` is None.

        ``summary`` is the provider in Placement, None if it probably does not exist. If
        ``verify_only`` is True, the desired state has not changed, so each difference is drift.
        ``may_evict`` is called before each deletion of an allocation of a provider to delete; if it
        returns False, allocations are kept. ``lease_expired`` is called before the provider is read
        again, and before each write that Placement does without a generation check. Raise Stale if
        it returns True, Conflict if other clients keep writing or another provider has the name,
        InUse if allocations prevent a removal (the inventory is then fully reserved), and other
        errors of Placement.
        """
        if desired is None:
            # It may be in a tree that is no longer the tree of the host.
            summary = summary or self.placement.get(uuid)
            _check_lease(lease_expired)
        drift: tuple[str, ...] = ()
        removal_error: InUse | None = None
        # Read, compare and write anew after each conflict, never merge: the newest desired state is
        # in the database, and Placement is rendered from it.
        for _ in range(MAX_ATTEMPTS):
            try:
                actual, inventories = self._read(summary, desired)
                if verify_only and desired is not None:
                    # The first comparison counts: a retry has written part of the difference.
                    drift = drift or core.describe_drift(desired, actual)
                # Placement moves and renames a provider without a generation check.
                if desired is not None and actual is not None and _needs_move(actual, desired):
                    _check_lease(lease_expired)
                generation = self._write(uuid, desired, summary, actual, inventories)
            except InUse as exc:
                if desired is not None or not may_evict():
                    raise
                # The provider is now fully reserved: it gets no consumer while the present ones are
                # evicted.
                removal_error = exc
                break
            except Conflict as exc:
                conflict = exc
                # The concurrent writer may have a newer desired state.
                _check_lease(lease_expired)
                # By uuid, without the tree: the provider may have been moved to another one.
                summary = self.placement.get(uuid)
                if desired is not None and (summary is None or summary.name != desired.name):
                    drift += self._replace_foreign_provider(desired)
            else:
                parent = desired.parent_uuid if desired is not None else None
                return Outcome(drift, PlacementState(generation, parent))
        if removal_error is not None:
            self._delete_with_consumers(uuid, removal_error, may_evict, lease_expired)
            return Outcome(drift=(), state=PlacementState(generation=None, parent=None))
        raise Conflict(
            f"other clients keep changing the resource provider, {MAX_ATTEMPTS} attempts failed: "
            f"{conflict.message}"
        )

    def _read(
        self, summary: ProviderSummary | None, desired: core.Provider | None
    ) -> tuple[core.Provider | None, dict[str, dict[str, Any]]]:
        """Read a provider; return it as a value, and its inventories as Placement returns them."""
        if summary is None:
            return None, {}
        if desired is None:
            return actual_provider(summary, {}, frozenset()), {}
        inventories = self.placement.inventories(summary.uuid)
        traits = self.placement.traits(summary.uuid)
        return actual_provider(summary, inventories, traits), inventories

    def _write(
        self,
        uuid: str,
        desired: core.Provider | None,
        summary: ProviderSummary | None,
        actual: core.Provider | None,
        inventories: Mapping[str, Mapping[str, Any]],
    ) -> int:
        """Execute the calls that write the difference between the actual and the desired state.

        The first write carries the generation of ``summary``. Return the generation after the last
        write: a later one means that another client has written.
        """
        placement = self.placement
        generation = summary.generation if summary else 0
        if summary is not None and desired is not None and _needs_move(summary, desired):
            generation = placement.rename(uuid, desired.name, desired.parent_uuid)
            # The rename has no generation check, so the values read before may be outdated.
            actual, inventories = self._read(replace(summary, generation=generation), desired)
        for call in core.plan_calls(desired, actual):
            match call:
                case core.EnsureClasses(classes):
                    placement.ensure_classes(classes)
                case core.EnsureTraits(traits):
                    placement.ensure_traits(traits)
                case core.CreateProvider(new):
                    generation = placement.create(new.uuid, new.name, new.parent_uuid)
                case core.SetInventories(_, changed):
                    generation = self._set_inventories(uuid, generation, changed, inventories)
                case core.SetTraits(_, traits):
                    generation = placement.set_traits(uuid, generation, traits)
                case core.DeleteProvider(_):
                    self._delete(uuid)
        return generation

    def _set_inventories(
        self,
        uuid: str,
        generation: int,
        desired: Mapping[str, core.Inventory],
        actual: Mapping[str, Mapping[str, Any]],
    ) -> int:
        """Set the inventories of a provider; return its new generation.

        If an inventory to remove has allocations, reserve it in full and raise InUse. Its allocated
        units may be the same hardware as units of the new inventories. So the same number of units
        is reserved in the new inventories, too.
        """
        body = inventories_body(desired)
        try:
            return self.placement.set_inventories(uuid, generation, body)
        except InUse as exc:
            obsolete = {name: values for name, values in actual.items() if name not in body}
            allocations = (self.placement.allocations(uuid) or {}).values()
            used = sum(resources.get(name, 0) for resources in allocations for name in obsolete)
            reserved = _fully_reserved(obsolete) | {
                name: {**values, "reserved": min(values["total"], values["reserved"] + used)}
                for name, values in body.items()
            }
            if actual != reserved:
                self.placement.set_inventories(uuid, generation, reserved)
            raise InUse(
                f"inventory of {', '.join(sorted(obsolete))} still has allocations; reserved in "
                f"full, will be removed when they are released ({exc.message})"
            ) from exc

    def _delete(self, uuid: str) -> None:
        """Delete a provider, or reserve its inventories in full while it has allocations."""
        try:
            self.placement.delete(uuid)
        except InUse as exc:
            summary = self.placement.get(uuid)
            inventories = self.placement.inventories(uuid)
            reserved = _fully_reserved(inventories)
            if summary is not None and reserved != inventories:
                self.placement.set_inventories(uuid, summary.generation, reserved)
            raise InUse(
                "removed from the host but still has allocations; reserved in full, will be "
                f"deleted when they are released ({exc.message})"
            ) from exc

    def _delete_with_consumers(
        self,
        uuid: str,
        removal_error: InUse,
        may_evict: Callable[[], bool],
        lease_expired: Callable[[], bool],
    ) -> None:
        """Delete what consumers have allocated of a reserved provider, then the provider.

        Other allocations of the consumers are kept. A consumer whose allocations cannot be changed
        does not prevent the others: raise InUse, which names it, at the end. Raise
        ``removal_error``, that of the deletion before, if the allocations may not be deleted any
        more.
        """
        failures = []
        # One by one: Placement has no call that deletes what several consumers have of one
        # provider.
        for consumer in sorted(self.placement.allocations(uuid) or {}):
            _check_lease(lease_expired)
            if not may_evict():
                raise removal_error
            try:
                self._evict(consumer, uuid)
            except Unavailable:
                raise
            except CyborgError as exc:
                failures.append(f"{consumer} ({exc.message})")
        try:
            self._delete(uuid)
        except InUse as exc:
            if not failures:
                raise
            raise InUse(
                "removed from the host, but the allocations of some consumers cannot be deleted: "
                f"{join_limited(failures, MAX_NAMED)}"
            ) from exc

    def _evict(self, consumer: str, uuid: str) -> None:
        """Delete what a consumer has allocated of a provider; keep its other allocations."""
        current = self.placement.consumer(consumer)
        if current is None or uuid not in current.amounts:
            return
        others = {key: amounts for key, amounts in current.amounts.items() if key != uuid}
        self.placement.set_consumer(consumer, others, current)
        LOG.warning(
            "Deleted the allocation %s of a consumer: the host of the resource provider was "
            "removed",
            dict(current.amounts[uuid]),
            instance=consumer,
            provider=uuid,
        )

    def _replace_foreign_provider(self, desired: core.Provider) -> tuple[str, ...]:
        """Delete another provider that has the desired name; return a description of the drift.

        A provider with the same parent and the trait OWNER_CYBORG represents the same device: an
        earlier installation created it. For any other provider an operator must decide: raise
        Conflict.
        """
        other = self.placement.find(desired.name)
        if other is None or other.uuid == desired.uuid:
            return ()
        obstacle = None
        if other.parent_uuid != desired.parent_uuid:
            obstacle = f"the parent {other.parent_uuid or 'none'} instead of {desired.parent_uuid}"
        elif naming.OWNER_TRAIT not in self.placement.traits(other.uuid):
            obstacle = f"no trait {naming.OWNER_TRAIT}, so that it is not of this service"
        if obstacle is not None:
            raise Conflict(
                f"resource provider {other.uuid} has the name {desired.name!r} and {obstacle}: "
                "rename or delete it"
            )
        try:
            self._delete(other.uuid)
        except InUse as exc:
            raise InUse(
                f"resource provider {other.uuid} of an earlier installation has the same name and "
                f"cannot be deleted yet: {exc.message}"
            ) from exc
        return (f"resource provider {other.uuid} had the same name",)


def _needs_move(actual: ProviderSummary | core.Provider, desired: core.Provider) -> bool:
    return (actual.name, actual.parent_uuid) != (desired.name, desired.parent_uuid)


def _check_lease(lease_expired: Callable[[], bool]) -> None:
    if lease_expired():
        raise Stale("publisher lease expired, will retry")


def _fully_reserved(inventories: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {**values, "reserved": values["total"]} for name, values in inventories.items()}


def order_by_depth(
    rows: Sequence[LeasedProviderRow],
    tree: Mapping[str, ProviderSummary],
    desired: Mapping[str, core.Provider],
) -> list[LeasedProviderRow]:
    """Sort rows: desired providers, parents first; then providers to delete, children first."""
    parents = {uuid: summary.parent_uuid for uuid, summary in tree.items()}
    parents |= {uuid: provider.parent_uuid for uuid, provider in desired.items()}

    def depth(uuid: str) -> int:
        steps, parent = 0, parents.get(uuid)
        # Limited, since parents of Placement and of the desired state may together form a loop.
        while parent is not None and steps < len(parents):
            steps, parent = steps + 1, parents.get(parent)
        return steps

    def sort_key(row: LeasedProviderRow) -> tuple[bool, int]:
        is_removal = row["uuid"] not in desired
        return is_removal, -depth(row["uuid"]) if is_removal else depth(row["uuid"])

    return sorted(rows, key=sort_key)


_FIELDS = tuple(field.name for field in dataclasses.fields(core.Inventory))


def desired_providers(
    root_uuid: str, rows: Iterable[DesiredProviderRow]
) -> dict[str, core.Provider]:
    """Return the providers of ``deployables.write.desired_state`` below a compute node, by uuid."""
    return core.build_providers(root_uuid, [_to_deployable(row) for row in rows])


def actual_provider(
    summary: ProviderSummary, inventories: Mapping[str, Mapping[str, Any]], traits: frozenset[str]
) -> core.Provider:
    """Convert a provider as Placement returns it to a value that can be compared."""
    return core.Provider(
        uuid=summary.uuid,
        name=summary.name,
        parent_uuid=summary.parent_uuid,
        inventories={
            name: core.Inventory(**{field: body[field] for field in _FIELDS})
            for name, body in inventories.items()
        },
        traits=traits,
    )


def inventories_body(inventories: Mapping[str, core.Inventory]) -> dict[str, dict[str, Any]]:
    """Convert inventories to the body of Placement's API."""
    return {name: dataclasses.asdict(inventory) for name, inventory in inventories.items()}


def is_cordoned(row: DesiredProviderRow) -> bool:
    """Return whether new allocations of a deployable must be prevented, for any reason."""
    return not device_state.evaluate_row(row).schedulable


def _to_deployable(row: DesiredProviderRow) -> core.DeployableState:
    return core.DeployableState(
        uuid=row["uuid"],
        name=row["name"],
        resource_class=row["resource_class"],
        traits=frozenset(row["traits"]),
        total=row["total"],
        cordoned=is_cordoned(row),
        uncleanable=row["stuck"],
        parent_uuid=row["parent"],
        set_size=row["set_size"],
    )


ProviderRow = TypeVar("ProviderRow", LeasedProviderRow, VerifiedProviderRow)


def group_by_host(rows: Iterable[ProviderRow]) -> list[tuple[str, list[ProviderRow]]]:
    """Return the hosts, sorted, each with its rows."""
    by_host = itemgetter("host")
    ordered = sorted(rows, key=by_host)
    return [(host, list(group)) for host, group in itertools.groupby(ordered, by_host)]

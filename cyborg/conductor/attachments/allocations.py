# SPDX-License-Identifier: Apache-2.0
"""Steps ``allocate`` and ``shrink``: change the allocation of the consumer in Placement.

The consumer is the instance. For an attachment to a host it is the attachment itself, which has an
allocation only from ``allocate`` to ``shrink``.

The intended change is committed to the database before the request is sent. Placement refuses a
request with an outdated generation of the consumer. So if a conductor that was stopped sends its
request late, after another conductor has sent the same change, the change takes effect only once.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.clients.placement import ConsumerAllocation, Placement, ProviderSummary
from cyborg.conductor.attachments.checks import require_lease
from cyborg.conductor.attachments.leased import LeasedAttachment, Wait
from cyborg.conductor.placement.compute_nodes import ComputeNodeResolver
from cyborg.core.attachments import allocation as core
from cyborg.core.attachments.allocation import Intent
from cyborg.core.attachments.attachment import Mode
from cyborg.core.attachments.server import check_mode, needs_live
from cyborg.core.attachments.successor import describe_missing
from cyborg.core.binding.profile import Group, parse_groups
from cyborg.core.errors import Conflict, NoHandle, NotFound, WrongState
from cyborg.core.explain.explanation import make_demands
from cyborg.core.naming import OWNER_TRAIT
from cyborg.db.attachments import handles
from cyborg.db.attachments import write as store
from cyborg.db.contexts import write as contexts
from cyborg.db.explain import provider_states
from cyborg.db.profiles import write as device_profiles
from cyborg.db.unit_of_work import UnitOfWork

MAX_CONFLICTS = 5  # requests to Placement in one attempt
TURN_DELAY = 1.0  # seconds to wait for another attachment of the instance
HOST_USER = "cyborg"  # user_id of the allocations of hosts, which have no user


class AllocationLost(WrongState):
    """Nova has replaced the allocation of the instance, without the resources of the attachment."""


# Without a state, which forked workers would share: all would choose the same candidates.
_RANDOM = random.SystemRandom()


class AllocationSteps:
    """The steps of attachments that change allocations.

    A step returns None if it is complete, or the wait after which it is repeated.
    """

    def __init__(self, uow: UnitOfWork, placement: Placement) -> None:
        self.uow = uow
        self._placement = placement
        self._nodes = ComputeNodeResolver(placement, uow)

    def allocate(self, work: LeasedAttachment) -> Wait | None:
        """Choose providers and extend the allocation of the consumer, in the attachment's turn.

        Raise NoHandle, NotFound, WrongState, Conflict, Unavailable.
        """
        intent = work.recorded_intent
        if intent is None:
            intent = self._plan(work)
        if (wait := _take_turn(work, intent)) is not None:
            return wait
        last_conflict: str | None = None
        # Nova changes the same allocation at a resize or migration: each attempt reads it again.
        for _ in range(MAX_CONFLICTS):
            # Read in this attachment's turn: no other attachment changes the amounts meanwhile.
            allocation = self._placement.consumer(work.consumer)
            if work.mode is Mode.HOST:
                allocation = _own_allocation(work, intent, allocation)
            if allocation is None:
                raise WrongState(f"{work.target} has no allocation in Placement any more")
            generation = allocation.generation
            # It is extended already if the answer to an earlier request was lost.
            if not core.is_extended(allocation.amounts, intent):
                # The providers of the conflict may be full: choose others.
                if last_conflict is not None:
                    intent = self._plan(work)
                intent = _record_base(work, intent, allocation)
                extended = core.extend(allocation.amounts, intent.added)
                try:
                    self._placement.set_consumer(work.consumer, extended, allocation)
                except Conflict as exc:
                    last_conflict = exc.message
                    continue
                # Each write raises the generation by one, that of a new consumer from 0.
                generation = (allocation.generation or 0) + 1
            reached = replace(intent, generation=generation)
            # Without the key, another attachment of the instance has its turn.
            work.complete_step(allocation_key=None, intent=reached.to_dict())
            return None
        raise NoHandle(f"cannot extend the allocation of {work.target}: {last_conflict}")

    def check(self, work: LeasedAttachment) -> None:
        """Raise AllocationLost if the allocation lacks resources of the consumer or this step.

        Nova may have replaced the allocation since ``allocate``. Raise Unavailable.
        """
        consumer, intent = work.consumer, work.intent
        allocation = self._placement.consumer(consumer)
        # Without the ARQs of this attachment, which may not exist yet: ``added`` is their amount.
        # And without a context that was leased: its allocation may belong to another consumer.
        owned_by_others = self.uow.run(
            lambda tx: store.owned_units(tx, consumer, without=work.row["id"], all_contexts=False)
        )
        # Only at the providers and of the classes of this attachment: of others nothing was added.
        owned_there = core.select_amounts(owned_by_others, like=intent.added)
        needed = core.extend(owned_there, intent.added)
        # In this order: deleted; created again with the same uuid; replaced by smaller amounts.
        if (
            allocation is None
            or core.is_recreated(allocation.generation, intent)
            or not core.has_amounts(allocation.amounts, needed)
        ):
            raise AllocationLost(
                f"the allocation of {work.target} in Placement was replaced: it lacks the "
                "resources that were added for the attachment"
            )

    def shrink(self, work: LeasedAttachment) -> Wait | None:
        """Remove from the allocation exactly what ``allocate`` has added.

        If Nova has replaced the allocation meanwhile, nothing is removed. An amount that other ARQs
        of the instance need is never removed. The allocation of an attachment to a host is removed
        as a whole. Raise Conflict, Unavailable.
        """
        consumer, intent = work.consumer, work.recorded_intent
        # The attach failed before it planned a change, or Nova has replaced the allocation.
        if intent is None:
            return None
        if work.mode is Mode.HOST:
            return self._remove(work, intent)
        # Without the turn, ``allocate`` has completed: the amounts were added, so that they are to
        # be removed, and the base is that before the addition.
        if not work.has_turn:
            intent = replace(intent, base={}, shrinks=True)
            if (wait := _take_turn(work, intent)) is not None:
                return wait
        last_conflict = Conflict(f"the allocation of {work.target} changes too often")
        for _ in range(MAX_CONFLICTS):
            allocation = self._placement.consumer(consumer)
            # Nova has deleted the allocation, or created it again without the amounts.
            if allocation is None or core.is_recreated(allocation.generation, intent):
                return None
            needed_by_others = self.uow.run(
                lambda tx: store.owned_units(
                    tx, consumer, without=work.row["id"], all_contexts=True
                )
            )
            # An earlier request, whose answer was lost, took effect.
            if core.is_shrunk(allocation.amounts, intent, needed_by_others):
                return None
            # ``shrinks`` is recorded only if the amounts were added before.
            if intent.shrinks or core.is_extended(allocation.amounts, intent):
                intent = _record_base(work, replace(intent, shrinks=True), allocation)
                remaining: core.Amounts = core.shrink(
                    allocation.amounts, intent.added, needed_by_others
                )
            else:
                # The request to extend was not sent, or is late: a new generation makes it fail.
                remaining = allocation.amounts
            try:
                self._placement.set_consumer(consumer, remaining, allocation)
            except Conflict as exc:
                last_conflict = exc
                continue
            return None
        raise last_conflict

    def _remove(self, work: LeasedAttachment, intent: Intent) -> Wait | None:
        """Remove the allocation of an attachment to a host. Raise Conflict, Unavailable.

        Return None at the end, or the wait before a second look.
        """
        if not intent.was_requested:
            return None
        allocation = self._placement.consumer(work.consumer)
        # One of another user is no allocation of this attachment: the uuid may be that of a server.
        if allocation is not None and allocation.user == HOST_USER:
            self._placement.set_consumer(work.consumer, {}, allocation)
        if intent.generation is None and not intent.shrinks:
            # The request to create it may be late, and no generation makes it fail: look again,
            # once, for which ``shrinks`` is the mark.
            work.commit({"intent": replace(intent, shrinks=True).to_dict()})
            return Wait(self._placement.timeout)
        return None

    def find_groups(self, work: LeasedAttachment) -> tuple[Group, ...]:
        """Return the groups to satisfy, those of the profile. Raise NotFound."""
        name = work.row["device_profile_name"]
        profile = self.uow.run(lambda tx: device_profiles.by_name(tx, name))
        if profile is None:
            raise NotFound(f"{work.selected} does not exist any more")
        return parse_groups(profile["groups"])

    def select(
        self,
        work: LeasedAttachment,
        groups: Sequence[Group],
        candidates: Sequence[Mapping[str, str]],
    ) -> Sequence[Mapping[str, str]]:
        """Return the allocation candidates whose handles suit. Raise Conflict if no handle does.

        A candidate has the provider of each group, by ``core.group_name``. ``groups`` are for the
        successor of a device, which has more conditions.
        """
        # Some types of handles cannot be attached in this mode, see ``needs_live``.
        if work.mode is not Mode.NEXT_BOOT:
            return candidates
        providers = {provider for mapping in candidates for provider in mapping.values()}
        types = self.uow.run(lambda tx: handles.of_providers(tx, providers))
        unsuitable = {provider for provider in types if needs_live(types[provider])}
        suitable = [mapping for mapping in candidates if unsuitable.isdisjoint(mapping.values())]
        if candidates and not suitable:
            # Each candidate has a handle that this mode cannot deliver: raises with the reason.
            check_mode(set().union(*types.values()), work.mode, work.selected)
        return suitable

    def _plan(self, work: LeasedAttachment) -> Intent:
        groups = self.find_groups(work)
        providers = self._choose(work, groups)
        return Intent(providers, core.required_amounts(groups, providers))

    def _choose(self, work: LeasedAttachment, groups: Sequence[Group]) -> list[str]:
        """Return the provider of each group. Raise NoHandle, NotFound."""
        node, root = work.row["hostname"], self._find_root(work)
        if root is None:
            raise NotFound(f"Placement has no resource provider {node} for the host of the server")
        # An accelerator, and a lease, leave no choice of the providers.
        if work.row["accelerator"] is not None:
            return [self._find_provider(work.row["accelerator"], root.uuid, node)]
        if work.row["context_epoch"] is not None:
            return self._find_leased(work, root.uuid, node)
        candidates = self._placement.candidates(core.candidate_query(groups, root.uuid))
        selected = self.select(work, groups, candidates)
        if not selected:
            providers = sorted(self._placement.tree(root.uuid, OWNER_TRAIT))

            def explain(tx: sa.Connection) -> str:
                # The agent's name of the host can differ from that of the compute node.
                return explain_missing(
                    tx, groups, sorted({*contexts.hosts(tx, providers).values()})
                )

            raise NoHandle(
                f"host {node} has no free device for {work.selected}: "
                "Placement has no allocation candidates below its compute node: "
                f"{self.uow.run(explain)}"
            )
        # Concurrent attachments that all took the first candidate would get a conflict.
        mapping = _RANDOM.choice(selected)
        return [mapping[core.group_name(number)] for number in range(len(groups))]

    def _find_root(self, work: LeasedAttachment) -> ProviderSummary | None:
        """Return the compute node, None if Placement has none for the server. Raise NotFound."""
        if work.mode is Mode.HOST:  # the name is that of the agent
            return self._nodes.find(work.row["hostname"])
        return self._placement.find(work.row["hostname"])

    def _find_provider(self, accelerator: str, root: str, node: str) -> str:
        """Return the provider of an accelerator if it is below a compute node. Raise NotFound."""
        provider = self.uow.run(lambda tx: store.provider_of(tx, accelerator))
        if provider is None:
            raise NotFound(f"accelerator {accelerator} does not exist any more")
        # Nova has providers of its own below the same compute node.
        if provider not in self._placement.tree(root, OWNER_TRAIT):
            raise NotFound(
                f"accelerator {accelerator} is not below the compute node of host {node}: "
                f"Placement has no resource provider {provider} there"
            )
        return provider

    def _find_leased(self, work: LeasedAttachment, root: str, node: str) -> list[str]:
        """Return the provider of each group of a context with a lease, below a compute node.

        Raise NotFound, WrongState, Conflict.
        """
        uuid, epoch = work.row["device_context"], work.row["context_epoch"]
        assert uuid is not None
        assert epoch is not None
        lease = self.uow.run(lambda tx: require_lease(tx, uuid, epoch))
        if not self._placement.tree(root, OWNER_TRAIT).keys() >= set(lease.providers):
            raise NotFound(
                f"{work.selected} has a lease for host {lease.hostname}, whose resource providers "
                f"are not below compute node {node} of the server"
            )
        return list(lease.providers)


def explain_missing(
    tx: sa.Connection,
    groups: Sequence[Group],
    hosts: Iterable[str | None],
    device: str | None = None,
) -> str:
    """Return a text with the first failure of each device of hosts.

    ``device`` is the uuid of the device to replace, None if there is none.
    """
    demands = make_demands(groups)
    classes = {name for demand in demands for name in demand.units}
    targets = {demand.target for demand in demands}
    states = [
        state
        for host in hosts
        for state in provider_states.find(
            tx, resource_classes=classes, host=host, attach_targets=targets
        )
    ]
    return describe_missing(demands, states, device)


def _own_allocation(
    work: LeasedAttachment, intent: Intent, allocation: ConsumerAllocation | None
) -> ConsumerAllocation:
    """Return the allocation of an attachment to a host, without amounts if there is none yet.

    The caller may choose the uuid of the attachment. Raise Conflict if it is the uuid of a server
    or of another consumer.
    """
    if allocation is None:
        return ConsumerAllocation(
            amounts={}, generation=None, project=work.row["project_id"], user=HOST_USER
        )
    # Before a request, any allocation is another consumer's. After one, only that of another user:
    # a server may have been created with the uuid since the first look.
    if not intent.was_requested or allocation.user != HOST_USER:
        raise Conflict(
            f"uuid: {work.consumer} already is a consumer in Placement, such as a server: attach "
            "with another uuid, or with none"
        )
    return allocation


def _take_turn(work: LeasedAttachment, intent: Intent) -> Wait | None:
    """Record the intent and take the turn; return the wait if another attachment has the turn.

    Attachments of one instance take turns, because the amounts of two concurrent changes could not
    be distinguished.
    """
    try:
        if not work.has_turn:
            work.commit({"intent": intent.to_dict(), "allocation_key": work.consumer})
    except db_exc.DBDuplicateEntry:
        # The key is unique: the database decides, also between conductors.
        return Wait(TURN_DELAY, f"waiting for another attachment of {work.target}")
    return None


def _record_base(work: LeasedAttachment, intent: Intent, allocation: ConsumerAllocation) -> Intent:
    """Record the amounts before a change, and return the recorded intent."""
    base = core.select_amounts(allocation.amounts, intent.added)
    based = replace(intent, base=base, generation=allocation.generation)
    if based.to_dict() != work.row["intent"]:
        work.commit({"intent": based.to_dict()})
    return based

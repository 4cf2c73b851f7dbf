# SPDX-License-Identifier: Apache-2.0
"""Plan which device sets hosts offer, before their providers are published.

Each change that matters marks a provider of the host stale: a claim, a release, the end of a
cleaning, a report, an operator's action. A publisher that has leased stale providers plans the
offers of their hosts before it reads what to publish.

A set is withdrawn in two steps. Placement first reserves all its units; then, if no consumer has an
allocation of it, the set is withheld, and overlapping sets can be offered. So a server that was
allocated the set before always gets its devices.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType

import sqlalchemy as sa

from cyborg.core.device_sets.groups import SizeSummary, summarize, update_group
from cyborg.core.device_sets.offers import Offer, UnitUse, find_owned_sets, plan_offers
from cyborg.core.device_sets.pools import Pool, make_pools
from cyborg.core.errors import CyborgError
from cyborg.core.inventory.device_set import UNRESERVED, OfferState
from cyborg.core.log import get_logger
from cyborg.db.device_sets import offers as store
from cyborg.db.device_sets.read import SetRow, make_sets, summarize_group, units_of_host
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

# Seconds between two plans of a group that split the last wanted set of a size for a smaller one,
# although no such one was allocated. Each change plans the group, too, and splits the other sets.
GROUP_INTERVAL = 300.0
NOTHING: Mapping[str, int] = MappingProxyType({})

_host_of = attrgetter("host")


@dataclass(frozen=True, slots=True)
class PlanResult:
    """Hosts whose plan fails, and how often the plans have marked each provider stale."""

    failed: set[str] = field(default_factory=set)
    marked: Counter[str] = field(default_factory=Counter)


def plan_hosts(
    uow: UnitOfWork, hosts: Iterable[str], now: datetime, withdrawn: Mapping[str, int] = NOTHING
) -> PlanResult:
    """Plan the offers of hosts with device sets.

    ``withdrawn`` is as in ``plan_host``, but of all these hosts.

    The caller has leased providers of the hosts before: a change that no plan sees makes a provider
    stale again. Each plan is a transaction of its own that locks device sets before providers, as
    claims and reports do. The lease has locked providers: with plans in its transaction publishers
    of one group would deadlock.
    """
    result = PlanResult()
    for host in hosts:
        try:
            marked = uow.run(partial(plan_host, host=host, now=now, withdrawn=withdrawn))
            result.marked.update(marked)
        except CyborgError as exc:
            # Not raised, nor is an unexpected error: the caller must record what it has written to
            # Placement.
            LOG.warning("The offers of a host are not planned: %s", exc.message, host=host)
            result.failed.add(host)
        except Exception:
            LOG.exception("Unexpected error while planning the offers of a host", host=host)
            result.failed.add(host)
    return result


@dataclass(eq=False)
class GroupPlanner:
    """Sweep that splits the last wanted sets of each group for shortages, each GROUP_INTERVAL.

    ``wake_publisher`` is called after a plan; ``clock`` returns monotonic seconds.
    """

    uow: UnitOfWork
    wake_publisher: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    _next_at: float = field(init=False, default=0.0)

    def sweep(self) -> int:
        """Plan the groups if it is time; return their number."""
        if self.clock() < self._next_at:
            return 0
        self._next_at = self.clock() + GROUP_INTERVAL
        hosts = self.uow.run(store.first_hosts)
        for host in hosts:
            self.uow.run(partial(plan_host, host=host, now=self.uow.clock(), every_size=True))
        if hosts:
            self.wake_publisher()
        return len(hosts)


def plan_host(
    tx: sa.Connection,
    host: str,
    now: datetime,
    *,
    every_size: bool = False,
    withdrawn: Mapping[str, int] = NOTHING,
) -> Collection[str]:
    """Plan and write the offers of a host, and of others of its groups if a size is short.

    Mark the providers of the sets stale whose offer changes, and return their uuids. With
    ``every_size``, the last wanted sets of a size are split for each smaller size that is short,
    otherwise only for those of newly allocated sets. ``withdrawn`` has the published revisions of
    sets, by the uuid of the provider, that are reserved in Placement and that no consumer has:
    their withdrawal ends, unless a later revision may offer them again.
    """
    # Plans of one group wait for each other: two hosts would be split for one shortage.
    store.lock_groups(tx, host)
    planner = _Planner(tx)
    sets = planner.read(host, withdrawn)
    # Before the first plan: sets that no plan has seen yet, as their source is new, or has another
    # configuration.
    every_size = every_size or any(row["offer"] is None for row in sets.rows.values())
    allocated_sizes = _find_allocated_sizes(sets)
    for group in sorted({pool.group for pool in sets.pools}):
        # Without a group, each source of the host has what it wants, whatever other hosts offer.
        if not group:
            planner.plan(group, host, shortage=None)
            continue
        # Only one pool of a group wants sets: a source with the mode ALL has a pool of its own.
        wanting = (pool.wanted for pool in sets.pools if pool.group == group and pool.wanted)
        desired: Mapping[int, int] = next(wanting, {})
        urgent = desired if every_size else allocated_sizes
        summaries = summarize_group(tx, group)
        by_host = {name: list(sizes) for name, sizes in groupby(summaries, key=_host_of)}
        update_group(host, desired, by_host, plan=partial(planner.plan, group), urgent=urgent)
    return planner.write(now)


def _find_allocated_sizes(sets: "_HostSets") -> set[int]:
    """Return the sizes of the sets that have been allocated since the last plan."""
    owned = find_owned_sets(sets.uses)
    return {
        facts.size
        for pool in sets.pools
        for facts in pool.sets
        if facts.id in owned and sets.rows[facts.id]["offer"] != OfferState.ALLOCATED
    }


@dataclass(slots=True)
class _HostSets:
    """The rows of the sets of a host, by id and locked, and their pools, as last planned.

    ``uses`` has the units of the host that are not free.
    """

    rows: Mapping[int, SetRow]
    uses: Mapping[str, UnitUse]
    pools: list[Pool]


@dataclass(eq=False)
class _Planner:
    """Plans of hosts in one transaction. Each host is read once, and ``write`` writes all plans."""

    tx: sa.Connection
    _hosts: dict[str, _HostSets] = field(init=False, default_factory=dict)
    _changed: dict[int, Offer] = field(init=False, default_factory=dict)
    _stale: set[str] = field(init=False, default_factory=set)

    def read(self, host: str, withdrawn: Mapping[str, int] = NOTHING) -> _HostSets:
        """Return the sets of a host, locked. End the withdrawals of ``withdrawn``."""
        if host in self._hosts:
            return self._hosts[host]
        rows = store.lock_sets(self.tx, host)
        own_providers = {row["rp_uuid"] for row in rows}
        revisions = {uuid: withdrawn[uuid] for uuid in withdrawn.keys() & own_providers}
        # Those with a later revision were changed since, and may be offered again.
        ended = store.lock_current(self.tx, revisions, others=own_providers)
        # The units are read below, after these locks: with the claims that held the locks before.
        for row in rows:
            if row["rp_uuid"] in ended and row["offer"] == OfferState.WITHDRAWING:
                row["offer"] = OfferState.WITHHELD
                self._changed[row["id"]] = Offer(OfferState.WITHHELD, row["offer_reason"])
        found = make_sets(rows, units_of_host(self.tx, host))
        pools = make_pools(each.configure() for each in found.sets)
        self._hosts[host] = _HostSets({row["id"]: row for row in rows}, found.uses, pools)
        return self._hosts[host]

    def plan(self, group: str, host: str, shortage: Mapping[int, int] | None) -> list[SizeSummary]:
        """Plan the offers of a host's sets in a group; return the new summaries.

        ``shortage`` is what the host should offer, None for what its sources want.
        """
        sets = self.read(host)
        summaries: list[SizeSummary] = []
        for number, pool in enumerate(sets.pools):
            if pool.group != group:
                continue
            desired = pool.wanted if shortage is None else shortage
            uses = pool.select_uses(sets.uses)
            plan = plan_offers(pool.sets, uses, pool.mode, desired)
            summaries += summarize(host, pool.sets, uses, plan)
            planned = [replace(facts, state=plan[facts.id].state) for facts in pool.sets]
            sets.pools[number] = replace(pool, sets=planned)
            # The plan knows from the units that a set is allocated; the state tells it to others.
            for id_ in find_owned_sets(uses) & plan.keys():
                if plan[id_].state is OfferState.OFFERED:
                    plan[id_] = Offer(OfferState.ALLOCATED)
            for id_, offer in plan.items():
                self._change(sets.rows[id_], offer)
        return summaries

    def _change(self, row: SetRow, offer: Offer) -> None:
        """Set the offer of a set, to be written."""
        old = row["offer"]
        if (old, row["offer_reason"]) == (offer.state, offer.reason):
            return
        changes_inventory = (old in UNRESERVED) != (offer.state in UNRESERVED)
        if changes_inventory:
            self._stale.add(row["rp_uuid"])
        row["offer"], row["offer_reason"] = offer.state, offer.reason
        self._changed[row["id"]] = offer

    def write(self, now: datetime) -> Collection[str]:
        """Write the changed offers, and mark the providers stale whose inventory they change.

        Return the uuids of these providers.
        """
        if self._changed:
            store.write_offers(self.tx, self._changed, sorted(self._stale), now)
        return self._stale

# SPDX-License-Identifier: Apache-2.0
"""Bringing Placement to what the database wants, provider by provider.

What is wanted is rendered anew each time from the tables, never from what was told before. Several
conductors may publish at once: a lease keeps them apart, and where a lease ran out too early the
generations of Placement decide.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from oslo_config import cfg
from oslo_log import log
from oslo_utils import timeutils

from cyborg.clients.placement import Known, Placement
from cyborg.conductor import rendering
from cyborg.core import provider_tree
from cyborg.core.errors import Conflict, CyborgError, InUse, NotFound, Unavailable
from cyborg.core.provider_tree import Provider
from cyborg.db.store import deployables
from cyborg.db.store import providers as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

BATCH = 64  # providers of one lease
TRIES = 4  # of one provider, when others write to it at the same time
LONGEST_DELAY = 60.0  # seconds; a compute node's provider appears when nova-compute first starts
QUIET = 60.0  # seconds between two complaints that Placement is away

Row = Mapping[Any, Any]


@dataclass(slots=True)
class _Outcome:
    """What came of some providers: revisions by uuid, and errors by row."""

    published: dict[str, int] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)
    failed: list[tuple[Row, str, float]] = field(default_factory=list)

    def covers(self, row: Row) -> bool:
        """Tell whether something came of this row."""
        return (
            row["uuid"] in self.published
            or row["uuid"] in self.gone
            or any(other["uuid"] == row["uuid"] for other, _, _ in self.failed)
        )


class Publisher:
    """The one who tells Placement; several conductors may each have one."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        placement: Placement,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``now`` is the database's kind of time, naive UTC; ``clock`` counts seconds upwards."""
        self._conf = conf
        self._uow = uow
        self._placement = placement
        self._now = now
        self._clock = clock
        self._complained = -QUIET
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Have ``run_once`` return after the provider it is at."""
        self._stopped.set()

    def run_once(self) -> int:
        """Publish what is due until nothing is or Placement is away; return how many were."""
        count = 0
        timeout = self._conf.placement.request_timeout
        while not self._stopped.is_set():
            owner = str(uuid4())
            length = max(self._conf.conductor.lease, 3 * timeout)
            end = self._clock() + length - timeout
            now = self._now()
            until = now + timedelta(seconds=length)
            rows = self._uow.run(
                lambda tx, owner=owner, now=now, until=until: store.lease(  # type: ignore[misc]
                    tx, owner=owner, now=now, until=until, limit=BATCH
                )
            )
            if not rows:
                break
            outcome, away = self._batch(rows, end)
            self._record(owner, rows, outcome)
            count += len(outcome.published) + len(outcome.gone)
            if away:
                break
        return count

    def _batch(self, rows: Sequence[Row], end: float) -> tuple[_Outcome, bool]:
        """Publish leased rows until the lease is about to end; tell whether Placement is away."""
        outcome = _Outcome()
        uuids = [row["uuid"] for row in rows]
        desired = {
            row["uuid"]: row for row in self._uow.run(lambda tx: deployables.desired(tx, uuids))
        }
        ordered = sorted(rows, key=lambda row: str(row["host"]))
        try:
            for host, group in itertools.groupby(ordered, key=lambda row: str(row["host"])):
                self._host(host, list(group), desired, end, outcome)
        except Unavailable as bad:
            self._complain(bad)
            pause = self._conf.conductor.publish_interval
            outcome.failed += [(row, bad.message, pause) for row in rows if not outcome.covers(row)]
            return outcome, True
        return outcome, False

    def _host(
        self,
        host: str,
        rows: Sequence[Row],
        desired: Mapping[str, Row],
        end: float,
        outcome: _Outcome,
    ) -> None:
        if self._stopped.is_set() or self._clock() > end:
            return
        root = self._placement.find(host)
        tree = self._placement.tree(root.uuid) if root else {}
        mine = [desired[row["uuid"]] for row in rows if row["uuid"] in desired]
        wanted = rendering.wanted(root.uuid, mine) if root else {}
        for row in _in_order(rows, tree, wanted):
            if self._stopped.is_set() or self._clock() > end:
                return
            uuid, revision = row["uuid"], row["revision"]
            try:
                if uuid in desired and root is None:
                    raise NotFound(
                        f"Placement has no resource provider {host!r}: nova-compute makes it when "
                        "it first starts; is [DEFAULT] host the name that Nova has for this host?"
                    )
                self._provider(uuid, wanted.get(uuid), tree.get(uuid))
            except Unavailable:
                raise
            except CyborgError as bad:
                self._failed(outcome, row, bad.message)
            except Exception:
                LOG.exception("Publishing %s failed for a reason nobody foresaw", row["name"])
                self._failed(outcome, row, "internal error: the conductor's log has it")
            else:
                (outcome.published if uuid in desired else outcome.gone)[uuid] = revision

    def _failed(self, outcome: _Outcome, row: Row, error: str) -> None:
        level = LOG.debug if row["attempts"] else LOG.warning
        level("Resource provider %s is not published: %s", row["name"], error)
        delay = min(LONGEST_DELAY, 2.0 ** min(row["attempts"], 16))
        outcome.failed.append((row, error, delay))

    def _record(self, owner: str, rows: Sequence[Row], outcome: _Outcome) -> None:
        now = self._now()
        errors = [
            (row["uuid"], error, now + timedelta(seconds=delay))
            for row, error, delay in outcome.failed
        ]
        left = [row["uuid"] for row in rows if not outcome.covers(row)]

        def write(tx: Any) -> None:
            store.published(tx, owner, outcome.published)
            store.gone(tx, owner, outcome.gone)
            store.failed(tx, owner, errors)
            if left:
                store.give_back(tx, owner, left)

        self._uow.run(write)

    def _provider(self, uuid: str, wanted: Provider | None, known: Known | None) -> None:
        """Bring one provider to what is wanted, from what Placement has at this moment."""
        if wanted is None:
            # It may hang in a tree that is not the host's any longer.
            known = known or self._placement.get(uuid)
        for _ in range(TRIES):
            try:
                self._bring(uuid, wanted, known)
            except InUse:
                raise
            except Conflict as bad:
                clash = bad
                known = self._placement.get(uuid)
            else:
                return
        raise Conflict(f"gave up after {TRIES} tries: {clash.message}")

    def _bring(self, uuid: str, wanted: Provider | None, known: Known | None) -> None:
        generation = known.generation if known else 0
        actual: dict[str, Provider] = {}
        if known is not None and wanted is None:
            actual[uuid] = rendering.actual(known, {}, frozenset())
        elif known is not None and wanted is not None:
            if (known.name, known.parent_uuid) != (wanted.name, wanted.parent_uuid):
                generation = self._placement.rename(uuid, wanted.name, wanted.parent_uuid)
            inventories, traits = self._placement.inventories(uuid), self._placement.traits(uuid)
            actual[uuid] = rendering.actual(known, inventories, traits)
        for call in provider_tree.difference({uuid: wanted}, actual):
            generation = self._do(call, generation)

    def _do(self, call: provider_tree.Call, generation: int) -> int:
        """Carry out one call and return the provider's generation after it."""
        placement = self._placement
        match call:
            case provider_tree.EnsureClasses(names):
                placement.ensure_classes(names)
            case provider_tree.EnsureTraits(names):
                placement.ensure_traits(names)
            case provider_tree.CreateProvider(new):
                return placement.create(new.uuid, new.name, new.parent_uuid)
            case provider_tree.SetInventories(uuid, inventories):
                body = rendering.body(inventories)
                return placement.set_inventories(uuid, generation, body)
            case provider_tree.SetTraits(uuid, traits):
                return placement.set_traits(uuid, generation, traits)
            case provider_tree.DeleteProvider(uuid):
                self._delete(uuid)
        return generation

    def _delete(self, uuid: str) -> None:
        """Delete a provider, or close it while an instance is allocated to it."""
        try:
            self._placement.delete(uuid)
        except InUse as bad:
            known = self._placement.get(uuid)
            inventories = self._placement.inventories(uuid)
            closed = {
                name: {**values, "reserved": values["total"]}
                for name, values in inventories.items()
            }
            if known is not None and closed != inventories:
                self._placement.set_inventories(uuid, known.generation, closed)
            raise InUse(
                f"the host does not have it any longer, but it has allocations: closed, and "
                f"deleted when these are gone ({bad.message})"
            ) from bad

    def _complain(self, bad: CyborgError) -> None:
        if self._clock() - self._complained >= QUIET:
            self._complained = self._clock()
            LOG.warning("%s; resource providers wait to be published", bad.message)


def _in_order(
    rows: Sequence[Row], tree: Mapping[str, Known], wanted: Mapping[str, Provider]
) -> list[Row]:
    """Put parents before their children, and what goes last, children before their parents."""
    above = {uuid: known.parent_uuid for uuid, known in tree.items()}
    above |= {uuid: provider.parent_uuid for uuid, provider in wanted.items()}

    def depth(uuid: str) -> int:
        steps, at = 0, above.get(uuid)
        while at is not None and steps < len(above):
            steps, at = steps + 1, above.get(at)
        return steps

    def place(row: Row) -> tuple[bool, int]:
        going = row["uuid"] not in wanted
        return going, -depth(row["uuid"]) if going else depth(row["uuid"])

    return sorted(rows, key=place)

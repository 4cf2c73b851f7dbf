# SPDX-License-Identifier: Apache-2.0
"""Run the transactions of binds and leases: limits, retries, orphans, and what follows.

A bound ARQ belongs to the project of its instance, not to the project of the token: an
administrator who evacuates a host must not become the owner of the ARQs there. So the project is
that of the instance's allocations in Placement.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from oslo_config import cfg

from cyborg import tracing
from cyborg.clients.placement import Placement
from cyborg.conductor.binding import limits as project_limits
from cyborg.conductor.binding.claim_plan import AllocationsUnread, BindContext, BindResult
from cyborg.conductor.binding.claims import BeingCleaned, Retry
from cyborg.conductor.binding.cleaning_wait import CleaningWait, CleaningWaits
from cyborg.conductor.binding.context_states import record_refusal
from cyborg.core.errors import CyborgError, NoHandle, Unavailable
from cyborg.core.log import get_logger
from cyborg.core.orphans.orphans import providers_to_check
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.telemetry.recorder import BIND_SECONDS, BINDS, MetricRecorder

LOG = get_logger(__name__)

# Project in Placement of a consumer that was created without a project.
INCOMPLETE_CONSUMER_PROJECT = "00000000-0000-0000-0000-000000000000"


MAX_ATTEMPTS = 4  # transactions of one bind


@dataclass(frozen=True, slots=True)
class InstanceAllocations:
    """What Placement has of an instance: its project, None if unknown, and units by provider."""

    project: str | None = None
    units: Mapping[str, int] = field(default_factory=dict)


class OwnerLookup(Protocol):
    """Interface of ``OwnerResolver``."""

    def find_allocations(self, instance: str) -> InstanceAllocations:
        """Return the allocations of an instance. Raise Unavailable."""


@dataclass(frozen=True, slots=True)
class OwnerResolver:
    """Lookup of the allocations of instances; not cached, because they change."""

    placement: Placement

    def find_allocations(self, instance: str) -> InstanceAllocations:
        """Return the allocations of an instance; without a project if Placement has none.

        Raise Unavailable for any error of Placement.
        """
        try:
            project, units = self.placement.allocations_of(instance)
        except Unavailable:
            raise
        except CyborgError as exc:
            raise Unavailable(exc.message) from exc
        if project == INCOMPLETE_CONSUMER_PROJECT:
            project = None
        return InstanceAllocations(project, units)


T = TypeVar("T")


class OrphanChecker(Protocol):
    """Interface of ``cyborg.conductor.orphans.release.OrphanCheck``."""

    def release_at(self, providers: Sequence[str]) -> bool:
        """Release the orphaned ARQs of these providers; return whether to retry the bind."""


@dataclass(frozen=True, slots=True)
class Binder:
    """Runner of the transactions that claim handles; the attributes are those of ``Arqs``."""

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    wake_outbox: Callable[[], None]
    wake_jobs: Callable[[], None]
    wake_publisher: Callable[[], None]
    owners: OwnerLookup | None
    orphans: OrphanChecker | None
    limit_source: project_limits.LimitSource | None
    now: Callable[[], datetime]
    metrics: MetricRecorder
    waits: CleaningWaits

    def make_context(self) -> BindContext:
        """Return the context of a claim without an instance."""
        now, timeout = self.now(), self.conf.conductor.prepare_timeout
        return BindContext(now=now, prepare_timeout=timeout)

    def refresh(self, context: BindContext) -> BindContext:
        """Return the context of a claim at the present time.

        Each transaction needs this: queries of other services and locks may have taken long.
        """
        return replace(context, now=self.now())

    def make_instance_context(self, instance: str, project: str | None) -> BindContext:
        """Return the context of a bind; without ``project``, ask Placement about the instance.

        With ``project``, Placement is only asked if the device is cordoned: it adds a request to
        each bind, and binds continue while it is away.
        """
        # Only binds to instances honour an allocation after a cordon: Placement allocates to
        # instances, and Nova cannot choose another host any more.
        context = replace(self.make_context(), cordon_grace=self.conf.conductor.cordon_grace)
        if project is not None or self.owners is None:
            return context
        context, owner = self._add_allocations(context, instance)
        return replace(context, project=owner, owner_verified=owner is not None)

    def _add_allocations(
        self, context: BindContext, instance: str
    ) -> tuple[BindContext, str | None]:
        """Return the context with the allocations of an instance, and the project of these.

        If Placement does not answer, the context has the reason instead. Without ``owners`` the
        instance has none, so that a cordon counts.
        """
        if self.owners is None:
            return replace(context, allocated={}), None
        started = time.monotonic()
        try:
            with tracing.child_span("bind.find_project"):
                allocations = self.owners.find_allocations(instance)
            return replace(context, allocated=allocations.units), allocations.project
        except Unavailable as exc:
            LOG.warning(
                "Cannot read the allocations of an instance now: %s", exc.message, instance=instance
            )
            return replace(context, owner_error=exc.message), None
        finally:
            self.metrics.observe(BIND_SECONDS, time.monotonic() - started, "owner")

    def run(
        self,
        projects: Iterable[str | None],
        context: BindContext,
        work: Callable[[sa.Connection, BindContext, bool], T],
        answer: Callable[[T], Any] = lambda _: None,
        epochs: Mapping[str, int] | None = None,
        **log_fields: Any,
    ) -> T:
        """Run the transaction of a call that claims handles, and return its result.

        ``projects`` are those whose limits the transaction needs, as far as they are known. The
        last argument of ``work`` is whether to wait for handles that others have locked. ``answer``
        is that of ``UnitOfWork.run_once``. If concurrent transactions claim the handles, and if
        orphans own them, the transaction runs again. ``epochs`` has the present epoch of the device
        contexts that the call names. Raise what ``work`` raises; NoHandle is logged, with
        ``log_fields``, and kept with the unbound device contexts.
        """
        started = time.monotonic()
        with self.waits.of_bind() as wait:
            try:
                result = self._run(projects, context, work, answer, wait)
            except CyborgError as exc:
                self.metrics.count(BINDS, exc.code)
                raise
            finally:
                self._observe(time.monotonic() - started, wait.seconds)
        if isinstance(result, NoHandle):
            self.metrics.count(BINDS, result.code)
            # Nova logs only the HTTP status of the error, so the reasons are logged here.
            LOG.warning("No free handle: %s", result.message, **log_fields)
            # A transaction of its own: that of the bind was undone, with everything it wrote.
            record = partial(record_refusal, no_handle=result, epochs=epochs or {}, now=self.now())
            # The refusal, and not an error of this note: the deadline may have passed meanwhile.
            with contextlib.suppress(Unavailable):
                self.uow.run(record)
            raise result
        return result

    def wake(self, result: BindResult, *, has_bound_event: bool = True) -> None:
        """Count a bind after its commit, and wake the loops that have work.

        A bind with host work is counted at the end of this work. ``has_bound_event`` is whether a
        bind without host work has an event for Nova.
        """
        if result.arqs and not result.host_work_pending:
            self.metrics.count(BINDS, "bound")
        if result.providers:
            self.wake_publisher()
        if result.host_work_pending:
            self.wake_jobs()
        # With host work, Nova's event is written when the work is done.
        elif result.arqs and has_bound_event and self.conf.nova.send_events:
            self.wake_outbox()

    def _observe(self, seconds: float, waited: float) -> None:
        """Record the duration of a claim, of which the bind waited so long for cleanings."""
        self.metrics.observe(BIND_SECONDS, seconds - waited, "claim")
        if waited:
            self.metrics.observe(BIND_SECONDS, waited, "wait")

    def _run(
        self,
        projects: Iterable[str | None],
        context: BindContext,
        work: Callable[[sa.Connection, BindContext, bool], T],
        answer: Callable[[T], Any],
        cleaning_wait: CleaningWait,
    ) -> T | NoHandle:
        """Return the result of the transaction, or the error if no handle is free.

        This is the only loop around the transaction. Each cause of a failure has its own limit,
        and the deadline of the call bounds all of them: ``UnitOfWork`` starts nothing after it.
        """
        limits = project_limits.find_limits(self.limit_source, projects)
        context = replace(context, limits=limits)
        reasons: list[str] = []  # why earlier attempts were undone
        misses, orphans_checked = 0, False
        while True:
            try:
                with tracing.child_span("bind.claim", attempt=len(reasons)):
                    # The first attempt skips locked handles, the next ones wait for the locks.
                    waits_for_locks = bool(reasons)
                    call = partial(self._call, work, context, waits_for_locks)
                    return self.uow.run_once(call, answer)
            except Retry as exc:
                reasons.append(exc.reason)
                if len(reasons) == MAX_ATTEMPTS:
                    LOG.warning("Bind was undone at each attempt: %s", "; ".join(reasons))
                    return NoHandle(
                        "all candidate handles were claimed concurrently "
                        f"({MAX_ATTEMPTS} attempts), retry",
                        reasons={},
                    )
            except project_limits.ProjectsMissing as exc:
                misses += 1
                if misses == project_limits.MAX_MISSES:
                    raise project_limits.projects_change() from exc
                project_limits.add_missing(self.uow, limits, exc)
            except AllocationsUnread as exc:
                # Once: the context then has the allocations, or why they are unknown.
                context, _ = self._add_allocations(context, exc.instance)
            except NoHandle as exc:
                # Once, and before a wait: the handle of an orphan may need no cleaning.
                if not orphans_checked:
                    orphans_checked = True
                    if self._release_orphans(exc):
                        # Handles may be free now: begin as at the first attempt.
                        reasons.clear()
                        continue
                if not isinstance(exc, BeingCleaned) or not cleaning_wait.run(exc):
                    return exc
                # After a wait the attempts are counted anew. One reason stays: they wait for locks.
                del reasons[1:]

    def _call(
        self,
        work: Callable[[sa.Connection, BindContext, bool], T],
        context: BindContext,
        wait: bool,
        tx: sa.Connection,
    ) -> T:
        return work(tx, self.refresh(context), wait)

    def _release_orphans(self, no_handle: NoHandle) -> bool:
        """Release orphaned ARQs that own the handles needed; return whether to retry the bind.

        Call this outside a transaction: it queries Placement and Nova.
        """
        if self.orphans is None:
            return False
        return self.orphans.release_at(providers_to_check(no_handle.details["reasons"]))

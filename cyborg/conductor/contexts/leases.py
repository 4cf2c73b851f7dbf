# SPDX-License-Identifier: Apache-2.0
"""Reserve, bind and unbind device contexts; release the leases that have ended.

Each call is one transaction, which locks ARQs before contexts. A lease starts with new ARQs, so
that a late call with the uuid of a former ARQ finds nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.binding import binding as engine
from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.binding.claim_plan import BindContext, BindResult
from cyborg.conductor.binding.context_states import follow_arqs, record_contexts
from cyborg.conductor.binding.creation import renew_context_arqs
from cyborg.conductor.binding.release import ReleaseResult
from cyborg.conductor.contexts.device_contexts import (
    find_context,
    parse_selection,
    refuse_attached,
    to_response,
)
from cyborg.conductor.notifications.notifications import ArqEventRecorder
from cyborg.core.binding.arqs import BindRequest
from cyborg.core.binding.states import Step, source_states
from cyborg.core.contexts import leases as core
from cyborg.core.errors import WrongState
from cyborg.core.log import get_logger
from cyborg.db.binding import write as arq_store
from cyborg.db.contexts import write as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

BATCH = 100  # leases that one transaction of a sweep releases
MAX_BATCHES = 20  # transactions of one sweep


class _Expired(NamedTuple):
    """How many leases were released, the row ids that were looked at, and the released ARQs."""

    num_released: int
    checked: Sequence[int]
    result: ReleaseResult


class ContextLeases:
    """The operations on device contexts that claim and release handles.

    ``project_scope`` limits a call to the contexts of one project; None means all projects. Each
    call returns the row of the context as plain values.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        arqs: Arqs,
        recorder: ArqEventRecorder,
        *,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        """``arqs`` has the transactions of binds."""
        self._conf = conf
        self._uow = uow
        self._arqs = arqs
        self._recorder = recorder
        self._now = now or uow.clock

    def pre_bind(
        self, uuid: str, reservation: Mapping[str, Any], project_scope: str | None
    ) -> dict[str, Any]:
        """Claim the handles of a context under a lease, or renew its lease.

        ``reservation`` has hostname, mappings and, optionally, lease_seconds and epoch. Raise
        Invalid with the field, NotFound, WrongState, Conflict, OverLimit, NoHandle, Unavailable.
        """
        context, scope = self._find(uuid, project_scope)
        conf = self._conf.device_contexts
        request = core.parse_reserve(
            reservation, len(context["groups"]), conf.lease_ttl, conf.max_lease
        )

        # Nova has not chosen the host of a lease, so nobody else has found that its agent is up.
        claim = replace(self._arqs.binder.make_context(), check_host=True)
        work = partial(self._reserve, uuid=context["uuid"], scope=scope, request=request)
        result, row = self._run(context, claim, work)
        if result.arqs:  # none for a renewal
            LOG.info(
                "Reserved device context %s on host %s until %s, epoch %s",
                row["uuid"],
                row["hostname"],
                row["expires_at"],
                row["epoch"],
            )
            self._arqs.binder.wake(result)
        return row

    def bind(
        self,
        uuid: str,
        target: Mapping[str, Any],
        project_scope: str | None,
    ) -> dict[str, Any]:
        """Bind a context to an instance, with the handles of its lease if it has one.

        ``target`` has hostname, instance_uuid and, optionally, mappings and epoch. The project of
        the instance is the project of its allocation in Placement. Raise Invalid with the field,
        NotFound, WrongState, Conflict, OverLimit, NoHandle, Unavailable.
        """
        context, scope = self._find(uuid, project_scope)
        request = core.parse_bind(target, len(context["groups"]))
        # The caller does not decide which project has the instance, not even with a token of it.
        claim = self._arqs.binder.make_instance_context(request.instance, None)
        claim = replace(claim, check_host=True)

        work = partial(self._bind, uuid=context["uuid"], scope=scope, request=request)
        result, row = self._run(context, claim, work, instance=request.instance)
        self._arqs.finish_bind(result, request.instance)
        return row

    def unbind(
        self,
        uuid: str,
        use: Mapping[str, Any],
        project_scope: str | None,
        elevated: bool = False,
    ) -> dict[str, Any]:
        """Release the handles of a context and keep the context; do nothing if it owns none.

        ``use`` has epoch or instance_uuid of the use that ends; ``elevated`` callers may omit
        both. Raise Invalid, NotFound, Conflict, WrongState if it is attached to a server.
        """
        found, scope = self._find(uuid, project_scope)
        request = core.parse_unbind(use)

        def work(tx: sa.Connection) -> tuple[ReleaseResult, dict[str, Any]]:
            context, rows = _lock(tx, found["uuid"], scope)
            refuse_attached(tx, context, rows)
            core.check_unbind(_facts(context, rows), request, elevated=elevated)
            todo = [row for row in rows if row["state"] in source_states(Step.UNBIND)]
            result = self._arqs.release_arqs(tx, todo, keep=True)
            return result, to_response(find_context(tx, context["uuid"], scope))

        result, row = self._uow.run_once(work, answer=_row_of)
        self._arqs.finish_release(result, deleted=False)
        return row

    def sweep(self) -> int:
        """Release the handles of leases that have ended, and return the number of leases."""
        total, after = 0, 0
        # From the last id on, and not from the first: a lease that cannot be released, because its
        # context is in a wrong state, must not fill each batch.
        for _ in range(MAX_BATCHES):
            expired = self._uow.run(partial(self._expire, after=after))
            total += expired.num_released
            self._arqs.finish_release(expired.result, deleted=False)
            if len(expired.checked) < BATCH:
                break
            after = expired.checked[-1]
        if total:
            LOG.info("Released %d device contexts whose lease has ended", total)
        return total

    def _find(self, uuid: str, project_scope: str | None) -> tuple[store.ContextRow, str | None]:
        """Return a context without a lock, and the scope. Raise Invalid, NotFound.

        The groups and the project of a context never change.
        """
        uuid, scope = parse_selection(uuid, project_scope)
        return self._uow.run(lambda tx: find_context(tx, uuid, scope)), scope

    def _run(
        self,
        context: store.ContextRow,
        claim: BindContext,
        work: Callable[[sa.Connection, BindContext, bool], tuple[BindResult, dict[str, Any]]],
        **log_fields: Any,
    ) -> tuple[BindResult, dict[str, Any]]:
        """Run the transaction of a call; return what it has bound, and the row of the context."""
        uuid = context["uuid"]
        return self._arqs.binder.run(
            # Neither a renewal nor the bind of a lease needs limits: the transaction asks for those
            # that it needs.
            [],
            claim,
            work,
            answer=_row_of,
            epochs={uuid: context["epoch"]},
            device_context=uuid,
            **log_fields,
        )

    def _reserve(
        self,
        tx: sa.Connection,
        claim: BindContext,
        wait: bool,
        *,
        uuid: str,
        scope: str | None,
        request: core.ReserveRequest,
    ) -> tuple[BindResult, dict[str, Any]]:
        """Renew the lease of a context, or begin the next one with new ARQs.

        Return what was bound, nothing at a renewal, and the row of the context as plain values.
        """
        context, rows = _lock(tx, uuid, scope)
        claim = self._arqs.binder.refresh(claim)  # the locks may have taken long
        expires_at = claim.now + timedelta(seconds=request.seconds)
        result = BindResult()
        if core.decide_reserve(_facts(context, rows), request, claim.now) is core.Decision.RENEW:
            id_, epoch = context["id"], context["epoch"]
            if not store.renew_lease(tx, id_, epoch, expires_at, claim.now):
                raise core.stale_lease(uuid, context["state"], epoch, given=request.epoch)
        else:
            _check_providers(tx, request.hostname, request.providers)
            context, rows = self._renew_arqs(tx, context, claim.now)
            result = engine.reserve(
                tx,
                device_context=context,
                rows=rows,
                hostname=request.hostname,
                providers=request.providers,
                expires_at=expires_at,
                context=claim,
                wait=wait,
            )
            record_contexts(tx, [find_context(tx, uuid, scope)], self._recorder)
        return result, to_response(find_context(tx, uuid, scope))

    def _bind(
        self,
        tx: sa.Connection,
        claim: BindContext,
        wait: bool,
        *,
        uuid: str,
        scope: str | None,
        request: core.ContextBindRequest,
    ) -> tuple[BindResult, dict[str, Any]]:
        """Bind the ARQs of a context; without a lease they are replaced first.

        Return what was bound, nothing for a repeated call, and the row of the context as plain
        values.
        """
        context, rows = _lock(tx, uuid, scope)
        claim = self._arqs.binder.refresh(claim)
        facts, result = _facts(context, rows), BindResult()
        decision = core.decide_bind(facts, request, claim.now)
        if decision is not core.Decision.UNCHANGED:
            # A bind with a lease may leave out the providers: the lease has them.
            providers = request.providers or tuple(str(p) for p in facts.providers)
            if decision is core.Decision.BIND:
                _check_providers(tx, request.hostname, providers)
                context, rows = self._renew_arqs(tx, context, claim.now)
            bind_requests = [
                BindRequest(
                    row["uuid"],
                    hostname=request.hostname,
                    device_rp_uuid=providers[row["device_profile_group_id"]],
                    instance_uuid=request.instance,
                )
                for row in rows
            ]
            claim = replace(claim, epoch=request.epoch)
            result = self._arqs.bind_locked(tx, bind_requests, scope=None, context=claim, wait=wait)
        return result, to_response(find_context(tx, uuid, scope))

    def _renew_arqs(
        self, tx: sa.Connection, context: store.ContextRow, now: datetime
    ) -> tuple[store.ContextRow, list[arq_store.ArqRow]]:
        """Replace the ARQs of a locked context; return the context and the new ARQs."""
        renew_context_arqs(tx, context["id"], scope=None, now=now, recorder=self._recorder)
        return _lock(tx, context["uuid"], scope=None)

    def _expire(self, tx: sa.Connection, after: int) -> _Expired:
        """Release a batch of leases, after the row id ``after``."""
        now = self._now()
        ids = store.expired_leases(tx, now, after, BATCH)
        if not ids:
            return _Expired(num_released=0, checked=ids, result=ReleaseResult(0))
        # Only for the locks: ARQs before contexts.
        arq_store.lock_of_contexts(tx, ids)
        # Checked again under the lock: a lease may have just been bound or renewed.
        ended = store.lock_expired_leases(tx, ids, now)
        rows = arq_store.lock_of_contexts(tx, ended)
        leased = [row for row in rows if engine.is_leased(row)]
        result = self._arqs.release_arqs(tx, leased, keep=True)
        # The release also sets the states of its contexts. A context whose ARQs own nothing has no
        # part in it, and would keep the state of a lease.
        with_lease = {row["context_id"] for row in leased}
        without_lease = [row for row in rows if row["context_id"] not in with_lease]
        follow_arqs(tx, without_lease, self._recorder, now)
        return _Expired(num_released=len(ended), checked=ids, result=result)


def _row_of(done: tuple[object, dict[str, Any]]) -> dict[str, Any]:
    """Return the row of the context, the answer of a call, from the result of its transaction."""
    _, row = done
    return row


def _lock(
    tx: sa.Connection, uuid: str, scope: str | None
) -> tuple[store.ContextRow, list[arq_store.ArqRow]]:
    """Return a context and its ARQs, locked. Raise NotFound, WrongState."""
    context_id = find_context(tx, uuid, scope)["id"]
    locked, rows = store.lock_with_arqs(tx, [context_id])
    for context in locked:
        return context, rows
    raise WrongState(f"device context {uuid} is being deleted", device_context=uuid)


def _facts(context: store.ContextRow, rows: Sequence[arq_store.ArqRow]) -> core.ContextFacts:
    """Return the facts about a context; all ARQs of a group have the same provider."""
    by_group = {row["device_profile_group_id"]: row["device_rp_uuid"] for row in rows}
    return core.ContextFacts(
        uuid=context["uuid"],
        state=context["state"],
        epoch=context["epoch"],
        hostname=context["hostname"],
        instance=context["instance_uuid"],
        expires_at=context["lease_expires_at"],
        providers=tuple(by_group.get(number) for number in range(len(context["groups"]))),
    )


def _check_providers(tx: sa.Connection, hostname: str, providers: Sequence[str]) -> None:
    core.check_hosts(hostname, providers, store.hosts(tx, providers))

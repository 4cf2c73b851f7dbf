# SPDX-License-Identifier: Apache-2.0
"""Create, bind, unbind and delete accelerator requests (ARQs); each call is one transaction.

All transactions lock in the same order: ARQs by id, then projects with limits by name, then handles
by id. If a database locks in another order and a deadlock results, the unit of work runs the
transaction again.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db import exception as db_exc

from cyborg import tracing
from cyborg.conductor.binding import binding, release
from cyborg.conductor.binding import limits as project_limits
from cyborg.conductor.binding.binder import Binder, OrphanChecker, OwnerLookup
from cyborg.conductor.binding.claim_plan import BindContext, BindResult
from cyborg.conductor.binding.cleaning_wait import CleaningWaits, make_slots
from cyborg.conductor.binding.context_states import follow_arqs, record_claimed
from cyborg.conductor.binding.creation import build_arqs, renew_context_arqs, to_response
from cyborg.conductor.notifications.notifications import ArqEventRecorder, NotificationBuilder
from cyborg.core.binding.arqs import (
    BindRequest,
    UnbindRequest,
    arqs_not_found,
    check_requests,
    parse_uuids,
)
from cyborg.core.binding.profile import parse_groups
from cyborg.core.binding.states import OWNING_STATES, UNBOUND_STATES, Step, source_states
from cyborg.core.errors import Invalid, NotFound, OverLimit, ServiceTokenRequired, WrongState
from cyborg.core.log import get_logger
from cyborg.core.validation import check_optional_text, parse_uuid
from cyborg.db.binding import project_units
from cyborg.db.binding import write as store
from cyborg.db.profiles import write as profile_store
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.telemetry.recorder import MetricRecorder

LOG = get_logger(__name__)

# If fewer ARQs than these are left of the limit of a project, it is locked to create some.
LIMIT_MARGIN = 512

R = TypeVar("R", BindRequest, UnbindRequest)


def _do_nothing() -> None:
    """Do nothing: the default for the wake-up functions."""


class _Deletion(NamedTuple):
    """Result of a deletion, and the uuids of the ARQs that existed before it."""

    result: release.ReleaseResult
    existing: set[str]


class Arqs:
    """Operations on ARQs.

    ``scope`` limits a call to the ARQs of one project; None means all projects.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        wake_outbox: Callable[[], None] = _do_nothing,
        wake_jobs: Callable[[], None] = _do_nothing,
        owners: OwnerLookup | None = None,
        notifications: NotificationBuilder | None = None,
        orphans: OrphanChecker | None = None,
        *,
        limit_source: project_limits.LimitSource | None = None,
        now: Callable[[], datetime] | None = None,
        wake_publisher: Callable[[], None] = _do_nothing,
        metrics: MetricRecorder | None = None,
        call_threads: int = 64,
    ) -> None:
        """The functions that wake a loop are called after a commit that adds work for it.

        Without ``owners``, an ARQ keeps the project for which it was created. Without ``orphans``,
        a bind that finds no free handle fails without a retry. Without ``limit_source``, projects
        have no limits of units. ``call_threads`` is the number of calls that are answered at the
        same time: a part of them may wait for cleanings.
        """
        self._conf = conf
        self._uow = uow
        self._wake_outbox = wake_outbox
        self._wake_jobs = wake_jobs
        self._wake_publisher = wake_publisher
        self._limit_source = limit_source
        self._now = now or uow.clock
        self._stopping = threading.Event()
        self._event_recorder = ArqEventRecorder(
            conf, notifications or NotificationBuilder(conf, now=self._now)
        )
        self.binder = Binder(
            conf,
            uow,
            wake_outbox,
            wake_jobs,
            wake_publisher,
            owners,
            orphans,
            limit_source,
            self._now,
            metrics or MetricRecorder(),
            CleaningWaits(
                uow, self._now, pause=self._stopping.wait, slots=make_slots(call_threads)
            ),
        )

    def stop(self) -> None:
        """End the waits of binds for cleanings."""
        self._stopping.set()

    def create(
        self, device_profile_name: str, project_id: str | None, context_scope: str | None = None
    ) -> dict[str, Any]:
        """Create an ARQ for each unit of the profile; return ``{"arqs": [row of each ARQ]}``.

        Of the hidden profile of a device context, replace the ARQs of the context by new ones.
        ``context_scope`` is the only project whose contexts the caller may use, None for all
        projects: then the units are limited at the bind only. Raise NotFound if the profile does
        not exist or is deleted concurrently, WrongState if the context is in use or in error, and
        OverLimit if the project has too many ARQs or units.
        """
        name = device_profile_name
        if not isinstance(name, str):
            raise Invalid("device_profile_name must be a string", field="device_profile_name")
        if not name or not name.isprintable():
            # No profile can have such a name.
            raise _profile_not_found(ascii(name))
        project_id = check_optional_text("project_id", project_id)
        scope = check_optional_text("context_scope", context_scope)
        # A caller of all projects, such as an administrator who evacuates a host, creates ARQs of
        # any project: its units are compared at the bind, when it is known.
        limit_source = None if scope is None else self._limit_source
        try:
            rows = project_limits.run_with_limits(
                self._uow,
                limit_source,
                [project_id],
                lambda limits: self._uow.run_once(
                    lambda tx: self.insert_arqs(tx, name, project_id, limits=limits, scope=scope),
                    answer=_created,
                ),
            )
        except db_exc.DBReferenceError as exc:
            raise _profile_not_found(name) from exc
        tracing.annotate(arq=[row["uuid"] for row in rows])
        return _created(rows)

    def bind(
        self,
        requests: Sequence[Mapping[str, Any]],
        project_scope: str | None,
        instance_project: str | None = None,
    ) -> None:
        """Bind all the given ARQs, or none.

        A request has the keys request (uuid of the ARQ), hostname, device_rp_uuid, instance_uuid
        and optionally project_id. ``instance_project`` limits the bind to instances of this
        project; None means unrestricted. Raise Invalid, NotFound (ARQ or provider), WrongState,
        Conflict (the instance has other ARQs), OverLimit, NoHandle with the reasons.
        """
        scope = check_optional_text("project_scope", project_scope)
        bind_requests = _load_requests(BindRequest, requests)
        project = check_optional_text("instance_project", instance_project)
        # All requests have the same instance and host: ``_load_requests`` has checked this.
        instance = bind_requests[0].instance_uuid
        assert instance is not None  # ``BindRequest`` parses it as a uuid
        uuids = [item.request for item in bind_requests]
        tracing.annotate(arq=uuids, instance=instance, host=bind_requests[0].hostname)
        context = self.binder.make_instance_context(instance, project)

        def work(tx: sa.Connection, context: BindContext, wait: bool) -> BindResult:
            return self.bind_locked(
                tx, bind_requests, scope, context, wait=wait, has_bound_event=False
            )

        result = self.binder.run(
            {context.project or item.project_id for item in bind_requests},
            context,
            work,
            instance=instance,
            arq=uuids,
        )
        self.finish_bind(result, instance, has_bound_event=False)

    def unbind(self, requests: Sequence[Mapping[str, Any]], project_scope: str | None) -> None:
        """Unbind all the given ARQs, or none; a request is ``{"request": uuid of an ARQ}``.

        Raise Invalid, NotFound, WrongState.
        """
        scope = check_optional_text("project_scope", project_scope)
        uuids = [item.request for item in _load_requests(UnbindRequest, requests)]
        tracing.annotate(arq=uuids)
        released = self._uow.run_once(partial(self._unbind, uuids=uuids, scope=scope))
        self.finish_release(released, deleted=False)

    def delete(
        self,
        uuids: Sequence[str] | None,
        instance: str | None,
        project_scope: str | None,
        allow_bound: bool,
    ) -> None:
        """Delete ARQs by uuid, or all ARQs of an instance, and free their handles.

        An instance without ARQs is not an error. With uuids, the existing ARQs are deleted even if
        some do not exist; NotFound then lists the missing ARQs. Raise ServiceTokenRequired, and
        delete nothing, if an ARQ owns a handle and ``allow_bound`` is False.
        """
        scope = check_optional_text("project_scope", project_scope)
        if (uuids is None) == (instance is None):
            raise Invalid("give either arqs or instance, not both", field="arqs")
        tracing.annotate(arq=uuids, instance=instance)
        instance_uuid = None if instance is None else parse_uuid(instance, "instance")
        requested = () if uuids is None else parse_uuids(uuids)

        def work(tx: sa.Connection) -> _Deletion:
            if instance_uuid is not None:
                rows = store.lock_of_instance(tx, instance_uuid, scope)
                return self._delete(tx, rows, allow_bound)
            return self._delete(tx, store.lock(tx, requested, scope), allow_bound)

        def missing_error(deletion: _Deletion) -> NotFound | None:
            missing = sorted(set(requested) - deletion.existing)
            return arqs_not_found(missing) if missing else None

        # The deletion of the existing ARQs commits, with the error as the recorded answer.
        deletion = self._uow.run_once(work, missing_error)
        self.finish_release(deletion.result, deleted=True)
        if (error := missing_error(deletion)) is not None:
            raise error

    def insert_arqs(
        self,
        tx: sa.Connection,
        name: str,
        project_id: str | None,
        limits: project_limits.ProjectLimits | None,
        scope: str | None,
        attachment_id: int | None = None,
        epoch: int | None = None,
    ) -> Sequence[store.NewArqRow]:
        """Insert the ARQs of a profile, or renew those of a context.

        ``scope`` is the only project whose contexts may be used, None for all. ``attachment_id`` is
        the row id of the attachment that gets the ARQs. With ``epoch``, that of the lease of the
        context, the attachment gets the ARQs that the lease has. Raise NotFound, OverLimit,
        WrongState.
        """
        profile = self._find_profile(tx, name, project_id)
        # Not the hidden profile of another attachment.
        if profile["attachment_id"] not in (None, attachment_id):
            raise _profile_not_found(name)
        if (context_id := profile["context_id"]) is None:
            return self._insert(tx, name, profile, project_id, limits, attachment_id)
        recorder, now = self._event_recorder, self._now()
        arqs = renew_context_arqs(
            tx, context_id, scope, now, recorder, attachment_id=attachment_id, epoch=epoch
        )
        if arqs is None:
            raise _profile_not_found(name)
        return arqs

    def _find_profile(
        self, tx: sa.Connection, name: str, project_id: str | None
    ) -> profile_store.ProfileRow:
        """Return a profile, with the number of ARQs of the project if it has a limit."""
        # Counted in the query that reads the profile: a query of its own would cost each boot a
        # round trip.
        limit = self._conf.conductor.max_project_arqs
        is_limited = limit >= 0 and project_id is not None
        profile = profile_store.by_name(tx, name, project_id, max_count=limit if is_limited else 0)
        if profile is None:
            raise _profile_not_found(name)
        return profile

    def _insert(
        self,
        tx: sa.Connection,
        name: str,
        profile: profile_store.ProfileRow,
        project_id: str | None,
        limits: project_limits.ProjectLimits | None,
        attachment_id: int | None = None,
    ) -> list[store.NewArqRow]:
        """Insert the ARQs of a profile. Raise OverLimit, ProjectsMissing.

        ``profile`` is that of ``_find_profile``: its column ``used`` counts the project's ARQs.
        """
        groups = parse_groups(profile["groups"])
        rows = build_arqs(profile["id"], name, groups, project_id, self._now())
        if project_id is not None:
            self._check_limit(tx, project_id, profile["used"], len(rows))
        if limits is not None:
            units = Counter(row["resource_class"] for row in rows)
            project_limits.check_create(tx, project_id, units, limits)
        store.insert_all(tx, rows, attachment_id)
        self._event_recorder.record_created(tx, rows)
        return rows

    def _check_limit(self, tx: sa.Connection, project: str, used: int, new: int) -> None:
        """Raise OverLimit if ``new`` ARQs exceed ``max_project_arqs``.

        ``used`` was counted without a lock. Far from the limit this is enough: a lock would make
        all boots of a project wait for each other. Raise ProjectsMissing.
        """
        limit = self._conf.conductor.max_project_arqs
        if limit < 0 or used + new + LIMIT_MARGIN <= limit:
            return
        # Near the limit only, see above: then the count is exact, since every creation waits here.
        project_limits.lock_projects(tx, [project])
        used = project_units.count_arqs(tx, project, limit)
        if used + new > limit:
            raise OverLimit(
                f"project {project} has {used} accelerator requests and the limit is {limit}, "
                f"cannot create {new} more; delete unused accelerator requests",
                limit=limit,
                used=used,
            )

    def bind_locked(
        self,
        tx: sa.Connection,
        bind_requests: Sequence[BindRequest],
        scope: str | None,
        context: BindContext,
        *,
        wait: bool,
        append: bool = False,
        subject: str | None = None,
        has_bound_event: bool = True,
    ) -> BindResult:
        """Bind within a transaction, and record the events. Raise as ``binding.bind``.

        Without ``has_bound_event``, Nova gets an event only at the end of host work.
        """
        result = binding.bind(
            tx, bind_requests, scope, context, wait=wait, append=append, subject=subject
        )
        if result.host_work_pending:
            self._event_recorder.record_bind_started(tx, result.arqs)
        else:
            # Nova's own bind needs none: nova-compute reads the ARQs after the answer, and waits
            # for events of those only that are not Bound (``_get_bound_arq_resources`` of Nova).
            self._event_recorder.record_bound(tx, result.arqs, has_nova_event=has_bound_event)
        record_claimed(tx, result.arqs, self._event_recorder)
        return result

    def finish_bind(
        self, result: BindResult, instance: str, *, has_bound_event: bool = True
    ) -> None:
        """Log a bind after its commit, and wake the loops that have new work."""
        if result.arqs:
            message = "Preparing %d ARQ(s)" if result.host_work_pending else "Bound %d ARQ(s)"
            arqs = [arq["uuid"] for arq in result.arqs]
            LOG.info(message, len(arqs), instance=instance, arq=arqs)
            self.binder.wake(result, has_bound_event=has_bound_event)

    def _unbind(
        self, tx: sa.Connection, uuids: Sequence[str], scope: str | None
    ) -> release.ReleaseResult:
        """Unbind ARQs. Raise NotFound, and WrongState if another object owns one of them."""
        rows = store.lock(tx, uuids, scope)
        if missing := sorted(set(uuids) - {row["uuid"] for row in rows}):
            raise arqs_not_found(missing)
        # The host still cleans the handle of an ARQ in UnbindFailed: the ARQ is unbound already.
        todo = [row for row in rows if row["state"] not in UNBOUND_STATES]
        for row in todo:
            if row["state"] not in source_states(Step.UNBIND):
                raise WrongState(
                    f"cannot unbind ARQ {row['uuid']} in state {row['state']}",
                    request=row["uuid"],
                    state=row["state"],
                )
        if attached := [row["uuid"] for row in todo if row["attachment_id"] is not None]:
            raise WrongState(
                f"ARQ {', '.join(attached)} belongs to an attachment, which unbinds it: detach it",
                requests=attached,
            )
        if leased := [row["uuid"] for row in todo if binding.is_leased(row)]:
            raise WrongState(
                f"ARQ {', '.join(leased)} has no instance, its device context has a lease: unbind "
                "the device context",
                requests=leased,
            )
        return self.release_arqs(tx, todo, keep=True)

    def _delete(
        self, tx: sa.Connection, rows: Sequence[store.ArqRow], allow_bound: bool
    ) -> _Deletion:
        """Delete locked ARQs.

        Skip ARQs that are already being deleted. Without ``allow_bound`` delete nothing, and raise
        ServiceTokenRequired if an ARQ owns a handle, WrongState if one belongs to an attachment.
        An ARQ under a lease stays as it is, like an unbound ARQ of a device context: only an unbind
        of the context ends the lease.
        """
        existing = {row["uuid"] for row in rows}
        rows = [row for row in rows if not binding.is_leased(row)]
        if not allow_bound and any(row["state"] in OWNING_STATES for row in rows):
            bound = sorted(row["uuid"] for row in rows if row["state"] in OWNING_STATES)
            raise ServiceTokenRequired(
                f"deleting a bound ARQ requires a service token: {', '.join(bound)}",
                requests=bound,
            )
        attached = sorted(row["uuid"] for row in rows if row["attachment_id"] is not None)
        if attached and not allow_bound:
            raise WrongState(
                f"ARQ {', '.join(attached)} belongs to an attachment, which deletes it: detach it",
                requests=attached,
            )
        # An ARQ in Deleting is already being deleted.
        todo = [row for row in rows if row["state"] in source_states(Step.DELETE)]
        return _Deletion(self.release_arqs(tx, todo, keep=False), existing)

    def release_arqs(
        self, tx: sa.Connection, rows: Sequence[store.ArqRow], *, keep: bool
    ) -> release.ReleaseResult:
        """Release locked ARQs within a transaction, and record the events. Raise WrongState."""
        timeout, now = self._conf.conductor.release_timeout, self._now()
        rows = [row for row in rows if not release.is_idle(row)]
        result = release.release(tx, rows, keep=keep, now=now, timeout=timeout, whole_sets=True)
        self._event_recorder.record_released(tx, rows, keep=keep, failed=result.failed_arqs)
        follow_arqs(tx, rows, self._event_recorder, now)
        # Other ARQs, whose bind waited for the same job, are BindFailed now.
        failure = release.make_cancelled(now)
        follow_arqs(tx, result.failed_arqs, self._event_recorder, now, failure)
        return result

    def finish_release(self, result: release.ReleaseResult, *, deleted: bool) -> None:
        """Log the released ARQs and wake the loops that have new work."""
        message = "Deleted %d ARQ(s)" if deleted else "Unbound %d ARQ(s)"
        for instance, arqs in sorted(result.instances.items()):
            LOG.info(message, len(arqs), instance=instance or None, arq=arqs)
        if result.providers:
            self._wake_publisher()
        if result.jobs_created:
            self._wake_jobs()
        if result.failed_arqs:
            self._wake_outbox()


def _load_requests(kind: type[R], items: Any) -> tuple[R, ...]:
    """Parse the requests of a bind or unbind call. Raise Invalid, which names the wrong field."""
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise Invalid("expected a list of ARQs to bind or unbind", field="requests")
    try:
        requests = tuple(kind.from_dict(item) for item in items)
    except KeyError as exc:
        raise Invalid(f"/{exc.args[0]} is missing", field=f"/{exc.args[0]}") from exc
    except TypeError as exc:
        raise Invalid(f"malformed ARQ to bind or unbind: {exc}", field="requests") from exc
    check_requests(requests)
    return requests


def _profile_not_found(name: str) -> NotFound:
    return NotFound(
        f"no device profile {name[:255]!r}; GET /v2/device_profiles lists the known ones",
        device_profile_name=name[:255],
    )


def _created(rows: Sequence[store.NewArqRow]) -> dict[str, Any]:
    return {"arqs": [to_response(row) for row in rows]}

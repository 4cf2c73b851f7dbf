# SPDX-License-Identifier: Apache-2.0
"""Create, bind, unbind and delete accelerator requests (ARQs); each call is one transaction.

All transactions lock in the same order: ARQs by id, then handles by id. If a database locks in
another order and a deadlock results, the unit of work runs the transaction again.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db import exception as db_exc

from cyborg.conductor.arqs import binding, release
from cyborg.conductor.arqs.binding import BindContext
from cyborg.conductor.arqs.claims import ClaimLost
from cyborg.conductor.common.timestamps import to_iso
from cyborg.conductor.notifications import arq_events
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.arq import profile as profiles
from cyborg.core.arq.arqs import (
    BindRequest,
    UnbindRequest,
    arqs_not_found,
    check_requests,
    parse_uuids,
)
from cyborg.core.arq.orphans import providers_to_check
from cyborg.core.arq.states import (
    OWNING_STATES,
    UNBOUND_STATES,
    ArqState,
    Step,
    source_states,
)
from cyborg.core.errors import (
    Invalid,
    NoHandle,
    NotFound,
    OverLimit,
    ServiceTokenRequired,
    Unavailable,
    WrongState,
)
from cyborg.core.hosts.liveness import heartbeat_timeout
from cyborg.core.log import get_logger
from cyborg.core.validation import check_optional_text, parse_uuid
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.db.write import arqs as store
from cyborg.db.write import device_profiles as profile_store

LOG = get_logger(__name__)

R = TypeVar("R", BindRequest, UnbindRequest)

# Transactions of one bind. The first skips locked handles, the next ones wait for the locks.
MAX_ATTEMPTS = 4


class OwnerLookup(Protocol):
    """Interface of ``cyborg.conductor.arqs.ownership.OwnerResolver``."""

    def find_project(self, instance: str) -> str | None:
        """Return the project of an instance, None if it has no allocation. Raise Unavailable."""


class OrphanChecker(Protocol):
    """Interface of ``cyborg.conductor.arqs.orphan_check.OrphanCheck``."""

    def release_at(self, providers: Sequence[str]) -> bool:
        """Release the orphaned ARQs of these providers; return whether to retry the bind."""


def _do_nothing() -> None:
    """Do nothing: the default for the wake-up functions."""


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
        now: Callable[[], datetime] | None = None,
    ) -> None:
        """``wake_outbox`` and ``wake_jobs`` are called after a commit that adds work for them.

        Without ``owners``, an ARQ keeps the project for which it was created. Without ``orphans``,
        a bind that finds no free handle fails without a retry.
        """
        self._conf = conf
        self._uow = uow
        self._wake_outbox = wake_outbox
        self._wake_jobs = wake_jobs
        self._owners = owners
        self._orphans = orphans
        self._now = now or uow.clock
        self._event_recorder = arq_events.ArqEventRecorder(
            conf, notifications or NotificationBuilder(conf, now=self._now)
        )

    def create(self, device_profile_name: str, project_id: str | None) -> dict[str, Any]:
        """Create an ARQ for each unit of the profile; return ``{"arqs": [row of each ARQ]}``.

        Raise NotFound if the profile does not exist or is deleted concurrently.
        """
        if not isinstance(device_profile_name, str):
            raise Invalid("device_profile_name must be a string", field="device_profile_name")
        if not device_profile_name or not device_profile_name.isprintable():
            # No profile can have such a name.
            raise _profile_not_found(ascii(device_profile_name))
        project_id = check_optional_text("project_id", project_id)
        try:
            rows = self._uow.run_once(
                lambda tx: self._create(tx, device_profile_name, project_id), _created
            )
        except db_exc.DBReferenceError as exc:
            raise _profile_not_found(device_profile_name) from exc
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
        Conflict (the instance has other ARQs), NoHandle with the reasons.
        """
        scope = check_optional_text("project_scope", project_scope)
        bind_requests = _load_requests(BindRequest, requests)
        project = check_optional_text("instance_project", instance_project)
        self._bind(bind_requests, scope, project)

    def unbind(self, requests: Sequence[Mapping[str, Any]], project_scope: str | None) -> None:
        """Unbind all the given ARQs, or none; a request is ``{"request": uuid of an ARQ}``.

        Raise Invalid, NotFound, WrongState.
        """
        scope = check_optional_text("project_scope", project_scope)
        uuids = [item.request for item in _load_requests(UnbindRequest, requests)]
        released = self._uow.run_once(partial(self._unbind, uuids=uuids, scope=scope))
        self._finish(released, deleted=False)

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
        if instance is not None:
            instance_uuid = parse_uuid(instance, "instance")
            result, _ = self._uow.run_once(
                lambda tx: self._delete(
                    tx, store.lock_of_instance(tx, instance_uuid, scope), allow_bound
                )
            )
            self._finish(result, deleted=True)
            return
        requested = parse_uuids(uuids or ())

        def missing_error(deleted: tuple[release.ReleaseResult, set[str]]) -> NotFound | None:
            missing = sorted(set(requested) - deleted[1])
            return arqs_not_found(missing) if missing else None

        deleted = self._uow.run_once(
            lambda tx: self._delete(tx, store.lock(tx, requested, scope), allow_bound),
            missing_error,
        )
        self._finish(deleted[0], deleted=True)
        if (error := missing_error(deleted)) is not None:
            raise error

    def _create(
        self, tx: sa.Connection, name: str, project_id: str | None
    ) -> list[store.NewArqRow]:
        rows = self._insert_arqs(tx, name, project_id)
        self._event_recorder.record_created(tx, rows)
        return rows

    def _insert_arqs(
        self, tx: sa.Connection, name: str, project_id: str | None
    ) -> list[store.NewArqRow]:
        """Insert the ARQs of a profile. Raise NotFound, OverLimit.

        ARQs of concurrent transactions are not counted. A project can exceed its limit by the
        number of ARQs that all conductors create for it at the same time.
        """
        limit = self._conf.conductor.max_project_arqs
        is_limited = limit >= 0 and project_id is not None
        profile = profile_store.by_name(tx, name, project_id, limit if is_limited else 0)
        if profile is None:
            raise _profile_not_found(name)
        rows = _build_rows(profile, project_id, self._now())
        if is_limited and profile["used"] + len(rows) > limit:
            raise OverLimit(
                f"project {project_id} has {profile['used']} accelerator requests and the limit is "
                f"{limit}, cannot create {len(rows)} more; delete unused accelerator requests",
                limit=limit,
                used=profile["used"],
            )
        store.insert_all(tx, rows)
        return rows

    def _bind(
        self, bind_requests: Sequence[BindRequest], scope: str | None, project: str | None
    ) -> None:
        instance = bind_requests[0].instance_uuid
        context = self._bind_context(instance, project)
        result = self._try_bind(bind_requests, scope, context)
        if isinstance(result, NoHandle) and self._release_orphans(result):
            result = self._try_bind(bind_requests, scope, context)
        if isinstance(result, NoHandle):
            # Nova logs only the HTTP status of the error, so the reasons are logged here.
            LOG.warning(
                "No free handle: %s",
                result.message,
                instance=instance,
                arq=[item.request for item in bind_requests],
            )
            raise result
        if not result.arqs:
            return
        message = "Preparing %d ARQ(s)" if result.host_work_pending else "Bound %d ARQ(s)"
        LOG.info(
            message,
            len(result.arqs),
            instance=instance,
            arq=[arq["uuid"] for arq in result.arqs],
        )
        if result.host_work_pending:
            self._wake_jobs()
        elif self._conf.nova.send_events:
            self._wake_outbox()

    def _try_bind(
        self, bind_requests: Sequence[BindRequest], scope: str | None, context: BindContext
    ) -> binding.BindResult | NoHandle:
        """Bind in one transaction; retry if concurrent transactions claim the handles.

        Return the result. If no handle is free, return the NoHandle error, which the caller logs
        and raises.
        """
        for attempt in range(MAX_ATTEMPTS):
            work = partial(
                self._bind_once,
                bind_requests=bind_requests,
                scope=scope,
                context=context,
                wait=attempt > 0,
            )
            try:
                return self._uow.run_once(work)
            except ClaimLost:
                continue
            except NoHandle as exc:
                return exc
        return NoHandle(
            f"all candidate handles were claimed concurrently ({MAX_ATTEMPTS} attempts), retry",
            reasons={},
        )

    def _release_orphans(self, no_handle: NoHandle) -> bool:
        """Release orphaned ARQs that own the handles needed; return whether to retry the bind.

        Call this outside a transaction: it queries Placement and Nova.
        """
        if self._orphans is None:
            return False
        return self._orphans.release_at(providers_to_check(no_handle.details["reasons"]))

    def _bind_once(
        self,
        tx: sa.Connection,
        bind_requests: Sequence[BindRequest],
        scope: str | None,
        context: BindContext,
        wait: bool,
    ) -> binding.BindResult:
        result = binding.bind(tx, bind_requests, scope, context, wait=wait)
        if result.host_work_pending:
            self._event_recorder.record_bind_started(tx, result.arqs)
        else:
            self._event_recorder.record_bound(tx, result.arqs)
        return result

    def _bind_context(self, instance: str, project: str | None) -> BindContext:
        """Build the context of a bind; query the project of the instance if ``project`` is None."""
        conf, now = self._conf.conductor, self._now()
        verified, owner = True, None
        if project is None and self._owners is not None:
            error: str | None = None
            try:
                owner = self._owners.find_project(instance)
            except Unavailable as exc:
                error = exc.message
            if error is not None:
                LOG.warning(
                    "Cannot determine the project of an instance now, will retry: %s",
                    error,
                    instance=instance,
                )
            verified = owner is not None
        return BindContext(
            now=now,
            prepare_timeout=conf.prepare_timeout,
            alive_since=now - heartbeat_timeout(conf.hello_interval, conf.down_heartbeats),
            project=owner,
            owner_verified=verified,
        )

    def _unbind(
        self, tx: sa.Connection, uuids: Sequence[str], scope: str | None
    ) -> release.ReleaseResult:
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
        return self._release(tx, todo, keep=True)

    def _delete(
        self, tx: sa.Connection, rows: Sequence[store.ArqRow], allow_bound: bool
    ) -> tuple[release.ReleaseResult, set[str]]:
        """Delete locked ARQs; return the result, and the uuids of all given ARQs.

        Skip ARQs that are already being deleted. Raise ServiceTokenRequired, and delete nothing,
        if an ARQ owns a handle and ``allow_bound`` is False.
        """
        if not allow_bound and any(row["state"] in OWNING_STATES for row in rows):
            bound = sorted(row["uuid"] for row in rows if row["state"] in OWNING_STATES)
            raise ServiceTokenRequired(
                f"deleting a bound ARQ requires a service token: {', '.join(bound)}",
                requests=bound,
            )
        # An ARQ in Deleting is already being deleted.
        todo = [row for row in rows if row["state"] in source_states(Step.DELETE)]
        return self._release(tx, todo, keep=False), {row["uuid"] for row in rows}

    def _release(
        self, tx: sa.Connection, rows: Sequence[store.ArqRow], *, keep: bool
    ) -> release.ReleaseResult:
        timeout = self._conf.conductor.release_timeout
        result = release.release(tx, rows, keep=keep, now=self._now(), timeout=timeout)
        self._event_recorder.record_released(tx, rows, keep=keep, failed=result.failed_arqs)
        return result

    def _finish(self, result: release.ReleaseResult, *, deleted: bool) -> None:
        """Log the released ARQs and wake the loops that have new work."""
        message = "Deleted %d ARQ(s)" if deleted else "Unbound %d ARQ(s)"
        for instance, arqs in sorted(result.instances.items()):
            LOG.info(message, len(arqs), instance=instance or None, arq=arqs)
        if result.jobs_created:
            self._wake_jobs()
        if result.failed_arqs:
            self._wake_outbox()


def _build_rows(
    profile: profile_store.UsedProfileRow, project_id: str | None, now: datetime
) -> list[store.NewArqRow]:
    return [
        {
            "uuid": str(uuid4()),
            "state": str(ArqState.INITIAL),
            "profile_id": profile["id"],
            "device_profile_name": profile["name"],
            "device_profile_group_id": slot.group_id,
            "resource_class": slot.resource_class,
            "group": slot.group.to_dict(),
            "project_id": project_id,
            "created_at": now,
        }
        for slot in profiles.expand_slots(profiles.parse_groups(profile["groups"]))
    ]


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
    return NotFound(f"no device profile {name[:255]!r}", device_profile_name=name[:255])


def _created(rows: Sequence[store.NewArqRow]) -> dict[str, Any]:
    return {"arqs": [_to_response(row) for row in rows]}


def _to_response(row: store.NewArqRow) -> dict[str, Any]:
    """Convert the row of a new, unbound ARQ to the dictionary that the API shows."""
    public = {key: value for key, value in row.items() if key != "profile_id"}
    return public | {
        "hostname": None,
        "device_rp_uuid": None,
        "instance_uuid": None,
        "attach_handle_type": "",
        "attach_handle_uuid": None,
        "attach_handle_info": {},
        "created_at": to_iso(row["created_at"]),
        "updated_at": None,
    }

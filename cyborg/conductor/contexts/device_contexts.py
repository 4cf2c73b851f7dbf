# SPDX-License-Identifier: Apache-2.0
"""Create, change, expire and delete device contexts; each call is one transaction.

A context is created with its hidden device profile and its ARQs. Nova binds and unbinds these ARQs;
``cyborg.conductor.binding.context_states`` keeps the state of the context. All transactions lock
ARQs before contexts.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.clients.placement import Placement
from cyborg.conductor.binding import limits as project_limits
from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.binding.context_states import expiry, record_contexts
from cyborg.conductor.binding.creation import build_arqs
from cyborg.conductor.binding.release import ReleaseResult
from cyborg.conductor.notifications.notifications import ArqEventRecorder, NotificationBuilder
from cyborg.core.attachments.selector import attached_error
from cyborg.core.attachments.successor import describe_work
from cyborg.core.binding.profile import Group, find_target, hidden_profile_name, parse_groups
from cyborg.core.binding.states import Step, source_states
from cyborg.core.contexts import context as core
from cyborg.core.contexts.states import DELETABLE, EDITABLE, IN_USE, LEASED, ContextState
from cyborg.core.errors import Invalid, NotFound, OverLimit, Unavailable, WrongState
from cyborg.core.log import get_logger
from cyborg.core.notification import Event
from cyborg.core.text import to_iso
from cyborg.core.validation import check_integer, check_optional_text, parse_uuid
from cyborg.db.attachments import write as attachments
from cyborg.db.binding import write as arqs
from cyborg.db.contexts import write as store
from cyborg.db.profiles import write as device_profiles
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

BATCH = 100  # contexts that one transaction of a sweep deletes
MAX_BATCHES = 20  # transactions of one sweep
# The columns of a new context that its INSERT leaves to the database.
_UNSET = ("hostname", "instance_uuid", "error", "failure", "lease_expires_at", "updated_at")


class DeviceContexts:
    """Operations on device contexts.

    ``project_scope`` limits a call to the contexts of one project; None means all projects.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        placement: Placement | None = None,
        notifications: NotificationBuilder | None = None,
        *,
        arqs: Arqs | None = None,
        limit_source: project_limits.LimitSource | None = None,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        """Without ``placement``, allocation candidates cannot be queried.

        Without ``arqs``, no context in use can be deleted. Without ``limit_source``, projects have
        no limits of units.
        """
        self._arqs = arqs
        self._conf = conf
        self._uow = uow
        self._placement = placement
        self._limit_source = limit_source
        self._now = now or uow.clock
        self._recorder = ArqEventRecorder(
            conf, notifications or NotificationBuilder(conf, now=self._now)
        )

    def create(self, context: Mapping[str, Any], project_id: str | None) -> dict[str, Any]:
        """Create a context with its hidden profile and its ARQs; return its row as plain values.

        Raise Invalid with the field, NotFound if the device profile does not exist, Conflict if
        its devices would not be for a server or a port, OverLimit.
        """
        request = core.parse_request(context)
        project = check_optional_text("project_id", project_id)
        if project is None:
            raise Invalid(
                "project_id: a device context belongs to a project, and this token has none: use "
                "a token of a project",
                field="project_id",
            )
        return project_limits.run_with_limits(
            self._uow,
            self._limit_source,
            [project],
            lambda limits: self._uow.run_once(
                lambda tx: self._create(tx, request, project, limits), answer=dict
            ),
        )

    def update(
        self, uuid: str, changes: Mapping[str, Any], project_scope: str | None
    ) -> dict[str, Any]:
        """Change an unbound context; return its row as plain values.

        Raise Invalid with the field, NotFound, WrongState if the context is not unbound.
        """
        uuid, scope = parse_selection(uuid, project_scope)
        values = core.parse_changes(changes, self._now())
        return self._uow.run_once(lambda tx: self._update(tx, uuid, values, scope), dict)

    def delete(self, uuid: str, project_scope: str | None, allow_bound: bool | None = None) -> None:
        """Delete a context with its ARQs and its hidden profile.

        With ``allow_bound``, a context in use is unbound in the same transaction; the host cleans
        its former handles afterwards. Raise NotFound, and WrongState if the context owns handles
        and this is not allowed, has a lease, or is attached to a server.
        """
        uuid, scope = parse_selection(uuid, project_scope)
        allowed = DELETABLE | IN_USE if allow_bound is True else DELETABLE
        result = self._uow.run_once(lambda tx: self._delete(tx, uuid, scope, allowed))
        if result is not None and self._arqs is not None:
            # Its log says what became of the handles: the ARQs were unbound before the deletion.
            self._arqs.finish_release(result, deleted=False)
        LOG.info("Deleted device context %s", uuid)

    def candidates(self, uuid: str, project_scope: str | None, limit: int) -> dict[str, Any]:
        """Query Placement for up to ``limit`` allocation candidates of a context.

        Return ``{"candidates": [{"hostname", "mappings": {group number: [provider uuid]}}],
        "reason"}``. ``reason`` is the answer of Placement if it knows no such class or trait, else
        None. Raise Invalid, NotFound, Unavailable.
        """
        uuid, scope = parse_selection(uuid, project_scope)
        if check_integer("limit", limit, core.MAX_CANDIDATES) < 1:
            raise Invalid("limit: expected 1 or more", field="limit")
        groups = self._uow.run(lambda tx: find_context(tx, uuid, scope))["groups"]
        if self._placement is None:
            raise Unavailable("this conductor has no client of Placement")
        query = core.build_query(parse_groups(groups))
        try:
            answer = self._placement.allocation_candidates(query, limit)
        except Invalid as exc:
            # An unknown class or trait: Placement learns of it with the first device that has it.
            return {"candidates": [], "reason": exc.message}
        mappings = core.parse_candidates(answer, len(groups))
        provider_lists = [uuids for mapping in mappings for uuids in mapping.values()]
        providers = set(itertools.chain.from_iterable(provider_lists))
        hosts = self._uow.run(lambda tx: store.hosts(tx, providers))
        return {
            "candidates": [
                {"hostname": _host_of(mapping, hosts), "mappings": mapping} for mapping in mappings
            ],
            "reason": None,
        }

    def sweep(self) -> int:
        """Delete expired contexts and return their number."""
        deleted = 0
        # Small transactions: a large one would hold its locks while Nova binds and unbinds.
        for _ in range(MAX_BATCHES):
            num_deleted, num_found = self._uow.run(self._expire)
            deleted += num_deleted
            if num_found < BATCH:
                break
        if deleted:
            LOG.info("Deleted %d expired device contexts", deleted)
        return deleted

    def _create(
        self,
        tx: sa.Connection,
        request: core.ContextRequest,
        project: str,
        limits: project_limits.ProjectLimits | None,
    ) -> dict[str, Any]:
        """Insert a context with its hidden profile and its ARQs; return the response."""
        profile_name, groups = self._requested_groups(tx, request)
        now, uuid = self._now(), str(uuid4())
        row: store.NewContextRow = {
            "uuid": uuid,
            "project_id": project,
            "name": request.name,
            "description": request.description,
            "state": str(ContextState.UNBOUND),
            "groups": [group.to_dict() for group in groups],
            "config_data": dict(request.config_data),
            "device_profile": profile_name,
            "expires_at": expiry(now, self._conf.device_contexts.unbound_ttl),
            "created_at": now,
        }
        context_id = store.insert(tx, row)
        name = hidden_profile_name(uuid)
        profile_id = store.insert_hidden_profile(
            tx, context_id, uuid=str(uuid4()), name=name, groups=row["groups"], created_at=now
        )
        merged = core.merge_config(groups, request.config_data)
        rows = build_arqs(profile_id, name, merged, project, now, context_id)
        self._check_limits(tx, project, len(rows))
        if limits is not None:
            units = Counter(row["resource_class"] for row in rows)
            project_limits.check_create(tx, project, units, limits)
        arqs.insert_all(tx, rows)
        # The row as the database has it, without a query.
        created: Any = {**row, **dict.fromkeys(_UNSET), "epoch": 0}
        self._recorder.record_created(tx, rows)
        record_contexts(tx, [created], self._recorder, Event.CONTEXT_CREATED)
        return to_response(created)

    def _requested_groups(
        self, tx: sa.Connection, request: core.ContextRequest
    ) -> tuple[str | None, tuple[Group, ...]]:
        """Return the name of the source profile, if any, and the groups of the context.

        Raise NotFound, Invalid, and Conflict if a group has an unknown attach target.
        """
        # A request has either groups or the name of a profile.
        if request.groups is not None:
            return None, request.groups
        profile = device_profiles.find_visible(tx, request.device_profile or "")
        if profile is None:
            raise NotFound(
                f"device_profile: no device profile {request.device_profile}; GET "
                "/v2/device_profiles lists the known ones",
                device_profile=request.device_profile,
            )
        groups = core.require_owner(parse_groups(profile["groups"]), "device_profile")
        for group in groups:
            # A profile that was created before 2.5 can have any value, which each bind refuses.
            find_target(group, profile["name"])
        return profile["name"], groups

    def _check_limits(self, tx: sa.Connection, project: str, new_arqs: int) -> None:
        """Raise OverLimit if the new context or its ARQs exceed a limit of the project.

        The new context is already inserted, its ARQs are not. Raise ProjectsMissing.
        """
        limit = self._conf.device_contexts.max_per_project
        arq_limit = self._conf.conductor.max_project_arqs
        project_limits.lock_projects(tx, [project])
        # Counted up to the limits only; one more context for the new one. -1 means no limit.
        used = store.project_usage(
            tx, project, max_contexts=max(limit + 1, 0), max_arqs=max(arq_limit, 0)
        )
        if 0 <= limit < used["contexts"]:
            raise OverLimit(
                f"project {project} has {used['contexts'] - 1} device contexts and the limit is "
                f"{limit}; delete unused device contexts",
                limit=limit,
                used=used["contexts"] - 1,
            )
        if 0 <= arq_limit < used["arqs"] + new_arqs:
            raise OverLimit(
                f"project {project} has {used['arqs']} accelerator requests and the limit is "
                f"{arq_limit}, cannot create {new_arqs} more for a device context; delete unused "
                "accelerator requests and device contexts",
                limit=arq_limit,
                used=used["arqs"],
            )

    def _update(
        self, tx: sa.Connection, uuid: str, values: Mapping[str, Any], scope: str | None
    ) -> dict[str, Any]:
        """Write the columns ``values`` of a context; return the response.

        Raise NotFound, WrongState.
        """
        context_id = find_context(tx, uuid, scope)["id"]
        # ARQs before contexts, as everywhere: the new config data changes their groups.
        arqs.lock_of_contexts(tx, [context_id])
        if not store.update(tx, context_id, values):
            # Read again for the error: the state may have just changed.
            raise _wrong_state(find_context(tx, uuid, scope), "change", EDITABLE)
        context = find_context(tx, uuid, scope)
        if "config_data" in values:
            # The ARQs have copies of the groups, which jobs and restores read.
            groups = core.merge_config(parse_groups(context["groups"]), values["config_data"])
            store.set_arq_groups(tx, context["id"], [group.to_dict() for group in groups])
        record_contexts(tx, [context], self._recorder, Event.CONTEXT_UPDATED)
        return to_response(context)

    def _delete(
        self, tx: sa.Connection, uuid: str, scope: str | None, allowed: frozenset[ContextState]
    ) -> ReleaseResult | None:
        """Delete a context in one of the allowed states; return what was unbound for it.

        Raise NotFound, WrongState.
        """
        context_id = find_context(tx, uuid, scope)["id"]
        locked, rows = store.lock_with_arqs(tx, [context_id])
        context = next(iter(locked), None)
        if context is None:
            raise _not_found(uuid)
        refuse_attached(tx, context, rows)
        if context["state"] not in allowed:
            raise _wrong_state(context, "delete", allowed)
        if (work := store.find_successor(tx, context_id)) is not None:
            raise WrongState(
                f"cannot delete device context {uuid}: "
                f"{describe_work(work['state'], work['step'])}",
                device_context=uuid,
                state=context["state"],
            )
        result = None
        if context["state"] in IN_USE and self._arqs is not None:
            # The release follows the states of the ARQs, and so changes the context: read it again.
            todo = [row for row in rows if row["state"] in source_states(Step.UNBIND)]
            result = self._arqs.release_arqs(tx, todo, keep=True)
            locked, rows = store.lock_with_arqs(tx, [context_id])
        self._delete_locked(tx, locked, rows, Event.CONTEXT_DELETED)
        return result

    def _expire(self, tx: sa.Connection) -> tuple[int, int]:
        """Delete a batch of expired contexts; return how many were deleted and how many found."""
        now = self._now()
        ids = store.expired(tx, now, BATCH)
        if not ids:
            return 0, 0
        arqs.lock_of_contexts(tx, ids)
        # Checked again under the lock: a context may have just been bound or changed.
        contexts = store.lock_expired(tx, ids, now)
        # Read again: a concurrent call may have replaced the ARQs. Only new ones are locked here,
        # after their context; a deadlock with their bind is retried.
        old = arqs.lock_of_contexts(tx, [context["id"] for context in contexts])
        self._delete_locked(tx, contexts, old, Event.CONTEXT_EXPIRED)
        return len(contexts), len(ids)

    def _delete_locked(
        self,
        tx: sa.Connection,
        contexts: Sequence[store.ContextRow],
        rows: Sequence[arqs.ArqRow],
        event: Event,
    ) -> None:
        """Delete locked contexts and their locked ARQs. Raise WrongState."""
        if not contexts:
            return
        self._recorder.record_deleted(tx, rows)
        deleted = arqs.delete(tx, [row["id"] for row in rows])
        count = store.delete(tx, [context["id"] for context in contexts])
        # The rows are locked: this is a check that no guard of a DELETE differs from the caller's.
        if deleted != len(rows) or count != len(contexts):
            raise WrongState("the state of a device context or of its ARQs changed concurrently")
        record_contexts(tx, contexts, self._recorder, event)


def _host_of(mapping: Mapping[str, Sequence[str]], hosts: Mapping[str, str]) -> str | None:
    """Return the host of the first known provider; all providers of a candidate have one host."""
    providers = (provider for uuids in mapping.values() for provider in uuids)
    return next((hosts[provider] for provider in providers if provider in hosts), None)


def refuse_attached(
    tx: sa.Connection, context: store.ContextRow, rows: Sequence[arqs.ArqRow]
) -> None:
    """Raise WrongState if an ARQ of a context belongs to an attachment; ``rows`` are the ARQs."""
    for row in rows:
        if (id_ := row["attachment_id"]) is not None:
            raise attached_error(
                context["uuid"],
                context["instance_uuid"],
                context["hostname"],
                attachments.state_of(tx, id_),
            )


def parse_selection(uuid: str, project_scope: str | None) -> tuple[str, str | None]:
    """Return the uuid of a context, and the only project of the caller or None. Raise Invalid."""
    return parse_uuid(uuid, "uuid"), check_optional_text("project_scope", project_scope)


def find_context(tx: sa.Connection, uuid: str, scope: str | None) -> store.ContextRow:
    """Return a context without a lock. Raise NotFound."""
    context = store.find(tx, uuid, scope)
    if context is None:
        raise _not_found(uuid)
    return context


def _not_found(uuid: str) -> NotFound:
    return NotFound(f"no device context {uuid}", device_context=uuid)


def _wrong_state(
    context: store.ContextRow, verb: str, allowed: frozenset[ContextState]
) -> WrongState:
    instance = context["instance_uuid"]
    return WrongState(
        f"cannot {verb} device context {context['uuid']}: it is {context['state']}"
        + (f", instance {instance}" if instance else "")
        + f", expected {' or '.join(sorted(allowed))}",
        device_context=context["uuid"],
        state=context["state"],
    )


def to_response(context: store.ContextRow) -> dict[str, Any]:
    """Convert a row to plain values, without the row id.

    ``expires_at`` is the end of the lease while the context has one.
    """
    hidden = ("id", "lease_expires_at", "failure")
    plain: dict[str, Any] = {name: value for name, value in context.items() if name not in hidden}
    if context["state"] in LEASED:
        plain["expires_at"] = context["lease_expires_at"]
    for name in ("expires_at", "created_at", "updated_at"):
        plain[name] = None if plain[name] is None else to_iso(plain[name])
    return plain

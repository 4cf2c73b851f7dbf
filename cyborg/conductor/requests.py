# SPDX-License-Identifier: Apache-2.0
"""Accelerator requests: made, bound, unbound, deleted; each call is one transaction.

Locks are taken in one order everywhere: requests by id, then handles by id. What two databases
order differently all the same ends as a deadlock, which the unit of work runs again.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Protocol
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db import exception as db_exc
from oslo_log import log
from oslo_utils import timeutils

from cyborg.conductor import binding, events, unbinding, wishlist
from cyborg.conductor.binding import Terms
from cyborg.conductor.claiming import Lost
from cyborg.conductor.limits import optional
from cyborg.conductor.moments import iso
from cyborg.conductor.notices import Notices
from cyborg.core import profile as profiles
from cyborg.core.errors import (
    Invalid,
    NoHandle,
    NotFound,
    ServiceTokenRequired,
    Unavailable,
    WrongState,
)
from cyborg.core.request import Bind, parse_uuid
from cyborg.core.states import HOLDING, RequestState, Step, sources
from cyborg.db.store import device_profiles as profile_store
from cyborg.db.store import requests as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

ATTEMPTS = 4  # transactions: one that waits for nobody, then as long as others are faster


class Owners(Protocol):
    """Who knows whose an instance is: ``cyborg.conductor.owners.Owners``."""

    def project_of(self, instance: str) -> str | None:
        """Return the project of an instance, None when it has no allocation. Raises Unavailable."""


def _nothing() -> None:
    """Wake nobody."""


class Requests:
    """What may be done to accelerator requests.

    In every call ``scope`` is the project whose requests exist for the caller; None is every
    project.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        wake_outbox: Callable[[], None] = _nothing,
        wake_jobs: Callable[[], None] = _nothing,
        owners: Owners | None = None,
        notices: Notices | None = None,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
    ) -> None:
        """``wake_outbox`` and ``wake_jobs`` are called after the commit of work for them.

        Without ``owners`` a request stays with the project that it was made for.
        """
        self._conf = conf
        self._uow = uow
        self._wake_outbox = wake_outbox
        self._wake_jobs = wake_jobs
        self._owners = owners
        self._telling = events.Telling(conf, notices or Notices(conf))
        self._now = now

    def create(self, device_profile_name: str, project_id: str | None) -> dict[str, Any]:
        """Make one request for each unit that the profile asks for; return their rows as ``arqs``.

        Raises NotFound when there is no such profile, or when it is deleted at this moment.
        """
        if not isinstance(device_profile_name, str):
            raise Invalid("device_profile_name must be a string", field="device_profile_name")
        if not device_profile_name or not device_profile_name.isprintable():
            raise _no_profile(ascii(device_profile_name))  # what cannot be a name is nobody's
        project_id = optional("project_id", project_id)
        try:
            rows = self._uow.run(lambda tx: self._create(tx, device_profile_name, project_id))
        except db_exc.DBReferenceError as bad:
            raise _no_profile(device_profile_name) from bad
        return {"arqs": [_plain(row) for row in rows]}

    def patch(
        self,
        wishes: Sequence[Mapping[str, Any]],
        verb: str,
        scope: str | None,
        project: str | None = None,
    ) -> None:
        """Bind or unbind every request named, or none.

        ``verb`` is ``bind`` (a wish has request, hostname, device_rp_uuid, instance_uuid and
        perhaps project_id) or ``unbind`` (request). ``project`` is the one whose instances the
        caller's own roles reach, None when these reach further or nobody knows. Raises Invalid,
        NotFound (request or provider), WrongState, Conflict (the instance has other requests),
        NoHandle with the reasons.
        """
        scope = optional("scope", scope)
        if verb == "bind":
            self._bind(wishlist.read_binds(wishes), scope, optional("project", project))
        elif verb == "unbind":
            uuids = wishlist.read_unbinds(wishes)
            self._after(self._uow.run(partial(self._unbind, uuids=uuids, scope=scope)))
        else:
            raise Invalid(f"verb {str(verb)[:20]!r} is neither 'bind' nor 'unbind'", field="verb")

    def delete(
        self,
        uuids: Sequence[str] | None,
        instance: str | None,
        scope: str | None,
        bound_too: bool,
    ) -> None:
        """Delete requests by their uuids or those of an instance, and free their handles.

        Of an instance there may be none. By uuid the known ones go even when others are unknown,
        of which NotFound then tells. Raises ServiceTokenRequired, and deletes nothing, when one
        holds a handle and ``bound_too`` is False.
        """
        scope = optional("scope", scope)
        if (uuids is None) == (instance is None):
            raise Invalid("expected either arqs or instance", field="arqs")
        if instance is not None:
            of = parse_uuid(instance, "instance")
            done, _ = self._uow.run(
                lambda tx: self._delete(tx, store.lock_of_instance(tx, of, scope), bound_too)
            )
            self._after(done)
            return
        wanted = wishlist.read_uuids(uuids or ())
        done, known = self._uow.run(
            lambda tx: self._delete(tx, store.lock(tx, wanted, scope), bound_too)
        )
        self._after(done)
        if unknown := sorted(set(wanted) - known):
            raise wishlist.unknown(unknown)

    def _create(self, tx: sa.Connection, name: str, project_id: str | None) -> list[dict[str, Any]]:
        rows = _create(tx, name, project_id)
        self._telling.made(tx, rows)
        return rows

    def _bind(self, wishes: Sequence[Bind], scope: str | None, project: str | None) -> None:
        terms = self._terms(wishes[0].instance_uuid, project)
        for attempt in range(ATTEMPTS):
            try:
                work = partial(
                    self._bind_once, wishes=wishes, scope=scope, terms=terms, wait=attempt > 0
                )
                done = self._uow.run(work)
            except Lost:
                continue
            except NoHandle as bad:
                # Nova drops the text of an answer and keeps the status alone: the operator finds
                # the reasons here.
                LOG.warning("No handle for instance %s: %s", wishes[0].instance_uuid, bad.message)
                raise
            break
        else:
            raise NoHandle(
                f"others took each handle first, {ATTEMPTS} times: ask again", reasons={}
            )
        if not done.rows:
            return
        told = "Preparing" if done.started else "Bound"
        LOG.info("%s %d request(s) for instance %s", told, len(done.rows), wishes[0].instance_uuid)
        if done.started:
            self._wake_jobs()
        elif self._conf.nova.notify:
            self._wake_outbox()

    def _bind_once(
        self,
        tx: sa.Connection,
        wishes: Sequence[Bind],
        scope: str | None,
        terms: Terms,
        wait: bool,
    ) -> binding.Done:
        done = binding.bind(tx, wishes, scope, terms, wait=wait)
        if done.started:
            self._telling.started(tx, done.rows)
        else:
            self._telling.bound(tx, done.rows)
        return done

    def _terms(self, instance: str, project: str | None) -> Terms:
        """Settle whose the instance is: an administrator's token does not tell."""
        ours, now = self._conf.conductor, self._now()
        known, owner = True, None
        if project is None and self._owners is not None:
            try:
                owner = self._owners.project_of(instance)
            except Unavailable as bad:
                LOG.warning("Whose instance %s is, is settled later: %s", instance, bad.message)
            known = owner is not None
        return Terms(
            now=now,
            seconds=ours.prepare_timeout,
            alive_since=now - timedelta(seconds=ours.hello_interval * (ours.down_after + 1)),
            project=owner,
            owner_known=known,
        )

    def _unbind(
        self, tx: sa.Connection, uuids: Sequence[str], scope: str | None
    ) -> unbinding.Released:
        rows = store.lock(tx, uuids, scope)
        if unknown := sorted(set(uuids) - {row["uuid"] for row in rows}):
            raise wishlist.unknown(unknown)
        todo = [row for row in rows if row["state"] != RequestState.UNBOUND]
        for row in todo:
            if row["state"] not in sources(Step.UNBIND):
                raise WrongState(
                    f"cannot unbind request {row['uuid']}, which is {row['state']}",
                    request=row["uuid"],
                    state=row["state"],
                )
        return self._release(tx, todo, keep=True)

    def _delete(
        self, tx: sa.Connection, rows: Sequence[sa.RowMapping], bound_too: bool
    ) -> tuple[unbinding.Released, set[str]]:
        """Delete locked requests; return the uuids of those there were."""
        if not bound_too and any(row["state"] in HOLDING for row in rows):
            bound = sorted(row["uuid"] for row in rows if row["state"] in HOLDING)
            raise ServiceTokenRequired(
                f"deleting a bound request requires a service token: {', '.join(bound)}",
                requests=bound,
            )
        # One that is Deleting has its end before it already.
        todo = [row for row in rows if row["state"] in sources(Step.DELETE)]
        return self._release(tx, todo, keep=False), {row["uuid"] for row in rows}

    def _release(
        self, tx: sa.Connection, rows: Sequence[sa.RowMapping], *, keep: bool
    ) -> unbinding.Released:
        done = unbinding.release(tx, rows, keep=keep, now=self._now())
        self._telling.released(tx, rows, keep=keep, failed=done.failed)
        return done

    def _after(self, done: unbinding.Released) -> None:
        if done.jobs:
            self._wake_jobs()
        if done.failed:
            self._wake_outbox()


def _create(tx: sa.Connection, name: str, project_id: str | None) -> list[dict[str, Any]]:
    profile = profile_store.by_name(tx, name)
    if profile is None:
        raise _no_profile(name)
    now = timeutils.utcnow()
    rows = [
        {
            "uuid": str(uuid4()),
            "state": str(RequestState.INITIAL),
            "profile_id": profile["id"],
            "device_profile_name": profile["name"],
            "device_profile_group_id": slot.group_id,
            "resource_class": slot.resource_class,
            "group": slot.group.to_dict(),
            "project_id": project_id,
            "created_at": now,
        }
        for slot in profiles.slots(profiles.parse_groups(profile["groups"]))
    ]
    store.insert_all(tx, rows)
    return rows


def _no_profile(name: str) -> NotFound:
    return NotFound(f"no device profile {name[:255]!r}", device_profile_name=name[:255])


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new request as the read side shows it: unbound, without its database ids."""
    shown = {key: value for key, value in row.items() if key != "profile_id"}
    return shown | {
        "hostname": None,
        "device_rp_uuid": None,
        "instance_uuid": None,
        "attach_handle_type": "",
        "attach_handle_uuid": None,
        "attach_handle_info": {},
        "created_at": iso(row["created_at"]),
        "updated_at": None,
    }

# SPDX-License-Identifier: Apache-2.0
"""Accelerator requests: made, bound, unbound, deleted; each call is one transaction.

Locks are taken in one order everywhere: requests by id, then handles by id. What two databases
order differently all the same ends as a deadlock, which the unit of work runs again.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db import exception as db_exc
from oslo_log import log
from oslo_utils import timeutils

from cyborg.conductor import binding, wishlist
from cyborg.conductor.limits import optional
from cyborg.conductor.moments import iso
from cyborg.core import profile as profiles
from cyborg.core.errors import Invalid, NoHandle, NotFound, ServiceTokenRequired, WrongState
from cyborg.core.request import Bind, parse_uuid
from cyborg.core.states import HOLDING, RequestState, Step, sources
from cyborg.db.store import claims
from cyborg.db.store import device_profiles as profile_store
from cyborg.db.store import requests as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

ATTEMPTS = 4  # transactions: one that waits for nobody, then as long as others are faster


class Requests:
    """What may be done to accelerator requests.

    In every call ``scope`` is the project whose requests exist for the caller; None is every
    project.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        wake_outbox: Callable[[], None] = lambda: None,
    ) -> None:
        """``wake_outbox`` is called after the commit of anything that Nova must be told."""
        self._conf = conf
        self._uow = uow
        self._wake_outbox = wake_outbox

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
            rows = self._uow.run(lambda tx: _create(tx, device_profile_name, project_id))
        except db_exc.DBReferenceError as bad:
            raise _no_profile(device_profile_name) from bad
        return {"arqs": [_plain(row) for row in rows]}

    def patch(self, wishes: Sequence[Mapping[str, Any]], verb: str, scope: str | None) -> None:
        """Bind or unbind every request named, or none.

        ``verb`` is ``bind`` (a wish has request, hostname, device_rp_uuid, instance_uuid and
        perhaps project_id) or ``unbind`` (request). Raises Invalid, NotFound (request or provider),
        WrongState, Conflict (the instance has other requests), NoHandle with the reasons.
        """
        scope = optional("scope", scope)
        if verb == "bind":
            self._bind(wishlist.read_binds(wishes), scope)
        elif verb == "unbind":
            uuids = wishlist.read_unbinds(wishes)
            self._uow.run(lambda tx: _unbind(tx, uuids, scope))
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
            self._uow.run(lambda tx: _delete(tx, store.lock_of_instance(tx, of, scope), bound_too))
            return
        wanted = wishlist.read_uuids(uuids or ())
        known = self._uow.run(lambda tx: _delete(tx, store.lock(tx, wanted, scope), bound_too))
        if unknown := sorted(set(wanted) - known):
            raise wishlist.unknown(unknown)

    def _bind(self, wishes: Sequence[Bind], scope: str | None) -> None:
        notify = self._conf.nova.notify
        for attempt in range(ATTEMPTS):
            try:
                work = partial(
                    binding.bind, wishes=wishes, scope=scope, notify=notify, wait=attempt > 0
                )
                bound = self._uow.run(work)
            except binding.Lost:
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
        if bound:
            LOG.info("Bound %s request(s) to instance %s", bound, wishes[0].instance_uuid)
            if notify:
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


def _unbind(tx: sa.Connection, uuids: Sequence[str], scope: str | None) -> None:
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
    if not todo:
        return
    ids = [row["id"] for row in todo]
    claims.release(tx, ids)
    if store.unbind(tx, ids) != len(ids):
        raise WrongState("a request changed while it was unbound: ask again")


def _delete(tx: sa.Connection, rows: Sequence[sa.RowMapping], bound_too: bool) -> set[str]:
    """Delete locked requests; return the uuids of those there were."""
    holding = [row["id"] for row in rows if row["state"] in HOLDING]
    if holding and not bound_too:
        bound = sorted(row["uuid"] for row in rows if row["state"] in HOLDING)
        raise ServiceTokenRequired(
            f"deleting a bound request requires a service token: {', '.join(bound)}",
            requests=bound,
        )
    if holding:
        claims.release(tx, holding)
    # One that is Deleting has its end before it already.
    ids = [row["id"] for row in rows if row["state"] in sources(Step.DELETE)]
    if ids and store.delete(tx, ids) != len(ids):
        raise WrongState("a request changed while it was deleted: ask again")
    return {row["uuid"] for row in rows}


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

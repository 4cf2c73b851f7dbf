# SPDX-License-Identifier: Apache-2.0
"""Discoveries on demand: asked of agents, answered by them later, never left open for ever."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_context import context
from oslo_log import log
from oslo_utils import timeutils

from cyborg.conductor import limits
from cyborg.conductor.calls import Calls
from cyborg.core import wire
from cyborg.core.errors import CyborgError, Invalid, NotFound
from cyborg.core.report import BackendState, BackendStatus
from cyborg.core.request import parse_uuid
from cyborg.db.store import discoveries as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

KEEP = timedelta(days=1)  # how long discoveries can be looked up
PURGED = 1000  # parts of them at a time
_OUTCOMES: Mapping[BackendStatus, str] = {
    BackendStatus.READY: store.DONE,
    BackendStatus.ERROR: store.FAILED,
}


class Agents(Protocol):
    """What asks agents: `cyborg.rpc.agent.AgentClient`."""

    def discovery(
        self, host: str, driver: str | None = None, discovery_id: str | None = None
    ) -> Mapping[str, Any]:
        """Have one agent begin a discovery."""


class Discoveries:
    """What may be done about discoveries."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        agents: Agents,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
    ) -> None:
        self._conf = conf
        self._uow = uow
        self._agents = agents
        self._now = now
        self._calls = Calls("discovery")

    def create(self, host: str | None = None, driver: str | None = None) -> dict[str, Any]:
        """Have backends look again: all, those of a host, those of a driver or both.

        Returns the uuid of the discovery at once; what comes of it stands in its rows. Raises
        NotFound, with names that are near, when there is no such host or backend.
        """
        host, driver = limits.optional("host", host), limits.optional("driver", driver)
        uuid = str(uuid4())

        def write(tx: sa.Connection) -> list[str]:
            meant = store.targets(tx, host, driver)
            if not meant:
                raise _nothing(store.targets(tx, None, None), host, driver)
            store.add(tx, uuid, [(row["host"], row["backend"]) for row in meant])
            return sorted({row["host"] for row in meant})

        asker = context.get_current()

        def ask(one: str) -> None:
            if asker is not None:
                asker.update_store()  # the agents' logs show the request, too
            self._ask(uuid, one, driver)

        self._calls.begin(ask, self._uow.run(write))
        return {"uuid": uuid}

    def done(self, discovery_id: str, host: str, drivers: Sequence[Mapping[str, Any]]) -> None:
        """Take an agent's word on how its backends' discovery ended. Raises Invalid."""
        uuid = parse_uuid(discovery_id, "discovery_id")
        host = limits.text("host", host)
        outcomes = [
            (state.name, _OUTCOMES[state.status], state.error)
            for state in _read(drivers)
            if state.status in _OUTCOMES
        ]
        self._uow.run(lambda tx: store.decide(tx, uuid, host, outcomes))

    def sweep(self) -> int:
        """Fail what has been in progress for too long, and forget what is old.

        Returns how many backends' rows that was.
        """
        # A call on the bus, the discovery itself, and the call back.
        seconds = 2 * self._conf.rpc.timeout + self._conf.agent.discovery_timeout
        before = self._now() - timedelta(seconds=seconds)
        error = f"no answer in {seconds:g} s: is the agent of this host running?"
        old = self._now() - KEEP
        purged = self._uow.run(lambda tx: store.purge(tx, old, PURGED))
        return purged + self._uow.run(lambda tx: store.fail_older(tx, before, error))

    def stop(self) -> None:
        """Begin no more calls; those that were not made are failed by a later sweep."""
        self._calls.stop()

    def _ask(self, uuid: str, host: str, driver: str | None) -> None:
        try:
            self._agents.discovery(host=host, driver=driver, discovery_id=uuid)
        except CyborgError as bad:
            self._fail(uuid, host, bad.message)
        except Exception:
            LOG.exception("Asking %s for a discovery failed for a reason nobody foresaw", host)
            self._fail(uuid, host, "internal error: the conductor's log has it")

    def _fail(self, uuid: str, host: str, error: str) -> None:
        LOG.warning("Discovery %s on host %s failed: %s", uuid, host, error)
        try:
            self._uow.run(lambda tx: store.fail_host(tx, uuid, host, error))
        except CyborgError as bad:
            LOG.warning("Discovery %s stays in progress until the sweep: %s", uuid, bad.message)


def _read(drivers: Any) -> list[BackendState]:
    try:
        states = [wire.load_backend(body) for body in drivers]
    except (KeyError, TypeError, ValueError, AttributeError) as bad:
        raise Invalid(f"malformed drivers: {type(bad).__name__} {bad}", field="drivers") from bad
    limits.check_backends(states)
    return states


def _nothing(known: Sequence[Mapping[Any, Any]], host: str | None, driver: str | None) -> NotFound:
    """Say what was asked for in vain, and what there is that looks like it."""
    hosts = sorted({row["host"] for row in known})
    if not known:
        return NotFound("no agent has told of a backend yet: is cyborg-agent running anywhere?")
    if host is not None and host not in hosts:
        return _unknown("host", host, hosts)
    here = [row for row in known if host in (None, row["host"])]
    names = sorted({row["driver"] for row in here} | {row["backend"] for row in here})
    return _unknown("driver", str(driver), names)


def _unknown(field: str, wanted: str, names: Sequence[str]) -> NotFound:
    near = difflib.get_close_matches(wanted, names, n=3) or list(names[:3])
    return NotFound(
        f"no {field} {wanted[:255]!r} is known; near to it: {', '.join(near)}",
        field=field,
        near=near,
    )

# SPDX-License-Identifier: Apache-2.0
"""Discoveries on demand: started on agents, which report the result later."""

import difflib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_context import context

from cyborg.core.errors import CyborgError, NotFound
from cyborg.core.inventory.report import BackendStatus, parse_backends
from cyborg.core.log import get_logger
from cyborg.core.validation import check_optional_text, check_text, parse_uuid
from cyborg.db import old_rows
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.db.write import discoveries as store
from cyborg.rpc.contract import AgentAPI
from cyborg.threads.fanout import FanOut

LOG = get_logger(__name__)

RETENTION = timedelta(days=1)  # how long discoveries can be looked up
PURGE_LIMIT = 1000  # rows of old discoveries that one sweep deletes
_OUTCOMES: Mapping[BackendStatus, str] = {
    BackendStatus.READY: store.DONE,
    BackendStatus.ERROR: store.FAILED,
}


class Discoveries:
    """Discoveries: start, complete, expire."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        agents: AgentAPI,
        *,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        self._conf = conf
        self._uow = uow
        self._agents = agents
        self._now = now or uow.clock
        self._calls = FanOut("discovery")

    def create(self, host: str | None = None, driver: str | None = None) -> dict[str, Any]:
        """Start a discovery of the backends of a host and a driver; None selects all.

        Do not wait for the results, which are stored later. Return the discovery's uuid. Raise
        NotFound, with similar names, if there is no such host or backend.
        """
        host = check_optional_text("host", host)
        driver = check_optional_text("driver", driver)
        uuid = str(uuid4())

        def write(tx: sa.Connection) -> list[str]:
            targets = store.targets(tx, host, driver)
            if not targets:
                raise _no_target(store.targets(tx, None, None), host, driver)
            store.add(tx, uuid, [(row["host"], row["backend"]) for row in targets])
            return sorted({row["host"] for row in targets})

        ctxt, started = context.get_current(), time.monotonic()

        def start(target: str) -> None:
            if time.monotonic() - started > self._timeout():
                return  # queued behind agents that do not answer; the sweep has failed it
            if ctxt is not None:
                ctxt.update_store()  # so that the agents' logs have the request id
            self._start(uuid, target, driver)

        self._calls.submit(start, self._uow.run_once(write, lambda _: {"uuid": uuid}))
        return {"uuid": uuid}

    def complete(self, discovery_id: str, host: str, drivers: Sequence[Mapping[str, Any]]) -> None:
        """Record the results of a discovery on one host. Raise Invalid."""
        uuid = parse_uuid(discovery_id, "discovery_id")
        host = check_text("host", host)
        outcomes = [
            (state.name, _OUTCOMES[state.status], state.error)
            for state in parse_backends(drivers)
            if state.status in _OUTCOMES
        ]
        self._uow.run(lambda tx: store.record_outcomes(tx, uuid, host, outcomes))

    def sweep(self) -> int:
        """Fail discoveries at their timeout, delete old discoveries; return the number of rows."""
        seconds = self._timeout()
        created_before = self._now() - timedelta(seconds=seconds)
        error = f"no answer in {seconds:g} s: is the agent of this host running?"
        old = self._now() - RETENTION
        purged = self._uow.run(lambda tx: old_rows.DISCOVERIES.purge(tx, old, PURGE_LIMIT))
        return purged + self._uow.run(lambda tx: store.fail_older(tx, created_before, error))

    def stop(self) -> None:
        """Start no more calls. A later sweep marks the discoveries without a call as failed."""
        self._calls.stop()

    def _timeout(self) -> float:
        """Return the timeout of a discovery in seconds."""
        # The call to the agent, the discovery itself, and the call back.
        return float(2 * self._conf.rpc.timeout + self._conf.agent.discovery_timeout)

    def _start(self, uuid: str, host: str, driver: str | None) -> None:
        try:
            self._agents.discovery(host=host, driver=driver, discovery_id=uuid)
        except CyborgError as exc:
            error = exc.message
        except Exception:
            LOG.exception("Unexpected error while starting a discovery", discovery=uuid, host=host)
            error = "internal error: the conductor's log has it"
        else:
            return
        self._fail(uuid, host, error)

    def _fail(self, uuid: str, host: str, error: str) -> None:
        LOG.warning("Discovery failed: %s", error, discovery=uuid, host=host)
        store_error: str | None = None
        try:
            self._uow.run(lambda tx: store.fail_host(tx, uuid, host, error))
        except CyborgError as exc:
            store_error = exc.message
        if store_error is not None:
            LOG.warning(
                "Cannot record the failure of a discovery, it will time out: %s",
                store_error,
                discovery=uuid,
                host=host,
            )


def _no_target(
    backends: Sequence[store.TargetRow], host: str | None, driver: str | None
) -> NotFound:
    """Return the error for a host or driver without backends, with similar names."""
    hosts = sorted({row["host"] for row in backends})
    if not backends:
        return NotFound("no backend has been reported; is cyborg-agent running?")
    if host is not None and host not in hosts:
        return _unknown("host", host, hosts)
    candidates = [row for row in backends if host in (None, row["host"])]
    names = sorted({row["driver"] for row in candidates} | {row["backend"] for row in candidates})
    return _unknown("driver", str(driver), names)


def _unknown(field: str, name: str, names: Sequence[str]) -> NotFound:
    near = difflib.get_close_matches(name, names, n=3) or list(names[:3])
    return NotFound(
        f"unknown {field} {name[:255]!r}; similar: {', '.join(near)}",
        field=field,
        near=near,
    )

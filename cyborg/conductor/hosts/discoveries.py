# SPDX-License-Identifier: Apache-2.0
"""Discoveries on demand: started on agents, which report the result later."""

import difflib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_context import context
from oslo_db import exception as db_exc

from cyborg.conductor.common.calls import check_epoch
from cyborg.core.errors import Conflict, CyborgError, NotFound
from cyborg.core.inventory.report import BackendStatus, parse_backends
from cyborg.core.log import get_logger
from cyborg.core.validation import check_optional_text, check_text, parse_uuid
from cyborg.db import old_rows
from cyborg.db.discoveries import write as store
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.agent_api import AgentAPI
from cyborg.threads.calls import FanOut

LOG = get_logger(__name__)

# How long discoveries can be looked up.
RETENTION = timedelta(days=1)
HOST_DOWN = "the agent of the host is down"
# Rows of old discoveries that one transaction deletes.
PURGE_LIMIT = 1000
# Transactions of one sweep.
MAX_PURGES = 100
# The calls of each one take threads of this process.
MAX_OPEN_DISCOVERIES = 100
# Attempts to record a discovery while others with the same filters are recorded.
MAX_ATTEMPTS = 5
_OUTCOMES: Mapping[BackendStatus, str] = {
    BackendStatus.READY: store.DONE,
    BackendStatus.ERROR: store.FAILED,
}


@dataclass(eq=False)
class Discoveries:
    """Discoveries: start, complete, expire."""

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    agents: AgentAPI

    def __post_init__(self) -> None:
        self._calls = FanOut("discovery")

    def create(self, host: str | None = None, driver: str | None = None) -> dict[str, Any]:
        """Start a discovery of the backends of a host and a driver; None selects all.

        Do not wait for the results, which are stored later. Backends whose host is down fail at
        once. Return the discovery's uuid. Raise NotFound, with similar names, if there is no such
        host or backend, and Conflict while a discovery of the same host and driver is open, or too
        many discoveries are.
        """
        host = check_optional_text("host", host)
        driver = check_optional_text("driver", driver)
        # The key is UNIQUE: of two requests with the same filters, the second INSERT fails.
        key = store.mutex_key(host, driver)
        uuid = str(uuid4())

        def write(tx: sa.Connection) -> list[str]:
            targets = store.targets(tx, host, driver)
            if not targets:
                raise _no_target(store.targets(tx, host=None, driver=None), host, driver)
            # Refused, not joined: the open one may have read a host before its last change.
            if (other := store.find_open(tx, key)) is not None:
                raise Conflict(
                    f"discovery {other} of the same host and driver is in progress; wait until it "
                    "has ended",
                    discovery=other,
                )
            if store.count_open(tx) >= MAX_OPEN_DISCOVERIES:
                raise Conflict(
                    f"{MAX_OPEN_DISCOVERIES} discoveries are in progress; wait until one has ended"
                )
            store.add(tx, uuid, key, [_to_target(row) for row in targets])
            # Each call of an absent agent would occupy a thread for seconds, while others wait.
            return sorted({row["host"] for row in targets if not row["host_down"]})

        ctxt = context.get_current()
        created_at = time.monotonic()

        def start(target_host: str) -> None:
            if time.monotonic() - created_at > self._timeout():
                return  # queued behind agents that do not answer; the sweep has failed it
            if ctxt is not None:
                ctxt.update_store()  # so that the agents' logs have the request id
            self._start(uuid, target_host, driver)

        hosts = self._record(uuid, write)
        # After the commit: an agent may answer before the call returns.
        self._calls.submit(start, hosts)
        return {"uuid": uuid}

    def _record(self, uuid: str, write: Callable[[sa.Connection], list[str]]) -> list[str]:
        """Commit a new discovery; return the hosts whose agents to call. Raise Conflict."""
        for _ in range(MAX_ATTEMPTS):
            try:
                # A copy of the call gets the same uuid from the record of this one.
                return self.uow.run_once(write, answer=lambda _: {"uuid": uuid})
            except db_exc.DBDuplicateEntry:
                # Another one with the same filters was recorded concurrently; the retry sees it.
                continue
        raise Conflict("another discovery of the same host and driver is being created, retry")

    def complete(
        self,
        discovery_id: str,
        host: str,
        drivers: Sequence[Mapping[str, Any]],
        epoch: str | None = None,
    ) -> None:
        """Record the results of a discovery on one host; ignore those that it does not wait for.

        ``drivers`` are the states of the backends that the agent has discovered. Raise Invalid, and
        Stale if ``epoch`` is not that of the host's agent.
        """
        uuid = parse_uuid(discovery_id, "discovery_id")
        host = check_text("host", host)
        # A backend that is still DISCOVERING has no result.
        outcomes = [
            store.Outcome(state.name, _OUTCOMES[state.status], state.error)
            for state in parse_backends(drivers)
            if state.status in _OUTCOMES
        ]
        epoch = None if epoch is None else parse_uuid(epoch, "epoch")

        # The epoch in the transaction of the result: a new process of the agent may register
        # meanwhile.
        def write(tx: sa.Connection) -> int:
            check_epoch(tx, host, epoch)
            return store.record_outcomes(tx, uuid, host, outcomes)

        recorded = self.uow.run(write)
        if ignored := len(outcomes) - recorded:
            LOG.info(
                "%d results ignored, because the discovery does not wait for them: it is unknown, "
                "or the backend has a result",
                ignored,
                discovery=uuid,
                host=host,
            )

    def sweep(self) -> int:
        """Fail discoveries at their timeout, delete old discoveries; return the number of rows."""
        seconds = self._timeout()
        created_before = self.uow.clock() - timedelta(seconds=seconds)
        error = f"no answer in {seconds:g} s: is the agent of this host running?"
        failed = self.uow.run(lambda tx: store.fail_older(tx, created_before, error))
        cutoff = self.uow.clock() - RETENTION
        purged = old_rows.DISCOVERIES.purge_batches(self.uow, cutoff, PURGE_LIMIT, MAX_PURGES)
        return failed + purged

    def stop(self) -> None:
        """Start no more calls. A later sweep marks the discoveries without a call as failed."""
        self._calls.stop()

    def _timeout(self) -> float:
        """Return the timeout of a discovery in seconds."""
        # The call to the agent, the discovery itself, and the call back.
        return float(2 * self.conf.rpc.timeout + self.conf.agent.discovery_timeout)

    def _start(self, uuid: str, host: str, driver: str | None) -> None:
        try:
            self.agents.discovery(host=host, driver=driver, discovery_id=uuid)
        except CyborgError as exc:
            self._fail(uuid, host, exc.message)
        except Exception:
            LOG.exception("Unexpected error while starting a discovery", discovery=uuid, host=host)
            self._fail(uuid, host, "internal error: the conductor's log has it")

    def _fail(self, uuid: str, host: str, error: str) -> None:
        """Record the error for all backends of a host."""
        LOG.warning("Discovery failed: %s", error, discovery=uuid, host=host)
        try:
            self.uow.run(lambda tx: store.fail_host(tx, uuid, host, error))
        except CyborgError as exc:
            LOG.warning(
                "Cannot record the failure of a discovery, it will time out: %s",
                exc.message,
                discovery=uuid,
                host=host,
            )


def _to_target(row: store.TargetRow) -> store.Target:
    return store.Target(row["host"], row["backend"], HOST_DOWN if row["host_down"] else None)


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

# SPDX-License-Identifier: Apache-2.0
"""Calls of other daemons: check the sender's epoch, and execute each changing call once.

oslo.messaging publishes a call again when its connection fails before the broker has confirmed it,
so that two conductors may each receive a copy. Each call has a random id, which its copies share.
Two equal calls that a caller makes on purpose have different ids, even in one REST request.
"""

import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.core.errors import CyborgError, Stale, TimedOut, Unavailable
from cyborg.core.hosts import is_current_epoch
from cyborg.core.log import get_logger
from cyborg.db import deadline, old_rows
from cyborg.db import unit_of_work as idempotency
from cyborg.db.services import write as services
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.publishing import DEDUPLICATED_METHODS

LOG = get_logger(__name__)


# Seconds for which a copy of a call is recognised, at least. The broker drops old calls before.
MIN_RETENTION = 600.0
# The calls whose caller acts at once on the end of its wait: Nova builds the server elsewhere.
# Other calls go on: a host is removed in many transactions, and its operator looks again.
CLAIMING_METHODS = frozenset(
    {
        "arq_create",
        "arq_bind",
        "attachment_create",
        "device_context_create",
        "device_context_pre_bind",
        "device_context_bind",
    }
)
# Seconds of the caller's wait that are left for the commit and the way of the answer, at most; a
# commit that begins within them is confirmed in time.
ANSWER_SECONDS = 1.0
ANSWER_SHARE = 0.1
PURGE_BATCH = 1000  # records deleted in one transaction
MAX_BATCHES = 50  # transactions of one sweep


def check_epoch(tx: sa.Connection, host: str, epoch: str | None) -> None:
    """Raise Stale unless a result with ``epoch`` is from the current agent of the host.

    A former process of the agent, or a sender that uses the name of another host, does not know the
    epoch. ``epoch`` is None from an older agent.
    """
    agent = services.find_agent(tx, host)
    current, versions = (agent["epoch"], agent["versions"]) if agent else (None, {})
    if is_current_epoch(epoch, current, versions):
        return
    raise make_stale_error(host, epoch)


def make_stale_error(host: str, epoch: str | None) -> Stale:
    """Return the error for a call with an epoch that is not that of the host's agent."""
    name = "a result without an epoch" if epoch is None else f"unknown agent epoch {epoch}"
    return Stale(f"{name} for host {host}", host=host)


class IdempotentEndpoint:
    """RPC endpoint that executes each call of DEDUPLICATED_METHODS once.

    A rejected call leaves no record: nothing has changed, and a copy is rejected again. The
    exception is a call whose transaction committed and recorded an error as the answer.
    """

    def __init__(self, handlers: Mapping[str, Callable[..., Any]], uow: UnitOfWork) -> None:
        self._handlers = handlers
        self._uow = uow

    def __getattr__(self, name: str) -> Any:
        if name not in self._handlers:
            raise AttributeError(name)
        return functools.partial(self._call, name, self._handlers[name])

    def _call(self, name: str, handler: Callable[..., Any], ctxt: Any, /, **arguments: Any) -> Any:
        """Execute a call, or return the recorded answer if a copy of it has committed."""
        call_id = getattr(ctxt, "call_id", None)
        # An older peer sends no id. The other methods may be repeated.
        if call_id is None or name not in DEDUPLICATED_METHODS:
            return handler(**arguments)
        key = make_key(call_id, ctxt.request_id, name, arguments)
        end = self._find_deadline(ctxt) if name in CLAIMING_METHODS else None
        # Context variables, not arguments: every transaction of the call respects them.
        with idempotency.call_context(key), deadline.call_deadline(end):
            try:
                return handler(**arguments)
            except idempotency.RepeatedCall:
                # Raised by the INSERT of the record, so the first copy has committed: its answer is
                # in the table.
                recorded = self._find(key)
                if recorded is None:
                    raise TimedOut(
                        f"{name} was executed, but its answer cannot be read from the database"
                    ) from None
            except CyborgError as exc:
                # The error may be caused by an earlier copy, or by a commit whose answer was lost:
                # then the recorded answer counts. If no record can be read, the error is raised,
                # and may leave open whether the call was executed.
                recorded = self._find(key)
                if recorded is None or _is_own_error(recorded, exc):
                    raise
        LOG.warning(
            "Duplicate of call %s (%s) received, returning the recorded answer", call_id, name
        )
        return idempotency.unwrap_answer(recorded)

    def _find_deadline(self, ctxt: Any) -> float | None:
        """Return when the last transaction of a call may commit, in monotonic seconds."""
        # In the database's time: the clock of the caller's host may differ.
        answer_by: datetime | None = getattr(ctxt, "answer_by", None)
        if answer_by is None:
            return None
        left = (answer_by - self._uow.clock()).total_seconds()
        return time.monotonic() + left - min(ANSWER_SECONDS, ANSWER_SHARE * max(left, 0.0))

    def _find(self, key: str) -> dict[str, Any] | None:
        """Return the record of a call; None if there is none or the database is unavailable."""
        try:
            # Without the deadline: a copy that comes after it has the answer of the first one.
            with deadline.call_deadline(None):
                return self._uow.run(lambda tx: idempotency.find_answer(tx, key))
        except Unavailable:
            return None


def _is_own_error(recorded: Mapping[str, Any], error: CyborgError) -> bool:
    """Return whether the recorded answer of a call is the error that it has just raised.

    A call may commit and record an error as its answer: one that deletes the known objects is
    rejected for the unknown ones.
    """
    # Compared as JSON, which the record was: a tuple is a list there.
    return bool(recorded.get("error") == json.loads(json.dumps(error.to_wire())))


class CallRecords:
    """Records of executed calls, deleted when no copy of the call can arrive any more."""

    def __init__(self, conf: cfg.ConfigOpts, uow: UnitOfWork) -> None:
        self._retention = timedelta(seconds=max(MIN_RETENTION, 10 * conf.rpc.timeout))
        self._uow = uow

    def sweep(self) -> int:
        """Delete expired records and return their number."""
        expires_before = self._uow.clock() - self._retention
        records = old_rows.CALL_RECORDS
        return records.purge_batches(self._uow, expires_before, PURGE_BATCH, MAX_BATCHES)


def make_key(
    call_id: str, request_id: str | None, method: str, arguments: Mapping[str, Any]
) -> str:
    """Return a key of 64 characters, the same for all copies of a call and for no other call.

    ``arguments`` are plain values.
    """
    # Arguments are included: an id used twice by mistake must not get another call's answer.
    body = json.dumps([call_id, request_id, method, arguments], sort_keys=True)
    return hashlib.sha256(body.encode()).hexdigest()

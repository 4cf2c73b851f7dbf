# SPDX-License-Identifier: Apache-2.0
"""Check that a call is from the current process of a host's agent."""

import sqlalchemy as sa

from cyborg.core.errors import Stale
from cyborg.core.hosts.liveness import is_current_epoch
from cyborg.db.services import write as services


def check_epoch(tx: sa.Connection, host: str, epoch: str | None) -> None:
    """Raise Stale unless a result with ``epoch`` is from the current agent of the host.

    A former process of the agent, or a sender that uses the name of another host, does not know the
    epoch. ``epoch`` is None from an older agent.
    """
    agent = services.agent_epoch(tx, host)
    current, versions = (agent["epoch"], agent["versions"]) if agent else (None, {})
    if is_current_epoch(epoch, current, versions):
        return
    raise make_stale_error(host, epoch)


def make_stale_error(host: str, epoch: str | None) -> Stale:
    """Return the error for a call with an epoch that is not that of the host's agent."""
    name = "a result without an epoch" if epoch is None else f"unknown agent epoch {epoch}"
    return Stale(f"{name} for host {host}", host=host)

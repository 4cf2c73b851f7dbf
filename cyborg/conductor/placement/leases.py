# SPDX-License-Identifier: Apache-2.0
"""Leases of providers for calls to Placement, and the leased rows by host."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import itemgetter
from typing import TypeVar

from oslo_config import cfg

from cyborg.clients.placement import Placement
from cyborg.conductor.common.lease_owner import new_owner
from cyborg.db.providers.write import LeasedProviderRow, VerifiedProviderRow

ProviderRow = TypeVar("ProviderRow", LeasedProviderRow, VerifiedProviderRow)


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease of rows until ``until``; no call may start after ``end``, a monotonic time."""

    owner: str
    until: datetime
    end: float


def new_lease(conf: cfg.ConfigOpts, placement: Placement, now: datetime, clock: float) -> Lease:
    """Return a lease from ``now``, at ``clock`` monotonic seconds, that outlives its last call."""
    timeout = placement.timeout
    length = max(conf.conductor.lease_timeout, 3 * timeout)
    until = now + timedelta(seconds=length)
    return Lease(new_owner(conf.host), until, clock + length - timeout)


def group_by_host(rows: Iterable[ProviderRow]) -> list[tuple[str, list[ProviderRow]]]:
    """Return the hosts, sorted, each with its rows."""
    by_host = itemgetter("host")
    ordered = sorted(rows, key=by_host)
    return [(host, list(group)) for host, group in itertools.groupby(ordered, by_host)]

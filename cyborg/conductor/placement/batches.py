# SPDX-License-Identifier: Apache-2.0
"""Batches of a publisher: leased providers, what is read of their hosts, and the results."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from cyborg.clients.placement import ProviderSummary
from cyborg.conductor.common.work_lease import WorkLease
from cyborg.core.errors import NotFound
from cyborg.core.placement import Provider
from cyborg.db.deployables.write import DesiredProviderRow
from cyborg.db.providers.write import Failure, LeasedProviderRow, Published

Rows = Sequence[LeasedProviderRow]


class FailedRow(NamedTuple):
    """A row that was not published; ``delay`` is the time until the next try, in seconds."""

    row: LeasedProviderRow
    error: str
    delay: float

    def to_failure(self, now: datetime) -> Failure:
        """Return what is written of it."""
        row, next_try_at = self.row, now + timedelta(seconds=self.delay)
        return Failure(row["uuid"], row["revision"], row["attempts"], self.error, next_try_at)


@dataclass(slots=True)
class BatchResult:
    """Results of a batch: published providers by uuid, and failures.

    ``withdrawn`` has the revisions of the device sets, by the uuid of the provider, that are
    reserved in Placement while no consumer has an allocation of them.
    """

    published: dict[str, Published] = field(default_factory=dict)
    deleted: dict[str, int] = field(default_factory=dict)
    failed: list[FailedRow] = field(default_factory=list)
    unanswered: dict[str, str] = field(default_factory=dict)
    withdrawn: dict[str, int] = field(default_factory=dict)
    hosts_without_compute_node: set[str] = field(default_factory=set)
    repaired: int = 0

    def add(self, other: "BatchResult") -> None:
        """Add the results of other rows."""
        self.published |= other.published
        self.deleted |= other.deleted
        self.failed += other.failed
        self.unanswered |= other.unanswered
        self.withdrawn |= other.withdrawn
        self.hosts_without_compute_node |= other.hosts_without_compute_node
        self.repaired += other.repaired

    def has_result(self, row: LeasedProviderRow) -> bool:
        """Return whether the batch has a result for the row, which may be a failure."""
        uuid = row["uuid"]
        return (
            uuid in self.published
            or uuid in self.deleted
            or uuid in self.unanswered
            or any(failed.row["uuid"] == uuid for failed in self.failed)
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Leased rows with their desired state, and the hosts with device sets.

    The desired state of a batch with sets is read after their offers are planned.
    ``unplanned`` are the hosts whose offers could not be planned: they are not published.
    """

    lease: WorkLease
    rows: Rows
    hosts_with_sets: Sequence[str]
    desired: Mapping[str, DesiredProviderRow]
    unplanned: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class HostState:
    """What Placement has of a host, for the publishing of its providers.

    ``root`` is the compute node provider. It is None if it is not needed, or does not exist:
    ``missing_node`` is the error then. ``tree`` has the existing providers and ``providers`` the
    desired ones, by uuid.
    """

    root: ProviderSummary | None
    missing_node: NotFound | None
    tree: Mapping[str, ProviderSummary]
    providers: Mapping[str, Provider]

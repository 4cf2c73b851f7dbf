# SPDX-License-Identifier: Apache-2.0
"""Answer an agent which of the partitions that it has activated are still in use.

The agent asks when it starts, and while it runs. A partition that nothing uses is deactivated as
after a server: its devices become dirty, and a release job deactivates it and cleans them. Until
then the sets with one of these devices are reserved, and the agent refuses the job while a guest
has a device. So a server whose ARQs were lost with the database keeps its NVLink.
"""

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from cyborg.conductor.binding import release
from cyborg.conductor.common.calls import check_epoch
from cyborg.core.errors import InUse, Invalid
from cyborg.core.inventory.activations import PartitionUse
from cyborg.core.log import get_logger
from cyborg.core.text import describe
from cyborg.core.validation import check_text, parse_uuid
from cyborg.db.device_sets import uses
from cyborg.db.device_sets import write as device_sets
from cyborg.db.jobs import write as jobs
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

# More than one fabric has (``FM_MAX_FABRIC_PARTITIONS`` of NVIDIA's ``nv_fm_types.h`` is 64).
MAX_PARTITIONS = 256


@dataclass(frozen=True)
class ActivePartitions:
    """Check of the active partitions of hosts.

    ``release_timeout`` is [conductor] release_timeout. The functions wake the tasks that continue
    after a commit.
    """

    uow: UnitOfWork
    wake_publisher: Callable[[], None]
    wake_jobs: Callable[[], None]
    release_timeout: float

    def check(self, host: str, epoch: str, partitions: Any) -> dict[str, Any]:
        """Return the use of each partition; have the unused ones deactivated.

        See ``rpc.contract``. Raise Invalid, and Stale if the epoch is unknown.
        """
        host, epoch = check_text("host", host), parse_uuid(epoch, "epoch")
        addresses = _parse(partitions)

        def read(tx: sa.Connection) -> dict[str, uses.SetUse]:
            check_epoch(tx, host, epoch)
            return uses.read(tx, host, addresses)

        found = self.uow.run(read)
        unused = {a for a, item in found.items() if item.use is PartitionUse.UNUSED}
        overlapped = {a for a in unused if not self._deactivate(host, a, found[a].provider)}
        answers = {
            address: PartitionUse.OVERLAPPED if address in overlapped else item.use
            for address, item in found.items()
        }
        return {"uses": [answers.get(address) for address in addresses]}

    def _deactivate(self, host: str, address: str, provider: str) -> bool:
        """Have a partition deactivated; return False if a device of it is in use or missing."""
        now = self.uow.clock()
        try:
            self.uow.run(lambda tx: enqueue_deactivation(tx, [provider], now, self.release_timeout))
        except InUse:
            # Claimed since it was read. Or a device is missing: its handle cannot be made dirty.
            return False
        LOG.warning(
            "Partition is active and no accelerator request has it: it will be deactivated when no "
            "guest has its devices",
            host=host,
            device=address,
        )
        self.wake_publisher()
        self.wake_jobs()
        return True


def enqueue_deactivation(
    tx: sa.Connection, providers: Collection[str], now: datetime, timeout: float
) -> None:
    """Clean the members of partitions as after a server: this deactivates the partitions.

    ``providers`` are the uuids of the providers of their sets. Until then nobody can claim the
    members: a partition must not be deactivated for a server that gets it meanwhile. Raise InUse if
    a member has an owner now.
    """
    members = [device_sets.make_dirty(tx, id_, now) for id_ in device_sets.find_ids(tx, providers)]
    ids = list(itertools.chain(*members))
    release.enqueue_cleaning(tx, jobs.unassigned_dirty(tx, len(ids), ids), now=now, timeout=timeout)


def _parse(partitions: Any) -> list[str]:
    """Return the addresses of deployables. Raise Invalid."""
    if not isinstance(partitions, list) or len(partitions) > MAX_PARTITIONS:
        raise Invalid(
            f"partitions: found {describe(partitions)}; expected a list of at most "
            f"{MAX_PARTITIONS} addresses",
            field="partitions",
        )
    return [check_text("partitions", address) for address in partitions]

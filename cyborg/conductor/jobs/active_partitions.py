# SPDX-License-Identifier: Apache-2.0
"""Answer an agent which of the partitions that it has activated are still in use.

The agent asks when it starts, and while it runs. The partition may have been released since the
agent has read it, so the answer alone changes nothing: the agent reads a partition that nothing
uses again, and requests its deactivation if it is still active. This works as after a server: its
devices become dirty, and a release job deactivates it and cleans them. Until
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
from cyborg.core.errors import Invalid
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

    def find_uses(self, host: str, epoch: str, partitions: Any) -> dict[str, Any]:
        """Return the use of each partition, and change nothing.

        See ``rpc.contract``. Raise Invalid, and Stale if the epoch is unknown.
        """
        host, epoch, addresses = _parse(host, epoch, partitions)

        def read(tx: sa.Connection) -> dict[str, uses.SetUse]:
            check_epoch(tx, host, epoch)
            return uses.read(tx, host, addresses)

        found = self.uow.run(read)
        return {"uses": [found[a].use if a in found else None for a in addresses]}

    def deactivate(self, host: str, epoch: str, partitions: Any) -> dict[str, Any]:
        """Have those of the partitions deactivated that are unused now; return these.

        See ``rpc.contract``. Raise Invalid, InUse if a device is claimed meanwhile, and Stale if
        the epoch is unknown.
        """
        host, epoch, addresses = _parse(host, epoch, partitions)
        now = self.uow.clock()

        def write(tx: sa.Connection) -> list[str]:
            check_epoch(tx, host, epoch)
            found = uses.read(tx, host, addresses)
            unused = [a for a, item in found.items() if item.use is PartitionUse.UNUSED]
            providers = [found[address].provider for address in unused]
            enqueue_deactivation(tx, providers, now, self.release_timeout)
            return sorted(unused)

        deactivated = self.uow.run_once(write, answer=lambda found: {"deactivated": found})
        for address in deactivated:
            LOG.warning(
                "Partition is active and no accelerator request has it: it will be deactivated "
                "when no guest has its devices",
                host=host,
                device=address,
            )
        if deactivated:
            self.wake_publisher()
            self.wake_jobs()
        return {"deactivated": deactivated}


def enqueue_deactivation(
    tx: sa.Connection, providers: Collection[str], now: datetime, timeout: float
) -> None:
    """Clean the members of partitions as after a server: this deactivates the partitions.

    ``providers`` are the uuids of the providers of their sets. Until then nobody can claim the
    members: a partition must not be deactivated for a server that gets it meanwhile. Raise InUse if
    a member has an owner now, or is missing.
    """
    members = [device_sets.make_dirty(tx, id_, now) for id_ in device_sets.find_ids(tx, providers)]
    ids = list(itertools.chain(*members))
    release.enqueue_cleaning(tx, jobs.unassigned_dirty(tx, len(ids), ids), now=now, timeout=timeout)


def _parse(host: str, epoch: str, partitions: Any) -> tuple[str, str, list[str]]:
    """Return a host, an epoch, and the addresses of deployables. Raise Invalid."""
    host, epoch = check_text("host", host), parse_uuid(epoch, "epoch")
    if not isinstance(partitions, list) or len(partitions) > MAX_PARTITIONS:
        raise Invalid(
            f"partitions: found {describe(partitions)}; expected a list of at most "
            f"{MAX_PARTITIONS} addresses",
            field="partitions",
        )
    return host, epoch, [check_text("partitions", address) for address in partitions]

# SPDX-License-Identifier: Apache-2.0
"""Delete expired device tombstones. Reports write tombstones and restore devices from them."""

from collections.abc import Callable
from datetime import datetime, timedelta

from oslo_config import cfg

from cyborg.db import old_rows
from cyborg.db.unit_of_work import UnitOfWork

BATCH = 256  # tombstones deleted in one sweep


class Tombstones:
    """Tombstones of removed devices."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        *,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        self._conf = conf
        self._uow = uow
        self._now = now or uow.clock

    def sweep(self) -> int:
        """Delete tombstones older than [conductor] tombstone_ttl seconds; return their number."""
        expires_before = self._now() - timedelta(seconds=self._conf.conductor.tombstone_ttl)
        return self._uow.run(lambda tx: old_rows.TOMBSTONES.purge(tx, expires_before, BATCH))

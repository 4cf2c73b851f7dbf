# SPDX-License-Identifier: Apache-2.0
"""Forgetting devices that have been gone for long; a report remembers them and brings them back."""

from collections.abc import Callable
from datetime import datetime, timedelta

from oslo_config import cfg
from oslo_utils import timeutils

from cyborg.db.store import departed as store
from cyborg.db.unit_of_work import UnitOfWork

BATCH = 256  # devices that one sweep forgets


class Departed:
    """What is remembered of devices that are gone."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
    ) -> None:
        self._conf = conf
        self._uow = uow
        self._now = now

    def sweep(self) -> int:
        """Forget what has been gone for longer than ``remember``; return how many devices."""
        before = self._now() - timedelta(seconds=self._conf.conductor.remember)
        return self._uow.run(lambda tx: store.purge(tx, before, BATCH))

# SPDX-License-Identifier: Apache-2.0
"""Count all objects for all processes of the cloud, as often as ``db.totals.cache`` counts again.

A worker of the API, or a conductor, that has just started then has the numbers at once.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from oslo_db import exception as db_exc

from cyborg.core.log import get_logger
from cyborg.db.totals import read as totals
from cyborg.db.totals import write as store
from cyborg.db.totals.cache import lifetime
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

# Seconds between two looks at the age of the stored counts.
INTERVAL = 60.0


@dataclass(eq=False)
class CountRecorder:
    """Recorder of the numbers of all objects; ``clock`` returns monotonic seconds.

    Conductors that find old counts at the same time all count; the newest counts stay.
    """

    uow: UnitOfWork
    clock: Callable[[], float] = time.monotonic

    def run_once(self) -> int:
        """Count and store the numbers if the stored ones are too old; return 1 if so, else 0."""
        stored = self.uow.run(totals.find_stored)
        now = self.uow.clock()
        if stored is not None:
            age = (now - stored.counted_at).total_seconds()
            if age < lifetime(stored.seconds):
                return 0
        begin = self.clock()
        counts = self.uow.run(totals.count)
        counted = totals.StoredCounts(counts, now, self.clock() - begin)
        try:
            self.uow.run(lambda tx: store.save_counts(tx, counted))
        except db_exc.DBDuplicateEntry:
            # Another conductor has stored the first counts meanwhile, which are as new as these.
            LOG.debug("Another conductor has counted all objects")
        return 1

# SPDX-License-Identifier: Apache-2.0
"""The base class of the API's controllers, and the objects they share."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from oslo_config import cfg

from cyborg.api.paging import PageRequest, R
from cyborg.core.hosts.liveness import Liveness, evaluate
from cyborg.db.reader import Reader
from cyborg.rpc.contract import ConductorAPI


@dataclass(frozen=True)
class ApiContext:
    """Shared objects of all controllers: reads use the database, writes go to the conductor."""

    conf: cfg.ConfigOpts
    conductor: ConductorAPI
    reader: Reader


class Resource:
    """Base class of the controller of one resource type."""

    def __init__(self, context: ApiContext) -> None:
        self.context = context

    def read_page(
        self, page: PageRequest, find: Callable[..., list[R]], **filters: Any
    ) -> tuple[list[R], str | None]:
        """Return the rows of a page and the marker of the next page, None on the last page."""
        with self.context.reader.connect() as connection:
            return page.read(lambda window: find(connection, page=window, **filters))

    def liveness_evaluator(self) -> Callable[[datetime], Liveness]:
        """Return a function that maps a service's last heartbeat time to its liveness.

        The current time is read once, so that it is the same for all rows of a response.
        """
        clock, conf = self.context.reader.clock, self.context.conf.conductor
        clock.refresh()
        now = clock()
        return lambda last_seen_at: evaluate(
            last_seen_at, now, conf.hello_interval, conf.late_heartbeats, conf.down_heartbeats
        )

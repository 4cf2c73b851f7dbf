# SPDX-License-Identifier: Apache-2.0
"""The base class of the API's controllers, and the objects they share."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from oslo_config import cfg

from cyborg.api.paging import PageRequest, R
from cyborg.api.request_context import RequestContext
from cyborg.api.types import MAX_SHOWN
from cyborg.core.errors import NotFound
from cyborg.core.hosts import Liveness, closest_names, evaluate
from cyborg.db.engine import Reader
from cyborg.db.services.read import has_host, host_names
from cyborg.db.totals.cache import CountCache
from cyborg.rpc.contract import ConductorAPI

HOST_CHECK_SINCE = (2, 6)
"""First microversion in which a list with an unknown host is an error."""

MAX_HOSTS = 3
"""Hosts that an error names."""


@dataclass(frozen=True)
class ApiContext:
    """Shared objects of all controllers: reads use the database, writes go to the conductor."""

    conf: cfg.ConfigOpts
    conductor: ConductorAPI
    reader: Reader

    @functools.cached_property
    def counts(self) -> CountCache:
        """Return the cached numbers of objects."""
        return CountCache(self.reader)


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

    def check_host(
        self, request: RequestContext, host: str | None, document: Mapping[str, Any]
    ) -> None:
        """Raise NotFound, with similar names, if a list is empty because a host is not known.

        Versions before HOST_CHECK_SINCE answer an empty list, and so do all versions to callers who
        do not see the hosts.
        """
        lists = (rows for key, rows in document.items() if key != "groups")
        if (
            host is None
            or request.version < HOST_CHECK_SINCE
            or not request.caller.is_elevated
            or any(isinstance(rows, list) and rows for rows in lists)
        ):
            return
        with self.context.reader.connect() as connection:
            if has_host(connection, host):
                return
            hosts = host_names(connection)
        near = closest_names(host, hosts) or hosts[:MAX_HOSTS]
        known = f"known are {', '.join(near)}" if near else "no host is known: is an agent running?"
        raise NotFound(f"unknown host {host[:MAX_SHOWN]!r}; {known}", field="host", near=list(near))

    def read_clock(self) -> datetime:
        """Return the current time of the database."""
        clock = self.context.reader.clock
        clock.refresh()
        return clock()

    def liveness_evaluator(self) -> Callable[[datetime, datetime], Liveness]:
        """Return a function that maps the deadlines of a service, late and down, to its liveness.

        The current time is read once, so that it is the same for all rows of a response.
        """
        now = self.read_clock()
        return lambda late_at, down_at: evaluate(late_at, down_at, now)

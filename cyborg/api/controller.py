# SPDX-License-Identifier: Apache-2.0
"""What an operation gets: the page, the request, and the parts that all operations share."""

import functools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import urlencode

import pecan
import webob
from oslo_config import cfg

from cyborg.api import auth, middleware, types, versions
from cyborg.api.slots import Turns
from cyborg.api.types import MAX_SHOWN, Enum, PositiveInt, Text
from cyborg.core.errors import Invalid, NotFound
from cyborg.core.hosts import Liveness, closest_names, evaluate
from cyborg.db.engine import Reader
from cyborg.db.paging import Page, Row, Total
from cyborg.db.services.read import has_host, host_names
from cyborg.db.totals.cache import CountCache
from cyborg.rpc.contract import ConductorAPI

R = TypeVar("R", bound=Row)
PARAMETERS: Mapping[str, Any] = {
    "limit": PositiveInt(),
    "marker": Text(),
    "sort_key": Text(),
    "sort_dir": Enum("asc", "desc"),
}
# The parameter of a list that adds the number of its rows on all pages to the answer.
WITH_COUNT = "with_count"
COUNT_SINCE = (2, 6)


class PageRequest:
    """The page that a request asks for; ``max_limit`` is the default and maximum page size."""

    def __init__(self, values: Mapping[str, Any], max_limit: int) -> None:
        limit = values.get("limit")
        self._unlimited = limit is None
        self._limit = max_limit if limit is None else min(limit, max_limit)
        self._marker = values.get("marker")
        self._sort_key = values.get("sort_key")
        self._sort_dir = values.get("sort_dir") or "asc"
        self._total = Total() if values.get(WITH_COUNT) == "true" else None

    @property
    def is_whole(self) -> bool:
        """Return whether the request has no paging parameter: the whole list in its usual order."""
        given = (self._marker, self._sort_key, self._total)
        return self._unlimited and given == (None, None, None) and self._sort_dir == "asc"

    @property
    def count(self) -> int | None:
        """Return the number of rows on all pages, None if the request does not ask for it."""
        return None if self._total is None else self._total.rows

    def read(
        self, find: Callable[[Page], list[R]], *, whole: bool = False
    ) -> tuple[list[R], str | None]:
        """Return the rows and the marker of the next page, None on the last page.

        With ``whole``, a request without a limit gets all rows: for short lists that a client needs
        in one response.
        """
        limit = None if whole and self._unlimited else self._limit
        # One extra row shows whether there is a next page.
        fetch_limit = None if limit is None else limit + 1
        rows = find(Page(fetch_limit, self._marker, self._sort_key, self._sort_dir, self._total))
        if limit is None or len(rows) <= limit:
            return rows, None
        page = rows[:limit]
        return page, str(page[-1]["uuid"])


class Request(pecan.Request):  # type: ignore[misc]
    """A pecan request that reports malformed input as client errors."""

    # The size of the body is already limited, so that it can stay in memory. WebOb writes bodies of
    # more than 10 KiB to a file by default.
    request_body_tempfile_limit = sys.maxsize

    @property
    def GET(self) -> Any:
        """Return the query parameters. Raise Invalid if they are not UTF-8."""
        try:
            return super().GET
        except UnicodeDecodeError:
            raise Invalid("query: the query of the URL is not UTF-8", field="query") from None

    @functools.cached_property
    def json(self) -> Any:
        """Return the parsed body. Raise ValueError, which pecan handles too, if it is not JSON."""
        try:
            return json.loads(self.body, parse_constant=_reject_constant)
        except UnicodeDecodeError:
            # Pecan would log it as a server error with a traceback.
            raise ValueError("not UTF-8") from None
        except RecursionError:
            raise ValueError("nested too deeply") from None
        except OSError:
            raise ValueError("ended before its Content-Length") from None


class RequestContext:
    """What a controller method needs from its request, and helpers to build the response."""

    def __init__(self, request: Request, response: webob.Response) -> None:
        environ = request.environ
        self.caller: auth.Caller = environ[auth.ENVIRON]
        self.version: versions.Version = environ[versions.ENVIRON]
        self._request = request
        self._response = response
        self._root: str = environ[middleware.ROOT]

    def url(self, collection: str, uuid: str | None = None) -> str:
        """Return the URL of a collection or of one of its objects."""
        return f"{self._root}/v2/{collection}" + (f"/{uuid}" if uuid else "")

    def links(self, collection: str, uuid: str, *, bookmark: bool = False) -> list[dict[str, str]]:
        """Return the links of an object."""
        links = [{"href": self.url(collection, uuid), "rel": "self"}]
        if bookmark:
            # A bookmark has no version, as in other services of OpenStack.
            links.append({"href": f"{self._root}/{collection}/{uuid}", "rel": "bookmark"})
        return links

    def add_next_link(
        self, document: dict[str, Any], path: str, rows: str, marker: str | None
    ) -> dict[str, Any]:
        """Add the link to the next page of ``rows``; ``marker`` starts it, None on the last page.

        ``path`` is the path of the document below /v2.
        """
        if marker is not None:
            query = [(key, value) for key, value in self._request.GET.items() if key != "marker"]
            href = f"{self.url(path)}?{urlencode([*query, ('marker', marker)])}"
            document[f"{rows}_links"] = [{"rel": "next", "href": href}]
        return document

    def serialize(self, datatype: Any, row: Row, collection: str, **more: Any) -> dict[str, Any]:
        """Return a row as the JSON object that its type describes, with a self link."""
        links = self.links(collection, row["uuid"])
        return types.serialize(datatype, {"links": links, **row, **more})

    def serialize_page(
        self, datatype: Any, row: Row, collection: str, rows: str, marker: str | None
    ) -> dict[str, Any]:
        """Return a row with a page of its parts in the field ``rows``, and the link to the next."""
        links = f"{rows}_links"
        document = self.serialize(datatype, {**row, links: []}, collection)
        # Absent on the last page, as in a list; the plan of a type knows no absent field.
        del document[links]
        return self.add_next_link(document, f"{collection}/{row['uuid']}", rows, marker)

    def created(self, datatype: Any, row: Row, collection: str) -> dict[str, Any]:
        """Return a new object as JSON, and set the Location header to its URL."""
        # An absolute URL: WebOb would resolve a relative one with the Host header.
        self._response.location = self.url(collection, row["uuid"])
        return self.serialize(datatype, row, collection)


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


# First microversion in which a list with an unknown host is an error.
HOST_CHECK_SINCE = (2, 6)

# Hosts that an error names.
MAX_HOSTS = 3

# Explanations and capacities of the whole cloud, which take up to a second each in a large one.
# Those of one worker are evaluated one after another, so that their memory is that of one.
# Maximum number of requests that wait, and the maximum seconds of their wait.
MAX_WAITING_EVALUATIONS = 2
EVALUATION_TURN_SECONDS = 3.0


def _make_turns() -> Turns:
    reason = "the devices of the cloud are being evaluated for other requests"
    return Turns(reason, MAX_WAITING_EVALUATIONS, EVALUATION_TURN_SECONDS)


@dataclass(frozen=True)
class ApiContext:
    """Shared objects of all controllers: reads use the database, writes go to the conductor.

    ``evaluations`` are the turns of requests that evaluate the providers of the whole cloud.
    """

    conf: cfg.ConfigOpts
    conductor: ConductorAPI
    reader: Reader
    evaluations: Turns = field(default_factory=_make_turns)

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
        if host is None or request.version < HOST_CHECK_SINCE or not request.caller.is_elevated:
            return
        # All lists of the document: the key of the rows is not passed to this method. The groups of
        # an explanation are those of the profile, even if the host is unknown.
        lists = (rows for key, rows in document.items() if key != "groups")
        if any(isinstance(rows, list) and rows for rows in lists):
            return
        with self.context.reader.connect() as connection:
            # One row; the names of all hosts are read for the error only.
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

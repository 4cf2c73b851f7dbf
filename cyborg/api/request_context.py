# SPDX-License-Identifier: Apache-2.0
"""The context of one request: caller, microversion, and helpers to build the response."""

import functools
import json
import sys
from typing import Any
from urllib.parse import urlencode

import pecan
import webob

from cyborg.api import identity, middleware, types, versions
from cyborg.core.errors import Invalid
from cyborg.db.paging import Row


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
        self.caller: identity.Caller = environ[identity.ENVIRON]
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
            links.append({"href": f"{self._root}/{collection}/{uuid}", "rel": "bookmark"})
        return links

    def next_links(self, collection: str, marker: str) -> list[dict[str, str]]:
        """Return the links of a page that is not the last; ``marker`` starts the next page."""
        query = [(key, value) for key, value in self._request.GET.items() if key != "marker"]
        query.append(("marker", marker))
        return [{"rel": "next", "href": f"{self.url(collection)}?{urlencode(query)}"}]

    def serialize(self, datatype: Any, row: Row, collection: str, **more: Any) -> dict[str, Any]:
        """Return a row as the JSON object that its type describes, with a self link."""
        links = self.links(collection, row["uuid"])
        return types.serialize(datatype, {"links": links, **row, **more})

    def serialize_page(
        self, datatype: Any, row: Row, collection: str, rows: str, marker: str | None
    ) -> dict[str, Any]:
        """Return a row whose field ``rows`` has a page of its parts, with a link to the next page.

        Without ``marker`` it is the last page: the link is absent, as in a list.
        """
        links = f"{rows}_links"
        document = self.serialize(datatype, {**row, links: []}, collection)
        del document[links]
        if marker is not None:
            document[links] = self.next_links(f"{collection}/{row['uuid']}", marker)
        return document

    def created(self, datatype: Any, row: Row, collection: str) -> dict[str, Any]:
        """Return a new object as JSON, and set the Location header to its URL."""
        # An absolute URL: WebOb would resolve a relative one with the Host header.
        self._response.location = self.url(collection, row["uuid"])
        return self.serialize(datatype, row, collection)


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")

# SPDX-License-Identifier: Apache-2.0
"""One request while it is served: who asks, in which version, and how to build the answer."""

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pecan
import webob

from cyborg.api import caller, edge, paging, types, versions
from cyborg.core.errors import Invalid
from cyborg.db.read.paging import Row


class Request(pecan.Request):  # type: ignore[misc]
    """A request whose mistakes are told as such."""

    # The edge has bounded the body: it need not lie in a file, as WebOb would have it from 10 KiB.
    request_body_tempfile_limit = sys.maxsize

    @property
    def GET(self) -> Any:
        """The parameters of the URL. Raises Invalid."""
        try:
            return super().GET
        except UnicodeDecodeError:
            raise Invalid("query: the query of the URL is not UTF-8", field="query") from None

    @functools.cached_property
    def json(self) -> Any:
        """The body. Raises ValueError, which pecan, who looks too, takes for no JSON."""
        try:
            return json.loads(self.body, parse_constant=_no_number)
        except UnicodeDecodeError:
            # Pecan would log it as a fault of ours, with a traceback.
            raise ValueError("it is not UTF-8") from None
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        except OSError:
            raise ValueError("it ended before its Content-Length") from None


class Call:
    """What a method of a resource gets of its request."""

    def __init__(self, request: Request, response: webob.Response) -> None:
        environ = request.environ
        self.caller: caller.Caller = environ[caller.ENVIRON]
        self.version: versions.Version = environ[versions.ENVIRON]
        self._request = request
        self._response = response
        self._root: str = environ[edge.ROOT]

    def url(self, collection: str, uuid: str | None = None) -> str:
        """Return the URL of a collection or of one of its objects."""
        return f"{self._root}/v2/{collection}" + (f"/{uuid}" if uuid else "")

    def links(self, collection: str, uuid: str, *, bookmark: bool = False) -> list[dict[str, str]]:
        """Return the links that an object carries."""
        links = [{"href": self.url(collection, uuid), "rel": "self"}]
        if bookmark:
            links.append({"href": f"{self._root}/{collection}/{uuid}", "rel": "bookmark"})
        return links

    def collection(
        self,
        key: str,
        show: Callable[["Call", Row], Mapping[str, Any]],
        page: tuple[Sequence[Row], str | None],
        collection: str | None = None,
    ) -> dict[str, Any]:
        """Return the document of a list: its rows and, if there are more, the next page's link."""
        rows, marker = page
        document: dict[str, Any] = {key: [show(self, row) for row in rows]}
        if marker is not None:
            query = list(self._request.GET.items())
            document[f"{key}_links"] = paging.links(self.url(collection or key), query, marker)
        return document

    def locate(self, url: str) -> None:
        """Have the answer say where the new object is."""
        # WebOb would make a relative URL absolute by the Host header; this one is absolute.
        self._response.location = url

    def dump(self, datatype: Any, row: Row, collection: str, **more: Any) -> dict[str, Any]:
        """Return a row with the self link of its object, as its type describes it."""
        links = self.links(collection, row["uuid"])
        return types.dump(datatype, {"links": links, **row, **more})


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")
